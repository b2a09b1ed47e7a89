"""What a page is given and what it gives back; no HTTP library in here.

A page is a plain function `Ask -> Reply` that runs in a thread, so it may read the database and
render. It reaches the registry only through verbs of gateway/service/, by `ask.me.control`, which
has the user's rights. Figures of the running server come in `ask.live`, taken on the event loop
just before.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias
from urllib.parse import urlencode

from admin.csrf import masked
from admin.fleet_watch import FleetWatch
from admin.live_state import LiveState
from admin.navigation import Group
from admin.oidc.provider import Provider
from admin.overview_board import Board
from admin.requests import events_as, request_as
from admin.static_files import StaticFiles
from admin.templating import Templates
from gateway.edge import Edge
from gateway.service.control import Control
from gateway.service.sessions import SignedIn
from gateway.settings import Settings
from gateway.types import RequestKind

PREFIX = "/admin"
NOTE_COOKIE = "polyhost_note"
MAX_NOTE_LEN = 300
SEE_OTHER = 303

Headers: TypeAlias = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Desk:
    """What all pages share. Built once for a process."""

    settings: Settings
    control: Control
    """The server's own rights: for signing in and for finding whose session it is."""
    templates: Templates
    static: StaticFiles
    navigation: Sequence[Group]
    edge: Edge
    """What requests of tenants go through; for pages that send one themselves."""
    fleet: FleetWatch
    board: Board
    provider: Provider | None = None
    """Whom operators may sign in by."""
    streaming: set[asyncio.Task[None]] = field(default_factory=set)
    """Requests that pages sent, as long as they run: also for who has left. Of the loop alone."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """One request as it came, with its body read."""

    method: str
    path: str
    query_string: str
    headers: Mapping[str, str]
    cookies: Mapping[str, str]
    address: str
    is_https: bool
    http_id: str
    params: Mapping[str, str]
    loop: asyncio.AbstractEventLoop
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Reply:
    """What is sent back. `headers` come on top of those that every answer has."""

    body: bytes = b""
    status: int = 200
    media: str = "text/html; charset=utf-8"
    headers: Headers = field(default_factory=list)
    chunks: Iterator[bytes] | AsyncIterator[bytes] | None = None
    """Instead of a body: what is made while it is sent, in a thread or on the event loop."""
    user_id: str = ""
    """Of who gets the chunks."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request on its way through a page."""

    desk: Desk
    incoming: Incoming
    query: Mapping[str, str]
    form: Mapping[str, str]
    """Of a POST: the last value of each field, without the CSRF token."""
    signed_in: SignedIn | None
    token: str
    """The session's; "" where there is none."""
    now_at: float
    state: LiveState | None = None
    form_lists: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """All values of each field."""

    @property
    def me(self) -> SignedIn:
        """Who asks. Only for pages behind a sign-in."""
        assert self.signed_in is not None
        return self.signed_in

    @property
    def control(self) -> Control:
        """What verbs take, with the user's rights."""
        return self.me.control

    @property
    def live(self) -> LiveState:
        """Only for routes that say `live`."""
        assert self.state is not None
        return self.state

    @property
    def params(self) -> Mapping[str, str]:
        """Parts of the path."""
        return self.incoming.params

    def url(self, **changes: str | None) -> str:
        """This page with other filters; None takes one away."""
        wanted = {**self.query, **changes}
        kept = {name: value for name, value in wanted.items() if value}
        path = self.incoming.path
        return f"{path}?{urlencode(kept)}" if kept else path

    def request_as(self, kind: RequestKind, body: bytes, key_id: str) -> bytes:
        """Send a request as a key that this user may ask as; see requests.py."""
        return request_as(self.desk.edge, self.incoming.loop, kind, body, key_id)

    def events_as(self, kind: RequestKind, body: bytes, key_id: str) -> AsyncIterator[bytes]:
        """A streamed one, as it comes; see requests.py."""
        return events_as(self.desk.edge, self.desk.streaming, kind, body, key_id)

    def fragment(self, template: str, macro: str, *arguments: object) -> str:
        """One macro of a template as HTML: what a live part is replaced by."""
        return self.desk.templates.macro(template, macro, *arguments)

    def page(
        self, template: str, status: int = 200, headers: Headers | None = None, **context: Any
    ) -> Reply:
        """A template as a page. A note that waits for this page is shown once."""
        given = {
            "ask": self,
            "me": self.signed_in,
            "csrf": masked(self.token),
            "theme": self.incoming.cookies.get("polyhost_theme", ""),
            "note": read_note(self.incoming.cookies.get(NOTE_COOKIE, "")),
            "now_at": self.now_at,
            "static": self.desk.static.url,
            "navigation": self.desk.navigation,
            "prefix": PREFIX,
            "currency": self.desk.settings.currency,
        }
        html = self.desk.templates.render(template, {**given, **context})
        told = list(headers or ())
        if given["note"]:
            told.append(("set-cookie", f"{NOTE_COOKIE}=; Path={PREFIX}; Max-Age=0"))
        return Reply(html.encode(), status, headers=told)

    def redirect(self, path: str, note: str = "", headers: Headers | None = None) -> Reply:
        """Go on to another page (a path below PREFIX), which says `note` once."""
        told = [("location", PREFIX + path), *(headers or ())]
        if note:
            told.append(("set-cookie", note_cookie(note)))
        return Reply(b"", SEE_OTHER, headers=told)


Page: TypeAlias = Callable[[Ask], Reply]
Fragments: TypeAlias = Callable[[Ask], Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class PageRoute:
    """A path below PREFIX. `live`: it wants the running server's figures. `pool`: its threads."""

    method: Literal["GET", "POST"]
    path: str
    run: Page
    live: bool = False
    open: bool = False
    """Whether it is also for who has not signed in."""
    pool: Literal["pages", "sign_in", "checks", "provider"] = "pages"


@dataclass(frozen=True, slots=True)
class StreamRoute:
    """A path below PREFIX that sends parts of a page when they change (live.py)."""

    path: str
    run: Fragments
    every_s: float = 1.0


def note_cookie(note: str) -> str:
    """Carries a line to the next page. What it says is escaped there like anything else."""
    text = note[:MAX_NOTE_LEN].encode().hex()
    return f"{NOTE_COOKIE}={text}; Path={PREFIX}; Max-Age=30; HttpOnly; SameSite=Strict"


def read_note(cookie: str) -> str:
    """What `note_cookie` carries; "" where it is nothing of the kind."""
    try:
        return bytes.fromhex(cookie).decode()[:MAX_NOTE_LEN]
    except ValueError:
        return ""
