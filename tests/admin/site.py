"""The operator's pages in this process: a real registry and a real HTTP server, workers scripted.

`running_site` serves in a thread of its own, so that a test may drive it with a browser or with
`Visitor`, a small client with a cookie jar that sends what a browser would.
"""

import asyncio
import contextlib
import html
import re
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy.orm import Session

from admin.context.operator_context import OperatorContext, open_context
from engine.protocol import ModelStatus, WorkerStatus
from gateway.settings.settings import Settings
from registry.accounts import users
from registry.models import catalog
from registry.models.catalog import PackFacts
from tests.gateway.edge_kit import Kit, make_kit, serving
from tests.migrated import migrated

P = ParamSpec("P")
R = TypeVar("R")
PASSWORD = "a password of tests"
MIB = 1 << 20


@dataclass
class Site:
    """A running site. `context` acts with all rights on its registry."""

    url: str
    kit: Kit
    operator: OperatorContext

    def visitor(self, user: str = "", password: str = PASSWORD) -> "Visitor":
        """Somebody with a browser, signed in where a user is named."""
        visitor = Visitor(self.url)
        if user:
            answer = visitor.sign_in(user, password)
            assert answer.status == 200, answer.text
        return visitor

    def read(self, find: Callable[Concatenate[Session, P], R], *args: P.args, **kw: P.kwargs) -> R:
        """What a function of the registry finds."""
        with self.operator.reading() as session:
            return find(session, *args, **kw)

    def write(self, do: Callable[Concatenate[Session, P], R], *args: P.args, **kw: P.kwargs) -> R:
        """What a function of the registry makes of it."""
        with self.operator.writing() as session:
            return do(session, *args, **kw)

    def add_user(self, name: str, role: str, tenant: str = "") -> None:
        """With PASSWORD."""
        with self.operator.writing() as session:
            users.create_user(session, name, PASSWORD, role, tenant, now_at=self.operator.clock())

    def add_model(self, name: str, **facts: Any) -> None:
        """A ready model, without a pack."""
        given = {
            "revision": f"rev-{name}",
            "pack": name,
            "family": "llama",
            "dtype": "bfloat16",
            "weight_bytes": 64 * MIB,
            "max_context": 2048,
            "vocab_size": 32000,
            **facts,
        }
        now_at = self.operator.clock()
        with self.operator.writing() as session:
            model = catalog.add_model(session, name, f"/models/{name}", now_at=now_at)
            assert catalog.finish(session, model.registration, PackFacts(**given), now_at=now_at)


@dataclass
class Answer:
    """What came back, redirects followed."""

    status: int
    url: str
    headers: "Message[str, str]"
    body: bytes

    @property
    def text(self) -> str:
        """The page."""
        return self.body.decode()

    @property
    def csrf(self) -> str:
        """The token of the page's forms."""
        found = re.search(r'name="csrf" value="([0-9a-f]+)"', self.text)
        return found.group(1) if found else ""


