"""One tenant: what it has, what it uses of its limits now, its keys, and what may be changed."""

from collections.abc import Collection, Mapping, Sequence

from admin import floor_form
from admin.amounts import decimal_text
from admin.ask import Ask, PageRoute, Reply, StreamRoute
from admin.forms import Field, Form
from admin.limits_form import Owner, is_in_force, limits_form, store, uses
from admin.merged_form import CLASH, TRIES, merge, with_marks
from admin.pages.tenants import PRIORITIES
from admin.templating import path
from gateway.service import key_list, tenant_list
from gateway.service import tenants as verbs
from gateway.service.control import require
from gateway.service.meanwhile import ChangedMeanwhile, who_set
from gateway.service.tenant_list import TenantView
from registry.errors import RegistryError
from registry.key_list import KeyFilter
from registry.paging import Cut

NUM_KEYS_SHOWN = 10
FIELDS = {"weight": "weight", "priority": "priority", "reserved": "reserved_share"}
"""Of the form, and what the audit log calls them."""


def show(ask: Ask) -> Reply:
    """The page."""
    return _page(ask, tenant_list.tenant_view(ask.control, ask.params["id"]))


def live(ask: Ask) -> Mapping[str, str]:
    """What is used now, and whether the limits have arrived."""
    view = tenant_list.tenant_view(ask.control, ask.params["id"])
    return {
        "figures": ask.fragment(
            "tenant_parts.html", "figures", view, ask.live, ask.desk.settings.currency
        ),
        "uses": _uses(ask, view),
    }


def change(ask: Ask) -> Reply:
    """Weight, priority and what is kept free for it."""
    for _ in range(TRIES):
        try:
            return _change(ask)
        except ChangedMeanwhile:  # between our look and our change: look again
            continue
    raise ChangedMeanwhile(CLASH)


def _change(ask: Ask) -> Reply:
    """Raises ChangedMeanwhile where somebody else was quicker by a moment."""
    view = tenant_list.tenant_view(ask.control, ask.params["id"])
    require(ask.control, "tenants.write")
    form = _form(ask, view, given=True)
    if not merge(form, _form(ask, view), lambda names: _who_set(ask, view, names)):
        return _page(ask, view, form=form, status=409)
    weight, priority = form.decimal("weight"), form.text("priority")
    reserved = form.decimal("reserved")
    if form.is_sound:
        try:
            verbs.update_tenant(
                ask.control,
                view.tenant.id,
                weight=weight,
                priority=priority,
                reserved_share=(reserved or 0.0) / 100,
                seen=verbs.share_mark(view.tenant),
            )
        except ChangedMeanwhile:
            raise
        except RegistryError as error:
            form.trouble = str(error)
        else:
            return ask.redirect(_at(view), "Changed: the next requests are shared out by it.")
    return _page(ask, view, form=form, status=422)


def set_floor(ask: Ask) -> Reply:
    """Which models are its own, and how much of them stays on workers."""
    for _ in range(TRIES):
        view = tenant_list.tenant_view(ask.control, ask.params["id"])
        require(ask.control, "tenants.write")
        form = floor_form.floor_form(ask, view, given=True)
        try:
            status = floor_form.store(ask, view, form)
        except ChangedMeanwhile:  # between our look and our change: look again
            continue
        if status == 200:
            return ask.redirect(_at(view) + "#floor", "Changed: workers hear of it soon.")
        return _page(ask, view, of_floor=form, status=status)
    raise ChangedMeanwhile(CLASH)


def set_limits(ask: Ask) -> Reply:
    """Those that were changed in the form."""
    view = tenant_list.tenant_view(ask.control, ask.params["id"])
    require(ask.control, "limits.write")
    form = limits_form(ask, _owners(view), given=True)
    if store(ask, _owners(view)[0], form):
        return ask.redirect(_at(view) + "#limits", "The limits are changed.")
    return _page(ask, view, of_limits=form, status=422)


