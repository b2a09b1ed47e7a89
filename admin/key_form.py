"""The form of an API key's bounds: for a new one and for changing one."""

from collections.abc import Sequence
from dataclasses import dataclass

from admin.amounts import day_of, day_text
from admin.ask import Ask
from admin.forms import Field, Form
from registry.api_keys import KeyRecord
from registry.key_cache import KeyCache
from registry.key_scopes import INFERENCE, USAGE

MAX_LIST_LEN = 8000
CACHE_MODES = {
    "off": "Off",
    "exact": "Exact: the same request again",
    "semantic": "Semantic: a question that means the same",
    "shadow": "Shadow: only measured, never served",
}


@dataclass(frozen=True, slots=True)
class KeyBounds:
    """What was given. None: no bound."""

    scopes: Sequence[str]
    allowed_models: Sequence[str] | None
    allowed_cidrs: Sequence[str] | None
    expires_at: float | None
    cache: KeyCache


def key_fields(ask: Ask, tenant: str, tenants: Sequence[str]) -> tuple[Field, ...]:
    """Of a new key."""
    return (
        Field("name", "Name", required=True, max_length=128, help="Where it will be used."),
        Field("tenant", "Tenant", required=True, value=tenant, suggestions=tenants,
              help="Who pays: name or id."),
        Field(INFERENCE, "It may ask models", "checkbox", value="1"),
        Field(USAGE, "It may read its tenant's usage", "checkbox"),
        *bound_fields(ask, None),
    )  # fmt: skip


def bound_fields(ask: Ask, key: KeyRecord | None) -> tuple[Field, ...]:
    """What can be changed of a key; with what holds now."""
    models = sorted(key.allowed_models or ()) if key else ()
    networks = [str(one) for one in key.allowed_networks or ()] if key else ()
    cache = key.cache if key else KeyCache()
    modes = dict(CACHE_MODES)
    if not ask.desk.settings.cache_embedder:
        modes = {mode: modes[mode] for mode in ("off", "exact")} | (
            {cache.mode: modes[cache.mode]} if cache.mode in modes else {}
        )
    return (
        Field(
            "models",
            "Models it may ask",
            "textarea",
            value="\n".join(models),
            placeholder="all",
            help="Names, one a line; empty: all.",
            max_length=MAX_LIST_LEN,
        ),
        Field(
            "networks",
            "Networks it may be used from",
            "textarea",
            value="\n".join(networks),
            placeholder="anywhere",
            help="Addresses or blocks such as 192.0.2.0/24, one a line; empty: anywhere.",
            max_length=MAX_LIST_LEN,
        ),
        Field(
            "expires",
            "Expires on",
            "date",
            value=day_text(key.expires_at) if key and key.expires_at is not None else "",
            help="From the beginning of that day (UTC) it is refused; empty: never.",
        ),
        Field("cache", "Cached answers", "select", value=cache.mode, choices=modes),
        Field(
            "cache_age",
            "Not older than",
            "number",
            value="" if cache.max_age_s is None else f"{cache.max_age_s:g}",
            unit="s",
            help=f"Empty: the server's own, {ask.desk.settings.cache_ttl_s:g} s.",
        ),
        Field(
            "cache_budget",
            "False hits allowed",
            "number",
            value="" if cache.false_hit_budget is None else f"{100 * cache.false_hit_budget:g}",
            unit="%",
            help="Of semantic hits; empty: the server's own, "
            f"{100 * ask.desk.settings.cache_false_hit_budget:g} %.",
        ),
        Field(
            "cache_sampled",
            "Also for sampled answers",
            "checkbox",
            value="1" if cache.sampled else "",
            help="Those drawn without a seed, which would differ each time.",
        ),
    )


def read_key(form: Form, now_at: float, key: KeyRecord | None = None) -> KeyBounds:
    """What stands in it; errors are in the form."""
    names = {field.name for field in form.fields}
    scopes = [scope for scope in (INFERENCE, USAGE) if scope in names and form.is_on(scope)]
    if INFERENCE in names and not scopes:
        form.errors[INFERENCE] = "A key has to be good for something."
    expires_at = day_of(form, "expires")
    if key and key.expires_at is not None and form.text("expires") == day_text(key.expires_at):
        expires_at = key.expires_at
    elif expires_at is not None and expires_at <= now_at:
        form.errors.setdefault("expires", "A day to come.")
    age_s, budget = form.decimal("cache_age"), form.decimal("cache_budget")
    mode = form.text("cache")
    if budget is not None and budget >= 100:
        form.errors.setdefault("cache_budget", "Less than 100 %.")
    share = None if budget is None else budget / 100
    cache = KeyCache(mode, age_s, share, form.is_on("cache_sampled"))
    return KeyBounds(scopes, _words(form, "models"), _words(form, "networks"), expires_at, cache)


def _words(form: Form, name: str) -> Sequence[str] | None:
    return form.text(name).replace(",", " ").split() or None
