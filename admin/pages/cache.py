"""Semantic cache: how often it answers, what that saved, how often it would be wrong; flushing.

Hits by tenant and model come from the ledger's sums, of all gateways; rates, checks and savings
from this gateway process's counters, since it began; what is kept from the stores themselves.
"""

from collections.abc import Mapping
from typing import Any

from admin.ask import Ask, PageRoute, Reply, StreamRoute
from admin.counters import counts
from admin.forms import Field, Form
from gateway.policy.permissions import allowed
from gateway.service import cache as verbs
from gateway.service.cache_use import cache_uses, upper_bound
from gateway.service.control import require
from registry.errors import Forbidden, InvalidValue, RegistryError

REQUESTS = "polyhost_semantic_cache_requests_total"
HITS = "polyhost_semantic_cache_hits_total"
CHECKS = "polyhost_semantic_cache_checks_total"
SAVED = "polyhost_semantic_cache_saved_nanos_total"
EMBED_FAILURES = "polyhost_semantic_cache_embed_failures_total"
COUNTERS = {REQUESTS: "result", HITS: "kind", CHECKS: "outcome", SAVED: "", EMBED_FAILURES: ""}


def show_cache(ask: Ask) -> Reply:
    """The page."""
    return _page(ask, _form(ask, given=False))


def live_cache(ask: Ask) -> Mapping[str, str]:
    """Figures and what is kept; sums by the hour are for who loads the page."""
    found = _figures(ask)
    parts = ("figures", "kept")
    return {each: ask.fragment("cache_parts.html", each, found) for each in parts}


def show_answers(ask: Ask) -> Reply:
    """What is kept of a tenant. Texts are the tenant's: who may purge them may read them."""
    _require_flush(ask)
    fields = (
        Field("tenant", "Tenant", help="Name or id."),
        Field("model", "Model", help="Empty: of all."),
    )
    form = Form(fields, dict(ask.query))
    tenant, model = form.text("tenant"), form.text("model")
    rows: list[dict[str, Any]] = []
    if tenant and form.is_sound:
        try:
            rows = verbs.list_entries(ask.control, tenant, model)
        except Forbidden:
            raise
        except RegistryError as error:
            form.trouble = str(error)
    return ask.page(
        "cache_answers.html",
        422 if not form.is_sound else 200,
        rows=rows,
        form=form,
        now_at=ask.control.clock(),
    )


def confirm_flush(ask: Ask) -> Reply:
    """What will happen, and a button."""
    form = _form(ask, given=True)
    tenant, model = form.text("tenant"), form.text("model")
    _require_flush(ask)
    if not (tenant or model):
        form.errors["tenant"] = "Say of which tenant, of which model, or both."
    if not form.is_sound:
        return _page(ask, form, 422)
    return ask.page(
        "confirm.html",
        title=f"Flush the cache {_scope(tenant, model)}?",
        text="Every gateway forgets these answers at once; the next such requests are computed.",
        button="Flush",
        danger=True,
        action="/cache/flush",
        fields={"tenant": tenant, "model": model},
        back="/cache",
    )


def flush(ask: Ask) -> Reply:
    """Forget them."""
    tenant, model = ask.form.get("tenant", "").strip(), ask.form.get("model", "").strip()
    _require_flush(ask)
    try:
        count = verbs.purge_cache(ask.control, tenant, model)
    except InvalidValue as error:
        form = _form(ask, given=True)
        form.trouble = str(error)
        return _page(ask, form, 422)
    what = "all answers" if count is None else f"{count} answers"
    return ask.redirect("/cache", f"Flushed {what} {_scope(tenant, model)}.")


def _scope(tenant: str, model: str) -> str:
    named = [f"of {tenant}" if tenant else "", f"for {model}" if model else ""]
    return " ".join(filter(None, named))


def _require_flush(ask: Ask) -> None:
    """Only who may do it for all; an owner of a tenant has the CLI's verb for the tenant."""
    require(ask.control, "cache.write")


def _form(ask: Ask, given: bool) -> Form:
    fields = (
        Field("tenant", "Tenant", help="Name or id; empty: of all."),
        Field("model", "Model", help="Empty: of all."),
    )
    return Form(fields, {**ask.query, **ask.form} if given else None)


def _page(ask: Ask, form: Form, status: int = 200) -> Reply:
    may_flush = allowed(ask.control.grants, "cache.write")
    return ask.page(
        "cache.html",
        status,
        found=_figures(ask),
        uses=cache_uses(ask.control),
        form=form,
        may_flush=may_flush,
    )


def _figures(ask: Ask) -> dict[str, Any]:
    require(ask.control, "cache.read")
    found = counts(ask.desk.edge, COUNTERS)
    hits, misses = (found[REQUESTS].get(each, 0) for each in ("hit", "miss"))
    agreed, differed = (found[CHECKS].get(each, 0) for each in ("agreed", "differed"))
    try:
        stores, trouble = verbs.cache_stats(ask.control), ""
    except Forbidden:
        raise
    except RegistryError as error:
        stores, trouble = [], str(error)
    return {
        "hits": found[HITS],
        "num_hits": hits,
        "num_looked": hits + misses,
        "num_bypassed": found[REQUESTS].get("bypass", 0),
        "num_checks": agreed + differed,
        "num_differed": differed,
        "at_most": upper_bound(differed, agreed + differed),
        "budget": ask.desk.settings.cache_false_hit_budget,
        "saved_nanos": found[SAVED].get("", 0),
        "num_unembedded": found[EMBED_FAILURES].get("", 0),
        "stores": stores,
        "trouble": trouble,
        "currency": ask.desk.settings.currency,
    }


ROUTES = (
    PageRoute("GET", "/cache", show_cache, live=True),
    PageRoute("GET", "/cache/answers", show_answers, live=True),
    PageRoute("GET", "/cache/confirm", confirm_flush, live=True),
    PageRoute("POST", "/cache/flush", flush, live=True),
)
STREAMS = (StreamRoute("/live/cache", live_cache, every_s=3.0),)
