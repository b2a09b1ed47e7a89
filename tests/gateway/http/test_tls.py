"""TLS by files, and a certificate that is renewed while the server runs."""

import asyncio
import os
import socket
import ssl
from pathlib import Path

import pytest
from starlette.types import Receive, Scope, Send

from gateway.http import http_protocol
from gateway.http.acceptor import Connections
from gateway.http.http_protocol import http_config
from gateway.http.tls import LOOK_EVERY_S, Certificate
from gateway.settings.settings import Settings
from tests.gateway.edge_kit import serving

PAIRS = Path(__file__).resolve().parents[2] / "data" / "tls"


class Clock:
    """Time that moves when the test says so."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Says by which scheme it was asked."""
    if scope["type"] == "http":
        text = str(scope["scheme"]).encode()
        headers = [(b"content-length", b"%d" % len(text)), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": text})


def put(folder: Path, name: str) -> tuple[str, str]:
    """The pair `name` as the server's files."""
    for kind in ("cert", "key"):
        (folder / f"{kind}.pem").write_bytes((PAIRS / f"{name}-{kind}.pem").read_bytes())
    return str(folder / "cert.pem"), str(folder / "key.pem")


def certificate_of(pair: str) -> bytes:
    """The certificate's bytes as a client sees them."""
    return ssl.PEM_cert_to_DER_cert((PAIRS / f"{pair}-cert.pem").read_text())


async def shown_by(port: int, name: str | None = None) -> bytes:
    """The certificate that a client is shown, with or without naming a server."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=context, server_hostname=name or ""
    )
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await reader.read()).endswith(b"https")
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    assert isinstance(shown, bytes)
    return shown


async def test_the_server_speaks_tls(tmp_path: Path) -> None:
    cert, key = put(tmp_path, "one")
    async with serving(app, Settings(tls_cert_file=cert, tls_key_file=key)) as base:
        port = int(base.rpartition(":")[2])
        assert await shown_by(port) == certificate_of("one")
        assert await shown_by(port, "localhost") == certificate_of("one")
        # Who speaks plainly is closed on, and others are served.
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200" not in await reader.read()
        writer.close()
        assert await shown_by(port) == certificate_of("one")


@pytest.mark.parametrize("asks_to_close", [False, True])
async def test_who_does_not_answer_the_end_of_tls_does_not_hold_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks_to_close: bool
) -> None:
    monkeypatch.setattr(http_protocol, "LINGER_S", 0.1)
    cert, key = put(tmp_path, "one")
    counted = Connections()

    async def keeps(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = [(b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    def ask(port: int) -> ssl.SSLSocket:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        plain = socket.create_connection(("127.0.0.1", port))
        found = context.wrap_socket(plain)
        last = b"Connection: close\r\n" if asks_to_close else b""
        found.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n" + last + b"\r\n")
        assert b"200" in found.recv(1000)
        return found

    async with asyncio.timeout(10):  # unanswered, an end of TLS is waited for 30 s
        settings = Settings(tls_cert_file=cert, tls_key_file=key)
        async with serving(keeps, settings, counted) as base:
            silent = await asyncio.to_thread(ask, int(base.rpartition(":")[2]))
            while asks_to_close and counted.num_open:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert counted.num_open == 0
    silent.close()


async def test_a_renewed_certificate_is_taken_and_a_broken_one_is_not(tmp_path: Path) -> None:
    files, clock = put(tmp_path, "one"), Clock()
    certificate = Certificate(*files, clock=clock)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nhttps")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=certificate.context)
    port = server.sockets[0].getsockname()[1]
    async with server:
        assert await shown_by(port) == certificate_of("one")
        put(tmp_path, "two")
        assert await shown_by(port) == certificate_of("one")  # not looked at yet
        clock.now_s += LOOK_EVERY_S
        assert await shown_by(port) == certificate_of("two")
        (tmp_path / "key.pem").write_bytes((PAIRS / "one-key.pem").read_bytes())
        clock.now_s += LOOK_EVERY_S
        assert await shown_by(port) == certificate_of("two")
        os.unlink(tmp_path / "cert.pem")
        clock.now_s += LOOK_EVERY_S
        assert await shown_by(port, "localhost") == certificate_of("two")
        put(tmp_path, "one")
        clock.now_s += LOOK_EVERY_S
        assert await shown_by(port) == certificate_of("one")


def test_a_key_with_a_password_is_refused_and_nobody_is_asked(tmp_path: Path) -> None:
    cert, key = put(tmp_path, "one")
    (tmp_path / "key.pem").write_bytes((PAIRS / "locked-key.pem").read_bytes())
    with pytest.raises(OSError, match="is encrypted"):
        Certificate(cert, key)


def test_files_that_cannot_be_used_are_said_at_the_start(tmp_path: Path) -> None:
    cert, key = put(tmp_path, "one")
    (tmp_path / "key.pem").write_bytes((PAIRS / "two-key.pem").read_bytes())
    for settings in (
        Settings(tls_cert_file=cert, tls_key_file=key),
        Settings(tls_cert_file=str(tmp_path / "none.pem")),
    ):
        with pytest.raises(OSError, match=r"."):  # ssl.SSLError is one
            http_config(app, settings, 1.0)
