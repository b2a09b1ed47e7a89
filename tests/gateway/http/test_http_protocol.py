"""What comes over a connection before it is a request, and after it has ceased to be one."""

import asyncio
import gc
import ipaddress
import json
import logging
import weakref
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvloop
from starlette.types import Receive, Scope, Send

from gateway.http.acceptor import Connections
from gateway.http.http_protocol import BoundedHttp
from gateway.http.post import ClientWatch
from gateway.settings.settings import Settings
from tests.gateway.edge_kit import serving

HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
WHOLE = HEAD + b"\r\n"


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads the body and says how long it was; what /slow asks for takes a while."""
    if scope["type"] != "http":
        return
    num_bytes, more = 0, True
    while more:
        message = await receive()
        num_bytes += len(message.get("body", b""))
        more = message.get("more_body", False)
    if scope["path"] == "/slow":
        await asyncio.sleep(0.3)
    text = b"%d" % num_bytes
    headers = [(b"content-length", b"%d" % len(text))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": text})


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async with serving(app, Settings(receive_timeout_s=0.1)) as base:
        yield int(base.rpartition(":")[2])


async def talk(port: int, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """Send the parts; everything that comes back until the server ends the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause_s)
        async with asyncio.timeout(10):
            return await reader.read()
    except ConnectionError:
        return b"reset"
    finally:
        writer.close()


