"""API keys: the list, a new one, whose text is shown once, and one key: what it uses of its limits
now, its bounds, another secret, its end."""

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from starlette.responses import Response

from admin.context.operator_context import require
from admin.context.policy.permissions import tenants_allowed
from admin.operations import keys as verbs
from admin.operations import tenants
from admin.operations.keys import KeyView, UnknownModels
from admin.pages.limits_form import Owner, change_limits, is_in_force, limits_form, uses
from admin.pages.three_way_merge import merge, retried, setters_of, with_versions
from admin.rendering.templating import may, path
from admin.web.forms import Field, Form, day_of, day_text
from admin.web.request import PageRequest, PageRoute, StreamRoute
from admin.web.tables import Column, Filter, TableSpec, table_state
from registry.accounts.api_keys import KeyRecord
from registry.accounts.key_terms import (
    FILES,
    INFERENCE,
    RESPONSES,
    USAGE,
    KeyCache,
    KeyChanges,
)
from registry.base import base32, random_token
from registry.errors import AlreadyExists, NotFound
from registry.lists.keys import STATES, KeyFilter

MAX_SUGGESTED = 200
ONCE = "once"
LABELS = {"working": "Active", "shut out": "Tenant disabled"}
PUBLIC_ID_BYTES = 10
TABLE = TableSpec(
    columns=(
        Column("Key", "name"),
        Column("Tenant", "tenant"),
        Column("State"),
        Column("Requests, 24 h", "requests", "number", "down"),
        Column("Cost, 24 h", "cost", "number", "down"),
        Column("Expires", "expires"),
        Column("Created", "created", first="down"),
    ),
    default_sort="-created",
    filters=(Filter("state", "State", {s: LABELS.get(s, s.capitalize()) for s in STATES}),),
    search="Name, public id or tenant",
)
BOUNDS = {
    "models": "allowed_models",
    "networks": "allowed_cidrs",
    "expires": "expires_at",
    "cache": "cache_mode",
    "cache_age": "cache_max_age_s",
    "cache_budget": "cache_false_hit_budget",
    "cache_sampled": "cache_sampled",
}
"""Of the form, and what the audit log calls them."""
GRACES = {"0": "Stop at once", "3600": "1 hour", "86400": "1 day", "604800": "7 days"}
MAX_LIST_LEN = 8000
CACHE_MODES = {
    "off": "Off",
    "exact": "Exact: identical requests",
    "semantic": "Semantic: questions with the same meaning",
    "shadow": "Shadow: measure only, never serve",
}


def list_keys(request: PageRequest) -> Response:
    """The page; `tenant` in the address: that tenant's alone."""
    table = table_state(TABLE, request.path, request.query)
    wanted = KeyFilter(table.search, table.chosen["state"])
    page, total, tenant = verbs.keys_page(
        request.operator, wanted, table.sort, table.cut, request.query.get("tenant", "")
    )
    return request.page("keys.html", table=table, page=page, total=total, tenant=tenant)


def show_add(request: PageRequest) -> Response:
    """An empty form."""
    form = _new_form(request, request.query.get("tenant", ""))
    return request.page("key_add.html", form=form, tenant=request.query.get("tenant", ""))


def add(request: PageRequest) -> Response:
    """A new key. Its text is on this answer and nowhere else: no redirect. The form makes one key,
    whose public id comes of the form's own mark: sent again, it leads to that key."""
    form = _new_form(request)
    public_id = _public_id(request, form.text(ONCE))
    name, tenant = form.text("name"), form.text("tenant")
    bounds = read_key(form, request.now_at)
    if form.is_sound:
        with form.refusals(tenant=NotFound, models=UnknownModels, once=AlreadyExists):
            key, plaintext = verbs.create_key(
                request.operator,
                tenant,
                name,
                cache=bounds.cache,
                scopes=bounds.scopes,
                allowed_models=bounds.allowed_models,
                expires_in_s=None
                if bounds.expires_at is None
                else bounds.expires_at - request.operator.clock(),
                allowed_cidrs=bounds.allowed_cidrs,
                public_id=public_id,
            )
            return request.page("key_made.html", key=key, plaintext=plaintext, rotated=False)
        if ONCE in form.errors:
            made = verbs.show_key(request.operator, public_id)
            note = "This form was sent already and the key was shown. If it is lost, rotate it."
            return request.redirect(f"/keys/{path(made.id)}", note)
    return request.page("key_add.html", 422, form=form, tenant=tenant)


