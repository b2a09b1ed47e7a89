"""A gateway process' way to the dispatcher: Hello at each connect, epochs that only rise."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bench.processes import free_port
from gateway.cluster import dispatcher_client
from gateway.cluster.dispatcher_client import SocketLink
from gateway.cluster.dispatcher_places import DispatcherPlaces
from gateway.cluster.dispatcher_protocol import (
    PROTOCOL_VERSION,
    Hello,
    Leave,
    State,
    ToDispatcher,
    ToGateway,
    Welcome,
    to_dispatcher,
)
from gateway.ipc import ipc, remote
from gateway.ipc.ipc import Channel
from tests.gateway.ipc.test_ipc import until
from tests.gateway.ipc.test_remote import authority


class Played:
    """A dispatcher that answers every Hello with an epoch."""

    def __init__(self, epoch: int, version: int = PROTOCOL_VERSION) -> None:
        self.epoch = epoch
        self.version = version
        self.heard: list[ToDispatcher] = []
        self.channels: list[Channel[ToDispatcher, ToGateway]] = []

    def new_channel(self) -> Channel[ToDispatcher, ToGateway]:
        channel: Channel[ToDispatcher, ToGateway] = Channel(to_dispatcher)

        def hear(message: ToDispatcher) -> None:
            self.heard.append(message)
            if isinstance(message, Hello):
                channel.send(Welcome(self.version, self.epoch))
                channel.send(State(True, {}, {}))

        channel.on_message = hear
        self.channels.append(channel)
        return channel

    def die(self) -> None:
        for channel in self.channels:
            channel.lose("killed")


@asynccontextmanager
async def linked(
    path: Path, silence_s: float = 60.0, places: DispatcherPlaces | None = None
) -> AsyncIterator[tuple[SocketLink, list[str]]]:
    link, log = SocketLink(places or DispatcherPlaces(path), silence_s), list[str]()
    link.hello = lambda: Hello(PROTOCOL_VERSION, "gateway-0", [], [], [])
    link.on_up.append(lambda is_other: log.append(f"up {link.epoch} {is_other}"))
    link.on_down.append(lambda: log.append("down"))
    link.on_message.append(lambda message: log.append(type(message).__name__))
    running = asyncio.create_task(link.run())
    try:
        yield link, log
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_it_connects_says_hello_and_does_so_again(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with linked(path) as (link, log):
        link.send(Leave("nobody is there"))
        first = Played(4)
        async with ipc.listening(path, first.new_channel):
            await until(lambda: log == ["up 4 True", "State"])
            link.send(Leave("r"))
            await until(lambda: Leave("r") in first.heard)
            first.die()
            await until(lambda: log[2:] == ["down", "up 4 False", "State"])
        first.die()
        await until(lambda: not link.is_up)
        second = Played(5)
        async with ipc.listening(path, second.new_channel):
            await until(lambda: "up 5 True" in log)
        assert [type(message) for message in first.heard[:2]] == [Hello, Leave]
        assert Leave("nobody is there") not in first.heard


async def test_an_earlier_dispatcher_or_another_version_is_not_spoken_to(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with linked(path) as (link, log):
        first = Played(7)
        async with ipc.listening(path, first.new_channel):
            await until(lambda: link.is_up)
        first.die()
        for played in (Played(6), Played(8, version=PROTOCOL_VERSION + 1)):
            log.clear()
            async with ipc.listening(path, played.new_channel):
                await until(lambda played=played: len(played.channels) > 1)
            played.die()
            assert not [line for line in log if line.startswith(("up", "State"))]
            assert link.epoch == 7


async def test_an_earlier_dispatcher_is_not_asked_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher_client, "EARLIER_RETRY_S", 60.0)
    path, earlier = tmp_path / "s", Played(6)
    async with linked(path) as (link, _):
        link.epoch = 7
        async with ipc.listening(path, earlier.new_channel):
            await until(lambda: bool(earlier.channels))
            await asyncio.sleep(6 * dispatcher_client.RETRY_S)
            assert len(earlier.channels) == 1
            assert not link.is_up


async def test_one_that_hangs_is_given_up(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with linked(path, silence_s=0.01) as (_, log):
        played = Played(1)
        async with ipc.listening(path, played.new_channel):
            await until(lambda: "down" in log)
            await until(lambda: len(played.channels) > 1)


async def test_it_goes_where_the_election_says_and_looks_elsewhere_by_itself(
    tmp_path: Path,
) -> None:
    path, port = tmp_path / "s", free_port()
    tls = authority(tmp_path / "ca", "a", "b")
    gone, there = f"127.0.0.1:{free_port()}", f"127.0.0.1:{port}"
    places = DispatcherPlaces(path, "10.0.0.1:7500", [gone, there], tls["a"])
    own, other = Played(4), Played(5)
    async with linked(path, places=places) as (link, log), ipc.listening(path, own.new_channel):
        await until(lambda: log == ["up 4 True", "State"])
        link.moved("10.0.0.1:7500", 4)  # It is there already.
        async with remote.listening(("127.0.0.1", port), tls["b"], other.new_channel):
            link.moved(there, 5)
            await until(lambda: log[2:] == ["down", "up 5 True", "State"])
            assert [type(message) for message in other.heard] == [Hello]
        other.die()
        num_before = len(own.channels)
        await until(lambda: len(own.channels) > num_before)  # An earlier one does not do.
        assert not link.is_up
        later = Played(6)
        async with remote.listening(("127.0.0.1", port), tls["b"], later.new_channel):
            await until(lambda: "up 6 True" in log)


@pytest.mark.parametrize("whose", ["server", "gateway"])
async def test_certificates_that_do_not_match_are_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, whose: str
) -> None:
    ours, others = authority(tmp_path / "ca", "a", "b"), authority(tmp_path / "other", "x")
    address, path = ("127.0.0.1", free_port()), tmp_path / "s"
    listens, connects = (others["x"], ours["a"]) if whose == "server" else (ours["a"], others["x"])
    if whose == "gateway":  # which takes any server's, and shows one of another authority
        connects.client.verify_mode = ssl.CERT_NONE
    places = DispatcherPlaces(path, "10.0.0.1:7500", [f"127.0.0.1:{address[1]}"], connects)
    played = Played(5)
    async with linked(path, places=places), remote.listening(address, listens, played.new_channel):
        await until(lambda: "no TLS with the server at 127.0.0.1" in caplog.text)
        await asyncio.sleep(6 * dispatcher_client.RETRY_S)
    assert caplog.text.count("no TLS with the server") == 1
    assert not played.heard


async def test_one_that_does_not_answer_a_hello_is_left_for_another_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process was stopped: the kernel takes the connection."""
    monkeypatch.setattr(dispatcher_client, "WELCOME_S", 0.01)
    path, address = tmp_path / "s", ("127.0.0.1", free_port())
    tls = authority(tmp_path / "ca", "a", "b")
    places = DispatcherPlaces(path, "10.0.0.1:7500", [f"127.0.0.1:{address[1]}"], tls["a"])
    stopped, other = Played(4), Played(5)
    stopped.new_channel = lambda: Channel(to_dispatcher)  # type: ignore[method-assign]
    async with (
        linked(path, places=places) as (_, log),
        ipc.listening(path, stopped.new_channel),
        remote.listening(address, tls["b"], other.new_channel),
    ):
        await until(lambda: "up 5 True" in log)
