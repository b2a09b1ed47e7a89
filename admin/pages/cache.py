"""Semantic cache: how often it answers, what that saved, how often it would be wrong; flushing.

Hits by tenant and model come from the ledger's sums, of all gateways; rates, checks and savings
from this gateway process's counters, since it began; what is kept from the stores themselves.
"""

from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import Response

from admin.context.operator_context import require
from admin.context.policy.permissions import allowed
from admin.live.rates import counts
from admin.operations import cache as verbs
from admin.operations.cache import cache_uses, upper_bound
from admin.web.forms import Field, Form
from admin.web.headers import PREFIX
from admin.web.request import PageRequest, PageRoute, StreamRoute
from admin.web.tables import Column, TableSpec, table_state
from registry.errors import Forbidden, InvalidValue, RegistryError
from registry.money.recent import CacheUse

REQUESTS = "polyhost_semantic_cache_requests_total"
HITS = "polyhost_semantic_cache_hits_total"
CHECKS = "polyhost_semantic_cache_checks_total"
SAVED = "polyhost_semantic_cache_saved_nanos_total"
EMBED_FAILURES = "polyhost_semantic_cache_embed_failures_total"
ANSWER_ROWS, MAX_ANSWERS = 10, 200
USES = TableSpec(
    columns=(
        Column("Tenant", "tenant"),
        Column("Model", "model"),
        Column("Answers", "answers", "number", "down"),
        Column("Cache hits", "hits", "number", "down"),
        Column("Hit rate", "rate", "number", "down"),
        Column("Billed for hits", "billed", "number", "down"),
    ),
    default_sort="-answers",
)
USE_VALUES: Mapping[str, Callable[[CacheUse], str | float]] = {
    "tenant": lambda use: use.tenant_name,
    "model": lambda use: use.model,
    "answers": lambda use: use.num_answers,
    "hits": lambda use: use.num_hits,
    "rate": lambda use: use.num_hits / use.num_answers,
    "billed": lambda use: use.hits_nanos,
}
USE_ROWS = 20
KEPT = TableSpec(
    columns=(
        Column("Request"),
        Column("Model", "model"),
        Column("Created", "created", first="down"),
        Column("Question"),
        Column("Answer"),
    ),
    default_sort="-created",
)
KEPT_VALUES: Mapping[str, Callable[[dict[str, Any]], str | float]] = {
    "model": lambda row: str(row["model"]),
    "created": lambda row: float(row["made_at"]),
}
COUNTERS = {REQUESTS: "result", HITS: "kind", CHECKS: "outcome", SAVED: "", EMBED_FAILURES: ""}


def show_cache(request: PageRequest) -> Response:
    """The page."""
    return _page(request, _form(request, given=False))


def live_cache(request: PageRequest) -> Mapping[str, str]:
    """Figures and what is kept; sums by the hour are for who loads the page."""
    found = _figures(request)
    parts = ("figures", "kept")
    return {each: request.fragment("cache_parts.html", each, found) for each in parts}


def show_answers(request: PageRequest) -> Response:
    """What is kept of a tenant. Texts are the tenant's: who may purge them may read them."""
    _require_flush(request)
    fields = (
        Field("tenant", "Tenant", help="Name or id."),
        Field("model", "Model", help="Leave empty for all models."),
    )
    form = Form(fields, dict(request.query))
    tenant, model = form.text("tenant"), form.text("model")
    rows: list[dict[str, Any]] = []
    if tenant and form.is_sound:
        with form.refusals():
            rows = verbs.list_entries(request.operator, tenant, model, MAX_ANSWERS)
    table = table_state(KEPT, request.path, request.query, ANSWER_ROWS)
    return request.page(
        "cache_answers.html",
        422 if not form.is_sound else 200,
        rows=rows,
        table=table,
        page=table.cut_rows(rows, KEPT_VALUES, lambda row: str(row["request_id"])),
        is_cut=len(rows) == MAX_ANSWERS,
        form=form,
        now_at=request.operator.clock(),
    )


def confirm_flush(request: PageRequest) -> Response:
    """What will happen, and a button."""
    form = _form(request, given=True)
    tenant, model = form.text("tenant"), form.text("model")
    _require_flush(request)
    if not (tenant or model):
        form.errors["tenant"] = "Give a tenant, a model or both."
    if not form.is_sound:
        return _page(request, form, 422)
    return request.page(
        "confirm.html",
        title=f"Flush the cache {_scope(tenant, model)}?",
        text="All gateways delete these answers at once. Later requests are computed again.",
        button="Flush",
        danger=True,
        action="/cache/flush",
        fields={"tenant": tenant, "model": model},
        back="/cache",
    )


def flush(request: PageRequest) -> Response:
    """Forget them."""
    tenant, model = (
        request.fields.get("tenant", "").strip(),
        request.fields.get("model", "").strip(),
    )
    _require_flush(request)
    try:
        count = verbs.purge_cache(request.operator, tenant, model)
    except InvalidValue as error:
        form = _form(request, given=True)
        form.trouble = str(error)
        return _page(request, form, 422)
    what = "all answers" if count is None else f"{count} answers"
    return request.redirect("/cache", f"Flushed {what} {_scope(tenant, model)}.")


def _scope(tenant: str, model: str) -> str:
    named = [f"of {tenant}" if tenant else "", f"for {model}" if model else ""]
    return " ".join(filter(None, named))


def _require_flush(request: PageRequest) -> None:
    """Only who may do it for all; an owner of a tenant has the CLI's verb for the tenant."""
    require(request.operator, "cache.write")


def _form(request: PageRequest, given: bool) -> Form:
    fields = (
        Field("tenant", "Tenant", help="Name or id. Leave empty for all tenants."),
        Field("model", "Model", help="Leave empty for all models."),
    )
    return Form(fields, {**request.query, **request.fields} if given else None)


def _page(request: PageRequest, form: Form, status: int = 200) -> Response:
    may_flush = allowed(request.operator.grants, "cache.write")
    table = table_state(USES, f"{PREFIX}/cache", request.query, USE_ROWS)
    uses = cache_uses(request.operator)
    return request.page(
        "cache.html",
        status,
        found=_figures(request),
        table=table,
        uses=table.cut_rows(uses, USE_VALUES, lambda use: f"{use.tenant_id} {use.model}"),
        form=form,
        may_flush=may_flush,
    )


def _figures(request: PageRequest) -> dict[str, Any]:
    require(request.operator, "cache.read")
    found = counts(request.context.edge, COUNTERS)
    hits, misses = (found[REQUESTS].get(each, 0) for each in ("hit", "miss"))
    agreed, differed = (found[CHECKS].get(each, 0) for each in ("agreed", "differed"))
    try:
        stores, trouble = verbs.cache_stats(request.operator), ""
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
        "budget": request.context.settings.cache_false_hit_budget,
        "saved_nanos": found[SAVED].get("", 0),
        "num_unembedded": found[EMBED_FAILURES].get("", 0),
        "stores": stores,
        "trouble": trouble,
        "currency": request.context.settings.currency,
    }


ROUTES = (
    PageRoute("GET", "/cache", show_cache),
    PageRoute("GET", "/cache/answers", show_answers),
    PageRoute("GET", "/cache/confirm", confirm_flush),
    PageRoute("POST", "/cache/flush", flush),
)
STREAMS = (StreamRoute("/live/cache", live_cache, every_s=3.0),)
