"""The session's cookie, signing in and out, and one's own account.

The cookie holds a random token; the registry has its digest
(registry/accounts/user_sessions.py). HttpOnly, SameSite=Strict, for the pages' paths alone, and
Secure where the request came over TLS.

A second cookie stays for a year and opens nothing: it tells a browser in which the user has signed
in before, so that failures of strangers do not count against it. It is Lax, because an identity
provider sends the browser back from elsewhere.
"""

from urllib.parse import quote, urlsplit

from starlette.responses import Response

from admin.operations import sessions
from admin.operations.sessions import SignInRefused
from admin.web.forms import Field, Form
from admin.web.headers import PREFIX
from admin.web.request import PageRequest, PageRoute
from gateway.settings.oidc_settings import EVERYBODY
from registry.accounts.known_browsers import VALID_S

COOKIE = "polyhost_session"
BROWSER_COOKIE = "polyhost_browser"
HOME = "/"


def set_session(response: Response, token: str, is_https: bool) -> Response:
    """Set the cookie; an empty token takes it away."""
    age = None if token else 0
    response.set_cookie(
        COOKIE, token, age, path=PREFIX, secure=is_https, httponly=True, samesite="strict"
    )
    return response


def let_in(request: PageRequest, response: Response, token: str) -> Response:
    """Set the cookies of a session that has just begun; the one before it in this browser ends."""
    operator = request.context.operator
    if request.token:
        sessions.sign_out(operator, request.token)
    signed_in = sessions.who(operator, token)
    if signed_in is not None:
        set_known(request, response, signed_in.user.id)
    return set_session(response, token, request.is_https)


def set_known(request: PageRequest, response: Response, user_id: str) -> Response:
    """Set the cookie by which this browser is known as the user's."""
    text = sessions.remember(request.context.operator, user_id)
    response.set_cookie(
        *(BROWSER_COOKIE, text, VALID_S),
        path=PREFIX, secure=request.is_https, httponly=True, samesite="lax",
    )  # fmt: skip
    return response


def known_cookie(request: PageRequest) -> str:
    """What `set_known` left in this browser; "" where nothing."""
    return request.cookies.get(BROWSER_COOKIE, "")


def sign_in_path(incoming_path: str, query_string: str) -> str:
    """Where somebody without a session is sent, to come back afterwards."""
    wanted = incoming_path.removeprefix(PREFIX) + (f"?{query_string}" if query_string else "")
    return "/sign-in" if wanted in ("", HOME) else f"/sign-in?next={quote(wanted, safe='')}"


def show_sign_in(request: PageRequest) -> Response:
    """The form."""
    if request.signed_in is not None:
        return request.redirect(next_path(request.query.get("next", "")))
    return _door(request, _form(), request.query.get("next", ""))


def sign_in_page(request: PageRequest, trouble: str, status: int) -> Response:
    """The form, and why signing in went no further."""
    form = _form()
    form.trouble = trouble
    return _door(request, form, request.query.get("next", ""), status)


def sign_in(request: PageRequest) -> Response:
    """A name and a password become a session."""
    form = _form(request)
    name, password = form.text("name"), form.value("password")
    if not password:
        form.errors["password"] = "Password is required."
    status, wait_s = 422, 0.0
    if form.is_sound:
        agent = request.headers.get("user-agent", "")
        operator = request.context.operator
        try:
            browser = known_cookie(request)
            token = sessions.sign_in(operator, name, password, request.address, agent, browser)
        except SignInRefused as refused:
            form.trouble = str(refused)
            wait_s = refused.wait_s
            status = 429 if wait_s else 401
        else:
            there = request.redirect(next_path(request.fields.get("next", "")))
            return let_in(request, there, token)
    response = _door(request, form, request.fields.get("next", ""), status)
    if wait_s:
        response.headers["retry-after"] = str(max(1, round(wait_s)))
    return response


def sign_out(request: PageRequest) -> Response:
    """The session ends, and so do its cookie and what the browser keeps of the pages."""
    sessions.sign_out(request.context.operator, request.token)
    by_provider = request.me.session.issuer and request.context.settings.oidc_sign_out
    path = "/sign-in?out=1" if by_provider else "/sign-in"
    return set_session(request.redirect(path), "", request.is_https)


def show_account(request: PageRequest) -> Response:
    """One's sessions, and another password."""
    return _account(request, _password_form())


def change_password(request: PageRequest) -> Response:
    """Another password; all of one's sessions end, this one too."""
    form = _password_form(request)
    present, new, again = (form.value(name) for name in ("present", "new", "again"))
    if new != again:
        form.errors["again"] = "The passwords do not match."
    if form.is_sound:
        with form.refusals():
            browser = known_cookie(request)
            sessions.change_own_password(request.operator, present, new, request.address, browser)
            note = "The password was changed and your sessions ended. Sign in again."
            response = set_session(request.redirect("/sign-in", note), "", request.is_https)
            return set_known(request, response, request.me.user.id)
    return _account(request, form, 422)


def end_session(request: PageRequest) -> Response:
    """One session of the list."""
    session_id = request.path_params["session_id"]
    sessions.end_session(request.operator, session_id)
    back = "/sessions" if request.fields.get("back") == "sessions" else "/account"
    return request.redirect(back, "The session was ended.")


def _account(request: PageRequest, form: Form, status: int = 200) -> Response:
    every = sessions.list_sessions(request.operator)
    mine = [each for each in every if each.user_id == request.me.user.id]
    return request.page(
        "account.html", status, form=form, sessions=mine, current=request.me.session.id
    )


def _door(request: PageRequest, form: Form, next: str, status: int = 200) -> Response:
    """The sign-in page: by the provider where there is one, by a password for who may."""
    provider, settings = request.context.provider, request.context.settings
    wanted = next_path(next)
    start = "/oidc/start" + ("" if wanted == HOME else f"?next={quote(wanted, safe='')}")
    return request.page(
        "sign_in.html",
        status,
        form=form,
        next=next,
        provider=provider.name if provider else "",
        start=start,
        few_passwords=settings.password_users.strip() != EVERYBODY,
        sign_out_there=bool(provider and settings.oidc_sign_out and request.query.get("out")),
    )


def _form(request: PageRequest | None = None) -> Form:
    fields = (
        Field("name", "User", required=True, autocomplete="username", max_length=128),
        Field("password", "Password", "password", required=True, autocomplete="current-password"),
    )
    return Form(fields, request.fields if request else None)


def _password_form(request: PageRequest | None = None) -> Form:
    fields = (
        Field("present", "Current password", "password", autocomplete="current-password"),
        Field(
            "new",
            "New password",
            "password",
            help="8 to 256 characters.",
            autocomplete="new-password",
        ),
        Field("again", "Repeat the new password", "password", autocomplete="new-password"),
    )
    return Form(fields, request.fields if request else None)


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