def error_of(answer: bytes) -> tuple[int, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head
    return int(head.split()[1]), json.loads(body)["error"]["code"]


@pytest.mark.parametrize(
    "parts",
    [
        [HEAD + b"X: " + b"a" * 60_000, b"a" * 60_000],
        [HEAD, *[b"X-Some: thing\r\n" * 1000] * 8],
        [b"GET /", *[b"a" * 30_000] * 4],
        [b"\r\n" * 20_000] * 4,
        [CHUNKED + b"3\r\nabc\r\n0\r\n", *[b"X-Trailer: thing\r\n" * 1000] * 8],
    ],
    ids=["one header", "many headers", "address", "empty lines", "trailers"],
)
async def test_what_is_endless_is_ended(port: int, parts: list[bytes]) -> None:
    answer = await talk(port, *parts, pause_s=0.002)
    assert answer in (b"", b"reset") or error_of(answer) == (431, "headers_too_large")


async def test_a_large_head_is_refused_in_words(port: int) -> None:
    answer = await talk(port, HEAD + b"X: ", b"a" * 70_000, pause_s=0.01)
    assert error_of(answer) == (431, "headers_too_large")


@pytest.mark.parametrize(
    "head",
    [
        HEAD + b"X: " + b"a" * 200_000 + b"\r\n\r\n",
        HEAD + b"X: y\r\n" * 40_000 + b"\r\n",
        b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n" % (b"a" * 70_000),
    ],
    ids=["one header", "many headers", "address"],
)
async def test_a_large_head_that_comes_at_once_is_refused_too(port: int, head: bytes) -> None:
    answer = await talk(port, head)
    assert answer == b"reset" or error_of(answer) == (431, "headers_too_large")


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_no_part_of_an_answer_to_head_is_written(version: bytes) -> None:
    async def streams(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            scope["state"]["connection"].write_chunk(b"event")
            await send({"type": "http.response.body", "body": b""})

    async with serving(streams, Settings()) as base:
        for method, has_parts in ((b"HEAD", False), (b"GET", True)):
            asked = b"%b / HTTP/%b\r\nHost: x\r\nConnection: close\r\n\r\n" % (method, version)
            _, _, body = (await talk(int(base.rpartition(":")[2]), asked)).partition(b"\r\n\r\n")
            assert (b"event" in body, bool(body)) == (has_parts, has_parts)


async def test_bodies_are_not_counted_as_heads(port: int) -> None:
    length = 1_000_000
    head = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % length
    assert (await talk(port, head, b"x" * length)).endswith(b"\r\n\r\n1000000")
    one = b"3e8\r\n" + b"x" * 1000 + b"\r\n"
    chunked = CHUNKED.replace(b"Host: x", b"Host: x\r\nConnection: close")
    answer = await talk(port, chunked, *[one] * 300, b"0\r\n\r\n")
    assert answer.endswith(b"\r\n\r\n300000")


@pytest.mark.parametrize("parts", [[], [HEAD], [WHOLE, HEAD]], ids=["none", "begun", "second"])
async def test_a_head_that_does_not_come_ends_the_connection(port: int, parts: list[bytes]) -> None:
    async with asyncio.timeout(3):
        answer = await talk(port, *parts)
    assert answer.count(b"200 OK") == (len(parts) == 2)


async def test_an_answer_is_not_broken_off_for_the_next_head(port: int) -> None:
    slow = b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n"
    assert (await talk(port, slow + HEAD)).count(b"200 OK") == 1


async def test_a_request_whose_head_began_during_the_answer_before_is_served() -> None:
    slow = b"GET /slow HTTP/1.1\r\nHost: x\r\n"
    async with serving(app, Settings(keep_alive_timeout_s=0.2)) as base:
        port = int(base.rpartition(":")[2])
        # The second one's head ends after the first answer, and its own answer comes 0.3 s later.
        answer = await talk(port, slow + b"\r\n" + slow, b"", b"\r\n", pause_s=0.2)
    assert answer.count(b"200 OK") == 2


async def test_garbage_is_not_answered_in_the_midst_of_another_answer(port: int) -> None:
    """The first of two requests is being answered when the third turns out to be none."""
    slow = b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n"
    assert await talk(port, slow, WHOLE + b"\x00\r\n\r\n", pause_s=0.05) == b""


def test_nothing_is_written_to_a_connection_that_was_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first of two requests is being served when the third ends the connection. On the loop of
    the real server, whose transports raise where asyncio's do not."""

    async def scenario() -> None:
        async with serving(app, Settings()) as base:
            slow = b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n"
            port = int(base.rpartition(":")[2])
            assert await talk(port, slow, WHOLE + b"\x00\r\n\r\n", pause_s=0.05) == b""

    uvloop.run(scenario())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_connection_serves_one_request_after_the_other(port: int) -> None:
    last = HEAD + b"Connection: close\r\n\r\n"
    assert (await talk(port, WHOLE, WHOLE, last, pause_s=0.05)).count(b"200 OK") == 3


@pytest.mark.parametrize("closing", [b"Connection: close\r\n\r\n", b"\r\n"])
def test_a_closed_connection_is_no_garbage(closing: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes with its last reference: a server that looks for garbage seldom would keep many."""
    made: list[weakref.ref[BoundedHttp]] = []
    begin = BoundedHttp.connection_made

    def connection_made(self: BoundedHttp, transport: asyncio.Transport) -> None:
        made.append(weakref.ref(self))
        begin(self, transport)

    monkeypatch.setattr(BoundedHttp, "connection_made", connection_made)

    async def scenario() -> None:
        async with serving(app, Settings(receive_timeout_s=5, keep_alive_timeout_s=0.2)) as base:
            for _ in range(3):
                assert b"200 OK" in await talk(int(base.rpartition(":")[2]), HEAD + closing)
            async with asyncio.timeout(10):
                while any(one() is not None for one in made):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

    gc.disable()
    try:
        uvloop.run(scenario())
    finally:
        gc.enable()
    assert len(made) == 3


async def test_what_is_no_http_gets_the_error_object(port: int) -> None:
    for what in (b"\x16\x03\x01\x02\x00\x01", CHUNKED + b"zz\r\nabc"):
        assert error_of(await talk(port, what)) == (400, "invalid_request")


async def who_asks(scope: Scope, receive: Receive, send: Send) -> None:
    """Says which client the server takes the connection for."""
    if scope["type"] != "http":
        return
    text = str(scope["client"][0]).encode()
    headers = [(b"content-length", b"%d" % len(text))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": text})


async def test_what_comes_after_a_body_is_no_header() -> None:
    """A proxy in front passes a client's trailers on: they are not what the proxy says."""
    said = b"X-Forwarded-For: "
    async with serving(who_asks, Settings(trusted_proxies="127.0.0.1")) as base:
        head = CHUNKED.replace(
            b"Host: x", b"Host: x\r\nConnection: close\r\n" + said + b"192.0.2.7"
        )
        trailer = said + b"192.0.2.99\r\n"
        answer = await talk(
            int(base.rpartition(":")[2]), head + b"3\r\nabc\r\n0\r\n" + trailer + b"\r\n"
        )
    assert answer.endswith(b"\r\n\r\n192.0.2.7")


@pytest.mark.parametrize(
    ("trusted", "said", "client"),
    [
        ("", "192.0.2.7", "127.0.0.1"),
        ("10.0.0.0/8", "192.0.2.7", "127.0.0.1"),
        ("127.0.0.0/8", "192.0.2.7", "192.0.2.7"),
        # What the client itself has put in front is not believed.
        ("127.0.0.0/8, 10.0.0.1", "8.8.8.8, 192.0.2.7, 10.0.0.1", "192.0.2.7"),
    ],
)
async def test_only_trusted_proxies_say_who_the_client_is(
    trusted: str, said: str, client: str
) -> None:
    request = WHOLE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    request = request.replace(b"Host: x", b"Host: x\r\nX-Forwarded-For: " + said.encode())
    async with serving(who_asks, Settings(trusted_proxies=trusted)) as base:
        answer = await talk(int(base.rpartition(":")[2]), request)
    assert answer.endswith(b"\r\n\r\n" + client.encode())


async def flood(scope: Scope, receive: Receive, send: Send) -> None:
    """Writes a stream for ever, whether or not it is read, until the client is gone."""
    if scope["type"] != "http":
        return
    gone = asyncio.Event()
    watch = ClientWatch(scope["state"]["connection"])
    watch.when_gone(gone.set)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    while not gone.is_set():
        if not watch.connection.is_full:
            watch.connection.write_chunk(b"x" * 65_536)
        await asyncio.sleep(0)


async def test_who_does_not_read_is_cut_off() -> None:
    settings = Settings(stream_write_timeout_s=0.1)
    connections = Connections()
    async with serving(flood, settings, connections) as base:
        port = int(base.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(WHOLE)
        async with asyncio.timeout(10):
            while not connections.ended["stalled"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()


async def leave_a_little(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers for the last time until a little is left that the client has not read."""
    if scope["type"] != "http":
        return
    headers = [(b"connection", b"close")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    transport = scope["state"]["connection"].transport
    while not transport.get_write_buffer_size():
        body = {"type": "http.response.body", "body": b"x" * 16_384, "more_body": True}
        await send(body)
    await send({"type": "http.response.body", "body": b""})


async def test_who_does_not_read_the_last_of_an_answer_is_cut_off() -> None:
    connections = Connections()
    async with serving(leave_a_little, Settings(stream_write_timeout_s=0.1), connections) as base:
        _, writer = await asyncio.open_connection(
            "127.0.0.1", int(base.rpartition(":")[2]), limit=1024
        )
        writer.write(WHOLE)
        async with asyncio.timeout(10):
            while not connections.ended["stalled"] or connections.num_open:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        writer.close()


async def test_empty_lines_do_not_keep_a_connection() -> None:
    connections = Connections()
    async with serving(app, Settings(keep_alive_timeout_s=0.2), connections) as base:
        port = int(base.rpartition(":")[2])
        async with asyncio.timeout(5):
            answer = await talk(port, WHOLE, *[b"\r\n"] * 8, pause_s=0.06)
        assert answer.count(b"200 OK") == 1 or answer == b"reset"
        assert connections.ended["idle"] == 1


async def test_connections_are_bounded_in_all_and_by_address() -> None:
    for bounds, status in (
        (Connections(max_total=2), 503),
        (Connections(max_per_address=2), 429),
    ):
        async with serving(app, Settings(), bounds) as base:
            port = int(base.rpartition(":")[2])
            held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            for reader, writer in held:
                writer.write(WHOLE)
                assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            assert error_of(await talk(port))[0] == status
            assert bounds.num_open == 2
            held.pop()[1].close()
            async with asyncio.timeout(5):
                while bounds.num_open > 1:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            last = HEAD + b"Connection: close\r\n\r\n"
            assert b"200 OK" in await talk(port, last)
            for _, writer in held:
                writer.close()


async def test_proxies_have_as_many_connections_as_they_like() -> None:
    bounds = Connections(max_per_address=1, proxies=(ipaddress.ip_network("127.0.0.0/8"),))
    async with serving(app, Settings(), bounds) as base:
        port = int(base.rpartition(":")[2])
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        last = HEAD + b"Connection: close\r\n\r\n"
        assert b"200 OK" in await talk(port, last)
        for _, writer in held:
            writer.close()


async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers without reading the body."""
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b""})


async def test_a_body_that_comes_after_the_refusal_does_not_keep_a_connection() -> None:
    connections = Connections()
    async with serving(refuse, Settings(keep_alive_timeout_s=0.2), connections) as base:
        port = int(base.rpartition(":")[2])
        head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
        async with asyncio.timeout(5):
            answer = await talk(port, head, *[b"x"] * 20, pause_s=0.05)
        assert answer == b"reset" or answer.startswith(b"HTTP/1.1 401")
        assert connections.ended["idle"] == 1


GET = b"GET / HTTP/1.1\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\n"
NO_CHUNKS = b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("request_bytes", "word"),
    [
        (GET + b"\r\n", "Host"),
        (GET + b"Host: a\r\nHost: b\r\n\r\n", "Host"),
        (GET + b"Host: a\r\nhost: a\r\n\r\n", "Host"),
        (b"GET / HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n", "Host"),
        (POST + b"Transfer-Encoding: identity, chunked\r\n\r\n" + NO_CHUNKS, "Transfer-Encoding"),
        (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + NO_CHUNKS, "Transfer-Encoding"),
        (
            POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n" + NO_CHUNKS,
            "Invalid",
        ),
        (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n" + NO_CHUNKS, "Transfer-Encoding"),
    ],
)
async def test_heads_that_servers_read_differently_end_the_connection(
    port: int, request_bytes: bytes, word: str
) -> None:
    answer = await talk(port, request_bytes + WHOLE)
    assert error_of(answer) == (400, "invalid_request")
    assert word.encode() in answer
    assert answer.count(b"HTTP/1.1 ") == 1, "what follows is read by nobody"


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET / HTTP/1.0\r\n\r\n",
        b"GET / HTTP/1.0\r\nHost: x\r\nConnection: keep-alive\r\n\r\n",
        POST + b"Connection: close\r\nTransfer-Encoding: Chunked\r\n\r\n" + NO_CHUNKS,
    ],
)
async def test_heads_that_are_as_they_should_be_are_served(port: int, request_bytes: bytes) -> None:
    assert (await talk(port, request_bytes)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
async def test_an_old_client_gets_no_chunks(method: bytes) -> None:
    async def parts(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-y", b"z")]})
        await send({"type": "http.response.body", "body": b"ab", "more_body": True})
        connection: BoundedHttp = scope["state"]["connection"]
        if method == b"GET":
            connection.write_chunk(b"cd")
        await send({"type": "http.response.body", "body": b"ef", "more_body": False})

    async with serving(parts) as base:
        port = int(base.rpartition(":")[2])
        old = await talk(port, method + b" / HTTP/1.0\r\n\r\n")
        new = await talk(port, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    head, _, body = old.partition(b"\r\n\r\n")
    assert head == b"HTTP/1.1 200 OK\r\nx-y: z\r\nconnection: close"
    assert body == (b"abcdef" if method == b"GET" else b"")
    assert b"transfer-encoding: chunked" in new