def _new_form(request: PageRequest, tenant: str = "") -> Form:
    """Raises Forbidden for who may make no key at all."""
    writable = tenants_allowed(request.operator.grants, "keys.write")
    if writable is not None and not writable:
        require(request.operator, "keys.write")
    names = _tenant_names(request, writable)
    mark = Field(ONCE, "Form", value=random_token(10))
    fields = (*key_fields(request, tenant or (names[0] if len(names) == 1 else ""), names), mark)
    return Form(fields, request.fields if request.method == "POST" else None)


def _public_id(request: PageRequest, once: str) -> str:
    """Of this session's form alone; "" where it has no mark."""
    digest = hmac.digest(request.token.encode(), b"polyhost key" + once.encode(), hashlib.sha256)
    return base32(digest[:PUBLIC_ID_BYTES]) if once else ""


def _tenant_names(request: PageRequest, writable: frozenset[str] | None) -> Sequence[str]:
    found = tenants.list_tenants(request.operator)
    names = [one.name for one in found if writable is None or one.id in writable]
    return names[:MAX_SUGGESTED]


def show(request: PageRequest) -> Response:
    """The page."""
    return _page(request, _view(request))


def live(request: PageRequest) -> Mapping[str, str]:
    """What is used now, and whether the limits have arrived."""
    view = _view(request)
    currency = request.context.settings.currency
    return {
        "state": request.fragment("key_parts.html", "state", view.key, request.now_at),
        "figures": request.fragment("key_parts.html", "figures", view, currency),
        "uses": _uses(request, view),
    }


@retried
def change(request: PageRequest) -> Response:
    """Models, networks, expiry, cached answers."""
    view = _view(request)
    require(request.operator, "keys.write", view.key.tenant_id)
    form = _form(request, view, given=True)
    by = setters_of(request, "key.change", view.key.id, BOUNDS)
    if not merge(form, _form(request, view), by):
        return _page(request, view, form=form, status=409)
    bounds = read_key(form, request.now_at, view.key)
    if form.is_sound:
        changes = KeyChanges(
            expires_at=bounds.expires_at,
            allowed_models=bounds.allowed_models,
            allowed_cidrs=bounds.allowed_cidrs,
            cache=bounds.cache,
        )
        with form.refusals(models=UnknownModels):
            verbs.change_key(request.operator, view.key.id, changes, verbs.bounds_mark(view.key))
            return request.redirect(_at(view), "Saved. The change takes effect within a second.")
    return _page(request, view, form=form, status=422)


def set_limits(request: PageRequest) -> Response:
    """Those that were changed in the form."""
    view = _view(request)
    return change_limits(
        *(request, _owners(view), _at(view) + "#limits"),
        lambda form: _page(request, view, of_limits=form, status=422),
    )


def show_rotate(request: PageRequest) -> Response:
    """How long the old secret is to work on."""
    view = _view(request)
    require(request.operator, "keys.write", view.key.tenant_id)
    return request.page("key_rotate.html", key=view.key, form=_grace_form(view))


def rotate(request: PageRequest) -> Response:
    """Another secret. It is on this answer and nowhere else: no redirect. Sent again, the form
    does nothing."""
    view = _view(request)
    require(request.operator, "keys.write", view.key.tenant_id)
    form = _grace_form(view, request)
    grace, instead_of = form.text("grace"), form.text("instead_of")
    if form.is_sound:
        operator = request.operator
        with form.refusals(instead_of=AlreadyExists):
            key, plaintext = verbs.rotate_key(operator, view.key.id, float(grace), instead_of)
            return request.page("key_made.html", key=key, plaintext=plaintext, rotated=True)
        if used := form.errors.get("instead_of"):
            return request.redirect(_at(view), f"{used.capitalize()}.")
    return request.page("key_rotate.html", 422, key=view.key, form=form)


