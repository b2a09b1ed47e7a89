"""Tenants: the list, a new one, and one tenant: what it has, what it uses of its limits now, its
keys, its floor, and what may be changed."""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Final

from starlette.responses import Response

from admin.context.operator_context import require
from admin.context.optimistic_lock import ChangedMeanwhile
from admin.context.policy.permissions import allowed
from admin.operations import keys, prices
from admin.operations import tenants as verbs
from admin.operations.tenants import TenantView
from admin.pages import plans
from admin.pages.limits_form import Owner, change_limits, is_in_force, limits_form, uses
from admin.pages.three_way_merge import merge, retried, setters_of, with_versions
from admin.rendering.templating import path
from admin.web.forms import Field, Form, decimal_text
from admin.web.request import PageRequest, PageRoute, StreamRoute
from admin.web.tables import Column, Filter, TableSpec, table_state
from registry.accounts.tenants import SERVERS_RETENTION
from registry.errors import AlreadyExists
from registry.lists.keys import KeyFilter
from registry.lists.tenants import TenantFilter
from registry.money.plans import TenantTerms
from registry.paging import Cut

PRIORITIES = {"interactive": "Interactive", "standard": "Standard", "batch": "Batch"}
TABLE = TableSpec(
    columns=(
        Column("Tenant", "name"),
        Column("State"),
        Column("Weight", "weight", "number", "down"),
        Column("Keys", "keys", "number", "down"),
        Column("Requests, 24 h", "requests", "number", "down"),
        Column("Cost, 24 h", "cost", "number", "down"),
        Column("Created", "created", first="down"),
    ),
    default_sort="-cost",
    filters=(
        Filter("state", "State", {"in": "Active", "out": "Disabled"}),
        Filter("priority", "Priority", PRIORITIES),
    ),
    search="Name or id",
)
NUM_KEYS_SHOWN = 10
FIELDS = {
    "weight": "weight",
    "priority": "priority",
    "reserved": "reserved_share",
    "internal": "internal",
    "retention": "response_retention_days",
}
FLOOR_FIELDS: Final = {"size": "size_bytes", "models": "models"}
"""Of the forms, and what the audit log calls them."""
GIB: Final = 1 << 30
MAX_LIST_LEN: Final = 9000


def list_tenants(request: PageRequest) -> Response:
    """The page."""
    table = table_state(TABLE, request.path, request.query)
    disabled = {"in": False, "out": True}.get(table.chosen["state"])
    wanted = TenantFilter(table.search, table.chosen["priority"], disabled)
    page, counts = verbs.tenants_page(request.operator, wanted, table.sort, table.cut)
    return request.page("tenants.html", table=table, page=page, counts=counts)


def show_add(request: PageRequest) -> Response:
    """An empty form."""
    require(request.operator, "tenants.write")
    return request.page("tenant_add.html", form=_new_form())


def add(request: PageRequest) -> Response:
    """A new tenant; its page is where keys and limits are made."""
    require(request.operator, "tenants.write")
    form = _new_form(request)
    name, weight = form.text("name"), form.decimal("weight")
    if form.is_sound:
        with form.refusals(name=AlreadyExists):
            made = verbs.create_tenant(request.operator, name, weight or 0.0)
            note = "The tenant was created. It needs a key."
            return request.redirect(f"/tenants/{path(made.id)}", note)
    return request.page("tenant_add.html", 422, form=form)


def _new_form(request: PageRequest | None = None) -> Form:
    fields = (
        Field("name", "Name", required=True, max_length=128),
        Field(
            "weight",
            "Weight",
            "number",
            required=True,
            value="1",
            help="Share relative to other tenants: weight 2 gets twice the service of weight 1.",
        ),
    )
    return Form(fields, request.fields if request else None)


def show(request: PageRequest) -> Response:
    """The page."""
    return _page(request, _view(request))


def live(request: PageRequest) -> Mapping[str, str]:
    """What is used now, and whether the limits have arrived."""
    view = _view(request)
    return {
        "figures": request.fragment(
            "tenant_parts.html", "figures", view, request.live, request.context.settings.currency
        ),
        "uses": _uses(request, view),
    }


@retried
def change(request: PageRequest) -> Response:
    """Weight, priority, what is kept free for it, and whether it is the operator's own."""
    view = _view(request)
    require(request.operator, "tenants.write")
    form = _form(request, view, given=True)
    by = setters_of(request, "tenant.update", view.tenant.id, FIELDS)
    if not merge(form, _form(request, view), by):
        return _page(request, view, form=form, status=409)
    weight, priority = form.decimal("weight"), form.text("priority")
    reserved = form.decimal("reserved")
    retention = form.whole("retention")
    if form.is_sound:
        with form.refusals():
            verbs.update_tenant(
                request.operator,
                view.tenant.id,
                weight=weight,
                priority=priority,
                reserved_share=(reserved or 0.0) / 100,
                internal=form.is_on("internal"),
                response_retention_days=SERVERS_RETENTION if retention is None else retention,
                seen=verbs.share_mark(view.tenant),
            )
            return request.redirect(_at(view), "Saved. The change applies to the next requests.")
    return _page(request, view, form=form, status=422)


