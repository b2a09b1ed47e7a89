"""One signed POST to a webhook. What is sent, and when, is alerts.py's.

    polyhost-timestamp   epoch seconds; refuse what is older than a few minutes
    polyhost-signature   v1=HMAC-SHA256(secret, "TIMESTAMP.BODY") in hex
    polyhost-alert       the alert's id: the same when it is sent again

Only operators set URLs, and still this trusts them little: no redirect is followed (a status is all
that is read of the answer), every try has one deadline over all of it, and nothing is sent to an
address that webhook_addresses.py refuses; to this host itself only where the URL says so, since a
name may turn to it later. The address that was looked at is the one that is connected to.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import socket
import ssl
from collections.abc import Callable
from urllib.parse import urlsplit

from admin.alerts.webhook_addresses import is_loopback, is_refused

TIMEOUT_S = 10.0
MAX_STATUS_LINE = 1024

Connect = Callable[[], ssl.SSLContext]


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
        raise NotDelivered(f"the receiver did not answer within {timeout_s:g} s") from error
    except (OSError, ValueError) as error:
        raise NotDelivered(f"{type(error).__name__}: {error}") from error
    if not 200 <= status < 300:
        raise NotDelivered(f"the receiver answered with status {status}")


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
        raise NotDelivered("the receiver did not answer in HTTP")
    return int(rest[:3])


async def _address_of(host: str, port: int) -> str:
    """The first address of that name that may be connected to. Raises OSError, NotDelivered."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for *_, where in found:
        text = str(where[0])
        address = ipaddress.ip_address(text.partition("%")[0])
        is_turned = is_loopback(address) and host not in ("localhost", text)
        if not is_turned and not is_refused(address):
            return text
    raise NotDelivered(f"{host} has no permitted address: use one that is not local or link-local")
