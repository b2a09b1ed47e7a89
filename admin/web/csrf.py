"""Whether a form was sent from a page of ours: token, Origin, Sec-Fetch-Site. Pure.

Every unsafe request has to pass all that apply: its Origin is this server, the browser does not
say that it comes from elsewhere, and the form holds the session's token. The token is a digest of
the session's, so that nothing is stored and every gateway process knows it; on a page it is masked
with fresh random bytes, so that what compression saves tells nothing about it (BREACH). Signing in
has no session yet, and goes by the first two.
"""

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from urllib.parse import urlsplit

FIELD = "csrf"
_LEN = 32


def token_of(session_token: str) -> bytes:
    """What a form of this session has to hold."""
    return hmac.digest(session_token.encode(), b"polyhost csrf", hashlib.sha256)


def masked(session_token: str) -> str:
    """The token as it stands on one page."""
    pad = secrets.token_bytes(_LEN)
    mixed = bytes(a ^ b for a, b in zip(pad, token_of(session_token), strict=True))
    return (pad + mixed).hex()


def is_token(given: str, session_token: str) -> bool:
    """Whether it is that session's, however masked."""
    try:
        data = bytes.fromhex(given)
    except ValueError:
        return False
    if len(data) != 2 * _LEN or not session_token:
        return False
    plain = bytes(a ^ b for a, b in zip(data[:_LEN], data[_LEN:], strict=True))
    return hmac.compare_digest(plain, token_of(session_token))


def is_own_origin(headers: Mapping[str, str], is_https: bool) -> bool:
    """Whether a browser says that this server's own page sent it. One that says nothing is none."""
    if headers.get("sec-fetch-site", "same-origin") != "same-origin":
        return False
    origin = headers.get("origin", "")
    host = headers.get("host", "").lower()
    if not origin or not host:
        return False
    try:
        parts = urlsplit(origin.lower())
    except ValueError:
        return False
    return parts.scheme == ("https" if is_https else "http") and parts.netloc == host
