"""One signed POST to a webhook. What is sent, and when, is alerts.py's.

    polyhost-timestamp   epoch seconds; refuse what is older than a few minutes
    polyhost-signature   v1=HMAC-SHA256(secret, "TIMESTAMP.BODY") in hex
    polyhost-alert       the alert's id: the same when it is sent again

Only operators set URLs, and still this trusts them little: no redirect is followed (a status is all
that is read of the answer), every try has one deadline over all of it, and an address that names
this host's own link or a cloud's metadata, no host or many is not connected to, however it is
dressed in IPv6; this host itself only where the URL says so, since a name may turn to it later. The
address that was looked at is the one that is connected to.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import socket
import ssl
from collections.abc import Callable
from typing import TypeAlias
from urllib.parse import urlsplit

TIMEOUT_S = 10.0
MAX_STATUS_LINE = 1024

# Where clouds tell a host its secrets, beyond link-local addresses: AWS, Google, Alibaba.
METADATA = frozenset(
    map(ipaddress.ip_address, ("fd00:ec2::254", "fd20:ce::254", "100.100.100.200"))
)
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")

Connect = Callable[[], ssl.SSLContext]
_Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address


class NotDelivered(Exception):
    """Why, in one line."""


def signature(secret: str, timestamp: int, body: bytes) -> str:
    """What the receiver computes too, and compares in constant time."""
    signed = f"{timestamp}.".encode() + body
    return "v1=" + hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest()


async def deliver(
    url: str,
    alert_id: str,
    secret: str,
    body: bytes,
    now_at: float,
    *,
    timeout_s: float = TIMEOUT_S,
    new_tls: Connect = ssl.create_default_context,
) -> None:
    """Returns when the receiver has answered 2xx. Raises NotDelivered."""
    try:
        async with asyncio.timeout(timeout_s):
            status = await _post(url, _head(url, alert_id, secret, body, now_at) + body, new_tls)
    except TimeoutError as error:
        raise NotDelivered(f"no answer within {timeout_s:g} s") from error
    except (OSError, ValueError) as error:
        raise NotDelivered(f"{type(error).__name__}: {error}") from error
    if not 200 <= status < 300:
        raise NotDelivered(f"the answer was {status}")


def _head(url: str, alert_id: str, secret: str, body: bytes, now_at: float) -> bytes:
    parts, timestamp = urlsplit(url), int(now_at)
    host = parts.netloc.encode("idna" if not parts.netloc.isascii() else "ascii").decode()
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    lines = (
        f"POST {target} HTTP/1.1",
        f"host: {host}",
        "user-agent: polyhost",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
        f"polyhost-timestamp: {timestamp}",
        f"polyhost-signature: {signature(secret, timestamp, body)}",
        f"polyhost-alert: {alert_id}",
    )
    return "\r\n".join((*lines, "", "")).encode()


async def _post(url: str, message: bytes, new_tls: Connect) -> int:
    parts = urlsplit(url)
    is_tls = parts.scheme == "https"
    host, port = parts.hostname or "", parts.port or (443 if is_tls else 80)
    reader, writer = await asyncio.open_connection(
        await _address_of(host, port),
        port,
        ssl=new_tls() if is_tls else None,
        server_hostname=host if is_tls else None,
        limit=MAX_STATUS_LINE,
    )
    try:
        writer.write(message)
        await writer.drain()
        line = await reader.readline()
    finally:
        writer.close()
    version, _, rest = line.decode("latin-1").partition(" ")
    if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
        raise NotDelivered("the answer was no HTTP")
    return int(rest[:3])


async def _address_of(host: str, port: int) -> str:
    """The first address of that name that may be connected to. Raises OSError, NotDelivered."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for *_, where in found:
        text = str(where[0])
        address = _undressed(ipaddress.ip_address(text.partition("%")[0]))
        is_nobodys = address.is_link_local or address.is_multicast or address.is_unspecified
        is_turned = address.is_loopback and host not in ("localhost", text)
        if not (is_nobodys or is_turned or address in METADATA):
            return text
    raise NotDelivered(f"{host} is at no address that may be told")


def _undressed(address: _Address) -> _Address:
    """The IPv4 address that an IPv6 address stands for, if it does."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    inner = address.ipv4_mapped or address.sixtofour
    if inner is None and address in NAT64:
        inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address if inner is None else inner
