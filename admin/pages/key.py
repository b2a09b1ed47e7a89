"""One API key: what it uses of its limits now, its bounds, another secret, its end."""

from collections.abc import Collection, Mapping, Sequence

from admin.ask import Ask, PageRoute, Reply, StreamRoute
from admin.forms import Field, Form
from admin.key_form import bound_fields, read_key
from admin.limits_form import Owner, is_in_force, limits_form, store, uses
from admin.merged_form import CLASH, TRIES, merge, with_marks
from admin.templating import may, path
from gateway.service import key_list
from gateway.service import keys as verbs
from gateway.service.control import require
from gateway.service.key_list import KeyView
from gateway.service.meanwhile import ChangedMeanwhile, who_set
from registry.errors import AlreadyExists, Forbidden, RegistryError
from registry.key_changes import KeyChanges

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
GRACES = {"0": "None: it stops at once", "3600": "1 hour", "86400": "1 day", "604800": "7 days"}


def show(ask: Ask) -> Reply:
    """The page."""
    return _page(ask, key_list.key_view(ask.control, ask.params["id"]))


def live(ask: Ask) -> Mapping[str, str]:
    """What is used now, and whether the limits have arrived."""
    view = key_list.key_view(ask.control, ask.params["id"])
    currency = ask.desk.settings.currency
    return {
        "state": ask.fragment("key_parts.html", "state", view.key, ask.now_at),
        "figures": ask.fragment("key_parts.html", "figures", view, currency),
        "uses": _uses(ask, view),
    }


def change(ask: Ask) -> Reply:
    """Models, networks, expiry, cached answers."""
    for _ in range(TRIES):
        try:
            return _change(ask)
        except ChangedMeanwhile:  # between our look and our change: look again
            continue
    raise ChangedMeanwhile(CLASH)


def _change(ask: Ask) -> Reply:
    """Raises ChangedMeanwhile where somebody else was quicker by a moment."""
    view = key_list.key_view(ask.control, ask.params["id"])
    require(ask.control, "keys.write", view.key.tenant_id)
    form = _form(ask, view, given=True)
    if not merge(form, _form(ask, view), lambda names: _who_set(ask, view, names)):
        return _page(ask, view, form=form, status=409)
    bounds = read_key(form, ask.now_at, view.key)
    if form.is_sound:
        changes = KeyChanges(
            expires_at=bounds.expires_at,
            allowed_models=bounds.allowed_models,
            allowed_cidrs=bounds.allowed_cidrs,
            cache=bounds.cache,
        )
        try:
            verbs.change_key(ask.control, view.key.id, changes, verbs.bounds_mark(view.key))
        except (Forbidden, ChangedMeanwhile):
            raise
        except RegistryError as error:
            form.trouble = str(error)
        else:
            return ask.redirect(_at(view), "The key is changed: it holds within a second.")
    return _page(ask, view, form=form, status=422)


def set_limits(ask: Ask) -> Reply:
    """Those that were changed in the form."""
    view = key_list.key_view(ask.control, ask.params["id"])
    require(ask.control, "limits.write")
    form = limits_form(ask, _owners(view), given=True)
    if store(ask, _owners(view)[0], form):
        return ask.redirect(_at(view) + "#limits", "The limits are changed.")
    return _page(ask, view, of_limits=form, status=422)


def show_rotate(ask: Ask) -> Reply:
    """How long the old secret is to work on."""
    view = key_list.key_view(ask.control, ask.params["id"])
    require(ask.control, "keys.write", view.key.tenant_id)
    return ask.page("key_rotate.html", key=view.key, form=_grace_form(view))


def rotate(ask: Ask) -> Reply:
    """Another secret. It is on this answer and nowhere else: no redirect. Sent again, the form
    does nothing."""
    view = key_list.key_view(ask.control, ask.params["id"])
    require(ask.control, "keys.write", view.key.tenant_id)
    form = _grace_form(view, ask)
    grace, instead_of = form.text("grace"), form.text("instead_of")
    if form.is_sound:
        try:
            key, plaintext = verbs.rotate_key(ask.control, view.key.id, float(grace), instead_of)
        except Forbidden:
            raise
        except AlreadyExists as error:
            return ask.redirect(_at(view), f"{str(error).capitalize()}.")
        except RegistryError as error:
            form.trouble = str(error)
        else:
            return ask.page("key_made.html", key=key, plaintext=plaintext, rotated=True)
    return ask.page("key_rotate.html", 422, key=view.key, form=form)


