"""Connections from the listening socket to a protocol: counted, refused, delayed, let go."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gateway.errors import ApiError
from gateway.server.acceptor import MAX_A_TURN, Acceptor
from gateway.server.connections import Connections, Place

PAIRS = Path(__file__).resolve().parents[2] / "data" / "tls"
GIVE_UP_S = 10.0


def refusal(error: ApiError) -> bytes:
    return b"%d" % error.kind.status


class Echo(asyncio.Protocol):
    """Says hello, and sends back what it is sent."""

    place: Place

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(b"hello")

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.place.leave()


@dataclass
class Door:
    """An acceptor and its clients."""

    acceptor: Acceptor
    port: int
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def knock(self, says: bytes = b"") -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        writer.write(says)
        return reader


@contextlib.asynccontextmanager
async def door(
    connections: Connections, tls: ssl.SSLContext | None = None, handshake_timeout_s: float = 30.0
) -> AsyncIterator[Door]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        acceptor = Acceptor(listener, Echo, connections, refusal, tls, handshake_timeout_s)
        acceptor.start()
        found = Door(acceptor, listener.getsockname()[1])
        yield found
        acceptor.close()
        await acceptor.wait_closed()
        for writer in found.writers:
            writer.close()
        await until(lambda: connections.num_open == 0)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(GIVE_UP_S):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def certificate() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(PAIRS / "one-cert.pem", PAIRS / "one-key.pem")
    return context


async def test_one_too_many_is_told_so_and_leaves_nothing() -> None:
    connections = Connections(max_per_address=2)
    async with door(connections) as ours:
        for _ in range(2):
            assert await (await ours.knock()).readexactly(5) == b"hello"
        for _ in range(3):
            # What it has sent is taken, or the answer would be lost with a reset.
            assert await (await ours.knock(b"GET / HTTP/1.1\r\n\r\n")).read() == b"429"
        assert connections.num_open == 2
        ours.writers[0].close()
        await until(lambda: connections.num_open == 1)
        assert await (await ours.knock()).readexactly(5) == b"hello"
    assert connections.ended == {"too many of one address": 3}


async def test_a_quick_address_is_served_later() -> None:
    connections = Connections(rate_per_address=20.0)
    async with door(connections) as ours:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        readers = [await ours.knock(b"!") for _ in range(30)]
        for reader in readers:
            assert await reader.readexactly(6) == b"hello!"
        assert loop.time() - began_s >= 0.3  # at least: 21 at once, then one each 50 ms
        assert connections.num_delayed >= 5
    assert not connections.ended


async def test_who_waits_for_its_turn_is_let_go_at_the_end() -> None:
    connections = Connections(rate_per_address=1.0)
    async with door(connections) as ours:
        readers = [await ours.knock() for _ in range(8)]
        assert await readers[0].readexactly(5) == b"hello"
        await until(lambda: connections.num_open == 8)
        ours.acceptor.close()
        assert await readers[-1].read() == b""


async def test_more_than_a_turn_takes_are_all_taken() -> None:
    connections = Connections()
    async with door(connections) as ours:
        readers = [await ours.knock(b"?") for _ in range(3 * MAX_A_TURN)]
        for reader in readers:
            assert await reader.readexactly(6) == b"hello?"


async def test_handshakes_count_and_have_their_time() -> None:
    connections = Connections(max_per_address=2)
    async with door(connections, certificate(), handshake_timeout_s=0.3) as ours:
        slow = [await ours.knock(b"\x16\x03\x01") for _ in range(2)]
        await until(lambda: connections.num_open == 2)
        assert await (await ours.knock()).read() == b""  # nothing can be told
        assert connections.ended["too many of one address"] == 1
        for reader in slow:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        await until(lambda: connections.num_open == 0)
        assert connections.ended["no handshake"] == 2
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        reader, writer = await asyncio.open_connection("127.0.0.1", ours.port, ssl=context)
        assert await reader.readexactly(5) == b"hello"
        writer.close()


async def test_handshakes_end_with_the_server() -> None:
    connections = Connections()
    async with door(connections, certificate()) as ours:
        await ours.knock(b"\x16\x03\x01")
        await until(lambda: connections.num_open == 1)


async def test_without_a_descriptor_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    connections = Connections()
    monkeypatch.setattr("gateway.server.acceptor.PAUSE_S", 0.05)
    async with door(connections) as ours:
        inner, failures = ours.acceptor._listener, [OSError(24, "too many"), OSError(23, "full")]

        class Full:
            """The listening socket of a process that has no descriptor left, twice."""

            def accept(self) -> tuple[socket.socket, tuple[str, int]]:
                if failures:
                    raise failures.pop()
                return inner.accept()

            def __getattr__(self, name: str) -> object:
                return getattr(inner, name)

        asyncio.get_running_loop().remove_reader(inner)
        ours.acceptor._listener = Full()  # type: ignore[assignment]
        ours.acceptor.start()
        assert await (await ours.knock()).readexactly(5) == b"hello"
        assert not failures