@retried
def set_floor(request: PageRequest) -> Response:
    """Which models are its own, and how much of them stays on workers."""
    view = _view(request)
    require(request.operator, "tenants.write")
    form = _floor_form(request, view, given=True)
    by = setters_of(request, "tenant.floor", view.tenant.id, FLOOR_FIELDS)
    if not merge(form, _floor_form(request, view), by):
        return _page(request, view, of_floor=form, status=409)
    size, names = form.decimal("size"), form.text("models").replace(",", " ").split()
    if size is None and names:
        form.errors.setdefault("size", "Enter how much to keep; 0 removes the floor.")
    elif size and not names:
        form.errors.setdefault("models", "Name the tenant's models.")
    if form.is_sound:
        num_bytes, seen = round((size or 0) * GIB), verbs.floor_mark(view.floor)
        with form.refusals():
            verbs.set_model_floor(request.operator, view.tenant.id, num_bytes, names, seen)
            note = "Saved. Workers apply the change shortly."
            return request.redirect(_at(view) + "#floor", note)
    return _page(request, view, of_floor=form, status=422)


def set_limits(request: PageRequest) -> Response:
    """Those that were changed in the form."""
    view = _view(request)
    return change_limits(
        *(request, _owners(view), _at(view) + "#limits"),
        lambda form: _page(request, view, of_limits=form, status=422),
    )


def set_plan(request: PageRequest) -> Response:
    """The tenant's plan and own discount, from a day on."""
    view = _view(request)
    require(request.operator, "prices.write")
    form = _terms_form(request, view, given=True)
    plan, discount, valid_from = (
        form.text("plan"),
        plans.discount_of(form),
        plans.start_of(form, request.now_at),
    )
    if form.is_sound:
        terms = (plan, discount, valid_from, form.text(plans.SEEN))
        try:
            with form.refusals():
                prices.set_terms(request.operator, view.tenant.id, *terms)
                return request.redirect(_at(view) + "#plan", "The plan was set.")
        except ChangedMeanwhile as error:
            now = _terms_form(request, view).value(plans.SEEN)
            form.given = {**request.fields, plans.SEEN: now}
            form.trouble = f"{str(error).capitalize()}. Send again to set yours anyway."
            return _page(request, view, of_plan=form, status=409)
    return _page(request, view, of_plan=form, status=422)


def withdraw_plan(request: PageRequest) -> Response:
    """Take back a plan that has not begun."""
    view = _view(request)
    require(request.operator, "prices.write")
    valid_from = plans.scheduled(request, _terms(request, view))
    seen = request.fields.get(plans.SEEN, "")
    prices.withdraw_terms(request.operator, view.tenant.id, valid_from, seen)
    return request.redirect(_at(view) + "#plan", "The scheduled plan was withdrawn.")


def _terms_form(request: PageRequest, view: TenantView, given: bool = False) -> Form:
    terms = _terms(request, view)
    held = [each for each in terms if each.valid_from <= request.now_at]
    return plans.terms_form(request, terms, held[-1] if held else None, given)


def _terms(request: PageRequest, view: TenantView) -> list[TenantTerms]:
    return [each for _, each in prices.list_terms(request.operator, view.tenant.id)]


def confirm_shut_out(request: PageRequest) -> Response:
    """What will happen, and a button."""
    view = _view(request)
    require(request.operator, "tenants.write")
    keys = "key stops" if view.num_keys == 1 else "keys stop"
    return request.page(
        "confirm.html",
        title=f"Disable {view.tenant.name}?",
        text=f"Its {view.num_keys} {keys} working within a second. Running requests finish. "
        "Usage and invoices are kept, and the tenant can be enabled again.",
        button="Disable",
        danger=True,
        action=f"/tenant/state/{path(view.tenant.id)}",
        fields={"disabled": "1"},
        back=_at(view),
    )


def set_state(request: PageRequest) -> Response:
    """Disable the tenant, or enable it again."""
    disabled = request.fields.get("disabled") == "1"
    found = verbs.update_tenant(request.operator, request.path_params["id"], disabled=disabled)
    done = "was disabled" if disabled else "was enabled"
    return request.redirect(f"/tenants/{path(found.id)}", f"{found.name} {done}.")