@dataclass
class Visitor:
    """A browser without a screen: cookies, redirects, Origin and Sec-Fetch-Site as they are sent
    from a page of the site, unless a test says otherwise."""

    base: str
    cookies: dict[str, str] = field(default_factory=dict)

    def get(self, path: str, **headers: str) -> Answer:
        """A page below /admin."""
        return self._send("GET", path, None, headers)

    def post(
        self, path: str, fields: Mapping[str, str], csrf: str | None = None, **headers: str
    ) -> Answer:
        """A form; its token is taken from the account page where the test gives none."""
        token = self.get("/account").csrf if csrf is None else csrf
        data = urllib.parse.urlencode({**fields, **({"csrf": token} if token else {})}).encode()
        sent = {"origin": self.base, "sec-fetch-site": "same-origin", **headers}
        return self._send("POST", path, data, {k: v for k, v in sent.items() if v})

    def sign_in(self, user: str, password: str = PASSWORD) -> Answer:
        """By the form."""
        return self.post("/sign-in", {"name": user, "password": password}, csrf="")

    def _send(
        self, method: str, path: str, data: bytes | None, headers: Mapping[str, str]
    ) -> Answer:
        url = path if path.startswith("http") else self.base + "/admin" + path
        for _ in range(5):
            request = urllib.request.Request(url, data, method=method)
            for name, value in headers.items():
                request.add_header(name.replace("_", "-"), value)
            if self.cookies:
                jar = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
                request.add_header("cookie", jar)
            answer = send(request)
            self.keep(answer.headers)
            if answer.status not in (302, 303, 308):
                return answer
            url = urllib.parse.urljoin(url, answer.headers["location"])
            method, data = "GET", None
        raise AssertionError(f"redirects without an end: {url}")

    def keep(self, headers: "Message[str, str]") -> None:
        """The cookies that came."""
        for line in headers.get_all("set-cookie") or []:
            name, _, value = line.partition(";")[0].partition("=")
            if "Max-Age=0" in line:
                self.cookies.pop(name, None)
            else:
                self.cookies[name] = value


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def send(request: urllib.request.Request) -> Answer:
    """One request, no redirect followed."""
    opener = urllib.request.build_opener(_NoRedirect)
    try:
        with opener.open(request, timeout=30) as answer:
            return Answer(answer.status, request.full_url, answer.headers, answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, request.full_url, error.headers, error.read())


def worker_status(*rows: ModelStatus, free_pages: int = 200) -> WorkerStatus:
    """A worker with an arena of 256 pages of 2 MiB."""
    pages = {f"{row.model_id}/weights": row.weight_bytes // (2 * MIB) for row in rows}
    return WorkerStatus(
        "epoch-1",
        "worker-0",
        8,
        free_pages * 2 * MIB,
        2.0,
        2 * MIB,
        256,
        {**pages, "free": free_pages},
        list(rows),
        [],
        [],
        {},
    )


def shown(text: str) -> str:
    """A page's text as it stands in HTML."""
    return html.escape(text)


@contextlib.contextmanager
def running_site(folder: Path, **settings: Any) -> Iterator[Site]:
    """The site, with the user `ann`, an owner, until the block ends."""
    data_dir = folder / "data"
    data_dir.mkdir()
    made = Settings(data_dir=str(data_dir), default_max_tokens=32, **settings)
    migrated(made.registry_url)
    with open_context(made, "tests") as context:
        up, over = threading.Event(), threading.Event()
        found: list[tuple[str, Kit]] = []

        async def serve() -> None:
            kit = make_kit(folder / "model", data_dir=str(data_dir), **settings)
            async with serving(kit.app, made) as url:
                found.append((url, kit))
                up.set()
                await asyncio.to_thread(over.wait)
                kit.dispatcher.stopping = True  # live pages come to an end

        thread = threading.Thread(target=lambda: asyncio.run(serve()), name="site")
        thread.start()
        try:
            assert up.wait(30), "the site did not start"
            (url, kit) = found[0]
            site = Site(url, kit, context)
            site.add_user("ann", "owner")
            yield site
        finally:
            over.set()
            thread.join(30)


def form_of(page: str, action: str) -> dict[str, str]:
    """The fields of the form that goes there, as a browser would send them again."""
    target = rf'action="/admin{re.escape(action)}(?:#\w+)?"'
    (form,) = re.findall(rf"<form [^>]*{target}.*?</form>", page, re.S)
    found: dict[str, str] = {}
    for attributes in re.findall(r"<input ([^>]*)>", form):
        told = dict(re.findall(r'([a-z-]+)="([^"]*)"', attributes))
        if told.get("type") == "checkbox" and "checked" not in attributes:
            continue
        if told.get("name") not in (None, "csrf"):
            found[told["name"]] = told["value"]
    for name, body in re.findall(r'<select [^>]*name="(\w+)"[^>]*>(.*?)</select>', form, re.S):
        found[name] = re.findall(r'value="([^"]*)"[^>]* selected', body)[0]
    for name, text in re.findall(r'<textarea [^>]*name="(\w+)"[^>]*>(.*?)</textarea>', form, re.S):
        found[name] = text
    return found
