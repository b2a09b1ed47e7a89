"""Answers that go on: bounded by user and in all, and over when their session is."""

import asyncio
import http.client
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from starlette.responses import Response
from starlette.routing import Route

from admin.operations import sessions, users
from admin.web import streams as streams_module
from admin.web.request import PageRequest, PageRoute, StreamRoute
from admin.web.session import COOKIE
from admin.web.streams import Download, Made, SessionOver, StreamedResponse, Streams, TooMany
from registry.accounts import user_sessions
from registry.errors import RegistryAway
from tests.admin.site import Site, Visitor, running_site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    with running_site(folder, max_admin_streams=5, max_admin_streams_per_user=3) as running:
        running.add_model("tiny")
        running.add_user("vera", "viewer")
        yield running


class Listener:
    """A live page without a browser."""

    def __init__(self, visitor: Visitor, path: str = "/live/models", method: str = "GET") -> None:
        parts = urlsplit(visitor.base)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
        jar = "; ".join(f"{name}={value}" for name, value in visitor.cookies.items())
        self._connection.request(method, "/admin" + path, headers={"cookie": jar})
        self._answer = self._connection.getresponse()
        self.status = self._answer.status
        self.media = self._answer.getheader("content-type", "")

    def until(self, event: str) -> None:
        """Read on until that event comes."""
        while line := self._answer.readline():
            if line == f"event: {event}\n".encode():
                return
        raise AssertionError(f"it ended without {event}")

    def rest(self) -> bytes:
        """Until it ends."""
        return self._answer.read()

    def close(self) -> None:
        self._connection.close()


def soon(holds: Callable[[], bool]) -> bool:
    for _ in range(400):
        if holds():
            return True
        time.sleep(0.025)
    return False


def opened(site: Site) -> Streams:
    found: Streams = site.kit.admin._streams
    return found


def test_how_many_a_user_and_all_may_have(site: Site) -> None:
    ann, vera = site.visitor("ann"), site.visitor("vera")
    again = site.visitor("ann")
    held = [Listener(who) for who in (ann, ann, again)]
    assert [each.status for each in held] == [200] * 3
    refused = ann.get("/live/models")
    assert refused.status == 503
    assert "max_admin_streams_per_user" in refused.text
    assert refused.headers["retry-after"]
    held += [Listener(vera), Listener(vera)]
    assert [each.status for each in held[3:]] == [200] * 2
    full = vera.get("/live/health")
    assert full.status == 503
    assert "(max_admin_streams)" in full.text
    for each in held:
        each.until("tick")
        each.close()
    assert soon(lambda: opened(site).num_open == 0)
    assert ann.get("/live/nothing").status == 404
    last = Listener(ann)
    assert last.status == 200
    last.close()
    assert soon(lambda: opened(site).num_open == 0)


def test_who_has_no_session_takes_no_place(site: Site) -> None:
    for visitor in (site.visitor(), Visitor(site.url, {COOKIE: "x" * 43})):
        assert visitor.get("/live/models").status == 401
    assert site.visitor("vera").get("/live/model/not-there").status == 401
    assert opened(site).num_open == 0


