"""Users, their roles and passwords, and everybody's sessions."""

from collections.abc import Callable, Mapping

from starlette.responses import Response

from admin.context.operator_context import require
from admin.context.optimistic_lock import ChangedMeanwhile
from admin.operations import sessions
from admin.operations import users as verbs
from admin.rendering.templating import may, path
from admin.web.forms import Field, Form
from admin.web.request import PageRequest, PageRoute
from admin.web.tables import Column, TableSpec, table_state
from registry.accounts.users import ROLES, UserRecord
from registry.errors import AlreadyExists, NotFound, RegistryError

SEEN = "seen"
ROLE_CHOICES = {
    "viewer": "Viewer: can view",
    "admin": "Admin: can view and change",
    "owner": "Owner: can also manage users",
}


TABLE = TableSpec(
    columns=(
        Column("Name", "name"),
        Column("Roles"),
        Column("State", "state"),
        Column("Created", "created", first="down"),
        Column("Password set", "password", first="down"),
    ),
    default_sort="name",
)
SORT_BY: Mapping[str, Callable[[UserRecord], str | float]] = {
    "name": lambda user: user.name.lower(),
    "state": lambda user: user.disabled,
    "created": lambda user: user.created_at,
    "password": lambda user: user.password_set_at,
}


def list_users(request: PageRequest) -> Response:
    """All that may be seen."""
    table = table_state(TABLE, request.path, request.query)
    users = verbs.list_users(request.operator)
    users.sort(key=SORT_BY[table.sort], reverse=table.descending)
    locks = verbs.list_sign_in_locks(request.operator) if may(request.me, "users.write") else ()
    return request.page("users.html", table=table, users=users, locks=locks)


def show_user(request: PageRequest) -> Response:
    """One user."""
    return _page(request, _user(request))


def show_add(request: PageRequest) -> Response:
    """An empty form."""
    require(request.operator, "users.write")
    return request.page("user_add.html", form=_add_form())


def add_user(request: PageRequest) -> Response:
    """A new user with one role."""
    require(request.operator, "users.write")
    form = _add_form(request)
    name, role, tenant = form.text("name"), form.text("role"), form.text("tenant")
    if form.is_sound:
        with form.refusals(name=AlreadyExists, tenant=NotFound):
            verbs.create_user(request.operator, name, form.value("password"), role, tenant)
            return request.redirect(f"/users/{path(name)}", f"{name} can sign in now.")
    return request.page("user_add.html", 422, form=form)


def set_role(request: PageRequest) -> Response:
    """A role for the installation or a tenant; an empty one takes it away."""
    user = _user(request)
    form = _role_form(request)
    role, tenant = request.fields.get("role", ""), request.fields.get("tenant", "").strip()
    if role and role not in ROLES:
        form.errors["role"] = "Choose a role from the list."
    if form.is_sound:
        try:
            seen = request.fields.get(SEEN, "")[:64]
            with form.refusals(tenant=NotFound):
                verbs.set_role(request.operator, user.name, role or None, tenant, seen)
                return request.redirect(f"/users/{path(user.name)}", "The roles were changed.")
        except ChangedMeanwhile:
            user = _user(request)
            form.trouble = (
                "Another user changed these roles in the meantime, as shown here. "
                "Nothing was saved."
            )
    return _page(request, user, role_form=form, status=422)


def set_password(request: PageRequest) -> Response:
    """Another password for somebody; their sessions end."""
    user = _user(request)
    form = _password_form(request)
    with form.refusals(password=RegistryError):
        verbs.set_password(request.operator, user.name, form.value("password"))
        return request.redirect(f"/users/{path(user.name)}", f"{user.name} has a new password.")
    return _page(request, user, password_form=form, status=422)


def bind(request: PageRequest) -> Response:
    """What the identity provider knows the user as."""
    user = _user(request)
    form = _bind_form(request)
    subject = form.text("subject")
    if form.is_sound:
        with form.refusals():
            verbs.bind(request.operator, user.name, subject)
            said = f"{user.name} can now sign in with the identity provider."
            return request.redirect(f"/users/{path(user.name)}", said)
    return _page(request, user, bind_form=form, status=422)


def unbind(request: PageRequest) -> Response:
    """No longer."""
    user = verbs.unbind(
        request.operator, request.path_params["name"], request.fields.get("issuer", "")
    )
    said = f"{user.name} was unbound and all sessions ended."
    return request.redirect(f"/users/{path(user.name)}", said)


