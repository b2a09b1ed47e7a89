"""What a request must be before a page sees it, and what is answered instead: refusals in words, or
the way to sign in."""

from urllib.parse import parse_qsl

from starlette.responses import PlainTextResponse, Response

from admin.operations.sessions import SignInRefused
from admin.web import csrf
from admin.web.headers import PREFIX
from admin.web.request import MAX_FIELDS, PageRequest, PageRoute
from admin.web.session import sign_in_path
from registry.errors import Forbidden, NotFound, RegistryAway, RegistryBusy, RegistryError

MAX_FORM_BYTES = 1 << 20


class Refused(Exception):
    """A request that no page has seen, with what to say."""

    def __init__(self, status: int, title: str, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.title = title


async def read_form(request: PageRequest) -> bool:
    """Read the body; False where it is larger than any form."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_FORM_BYTES:
            return False
    request.form_body = body
    return True


def form_of(request: PageRequest) -> dict[str, list[str]]:
    """All values of each field, of an ordinary form. Raises Refused."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/x-www-form-urlencoded":
        raise Refused(415, "Invalid form", "Send the form from a page of this server.")
    found: dict[str, list[str]] = {}
    try:
        text = request.form_body.decode()
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=MAX_FIELDS, errors="strict")
        if any("\0" in value for _, value in pairs):
            raise ValueError("NUL is no text")
    except ValueError as error:  # not UTF-8, too many fields, or not to be stored
        raise Refused(400, "Invalid form", "The form could not be read.") from error
    for name, value in pairs:
        found.setdefault(name, []).append(value)
    return found


def check_origin(request: PageRequest) -> None:
    """Raises Refused for a form that was not sent from a page of this server."""
    if not csrf.is_own_origin(request.headers, request.is_https):
        raise Refused(
            403,
            "Request from another site",
            "The form was not sent from a page of this server. Nothing was changed.",
        )


def check_path(request: PageRequest) -> None:
    """Raises Refused for a path that names nothing anywhere: no database takes a NUL."""
    if "\0" in request.path:
        raise Refused(404, "Not found", "This page does not exist.")


def check_token(request: PageRequest) -> None:
    """Raises Refused for a form that is not of this session."""
    given = request.field_lists.get(csrf.FIELD, [""])[-1]
    if not csrf.is_token(given, request.token):
        raise Refused(
            403,
            "This form is out of date",
            "The form belongs to another session. Nothing was changed; reload the page.",
        )


def signed_out(request: PageRequest) -> Response:
    """To the sign-in and back; a form that was sent is not sent again."""
    if request.headers.get("sec-fetch-dest") == "empty":
        return PlainTextResponse("sign in first", 401)
    if request.method == "POST":
        return request.redirect(
            "/sign-in", "Your session has ended. Nothing was changed; sign in again."
        )
    return request.redirect(sign_in_path(request.path, request.query_string))


def refused(request: PageRequest, error: RegistryError | Refused) -> Response:
    """A verb or the door said no."""
    if isinstance(error, Refused):
        return _page(request, error.status, error.title, str(error))
    if isinstance(error, Forbidden):
        return _page(request, 403, "Not allowed", str(error))
    if isinstance(error, NotFound):
        return _page(request, 404, "Not found", str(error))
    if isinstance(error, RegistryBusy):
        return _page(request, 503, "Busy", str(error))
    if isinstance(error, RegistryAway):
        text = (
            "These pages need the database. Requests of tenants are still served. Try again later."
        )
        return _page(request, 503, "The database does not answer", text)
    if isinstance(error, SignInRefused):
        return _page(request, 429, "Too many attempts", str(error))
    return _page(request, 409, "Nothing was changed", str(error))


def failed(request: PageRequest) -> Response:
    """A bug of ours; the log has it under the request's id."""
    text = f"The server log has the details under request {request.http_id}."
    return _page(request, 500, "Internal error", text)


def _not_here(request: PageRequest) -> Response:
    path = request.path.removeprefix(PREFIX)
    return _page(request, 404, "Not found", f"The page {path} does not exist.")


def _page(request: PageRequest, status: int, title: str, text: str) -> Response:
    return request.page("error.html", status, title=title, text=text, troubles=())


NOT_HERE = PageRoute("GET", "/", _not_here)