def _page(
    request: PageRequest,
    view: TenantView,
    form: Form | None = None,
    of_limits: Form | None = None,
    of_floor: Form | None = None,
    of_plan: Form | None = None,
    status: int = 200,
) -> Response:
    may_price = allowed(request.operator.grants, "prices.write")
    shown, num_keys, _ = keys.keys_page(
        request.operator,
        KeyFilter(),
        "created",
        Cut(NUM_KEYS_SHOWN, descending=True),
        view.tenant.id,
    )
    return request.page(
        "tenant.html",
        status,
        view=view,
        tenant=view.tenant,
        live=request.live,
        keys=shown.rows,
        num_keys=num_keys,
        uses=_uses(request, view),
        form=form or _form(request, view),
        of_limits=of_limits or limits_form(request, _owners(view)),
        of_floor=of_floor or _floor_form(request, view),
        of_plan=of_plan or (_terms_form(request, view) if may_price else None),
        terms=_terms(request, view),
        discount=plans.discount_text,
    )


def _uses(request: PageRequest, view: TenantView) -> str:
    owners = _owners(view)
    arrived = is_in_force(request, owners[0], view.key_id)
    found = uses(request, owners[:1])
    state = "now" if arrived else "soon" if view.key_id else "nobody"
    return request.fragment("limits_parts.html", "uses", found, state)


def _owners(view: TenantView) -> Sequence[Owner]:
    return (
        Owner("tenant", view.tenant.id, "the tenant", view.limits),
        Owner("gateway", "", "the server", view.gateway_limits),
    )


def _form(request: PageRequest, view: TenantView, given: bool = False) -> Form:
    tenant = view.tenant
    fields = (
        Field(
            "weight",
            "Weight",
            "number",
            required=True,
            value=decimal_text(tenant.weight),
            help="Share relative to other tenants: weight 2 gets twice the service of weight 1.",
        ),
        Field(
            "priority",
            "Priority",
            "select",
            value=tenant.priority,
            choices=PRIORITIES,
            help="Interactive multiplies the weight by four; batch uses only what others leave.",
        ),
        Field(
            "reserved",
            "Reserved capacity",
            "number",
            value=decimal_text(100 * tenant.reserved_share) if tenant.reserved_share else "",
            unit="%",
            help="Part of each worker's request slots and KV memory; at most 50 % for all tenants.",
        ),
        Field(
            "internal",
            "Internal tenant",
            "checkbox",
            value="1" if tenant.internal else "",
            help="A tenant of your own. The playground uses its keys by default.",
        ),
        Field(
            "retention",
            "Stored responses",
            "number",
            value=_days_text(tenant.response_retention_days),
            unit="days",
            placeholder="as the server",
            help="How long /v1/responses are kept, if shorter than the server's setting. 0 stores "
            "nothing and hides what is stored.",
        ),
    )
    return with_versions(Form(fields, request.fields if given else None))


def _days_text(days: int | None) -> str:
    return "" if days is None else str(days)


def _floor_form(request: PageRequest, view: TenantView, given: bool = False) -> Form:
    """As it stands; `given`: as it was sent."""
    fields = (
        Field(
            "size",
            "Kept loaded on each worker",
            "number",
            value=_gib_text(view.floor.size_bytes if view.floor else 0),
            unit="GiB",
            placeholder="nothing",
            help="How much memory of these models other tenants' models cannot evict. A floor as "
            "large as the device keeps all other models out. Leave both empty for no floor.",
        ),
        Field(
            "models",
            "Models",
            "textarea",
            value="\n".join(view.floor.models) if view.floor else "",
            placeholder="none",
            help="Model names, one per line. Several tenants may name the same model.",
            max_length=MAX_LIST_LEN,
        ),
    )
    return with_versions(Form(fields, request.fields if given else None))


def _gib_text(size_bytes: int) -> str:
    """To the byte."""
    return f"{Decimal(size_bytes) / GIB:.12f}".rstrip("0").rstrip(".") if size_bytes else ""


def _view(request: PageRequest) -> TenantView:
    """The tenant that the path names. Raises NotFound."""
    return verbs.tenant_view(request.operator, request.path_params["id"])


def _at(view: TenantView) -> str:
    return f"/tenants/{path(view.tenant.id)}"


ROUTES = (
    PageRoute("GET", "/tenants", list_tenants),
    PageRoute("GET", "/tenant/add", show_add),
    PageRoute("POST", "/tenant/add", add),
    PageRoute("GET", "/tenants/{id}", show),
    PageRoute("POST", "/tenant/change/{id}", change),
    PageRoute("POST", "/tenant/floor/{id}", set_floor),
    PageRoute("POST", "/tenant/limits/{id}", set_limits),
    PageRoute("POST", "/tenant/plan/{id}", set_plan),
    PageRoute("POST", "/tenant/unplan/{id}", withdraw_plan),
    PageRoute("GET", "/tenant/shut-out/{id}", confirm_shut_out),
    PageRoute("POST", "/tenant/state/{id}", set_state),
)
STREAMS = (StreamRoute("/live/tenant/{id}", live, every_s=0.7),)
