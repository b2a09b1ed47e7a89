"""What comes over a connection before it is a request, and after it has ceased to be one."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from gateway.settings import Settings
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


async def test_a_connection_serves_one_request_after_the_other(port: int) -> None:
    last = HEAD + b"Connection: close\r\n\r\n"
    assert (await talk(port, WHOLE, WHOLE, last, pause_s=0.05)).count(b"200 OK") == 3


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