def confirm_revoke(request: PageRequest) -> Response:
    """What will happen, and a button."""
    view = _view(request)
    require(request.operator, "keys.write", view.key.tenant_id)
    return request.page(
        "confirm.html",
        title=f"Revoke {view.key.name}?",
        text="The key stops working within a second and cannot be restored. Running requests "
        "finish; usage and invoices are kept.",
        button="Revoke",
        danger=True,
        action=f"/key/revoke/{path(view.key.id)}",
        fields={},
        back=_at(view),
    )


def revoke(request: PageRequest) -> Response:
    """For ever."""
    key = verbs.revoke_key(request.operator, request.path_params["id"])
    return request.redirect(f"/keys/{path(key.id)}", f"{key.name} was revoked.")


def _page(
    request: PageRequest,
    view: KeyView,
    form: Form | None = None,
    of_limits: Form | None = None,
    status: int = 200,
) -> Response:
    key = view.key
    return request.page(
        "key.html",
        status,
        view=view,
        key=key,
        uses=_uses(request, view),
        form=form or _form(request, view),
        of_limits=of_limits or limits_form(request, _owners(view)),
        may_change=may(request.me, "keys.write", key.tenant_id) and key.revoked_at is None,
    )


def _uses(request: PageRequest, view: KeyView) -> str:
    """The key's own limits and its tenant's: both are drawn on."""
    owners = _owners(view)[:2]
    usable = view.key.usable(request.now_at)
    arrived = all(is_in_force(request, owner, view.key.id) for owner in owners)
    state = "now" if arrived else "soon" if usable else "nobody"
    return request.fragment("limits_parts.html", "uses", uses(request, owners), state)


def _owners(view: KeyView) -> Sequence[Owner]:
    key = view.key
    return (
        Owner("key", key.id, "this key", key.limits),
        Owner("tenant", key.tenant_id, "the tenant", key.tenant_limits),
        Owner("gateway", "", "the server", view.gateway_limits),
    )


def _grace_form(view: KeyView, request: PageRequest | None = None) -> Form:
    """With the mark of the secret that it replaces: sent again, it replaces no other."""
    fields = (
        Field("grace", "Keep the old secret working for", "select", value="86400", choices=GRACES),
        Field("instead_of", "Secret", value=verbs.secret_mark(view.key)),
    )
    return Form(fields, request.fields if request else None)


def _form(request: PageRequest, view: KeyView, given: bool = False) -> Form:
    return with_versions(Form(bound_fields(request, view.key), request.fields if given else None))


def _view(request: PageRequest) -> KeyView:
    """The key that the path names. Raises NotFound."""
    return verbs.key_view(request.operator, request.path_params["id"])


def _at(view: KeyView) -> str:
    return f"/keys/{path(view.key.id)}"


@dataclass(frozen=True, slots=True)
class KeyBounds:
    """What was given. None: no bound."""

    scopes: Sequence[str]
    allowed_models: Sequence[str] | None
    allowed_cidrs: Sequence[str] | None
    expires_at: float | None
    cache: KeyCache


def key_fields(request: PageRequest, tenant: str, tenants: Sequence[str]) -> tuple[Field, ...]:
    """Of a new key."""
    return (
        Field("name", "Name", required=True, max_length=128, help="Where the key will be used."),
        Field("tenant", "Tenant", required=True, value=tenant, suggestions=tenants,
              help="The tenant to bill: name or id."),
        Field(INFERENCE, "Can send requests to models", "checkbox", value="1"),
        Field(RESPONSES, "Can read and delete stored responses", "checkbox",
              help="Part of sending requests to models. Alone it asks no models."),
        Field(USAGE, "Can read its tenant's usage", "checkbox"),
        Field(FILES, "Can store, read and delete its tenant's files", "checkbox"),
        *bound_fields(request, None),
    )  # fmt: skip


