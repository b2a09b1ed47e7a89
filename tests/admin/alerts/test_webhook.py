"""A signed POST: what arrives, and what is not believed, followed or waited for."""

import asyncio
import hashlib
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from admin.alerts import webhook
from admin.alerts.webhook import NotDelivered, deliver

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
SECRET = "whsec_x"
BODY = b'{"id":"alt_1"}'


@asynccontextmanager
async def receiver(handler: Handler) -> AsyncIterator[str]:
    """A server on a port of its own."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def read_request(reader: asyncio.StreamReader) -> tuple[str, dict[str, str], bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    line, *rest = head.strip().split("\r\n")
    headers = dict(each.split(": ", 1) for each in rest)
    return line, headers, await reader.readexactly(int(headers["content-length"]))


def answering(text: str) -> Handler:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(text.encode())

    return handler


async def send(url: str, timeout_s: float = 5.0) -> None:
    await deliver(url, "alt_1", SECRET, BODY, 1_795_000_000.9, timeout_s=timeout_s)


async def test_what_arrives_is_signed() -> None:
    got = list[tuple[str, dict[str, str], bytes]]()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.append(await read_request(reader))
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")

    async with receiver(handler) as url:
        await send(f"{url}/hook?to=me")
    ((line, headers, body),) = got
    assert line == "POST /hook?to=me HTTP/1.1"
    assert body == BODY
    assert headers["polyhost-alert"] == "alt_1"
    assert headers["polyhost-timestamp"] == "1795000000"
    expected = hmac.new(SECRET.encode(), b"1795000000." + BODY, hashlib.sha256).hexdigest()
    assert headers["polyhost-signature"] == f"v1={expected}"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("HTTP/1.1 500 Oh\r\n\r\n", "500"),
        ("HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\n\r\n", "302"),
        ("", "not answer in HTTP"),
        ("SSH-2.0-x\r\n", "not answer in HTTP"),
        ("HTTP/1.1 abc\r\n", "not answer in HTTP"),
        ("x" * 5000, "ValueError"),
    ],
)
async def test_only_a_success_is_one(answer: str, reason: str) -> None:
    async with receiver(answering(answer)) as url:
        with pytest.raises(NotDelivered, match=reason):
            await send(url)


async def test_who_takes_too_long_is_left() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not reader.at_eof():  # one byte at a time, for ever
            writer.write(b"H")
            await asyncio.sleep(0.01)
            await reader.read(10)

    async with receiver(handler) as url:
        with pytest.raises(NotDelivered, match="did not answer within"):
            await send(url, timeout_s=0.2)


async def test_nobody_is_there() -> None:
    async with receiver(answering("")) as url:
        pass
    with pytest.raises(NotDelivered, match="Connection"):
        await send(url)


@pytest.mark.parametrize(
    "host",
    [
        "169.254.169.254",
        "[fe80::1]",
        "[::ffff:169.254.169.254]",
        "[64:ff9b::a9fe:a9fe]",
        "[2002:a9fe:a9fe::1]",
        "[64:ff9b:1::a9fe:a9fe]",
        "[64:ff9b:1:a9fe:a9:fe00::]",
        "[64:ff9b:1:a9:fe:a9fe::]",
        "[64:ff9b:1:0:a9:fea9:fe00:0]",
        "[2001:0:4136:e378:8000:63bf:5601:5601]",
        "[2001:0:a9fe:a9fe:8000:63bf:3fff:fdd2]",
        "[::a9fe:a9fe]",
        "[::ffff:0:a9fe:a9fe]",
        "[2001:db8::5efe:169.254.169.254]",
        "[2001:db8::200:5efe:169.254.169.254]",
        "[fd00:ec2::254]",
        "[fd00:ec2::253]",
        "[fd20:ce::254]",
        "[fec0::1]",
        "[ff02::1]",
        "[::]",
        "168.63.129.16",
        "[::ffff:168.63.129.16]",
        "192.0.0.192",
        "100.100.100.200",
        "[64:ff9b::100.100.100.200]",
        "0.0.0.0",
        "0.1.2.3",
        "255.255.255.255",
        "2852039166",
        "0xa9fea9fe",
        "224.0.0.1",
    ],
)
async def test_addresses_that_are_nobodys_webhook(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object, **__: object) -> None:
        raise AssertionError("it was connected to")

    monkeypatch.setattr(asyncio, "open_connection", never)
    with pytest.raises(NotDelivered, match="no permitted address"):
        await send(f"http://{host}/latest")


@pytest.mark.parametrize(
    "host",
    [
        *("192.0.2.7", "10.0.0.7", "172.16.0.7", "192.168.0.7", "100.64.0.7", "[fd12::7]"),
        *("[2001:db8::7]", "[64:ff9b::192.0.2.7]", "[::ffff:10.0.0.7]", "[2002:c000:207::1]"),
    ],
)
async def test_addresses_of_others_and_of_the_operators_own_network(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def connect(*_: object, **__: object) -> None:
        raise OSError("stop here")

    monkeypatch.setattr(asyncio, "open_connection", connect)
    with pytest.raises(NotDelivered, match="stop here"):
        await send(f"http://{host}/hook")


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "169.254.169.254", "::ffff:127.0.0.1"])
async def test_a_name_that_turned_to_this_host_is_not_believed(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected = list[str]()

    async def resolve(*_: object, **__: object) -> list[tuple[object, ...]]:
        return [(0, 0, 0, "", (address, 80))]

    async def connect(host: str, *_: object, **__: object) -> None:
        connected.append(host)
        raise OSError("stop here")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    monkeypatch.setattr(asyncio, "open_connection", connect)
    with pytest.raises(NotDelivered, match="no permitted address"):
        await send("http://hooks.example/")
    assert not connected
    if "127.0.0.1" in address:  # who writes this host means it
        with pytest.raises(NotDelivered, match="stop here"):
            await send("http://localhost/")
        assert connected == [address]


async def test_tls_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def plain(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")

    async with receiver(plain) as url:
        with pytest.raises(NotDelivered, match="SSL"):
            await send(url.replace("http:", "https:"))
    assert webhook.signature("a", 1, b"") != webhook.signature("b", 1, b"")
