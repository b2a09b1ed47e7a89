"""The session's cookie, signing in and out, and one's own account.

The cookie holds a random token; the registry has its digest (registry/user_sessions.py). HttpOnly,
SameSite=Strict, for the pages' paths alone, and Secure where the request came over TLS.
"""

from urllib.parse import quote, urlsplit

from admin.ask import PREFIX, Ask, Headers, PageRoute, Reply
from admin.forms import Field, Form
from gateway.service import sessions
from gateway.service.sessions import SignInRefused
from gateway.settings_oidc import EVERYBODY
from registry.errors import RegistryError

COOKIE = "polyhost_session"
HOME = "/"


def session_cookie(token: str, is_https: bool) -> str:
    """Set it; an empty token takes it away."""
    age = "" if token else "; Max-Age=0"
    secure = "; Secure" if is_https else ""
    return f"{COOKIE}={token}; Path={PREFIX}; HttpOnly; SameSite=Strict{age}{secure}"


def sign_in_path(incoming_path: str, query_string: str) -> str:
    """Where somebody without a session is sent, to come back afterwards."""
    wanted = incoming_path.removeprefix(PREFIX) + (f"?{query_string}" if query_string else "")
    return "/sign-in" if wanted in ("", HOME) else f"/sign-in?next={quote(wanted, safe='')}"


def show_sign_in(ask: Ask) -> Reply:
    """The form."""
    if ask.signed_in is not None:
        return ask.redirect(next_path(ask.query.get("next", "")))
    return _door(ask, _form(), next=ask.query.get("next", ""))


def sign_in_page(ask: Ask, trouble: str, status: int, headers: Headers) -> Reply:
    """The form, and why signing in went no further."""
    form = _form()
    form.trouble = trouble
    return _door(ask, form, status, headers, ask.query.get("next", ""))


def sign_in(ask: Ask) -> Reply:
    """A name and a password become a session."""
    form = _form(ask)
    name, password = form.text("name"), form.value("password")
    if not password:
        form.errors["password"] = "Password is needed."
    headers: list[tuple[str, str]] = []
    status = 422
    if form.is_sound:
        incoming = ask.incoming
        try:
            token = sessions.sign_in(
                ask.desk.control,
                name,
                password,
                incoming.address,
                incoming.headers.get("user-agent", ""),
            )
        except SignInRefused as refused:
            form.trouble = str(refused)
            status = 401
            if refused.wait_s:
                status = 429
                headers = [("retry-after", str(max(1, round(refused.wait_s))))]
        else:
            if ask.token:  # whoever had this browser before is out
                sessions.sign_out(ask.desk.control, ask.token)
            cookie = session_cookie(token, incoming.is_https)
            return ask.redirect(
                next_path(ask.form.get("next", "")), headers=[("set-cookie", cookie)]
            )
    return _door(ask, form, status, headers, ask.form.get("next", ""))


def sign_out(ask: Ask) -> Reply:
    """The session ends, and so do its cookie and what the browser keeps of the pages."""
    sessions.sign_out(ask.desk.control, ask.token)
    cookie = session_cookie("", ask.incoming.is_https)
    by_provider = ask.me.session.issuer and ask.desk.settings.oidc_sign_out
    path = "/sign-in?out=1" if by_provider else "/sign-in"
    return ask.redirect(path, headers=[("set-cookie", cookie)])


def show_account(ask: Ask) -> Reply:
    """One's sessions, and another password."""
    return _account(ask, _password_form())


def change_password(ask: Ask) -> Reply:
    """Another password; all of one's sessions end, this one too."""
    form = _password_form(ask)
    present, new, again = (form.value(name) for name in ("present", "new", "again"))
    if new != again:
        form.errors["again"] = "The two are not the same."
    if form.is_sound:
        try:
            sessions.change_own_password(ask.me, present, new, ask.incoming.address)
        except RegistryError as error:
            form.trouble = str(error)
        else:
            cookie = session_cookie("", ask.incoming.is_https)
            return ask.redirect(
                "/sign-in",
                "The password is changed, and your sessions have ended: sign in again.",
                headers=[("set-cookie", cookie)],
            )
    return _account(ask, form, 422)


def end_session(ask: Ask) -> Reply:
    """One session of the list."""
    session_id = ask.params["session_id"]
    sessions.end_session(ask.me, session_id)
    back = "/sessions" if ask.form.get("back") == "sessions" else "/account"
    return ask.redirect(back, "The session has ended.")


def _account(ask: Ask, form: Form, status: int = 200) -> Reply:
    every = sessions.list_sessions(ask.me)
    mine = [each for each in every if each.user_id == ask.me.user.id]
    return ask.page("account.html", status, form=form, sessions=mine, current=ask.me.session.id)


def _door(
    ask: Ask, form: Form, status: int = 200, headers: Headers | None = None, next: str = ""
) -> Reply:
    """The sign-in page: by the provider where there is one, by a password for who may."""
    provider, settings = ask.desk.provider, ask.desk.settings
    wanted = next_path(next)
    start = "/oidc/start" + ("" if wanted == HOME else f"?next={quote(wanted, safe='')}")
    return ask.page(
        "sign_in.html",
        status,
        headers=headers,
        form=form,
        next=next,
        provider=provider.name if provider else "",
        start=start,
        few_passwords=settings.password_users.strip() != EVERYBODY,
        sign_out_there=bool(provider and settings.oidc_sign_out and ask.query.get("out")),
    )


def _form(ask: Ask | None = None) -> Form:
    fields = (
        Field("name", "User", required=True, autocomplete="username", max_length=128),
        Field("password", "Password", "password", required=True, autocomplete="current-password"),
    )
    return Form(fields, ask.form if ask else None)


def _password_form(ask: Ask | None = None) -> Form:
    fields = (
        Field("present", "Present password", "password", autocomplete="current-password"),
        Field(
            "new",
            "New password",
            "password",
            help="8 to 256 characters.",
            autocomplete="new-password",
        ),
        Field("again", "New password again", "password", autocomplete="new-password"),
    )
    return Form(fields, ask.form if ask else None)


def next_path(wanted: str) -> str:
    """A path of ours; anything else is the first page."""
    try:
        parts = urlsplit(wanted)
    except ValueError:  # such as //[
        return HOME
    ours = wanted.startswith("/") and not wanted.startswith("//") and "\\" not in wanted
    sound = ours and not parts.netloc and not parts.scheme and wanted.isprintable()
    return wanted if sound and not wanted.startswith("/sign-") else HOME


ROUTES = (
    PageRoute("GET", "/sign-in", show_sign_in, open=True),
    PageRoute("POST", "/sign-in", sign_in, open=True, pool="sign_in"),
    PageRoute("POST", "/sign-out", sign_out),
    PageRoute("GET", "/account", show_account),
    PageRoute("POST", "/account/password", change_password, pool="sign_in"),
    PageRoute("POST", "/sessions/end/{session_id}", end_session),
)
