"""Connections from the listening socket to a protocol: counted, refused, delayed, let go."""

import asyncio
import contextlib
import ipaddress
import logging
import os
import random
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
import uvloop

from gateway.errors import ApiError
from gateway.http.acceptor import (
    MAX_A_TURN,
    MAX_OPENED,
    Acceptor,
    Connections,
    ConnectionSlot,
    connections_of,
)
from gateway.settings.settings import Settings

PAIRS = Path(__file__).resolve().parents[2] / "data" / "tls"
GIVE_UP_S = 10.0


def refusal(error: ApiError) -> bytes:
    return b"%d" % error.kind.status


class Echo(asyncio.Protocol):
    """Says hello, and sends back what it is sent."""

    place: ConnectionSlot

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass
        self._transport.write(b"hello")

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


async def test_a_quick_address_is_served_later(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
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
    assert [r.getMessage().split()[2] for r in caplog.records] == ["127.0.0.1"]  # one for all


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


@pytest.mark.parametrize(
    ("connections", "num_opened", "num_taken"),
    [
        (Connections(), MAX_OPENED, MAX_OPENED),
        (Connections(max_per_address=4), 4, MAX_A_TURN),
        (Connections(rate_per_address=0.1), 1, MAX_A_TURN),
    ],
)
async def test_who_is_not_opened_holds_up_nobody(
    connections: Connections, num_opened: int, num_taken: int
) -> None:
    """A turn opens few, and takes many that are told to go or to wait."""
    async with door(connections) as ours:
        asyncio.get_running_loop().remove_reader(ours.acceptor._listener)
        for _ in range(MAX_A_TURN + 5):
            await ours.knock()
        ours.acceptor._take()
        assert len(ours.acceptor._opening) == num_opened
        assert connections.num_open + connections.ended.total() == num_taken
        assert connections.num_open - len(ours.acceptor._waiting) == num_opened


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
    monkeypatch.setattr("gateway.http.acceptor.PAUSE_S", 0.05)
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


def client_hello() -> bytes:
    """The first flight of a handshake."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    sent = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent).do_handshake()
    return sent.read()


async def rude(port: int, number: int, hello: bytes) -> None:
    """Comes and goes in one of six ways."""
    says = (b"", b"", hello[:40], hello, b"no handshake at all", hello)[number % 6]
    client = socket.socket()
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
    with contextlib.suppress(OSError):
        client.send(says)
        await asyncio.sleep(0.01 * (number % 3))
        if number % 2:  # with a reset, otherwise its half first
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            client.shutdown(socket.SHUT_WR)
            await asyncio.sleep(0.01 * (number % 5))
    client.close()


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("speaks_tls", [False, True])
@pytest.mark.parametrize("rate", [0.0, 400.0])
def test_nobody_keeps_a_place(
    make_loop: Callable[[], asyncio.AbstractEventLoop], speaks_tls: bool, rate: float
) -> None:
    """However they end: a place that is never left is one that nobody gets any more."""
    hello = client_hello()
    tls = certificate() if speaks_tls else None

    async def everybody() -> None:
        connections = Connections(max_total=60, max_per_address=50, rate_per_address=rate)
        num_files = len(os.listdir("/proc/self/fd"))
        async with door(connections, tls, handshake_timeout_s=0.2) as ours:
            for start in range(0, 1200, 200):
                numbers = range(start, start + 200)
                await asyncio.gather(*(rude(ours.port, n, hello) for n in numbers))
            await until(lambda: connections.num_open == 0)
            assert not connections._by_party
            assert not ours.acceptor._waiting
            await until(lambda: not ours.acceptor._opening)
            # The listening socket, and one of uvloop's own.
            await until(lambda: len(os.listdir("/proc/self/fd")) <= num_files + 2)

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(everybody())


def test_bounds_of_one_address_leave_others_alone() -> None:
    connections = Connections(max_per_address=2)
    places = [connections.enter("192.0.2.1") for _ in range(2)]
    with pytest.raises(ApiError) as refused:
        connections.enter("192.0.2.1")
    assert refused.value.kind.status == 429
    assert refused.value.retry_after_s
    places.append(connections.enter("192.0.2.2"))
    for place in (*places, *places):  # twice: once counts
        place.leave()
    assert connections.num_open == 0
    assert not connections._by_party
    assert connections.ended == {"too many of one address": 1}


def test_the_bound_of_all_holds_for_proxies_too() -> None:
    network = ipaddress.ip_network("192.0.2.0/24")
    connections = Connections(max_total=3, max_per_address=1, proxies=(network,))
    for _ in range(3):
        connections.enter("192.0.2.1")
    with pytest.raises(ApiError) as refused:
        connections.enter("192.0.2.1")
    assert refused.value.kind.status == 503


@pytest.mark.parametrize(
    ("trusted", "address", "fine"),
    [
        ("", "192.0.2.1", False),
        ("192.0.2.0/24, 10.0.0.1", "192.0.2.1", True),
        ("10.0.0.1", "192.0.2.1", False),
        ("*", "192.0.2.1", True),
        ("*", "2001:db8::1", True),
        ("192.0.2.0/24", "", False),
    ],
)
def test_proxies_are_those_of_the_settings(trusted: str, address: str, fine: bool) -> None:
    settings = Settings(trusted_proxies=trusted, max_connections_per_address=1)
    connections = connections_of(settings)
    connections.enter(address)
    if fine:
        connections.enter(address)
    else:
        with pytest.raises(ApiError):
            connections.enter(address)


def test_no_bound_is_no_bound() -> None:
    connections = Connections()
    assert not any(connections.enter("192.0.2.1").wait_s for _ in range(5000))
    assert connections.num_open == 5000


@pytest.mark.parametrize(
    ("one", "other", "is_one_party"),
    [
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
        ("fe80::1%eth0", "fe80::2", True),
        ("192.0.2.1", "192.0.2.2", False),
    ],
)
def test_a_network_of_64_bits_is_one_address(one: str, other: str, is_one_party: bool) -> None:
    connections = Connections(max_per_address=1)
    connections.enter(one)
    if is_one_party:
        with pytest.raises(ApiError):
            connections.enter(other)
    else:
        connections.enter(other)


def test_a_quick_address_waits_and_others_do_not() -> None:
    connections = Connections(rate_per_address=10.0)
    waits = [connections.enter("192.0.2.1", 100.0).wait_s for _ in range(20)]
    assert waits == pytest.approx([0.0] * 11 + [n / 10 for n in range(1, 10)])
    assert connections.enter("192.0.2.2", 100.0).wait_s == 0
    # In a second ten are served; those that wait have taken their turn already.
    assert connections.enter("192.0.2.1", 101.0).wait_s == pytest.approx(0.0, abs=1e-6)
    assert connections.enter("192.0.2.1", 101.0).wait_s == pytest.approx(0.1)
    assert connections.enter("192.0.2.1", 200.0).wait_s == 0
    assert connections.num_delayed == 10


def test_an_even_pace_below_the_bound_never_waits() -> None:
    connections = Connections(rate_per_address=10.0)
    assert not any(connections.enter("192.0.2.1", n / 9.9).wait_s for n in range(1000))


def test_proxies_do_not_wait() -> None:
    connections = connections_of(
        Settings(trusted_proxies="192.0.2.1", connection_rate_per_address=1)
    )
    assert not any(connections.enter("192.0.2.1", 5.0).wait_s for _ in range(50))


def test_what_is_remembered_of_addresses_is_forgotten() -> None:
    connections, chance = Connections(rate_per_address=2.0), random.Random(3)
    for n in range(20_000):
        connections.enter(f"10.0.{chance.randrange(256)}.{chance.randrange(256)}", n / 100).leave()
    assert len(connections._due_s) < 200
    assert not connections._by_party