def test_many_at_once_do_not_get_past_the_bound(site: Site) -> None:
    ann = site.visitor("ann")
    held: list[Listener] = []
    threads = [
        threading.Thread(target=lambda: held.append(Listener(ann, "/live/health")))
        for _ in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(each.status for each in held) == [200] * 3 + [503] * 9
    for each in held:
        each.close()
    assert soon(lambda: opened(site).num_open == 0)


def _out(site: Site, who: Visitor) -> None:
    who.post("/sign-out", {})


def _ended_by_an_owner(site: Site, who: Visitor) -> None:
    with site.operator.reading() as session:
        now_at = site.operator.clock()
        found = user_sessions.find(session, who.cookies[COOKIE], now_at=now_at, idle_s=1e9)
    assert found is not None
    site.visitor("ann").post(f"/sessions/end/{found.id}", {"back": "sessions"})


def _shut_out(site: Site, who: Visitor) -> None:
    ann = site.visitor("ann")
    ann.post("/user/disabled/vera", {"disabled": "1"})
    ann.post("/user/disabled/vera", {"disabled": ""})


def _by_a_command(site: Site, who: Visitor) -> None:
    sessions.sign_out(site.operator, who.cookies[COOKIE])


def _let_in_again(site: Site, who: Visitor) -> None:
    """Shut out and let in again between two looks of the watch."""
    users.set_user_disabled(site.operator, "vera", True)
    users.set_user_disabled(site.operator, "vera", False)


ENDS = (_out, _ended_by_an_owner, _shut_out, _by_a_command, _let_in_again)


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_a_stream_ends_with_its_session(
    site: Site, end: Callable[[Site, Visitor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    vera, other = site.visitor("vera"), site.visitor("ann")
    if end in (_out, _ended_by_an_owner, _shut_out):  # at once: not by the watch's own time
        monkeypatch.setattr(streams_module, "WATCH_EVERY_S", 3600.0)
    admin = site.kit.admin
    slow = admin._stream(StreamRoute("/slow", lambda ask: {"part": "x"}, every_s=3600.0))
    admin._router.routes.insert(0, Route("/slow", slow, methods=["GET"]))
    listener, stays = Listener(vera, "/slow"), Listener(other, "/live/models")
    listener.until("tick")
    end(site, vera)
    assert b"event: signed-out" in listener.rest()
    stays.until("tick")
    stays.until("tick")
    stays.close()
    listener.close()
    assert soon(lambda: opened(site).num_open == 0)


def _endless(request: PageRequest) -> Response:
    def chunks() -> Iterator[bytes]:
        while True:
            time.sleep(0.02)
            yield b"row\n" * 100

    return Download(chunks(), "endless.csv", "text/csv")


def _silent(request: PageRequest) -> Response:
    """As a talk whose model does not say anything yet."""

    async def chunks() -> AsyncIterator[bytes]:
        yield b"first\n"
        await asyncio.sleep(3600)

    return StreamedResponse(chunks(), "text/plain")


@pytest.mark.parametrize(("run", "counts"), [(_endless, 0), (_silent, 1)])
def test_what_is_sent_breaks_off_and_is_not_taken_for_whole(
    tmp_path: Path, run: Callable[[PageRequest], Response], counts: int
) -> None:
    with running_site(tmp_path) as own:
        admin = own.kit.admin
        page = admin._page(PageRoute("GET", "/endless", run))
        admin._router.routes.insert(0, Route("/endless", page, methods=["GET"]))
        ann = own.visitor("ann")
        listener = Listener(ann, "/endless")
        assert listener.status == 200
        assert soon(lambda: len(opened(own)._places) == 1)
        assert opened(own).num_open == counts
        ann.post("/sign-out", {})
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            listener.rest()
        listener.close()
        assert soon(lambda: admin._num_downloads == 0 and not opened(own)._places)


@pytest.mark.parametrize("run", [_endless, _silent])
def test_asking_for_the_headers_alone_takes_no_place(
    tmp_path: Path, run: Callable[[PageRequest], Response]
) -> None:
    """Nothing of what would go on is made, for nobody would read it or end it."""
    with running_site(tmp_path) as own:
        admin = own.kit.admin
        page = admin._page(PageRoute("GET", "/endless", run))
        admin._router.routes.insert(0, Route("/endless", page, methods=["GET"]))
        ann = own.visitor("ann")
        for path, media in (("/endless", "text/"), ("/live/models", "text/event-stream")):
            asked = Listener(ann, path, "HEAD")
            assert (asked.status, asked.rest()) == (200, b"")
            assert asked.media.startswith(media)
            assert soon(lambda: admin._num_downloads == 0 and not opened(own)._places)
            asked.close()  # kept open until now, as browsers do


async def test_the_watch_goes_on_while_the_database_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams_module, "WATCH_EVERY_S", 0.01)
    asked: list[frozenset[str]] = []

    async def ended(tokens: frozenset[str]) -> frozenset[str]:
        asked.append(tokens)
        if len(asked) == 1:
            raise RegistryAway("away")
        if len(asked) == 2:
            raise ValueError("a bug")
        return frozenset({"a"}) & tokens

    streams = Streams(2, 2, ended)
    first, second = streams.take("a", "ann"), streams.take("b", "bob")
    with pytest.raises(TooMany):
        streams.take("c", "eve")
    download = streams.take("c", "eve", is_counted=False)

    async def chunks() -> AsyncIterator[bytes]:
        yield b"one"
        await asyncio.sleep(3600)

    guarded = streams.guarded(first, chunks())
    assert await anext(guarded) == b"one"
    with pytest.raises(SessionOver):
        await anext(guarded)
    assert not second.over.is_set()
    for place in (first, first, second, download):
        streams.give_back(place)
    assert streams.num_open == 0
    for _ in range(100):
        if streams._watching is None:
            break
        await asyncio.sleep(0.01)
    assert streams._watching is None
    assert len(asked) >= 3


def test_who_leaves_while_a_chunk_is_made_waits_for_it_and_gives_all_back() -> None:
    making, go_on, given_back = threading.Event(), threading.Event(), threading.Event()

    def chunks() -> Iterator[bytes]:
        try:
            yield b"first"
            making.set()
            assert go_on.wait(30)
            yield b"second"
        finally:
            given_back.set()

    made = Made(chunks())
    assert next(made) == b"first"
    taking = threading.Thread(target=next, args=(made,))
    taking.start()
    assert making.wait(30)
    trouble: list[BaseException] = []

    def leave() -> None:
        try:
            made.close()
        except ValueError as error:
            trouble.append(error)

    closing = threading.Thread(target=leave)
    closing.start()
    go_on.set()
    for thread in (taking, closing):
        thread.join(30)
    assert (trouble, given_back.is_set(), list(made)) == ([], True, [])