def confirm_shut_out(ask: Ask) -> Reply:
    """What will happen, and a button."""
    view = tenant_list.tenant_view(ask.control, ask.params["id"])
    require(ask.control, "tenants.write")
    keys = "key is" if view.num_keys == 1 else "keys are"
    return ask.page(
        "confirm.html",
        title=f"Shut out {view.tenant.name}?",
        text=f"Its {view.num_keys} {keys} refused within a second. What runs now comes to its end. "
        "Usage and bills stay, and it can be let in again.",
        button="Shut out",
        danger=True,
        action=f"/tenant/state/{path(view.tenant.id)}",
        fields={"disabled": "1"},
        back=_at(view),
    )


def set_state(ask: Ask) -> Reply:
    """Shut out, or let in again."""
    disabled = ask.form.get("disabled") == "1"
    found = verbs.update_tenant(ask.control, ask.params["id"], disabled=disabled)
    done = "is shut out" if disabled else "is let in again"
    return ask.redirect(f"/tenants/{path(found.id)}", f"{found.name} {done}.")


def _page(
    ask: Ask,
    view: TenantView,
    form: Form | None = None,
    of_limits: Form | None = None,
    of_floor: Form | None = None,
    status: int = 200,
) -> Reply:
    keys, num_keys, _ = key_list.keys_page(
        ask.control, KeyFilter(), "created", Cut(NUM_KEYS_SHOWN, descending=True), view.tenant.id
    )
    return ask.page(
        "tenant.html",
        status,
        view=view,
        tenant=view.tenant,
        live=ask.live,
        keys=keys.rows,
        num_keys=num_keys,
        uses=_uses(ask, view),
        form=form or _form(ask, view),
        of_limits=of_limits or limits_form(ask, _owners(view)),
        of_floor=of_floor or floor_form.floor_form(ask, view),
    )


def _uses(ask: Ask, view: TenantView) -> str:
    owners = _owners(view)
    arrived = is_in_force(ask, owners[0], view.key_id)
    found = uses(ask, owners[:1])
    state = "now" if arrived else "soon" if view.key_id else "nobody"
    return ask.fragment("limits_parts.html", "uses", found, state)


def _owners(view: TenantView) -> Sequence[Owner]:
    return (
        Owner("tenant", view.tenant.id, "the tenant", view.limits),
        Owner("gateway", "", "the whole server", view.gateway_limits),
    )


def _form(ask: Ask, view: TenantView, given: bool = False) -> Form:
    tenant = view.tenant
    fields = (
        Field(
            "weight",
            "Weight",
            "number",
            required=True,
            value=decimal_text(tenant.weight),
            help="Its share against other tenants': 2 gets twice what 1 gets.",
        ),
        Field(
            "priority",
            "Priority",
            "select",
            value=tenant.priority,
            choices=PRIORITIES,
            help="Interactive counts four times; batch has what others leave.",
        ),
        Field(
            "reserved",
            "Kept free for it",
            "number",
            value=decimal_text(100 * tenant.reserved_share) if tenant.reserved_share else "",
            unit="%",
            help="Of each worker's request places and KV memory; 50 % over all tenants.",
        ),
    )
    return with_marks(Form(fields, ask.form if given else None))


def _who_set(ask: Ask, view: TenantView, names: Collection[str]) -> Mapping[str, str]:
    """By the fields of the form."""
    told = {name: FIELDS[name] for name in names}
    by = who_set(ask.control, "tenant.update", view.tenant.id, set(told.values()))
    return {name: by[field] for name, field in told.items()}


def _at(view: TenantView) -> str:
    return f"/tenants/{path(view.tenant.id)}"


ROUTES = (
    PageRoute("GET", "/tenants/{id}", show, live=True),
    PageRoute("POST", "/tenant/change/{id}", change, live=True),
    PageRoute("POST", "/tenant/floor/{id}", set_floor, live=True),
    PageRoute("POST", "/tenant/limits/{id}", set_limits, live=True),
    PageRoute("GET", "/tenant/shut-out/{id}", confirm_shut_out),
    PageRoute("POST", "/tenant/state/{id}", set_state),
)
STREAMS = (StreamRoute("/live/tenant/{id}", live, every_s=0.7),)