def set_disabled(request: PageRequest) -> Response:
    """Disable the user, or enable the user again."""
    disabled = request.fields.get("disabled") == "1"
    user = verbs.set_user_disabled(request.operator, request.path_params["name"], disabled)
    done = "was disabled; all sessions ended" if disabled else "was enabled"
    return request.redirect(f"/users/{path(user.name)}", f"{user.name} {done}.")


def unlock(request: PageRequest) -> Response:
    """Who had to wait after failed sign-ins may try again."""
    name, address = (request.fields.get(field, "") for field in ("name", "address"))
    verbs.unlock(request.operator, name, address)
    said = f"{name or address or 'Everybody'} can try to sign in again."
    return request.redirect("/users", said)


def confirm_remove(request: PageRequest) -> Response:
    """What will happen, and a button."""
    user = _user(request)
    return request.page(
        "confirm.html",
        title=f"Remove {user.name}?",
        text="The user's sessions end at once. The name stays in the audit log.",
        button="Remove",
        danger=True,
        action=f"/user/remove/{path(user.name)}",
        fields={},
        back=f"/users/{path(user.name)}",
    )


def remove(request: PageRequest) -> Response:
    """Gone."""
    user = verbs.remove_user(request.operator, request.path_params["name"])
    return request.redirect("/users", f"{user.name} was removed.")


def list_sessions(request: PageRequest) -> Response:
    """One's own, or everybody's for who may write users."""
    found = sessions.list_sessions(request.operator)
    return request.page("sessions.html", sessions=found, current=request.me.session.id)


def _page(
    request: PageRequest,
    user: UserRecord,
    role_form: Form | None = None,
    password_form: Form | None = None,
    bind_form: Form | None = None,
    status: int = 200,
) -> Response:
    whole = may(request.me, "users.read")
    return request.page(
        "user.html",
        status,
        user=user,
        seen=verbs.roles_mark(user),
        role_form=role_form or _role_form(),
        password_form=password_form or _password_form(),
        bind_form=bind_form or _bind_form(),
        bindings=verbs.bindings_of(request.operator, user.name) if whole else (),
        issuer=request.context.settings.oidc_issuer,
        provider=request.context.settings.oidc_name,
    )


def _user(request: PageRequest) -> UserRecord:
    name = request.path_params["name"]
    found = next((user for user in verbs.list_users(request.operator) if user.name == name), None)
    if found is None:
        raise NotFound(f"unknown user {name!r}")
    return found


def _add_form(request: PageRequest | None = None) -> Form:
    fields = (
        Field("name", "Name", required=True, max_length=128),
        Field(
            "password",
            "Password",
            "password",
            help="8 to 256 characters. The user can change it.",
            autocomplete="new-password",
        ),
        Field("role", "Role", "select", value="viewer", choices=ROLE_CHOICES),
        Field("tenant", "Tenant", help="Name or id. Leave empty for the whole installation."),
    )
    return Form(fields, request.fields if request else None)


def _role_form(request: PageRequest | None = None) -> Form:
    fields = (
        Field("role", "Role", "select", value="viewer", choices=ROLE_CHOICES),
        Field("tenant", "Tenant", help="Name or id. Leave empty for the whole installation."),
    )
    return Form(fields, request.fields if request else None)


def _password_form(request: PageRequest | None = None) -> Form:
    field = Field("password", "New password", "password", autocomplete="new-password")
    return Form((field,), request.fields if request else None)


def _bind_form(request: PageRequest | None = None) -> Form:
    field = Field(
        *("subject", "Subject"),
        required=True, max_length=255, help="The claim `sub`. A refused sign-in shows it.",
    )  # fmt: skip
    return Form((field,), request.fields if request else None)


ROUTES = (
    PageRoute("GET", "/users", list_users),
    PageRoute("GET", "/users/{name:path}", show_user),
    PageRoute("GET", "/user/add", show_add),
    PageRoute("POST", "/user/add", add_user, pool="sign_in"),
    PageRoute("POST", "/user/role/{name:path}", set_role),
    PageRoute("POST", "/user/password/{name:path}", set_password, pool="sign_in"),
    PageRoute("POST", "/user/bind/{name:path}", bind),
    PageRoute("POST", "/user/unbind/{name:path}", unbind),
    PageRoute("POST", "/user/disabled/{name:path}", set_disabled),
    PageRoute("POST", "/user/unlock", unlock),
    PageRoute("GET", "/user/remove/{name:path}", confirm_remove),
    PageRoute("POST", "/user/remove/{name:path}", remove),
    PageRoute("GET", "/sessions", list_sessions),
)
