"""What is answered instead of a page: refusals in words, and the way to sign in."""

from admin import csrf
from admin.ask import PREFIX, Ask, Incoming, PageRoute, Reply
from admin.session import sign_in_path
from gateway.service.sessions import SignInRefused
from registry.errors import Forbidden, NotFound, RegistryAway, RegistryBusy, RegistryError


class Refused(Exception):
    """A request that no page has seen, with what to say."""

    def __init__(self, status: int, title: str, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.title = title


def check_origin(incoming: Incoming) -> None:
    """Raises Refused for a form that was not sent from a page of this server."""
    if not csrf.is_own_origin(incoming.headers, incoming.is_https):
        raise Refused(
            403,
            "This did not come from here",
            "The form was not sent from a page of this server, so nothing was done.",
        )


def check_path(incoming: Incoming) -> None:
    """Raises Refused for a path that names nothing anywhere: no database takes a NUL."""
    if "\0" in incoming.path:
        raise Refused(404, "Not here", "There is no such page.")


def check_token(given: str, session_token: str) -> None:
    """Raises Refused for a form that is not of this session."""
    if not csrf.is_token(given, session_token):
        raise Refused(
            403,
            "This form is out of date",
            "It belongs to another session, so nothing was done: load the page again.",
        )


def signed_out(ask: Ask) -> Reply:
    """To the sign-in and back; a form that was sent is not sent again."""
    incoming = ask.incoming
    if incoming.headers.get("sec-fetch-dest") == "empty":
        return Reply(b"sign in first", 401, "text/plain")
    if incoming.method == "POST":
        return ask.redirect("/sign-in", "Your session has ended, and nothing was done.")
    return ask.redirect(sign_in_path(incoming.path, incoming.query_string))


def refused(ask: Ask, error: RegistryError | Refused) -> Reply:
    """A verb or the door said no."""
    if isinstance(error, Refused):
        return _page(ask, error.status, error.title, str(error))
    if isinstance(error, Forbidden):
        return _page(ask, 403, "You may not do this", str(error))
    if isinstance(error, NotFound):
        return _page(ask, 404, "Not here", str(error))
    if isinstance(error, RegistryBusy):
        return _page(ask, 503, "Busy", str(error))
    if isinstance(error, RegistryAway):
        text = "Nothing can be shown or changed until it does. Requests of tenants go on meanwhile."
        return _page(ask, 503, "The database does not answer", text)
    if isinstance(error, SignInRefused):
        return _page(ask, 429, "Too many tries", str(error))
    return _page(ask, 409, "This was not done", str(error))


def failed(ask: Ask) -> Reply:
    """A bug of ours; the log has it under the request's id."""
    text = f"The log has the reason under request {ask.incoming.http_id}."
    return _page(ask, 500, "Something went wrong here", text)


def _not_here(ask: Ask) -> Reply:
    path = ask.incoming.path.removeprefix(PREFIX)
    return _page(ask, 404, "Not here", f"There is no page {path}.")


def _page(ask: Ask, status: int, title: str, text: str) -> Reply:
    return ask.page("error.html", status, title=title, text=text)


NOT_HERE = PageRoute("GET", "/", _not_here)
