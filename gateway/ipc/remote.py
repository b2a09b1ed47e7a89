"""The same channels between servers: over TCP, encrypted, and each end shows a certificate.

All servers of an installation have certificates of one authority that is theirs alone
(`polyhost servers cert`), so whoever has one is a server of it, under whatever address: names are
not compared. A channel hears of its connection only after that: before it nothing that a peer sends
is decoded. A handshake has HANDSHAKE_S; how many go on at a time is bounded only by the open files
of the process, so the port belongs on a private network.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

from gateway.ipc.ipc import Accepted, Channel
from registry.errors import RegistryError

logger = logging.getLogger(__name__)

TELL_S = 60.0
"""How often it is logged that connections were refused."""
ADVICE = (
    "servers need certificates of one authority that have not run out; compare ca.pem of both, and "
    "their clocks (docs/processes.md)"
)
HANDSHAKE_S = 5.0
"""For whoever connects to show its certificate; asyncio closes the connection then."""


class TlsContexts(NamedTuple):
    """Of one server: for connections that it takes, and for those that it makes."""

    server: ssl.SSLContext
    client: ssl.SSLContext


def tls_contexts(cert: Path, key: Path, ca: Path) -> TlsContexts:
    """From files in PEM. Raises RegistryError where they cannot be used."""
    found = []
    for kind in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(kind)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(cert, key)
            context.load_verify_locations(ca)
        except OSError as error:  # ssl.SSLError is one
            raise RegistryError(
                f"cannot use {cert}, {key} and {ca} for connections between servers ({error}): "
                "make them by `polyhost servers cert`, and put this server's there"
            ) from error
        found.append(context)
    return TlsContexts(*found)


def check_listening(address: tuple[str, int]) -> None:
    """At a start, before anybody is told the address. Raises OSError where it cannot be bound: it
    is no address of this machine, or taken."""
    found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, where = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(where)


async def connect(
    address: tuple[str, int], tls: TlsContexts, channel: Channel[Any, Any], timeout_s: float
) -> None:
    """Raises OSError (a TimeoutError is one) where nobody listens, or shows no certificate."""
    host, port = address
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(timeout_s):
        await loop.create_connection(lambda: channel, host, port, ssl=tls.client)


@contextlib.asynccontextmanager
async def listening(
    address: tuple[str, int], tls: TlsContexts, new_channel: Callable[[], Channel[Any, Any]]
) -> AsyncIterator[None]:
    """As ipc.listening, at an address. Raises OSError where it cannot be bound."""
    host, port = address
    accept = Accepted(new_channel)
    server = await asyncio.get_running_loop().create_server(
        accept, host, port, ssl=tls.server, ssl_handshake_timeout=HANDSHAKE_S
    )
    telling = asyncio.create_task(_tell_refused(f"{host}:{port}", accept))
    try:
        async with accept.until_closed(server):
            yield
    finally:
        telling.cancel()


async def _tell_refused(address: str, accept: Accepted) -> None:
    """asyncio says nothing of a handshake that fails."""
    num_told = 0
    while True:
        await asyncio.sleep(TELL_S)
        num_refused = accept.num_begun - accept.num_made
        if num_refused > num_told:
            about = num_refused - num_told, address, ADVICE
            logger.warning("refused connections=%d without TLS at %s: %s", *about)
        num_told = num_refused
