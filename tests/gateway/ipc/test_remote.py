"""Channels between servers: only who has a certificate of the authority is heard, at either end."""

import asyncio
import contextlib
import gc
import socket
import weakref
from pathlib import Path
from typing import Any

import pytest

from admin.cli.main import main
from bench.processes import free_port
from gateway.cluster.dispatcher_server import DispatcherServer
from gateway.cluster.ticket_dispatcher import TicketDispatcher
from gateway.ipc import remote
from gateway.ipc.ipc import Channel
from gateway.ipc.remote import TlsContexts, tls_contexts
from gateway.limits.store import MemoryStore
from gateway.settings.settings import Settings
from registry.errors import RegistryError
from tests.gateway.ipc.test_ipc import DECODER, until


def authority(folder: Path, *names: str) -> dict[str, TlsContexts]:
    assert main(["servers", "cert", *names, "--dir", str(folder)]) == 0
    files = ("cert.pem", "key.pem", "ca.pem")
    return {name: tls_contexts(*(folder / name / file for file in files)) for name in names}


TLS_ALERT = b"\x15"


class Listener:
    """What a server heard."""

    def __init__(self) -> None:
        self.heard: list[int] = []
        self.lost: list[str] = []
        self.channels: list[Channel[int, int]] = []

    def new_channel(self) -> Channel[int, int]:
        channel: Channel[int, int] = Channel(DECODER)
        channel.on_message, channel.on_lost = self.heard.append, self.lost.append
        self.channels.append(channel)
        return channel


async def test_messages_go_both_ways_and_an_end_is_seen(tmp_path: Path) -> None:
    tls, there, here = authority(tmp_path / "ca", "a", "b"), Listener(), Listener()
    address = ("127.0.0.1", free_port())
    async with remote.listening(address, tls["a"], there.new_channel):
        ours = here.new_channel()
        await remote.connect(address, tls["b"], ours, 5.0)
        for number in range(3):
            ours.send(number)
        await until(lambda: there.heard == [0, 1, 2])
        there.channels[0].send(7)
        await until(lambda: here.heard == [7])
        there.channels[0].lose("broken")
        await until(lambda: here.lost)
        assert there.lost == ["broken"]


@pytest.mark.parametrize("who", ["server", "client", "nobody's"])
async def test_who_has_no_certificate_of_the_authority_is_not_heard(
    tmp_path: Path, who: str
) -> None:
    ours, others = authority(tmp_path / "ca", "a", "b"), authority(tmp_path / "other", "x")
    there, here = Listener(), Listener()
    address = ("127.0.0.1", free_port())
    listens = others["x"] if who == "server" else ours["a"]
    async with remote.listening(address, listens, there.new_channel):
        channel = here.new_channel()
        if who == "nobody's":
            with socket.create_connection(address) as raw:
                raw.sendall(b"\x00\x00\x00\x02\x91\x01")  # a frame, as it goes over a Unix socket
                answer = await asyncio.to_thread(raw.recv, 100)
                assert answer[:1] in (b"", TLS_ALERT)
        else:
            connects = others["x"] if who == "client" else ours["b"]
            with contextlib.suppress(OSError):  # a client is told by the end of its connection
                await remote.connect(address, connects, channel, 5.0)
                channel.send(1)
                await until(lambda: here.lost)
        assert there.heard == here.heard == []


async def test_connections_without_a_certificate_are_counted_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote, "TELL_S", 0.05)
    tls, address = authority(tmp_path / "ca", "a", "b"), ("127.0.0.1", free_port())
    async with remote.listening(address, tls["a"], Listener().new_channel):
        await remote.connect(address, tls["b"], Listener().new_channel(), 5.0)
        with socket.create_connection(address) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
            await until(lambda: "refused connections=1 without TLS" in caplog.text)


async def test_nobody_there_and_no_files_are_said(tmp_path: Path) -> None:
    tls = authority(tmp_path / "ca", "a")["a"]
    with pytest.raises(OSError, match=r"."):
        await remote.connect(("127.0.0.1", free_port()), tls, Listener().new_channel(), 5.0)
    with pytest.raises(RegistryError, match="polyhost servers cert"):
        tls_contexts(tmp_path / "none", tmp_path / "none", tmp_path / "none")


def test_an_address_that_cannot_be_had_is_found_at_the_start() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match=r"in use"):
            remote.check_listening(taken.getsockname())
    for address in ("192.0.2.1", "no.such.host.invalid"):
        with pytest.raises(OSError, match=r"."):
            remote.check_listening((address, 7500))
    remote.check_listening(("127.0.0.1", free_port()))


def test_certificates_are_added_and_never_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["servers", "cert", "--dir", str(tmp_path / "ca")]
    assert main([*command, "a"]) == 0
    assert main([*command, "b"]) == 0
    assert (tmp_path / "ca" / "a" / "ca.pem").read_bytes() == (
        tmp_path / "ca" / "b" / "ca.pem"
    ).read_bytes()
    for name in ("a", "../a", "a b"):
        assert main([*command, name]) != 0
    (tmp_path / "ca" / "ca-key.pem").unlink()
    assert main([*command, "c"]) != 0
    files = [path for path in (tmp_path / "ca").rglob("*") if path.is_file()]
    assert len(files) == 7
    assert all(path.stat().st_mode & 0o077 == 0 for path in files)
    assert "ca-key.pem" in capsys.readouterr().err


async def test_of_connections_without_a_handshake_nothing_is_kept(tmp_path: Path) -> None:
    tls, address = authority(tmp_path / "ca", "a", "b"), ("127.0.0.1", free_port())
    made: list[weakref.ref[Channel[Any, Any]]] = []
    server = DispatcherServer(
        TicketDispatcher(Settings()), MemoryStore(), 1, 1.0, lambda: 0.0, lambda: None
    )

    def new_channel() -> Channel[Any, Any]:
        channel = server.new_channel()
        made.append(weakref.ref(channel))
        return channel

    async with remote.listening(address, tls["a"], new_channel):
        for _ in range(5):
            with socket.create_connection(address) as raw:
                raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
                await asyncio.to_thread(raw.recv, 100)
        await until(lambda: gc.collect() >= 0 and len(made) == 5 and not any(r() for r in made))
        ours: Channel[Any, Any] = Channel(DECODER)
        await remote.connect(address, tls["b"], ours, 5.0)
        await until(lambda: any(r() for r in made))
        ours.close()
        await until(lambda: gc.collect() >= 0 and not any(r() for r in made))
