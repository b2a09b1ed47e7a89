"""A request as the pages get it, what all of them share, and their routes.

A page is a plain function `PageRequest -> Response` that runs in a thread, so it may read the
database and render. It reaches the registry only through operations of admin/operations/, by
`request.operator`, which has the user's rights. Figures of the running server come in
`request.live`, taken on the event loop just before.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias
from urllib.parse import parse_qsl, urlencode

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import Receive, Scope

from admin.context.operator_context import OperatorContext
from admin.live.fleet_watch import FleetWatch, LiveState
from admin.live.overview_board import Board
from admin.live.troubles import Trouble, TroubleWatch
from admin.oidc.provider import Provider
from admin.operations.sessions import SignedIn
from admin.rendering.templating import Templates, may
from admin.web import csrf
from admin.web.headers import PREFIX, VersionedFiles
from admin.web.navigation import Group
from admin.web.tenant_requests import events_as, request_as
from gateway.pipeline.edge import Edge
from gateway.settings.settings import Settings
from gateway.types import RequestKind

NOTE_COOKIE = "polyhost_note"
MAX_NOTE_LEN = 300
MAX_FIELDS = 500
MAX_QUERY_LEN = 8192
SEE_OTHER = 303
MAX_CHECKS = 2


@dataclass(frozen=True, slots=True)
class AppContext:
    """What all pages share. Built once for a process."""

    settings: Settings
    operator: OperatorContext
    """The server's own rights: for signing in and for finding whose session it is."""
    templates: Templates
    static: VersionedFiles
    navigation: Sequence[Group]
    edge: Edge
    """The way of tenants' requests; for pages that send one themselves."""
    fleet: FleetWatch
    board: Board
    troubles: TroubleWatch
    provider: Provider | None = None
    """The identity provider that operators may sign in by."""
    checks: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(MAX_CHECKS))
    """Checks of models to be registered that go on: each is a process of its own."""
    streaming: set[asyncio.Task[None]] = field(default_factory=set)
    """Requests that pages sent and that still run, also for a client that left. Of the loop
    alone."""


class PageRequest(Request):
    """Starlette's request with the form, the user and the shared context."""

    def __init__(self, scope: Scope, receive: Receive, context: AppContext, now_at: float) -> None:
        super().__init__(scope, receive)
        self.context = context
        self.now_at = now_at
        self.loop = asyncio.get_running_loop()
        pairs = parse_qsl(self.query_string[:MAX_QUERY_LEN], max_num_fields=None)[:MAX_FIELDS]
        self.query = {name: value for name, value in pairs if "\0" not in value}
        self.form_body = b""
        self.field_lists: Mapping[str, Sequence[str]] = {}
        """All values of each field of a form."""
        self.signed_in: SignedIn | None = None
        self.token = ""
        """The session's; "" where there is none."""
        self.live_state: LiveState | None = None

    @property
    def fields(self) -> Mapping[str, str]:
        """Of a form: the last value of each field, without the CSRF token."""
        lists = self.field_lists.items()
        return {name: values[-1] for name, values in lists if name != csrf.FIELD}

    @property
    def path(self) -> str:
        """As it came, with PREFIX."""
        return str(self.scope["path"])

    @property
    def query_string(self) -> str:
        """As it came."""
        return str(self.scope["query_string"].decode("latin-1"))

    @property
    def address(self) -> str:
        """The client's."""
        return self.client.host if self.client else ""

    @property
    def is_https(self) -> bool:
        """Whether the browser speaks TLS, to this server or to a trusted proxy."""
        return bool(self.scope["scheme"] == "https")

    @property
    def http_id(self) -> str:
        """The id under which the log has this request."""
        return str(self.scope.get("state", {}).get("http_id", ""))

    @property
    def me(self) -> SignedIn:
        """The user. Only for pages behind a sign-in."""
        assert self.signed_in is not None
        return self.signed_in

    @property
    def operator(self) -> OperatorContext:
        """What operations take, with the user's rights."""
        return self.me.operator

    @property
    def live(self) -> LiveState:
        """The running server's figures."""
        assert self.live_state is not None
        return self.live_state

    def url_with(self, **changes: str | None) -> str:
        """This page with other filters; None takes one away."""
        wanted = {**self.query, **changes}
        kept = {name: value for name, value in wanted.items() if value}
        return f"{self.path}?{urlencode(kept)}" if kept else self.path

    def request_as(self, kind: RequestKind, body: bytes, key_id: str) -> bytes:
        """Send a request as a key that this user may use; see tenant_requests.py."""
        return request_as(self.context.edge, self.loop, kind, body, key_id)

    def events_as(self, kind: RequestKind, body: bytes, key_id: str) -> AsyncIterator[bytes]:
        """A streamed one, as it comes; see tenant_requests.py."""
        return events_as(self.context.edge, self.context.streaming, kind, body, key_id)

    def fragment(self, template: str, macro: str, *arguments: object) -> str:
        """One macro of a template as HTML: what a live part is replaced by."""
        return self.context.templates.macro(template, macro, *arguments)

    def banner(self) -> Sequence[Trouble]:
        """What all pages say is down; nothing to users who may not see the whole installation."""
        seen = self.signed_in is not None and may(self.signed_in, "models.read")
        return self.context.troubles.look(self.live) if seen else ()

    def page(self, template: str, status: int = 200, **context: Any) -> Response:
        """A template as a page. A note that waits for this page is shown once."""
        note = read_note(self.cookies.get(NOTE_COOKIE, ""))
        given = {
            "me": self.signed_in,
            "csrf": csrf.masked(self.token),
            "theme": self.cookies.get("polyhost_theme", ""),
            "note": note,
            "now_at": self.now_at,
            "static": self.context.static.url,
            "navigation": self.context.navigation,
            "prefix": PREFIX,
            "currency": self.context.settings.currency,
        }
        if "troubles" not in context:  # a page that says what went wrong asks nothing more
            context["troubles"] = self.banner()
        templates = self.context.templates
        response = templates.TemplateResponse(self, template, {**given, **context}, status)
        if note:
            response.delete_cookie(NOTE_COOKIE, PREFIX)
        return response

    def redirect(self, path: str, note: str = "") -> Response:
        """Go on to another page (a path below PREFIX), which says `note` once."""
        response = RedirectResponse(PREFIX + path, SEE_OTHER)
        if note:
            text = note[:MAX_NOTE_LEN].encode().hex()  # escaped there like anything else
            response.set_cookie(
                NOTE_COOKIE, text, 30, path=PREFIX, httponly=True, samesite="strict"
            )
        return response


Page: TypeAlias = Callable[[PageRequest], Response]
Fragments: TypeAlias = Callable[[PageRequest], Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class PageRoute:
    """A path below PREFIX. `pool`: its threads. `is_use`: whether it keeps the session alive."""

    method: Literal["GET", "POST"]
    path: str
    run: Page
    is_use: bool = True
    open: bool = False
    """Whether it is also for users that have not signed in."""
    pool: Literal["pages", "sign_in", "checks", "provider"] = "pages"


@dataclass(frozen=True, slots=True)
class StreamRoute:
    """A path below PREFIX that sends parts of a page when they change (streams.py)."""

    path: str
    run: Fragments
    every_s: float = 1.0


def read_note(cookie: str) -> str:
    """What `redirect` wrote; "" where it is nothing of the kind."""
    try:
        return bytes.fromhex(cookie).decode()[:MAX_NOTE_LEN]
    except ValueError:
        return ""