def bound_fields(request: PageRequest, key: KeyRecord | None) -> tuple[Field, ...]:
    """What can be changed of a key; with what holds now."""
    models = sorted(key.allowed_models or ()) if key else ()
    networks = [str(one) for one in key.allowed_networks or ()] if key else ()
    cache = key.cache if key else KeyCache()
    modes = dict(CACHE_MODES)
    settings = request.context.settings
    if not settings.cache_embedder:
        modes = {mode: modes[mode] for mode in ("off", "exact")} | (
            {cache.mode: modes[cache.mode]} if cache.mode in modes else {}
        )
    return (
        Field(
            "models",
            "Allowed models",
            "textarea",
            value="\n".join(models),
            placeholder="all",
            help="Names, one per line. Leave empty for all models.",
            max_length=MAX_LIST_LEN,
        ),
        Field(
            "networks",
            "Allowed networks",
            "textarea",
            value="\n".join(networks),
            placeholder="any",
            help="Addresses or blocks such as 192.0.2.0/24, one per line. Leave empty for any.",
            max_length=MAX_LIST_LEN,
        ),
        Field(
            "expires",
            "Expires on",
            "date",
            value=day_text(key.expires_at) if key and key.expires_at is not None else "",
            help="The key stops working at the start of that day (UTC). Leave empty for never.",
        ),
        Field("cache", "Cached answers", "select", value=cache.mode, choices=modes),
        Field(
            "cache_age",
            "Maximum age",
            "number",
            value="" if cache.max_age_s is None else f"{cache.max_age_s:g}",
            unit="s",
            help=f"Leave empty for the server's default, {settings.cache_ttl_s:g} s.",
        ),
        Field(
            "cache_budget",
            "False hits allowed",
            "number",
            value="" if cache.false_hit_budget is None else f"{100 * cache.false_hit_budget:g}",
            unit="%",
            help="Share of semantic hits. Leave empty for the server's default, "
            f"{100 * settings.cache_false_hit_budget:g} %.",
        ),
        Field(
            "cache_sampled",
            "Also cache sampled answers",
            "checkbox",
            value="1" if cache.sampled else "",
            help="Answers sampled without a seed, which differ each time.",
        ),
    )


def read_key(form: Form, now_at: float, key: KeyRecord | None = None) -> KeyBounds:
    """What stands in it; errors are in the form."""
    names = {field.name for field in form.fields}
    scopes = [
        scope
        for scope in (INFERENCE, RESPONSES, USAGE, FILES)
        if scope in names and form.is_on(scope)
    ]
    if INFERENCE in names and not scopes:
        form.errors[INFERENCE] = "Select at least one permission."
    expires_at = day_of(form, "expires")
    if key and key.expires_at is not None and form.text("expires") == day_text(key.expires_at):
        expires_at = key.expires_at
    elif expires_at is not None and expires_at <= now_at:
        form.errors.setdefault("expires", "Choose a day in the future.")
    age_s, budget = form.decimal("cache_age"), form.decimal("cache_budget")
    mode = form.text("cache")
    if budget is not None and budget >= 100:
        form.errors.setdefault("cache_budget", "Must be less than 100 %.")
    share = None if budget is None else budget / 100
    cache = KeyCache(mode, age_s, share, form.is_on("cache_sampled"))
    return KeyBounds(scopes, _words(form, "models"), _words(form, "networks"), expires_at, cache)


def _words(form: Form, name: str) -> Sequence[str] | None:
    return form.text(name).replace(",", " ").split() or None


ROUTES = (
    PageRoute("GET", "/keys", list_keys),
    PageRoute("GET", "/key/add", show_add),
    PageRoute("POST", "/key/add", add),
    PageRoute("GET", "/keys/{id}", show),
    PageRoute("POST", "/key/change/{id}", change),
    PageRoute("POST", "/key/limits/{id}", set_limits),
    PageRoute("GET", "/key/rotate/{id}", show_rotate),
    PageRoute("POST", "/key/rotate/{id}", rotate),
    PageRoute("GET", "/key/revoke/{id}", confirm_revoke),
    PageRoute("POST", "/key/revoke/{id}", revoke),
)
STREAMS = (StreamRoute("/live/key/{id}", live, every_s=0.7),)
