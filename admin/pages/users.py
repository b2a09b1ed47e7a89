"""Users, their roles and passwords, and everybody's sessions."""

from admin.ask import Ask, PageRoute, Reply
from admin.forms import Field, Form
from admin.templating import may, path
from gateway.service import identities, sessions
from gateway.service import users as verbs
from gateway.service.control import require
from gateway.service.meanwhile import ChangedMeanwhile
from registry.errors import AlreadyExists, Forbidden, NotFound, RegistryError
from registry.users import ROLES, UserRecord

SEEN = "seen"
ROLE_CHOICES = {
    "viewer": "Viewer: sees",
    "admin": "Admin: changes",
    "owner": "Owner: changes, and decides who the users are",
}


def list_users(ask: Ask) -> Reply:
    """All that may be seen."""
    return ask.page("users.html", users=verbs.list_users(ask.control))


def show_user(ask: Ask) -> Reply:
    """One user."""
    return _page(ask, _user(ask))


def show_add(ask: Ask) -> Reply:
    """An empty form."""
    require(ask.control, "users.write")
    return ask.page("user_add.html", form=_add_form())


def add_user(ask: Ask) -> Reply:
    """A new user with one role."""
    require(ask.control, "users.write")
    form = _add_form(ask)
    name, role, tenant = form.text("name"), form.text("role"), form.text("tenant")
    if form.is_sound:
        try:
            verbs.create_user(ask.control, name, form.value("password"), role, tenant)
        except AlreadyExists as error:
            form.errors["name"] = str(error)
        except NotFound as error:
            form.errors["tenant"] = str(error)
        except RegistryError as error:
            form.trouble = str(error)
        else:
            return ask.redirect(f"/users/{path(name)}", f"{name} may sign in now.")
    return ask.page("user_add.html", 422, form=form)


def set_role(ask: Ask) -> Reply:
    """A role for the installation or a tenant; an empty one takes it away."""
    user = _user(ask)
    form = _role_form(ask)
    role, tenant = ask.form.get("role", ""), ask.form.get("tenant", "").strip()
    if role and role not in ROLES:
        form.errors["role"] = "Choose one of the list."
    if form.is_sound:
        try:
            seen = ask.form.get(SEEN, "")[:64]
            verbs.set_role(ask.control, user.name, role or None, tenant, seen)
        except ChangedMeanwhile:
            user = _user(ask)
            form.trouble = (
                "Somebody else has changed this user's roles meanwhile, to those that stand here: "
                "nothing was done."
            )
        except NotFound as error:
            form.errors["tenant"] = str(error)
        except RegistryError as error:
            form.trouble = str(error)
        else:
            return ask.redirect(f"/users/{path(user.name)}", "The roles are changed.")
    return _page(ask, user, role_form=form, status=422)


def set_password(ask: Ask) -> Reply:
    """Another password for somebody; their sessions end."""
    user = _user(ask)
    form = _password_form(ask)
    try:
        verbs.set_password(ask.control, user.name, form.value("password"))
    except RegistryError as error:
        form.errors["password"] = str(error)
        return _page(ask, user, password_form=form, status=422)
    return ask.redirect(f"/users/{path(user.name)}", f"{user.name} has another password.")


def bind(ask: Ask) -> Reply:
    """What the identity provider knows the user as."""
    user = _user(ask)
    form = _bind_form(ask)
    subject = form.text("subject")
    if form.is_sound:
        try:
            identities.bind(ask.control, user.name, subject)
        except Forbidden:
            raise
        except RegistryError as error:
            form.trouble = str(error)
        else:
            said = f"{user.name} may sign in by the provider now."
            return ask.redirect(f"/users/{path(user.name)}", said)
    return _page(ask, user, bind_form=form, status=422)


def unbind(ask: Ask) -> Reply:
    """No longer."""
    user = identities.unbind(ask.control, ask.params["name"], ask.form.get("issuer", ""))
    said = f"{user.name} is bound no longer, and all sessions have ended."
    return ask.redirect(f"/users/{path(user.name)}", said)


def set_disabled(ask: Ask) -> Reply:
    """Shut out, or let in again."""
    disabled = ask.form.get("disabled") == "1"
    user = verbs.set_user_disabled(ask.control, ask.params["name"], disabled)
    done = "is shut out; all sessions have ended" if disabled else "is let in again"
    return ask.redirect(f"/users/{path(user.name)}", f"{user.name} {done}.")


def confirm_remove(ask: Ask) -> Reply:
    """What will happen, and a button."""
    user = _user(ask)
    return ask.page(
        "confirm.html",
        title=f"Remove {user.name}?",
        text="The user's sessions end at once. The name stays in the audit log.",
        button="Remove",
        danger=True,
        action=f"/user/remove/{path(user.name)}",
        fields={},
        back=f"/users/{path(user.name)}",
    )


def remove(ask: Ask) -> Reply:
    """Gone."""
    user = verbs.remove_user(ask.control, ask.params["name"])
    return ask.redirect("/users", f"{user.name} is removed.")


def list_sessions(ask: Ask) -> Reply:
    """One's own, or everybody's for who may write users."""
    found = sessions.list_sessions(ask.me)
    return ask.page("sessions.html", sessions=found, current=ask.me.session.id)


def _page(
    ask: Ask,
    user: UserRecord,
    role_form: Form | None = None,
    password_form: Form | None = None,
    bind_form: Form | None = None,
    status: int = 200,
) -> Reply:
    whole = may(ask.me, "users.read")
    return ask.page(
        "user.html",
        status,
        user=user,
        seen=verbs.roles_mark(user),
        role_form=role_form or _role_form(),
        password_form=password_form or _password_form(),
        bind_form=bind_form or _bind_form(),
        bindings=identities.bindings_of(ask.control, user.name) if whole else (),
        issuer=ask.desk.settings.oidc_issuer,
        provider=ask.desk.settings.oidc_name,
    )


def _user(ask: Ask) -> UserRecord:
    name = ask.params["name"]
    found = next((user for user in verbs.list_users(ask.control) if user.name == name), None)
    if found is None:
        raise NotFound(f"no user {name!r}")
    return found


def _add_form(ask: Ask | None = None) -> Form:
    fields = (
        Field("name", "Name", required=True, max_length=128),
        Field(
            "password",
            "Password",
            "password",
            help="8 to 256 characters; the user can change it.",
            autocomplete="new-password",
        ),
        Field("role", "Role", "select", value="viewer", choices=ROLE_CHOICES),
        Field("tenant", "Of the tenant", help="Name or id; empty: of the whole installation."),
    )
    return Form(fields, ask.form if ask else None)


def _role_form(ask: Ask | None = None) -> Form:
    fields = (
        Field("role", "Role", "select", value="viewer", choices=ROLE_CHOICES),
        Field("tenant", "Of the tenant", help="Name or id; empty: of the whole installation."),
    )
    return Form(fields, ask.form if ask else None)


def _password_form(ask: Ask | None = None) -> Form:
    field = Field("password", "New password", "password", autocomplete="new-password")
    return Form((field,), ask.form if ask else None)


def _bind_form(ask: Ask | None = None) -> Form:
    field = Field(
        *("subject", "Its subject for this user"),
        required=True, max_length=255, help="The claim `sub`; who is refused is shown it.",
    )  # fmt: skip
    return Form((field,), ask.form if ask else None)


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
    PageRoute("GET", "/user/remove/{name:path}", confirm_remove),
    PageRoute("POST", "/user/remove/{name:path}", remove),
    PageRoute("GET", "/sessions", list_sessions),
)