def confirm_revoke(ask: Ask) -> Reply:
    """What will happen, and a button."""
    view = key_list.key_view(ask.control, ask.params["id"])
    require(ask.control, "keys.write", view.key.tenant_id)
    return ask.page(
        "confirm.html",
        title=f"Revoke {view.key.name}?",
        text="Who uses it is refused within a second, for ever: a revoked key cannot be let in "
        "again. What runs now comes to its end; usage and bills stay.",
        button="Revoke",
        danger=True,
        action=f"/key/revoke/{path(view.key.id)}",
        fields={},
        back=_at(view),
    )


def revoke(ask: Ask) -> Reply:
    """For ever."""
    key = verbs.revoke_key(ask.control, ask.params["id"])
    return ask.redirect(f"/keys/{path(key.id)}", f"{key.name} is revoked.")


def _page(
    ask: Ask,
    view: KeyView,
    form: Form | None = None,
    of_limits: Form | None = None,
    status: int = 200,
) -> Reply:
    key = view.key
    return ask.page(
        "key.html",
        status,
        view=view,
        key=key,
        uses=_uses(ask, view),
        form=form or _form(ask, view),
        of_limits=of_limits or limits_form(ask, _owners(view)),
        may_change=may(ask.me, "keys.write", key.tenant_id) and key.revoked_at is None,
    )


def _uses(ask: Ask, view: KeyView) -> str:
    """The key's own limits and its tenant's: both are drawn on."""
    owners = _owners(view)[:2]
    usable = view.key.usable(ask.now_at)
    arrived = all(is_in_force(ask, owner, view.key.id) for owner in owners)
    state = "now" if arrived else "soon" if usable else "nobody"
    return ask.fragment("limits_parts.html", "uses", uses(ask, owners), state)


def _owners(view: KeyView) -> Sequence[Owner]:
    key = view.key
    return (
        Owner("key", key.id, "this key", key.limits),
        Owner("tenant", key.tenant_id, "the tenant", key.tenant_limits),
        Owner("gateway", "", "the whole server", view.gateway_limits),
    )


def _grace_form(view: KeyView, ask: Ask | None = None) -> Form:
    """With the mark of the secret that it replaces: sent again, it replaces no other."""
    fields = (
        Field("grace", "The old secret works on for", "select", value="86400", choices=GRACES),
        Field("instead_of", "Secret", value=verbs.secret_mark(view.key)),
    )
    return Form(fields, ask.form if ask else None)


def _form(ask: Ask, view: KeyView, given: bool = False) -> Form:
    return with_marks(Form(bound_fields(ask, view.key), ask.form if given else None))


def _who_set(ask: Ask, view: KeyView, names: Collection[str]) -> Mapping[str, str]:
    """By the fields of the form."""
    told = {name: BOUNDS[name] for name in names}
    by = who_set(ask.control, "key.change", view.key.id, set(told.values()))
    return {name: by[field] for name, field in told.items()}


def _at(view: KeyView) -> str:
    return f"/keys/{path(view.key.id)}"


ROUTES = (
    PageRoute("GET", "/keys/{id}", show),
    PageRoute("POST", "/key/change/{id}", change),
    PageRoute("POST", "/key/limits/{id}", set_limits),
    PageRoute("GET", "/key/rotate/{id}", show_rotate),
    PageRoute("POST", "/key/rotate/{id}", rotate),
    PageRoute("GET", "/key/revoke/{id}", confirm_revoke),
    PageRoute("POST", "/key/revoke/{id}", revoke),
)
STREAMS = (StreamRoute("/live/key/{id}", live, every_s=0.7),)
