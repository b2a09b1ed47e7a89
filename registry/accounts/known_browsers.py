"""Browsers that a user has signed in with before, told by what they show: nothing is stored.

    text = remember(...)     at a sign-in, for a cookie:  1.USER.BROWSER.SIGNED_IN.MAC
    find(...)                at a later attempt: the user's id and the browser's, or None

The MAC is keyed with the digest of the user's password, which holds a random salt and is known to
the registry alone, so every gateway process can check it and another password ends them all. It
opens nothing: whoever shows it still needs the password. What it is good for is a count of failures
of its own (admin/operations/policy/sign_in_guard.py).
"""

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from typing import Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from registry.accounts.users import User

VALID_S: Final = 365 * 86_400
_ID_BYTES = 16
_TEXT = re.compile(r"1\.([\w-]{1,64})\.([\w-]{22})\.(\d{1,11})\.([0-9a-f]{64})", re.ASCII)


@dataclass(frozen=True, slots=True)
class KnownBrowser:
    """`id` is unguessable and made anew at each sign-in."""

    user_id: str
    user_name: str
    id: str


def remember(session: Session, user_id: str, *, now_at: float) -> str:
    """What the browser is to show; "" where there is no such user."""
    row = session.get(User, user_id)
    if row is None:
        return ""
    return _signed(row, secrets.token_urlsafe(_ID_BYTES), int(now_at))


def find(session: Session, text: str, *, now_at: float) -> KnownBrowser | None:
    """None where it was not made by `remember`, is too old, or the user has another password."""
    parts = _TEXT.fullmatch(text)
    row = None if parts is None else session.scalar(select(User).where(User.id == parts[1]))
    if parts is None or row is None or not 0 <= now_at - int(parts[3]) < VALID_S:
        return None
    if not hmac.compare_digest(_signed(row, parts[2], int(parts[3])), text):
        return None
    return KnownBrowser(row.id, row.name, parts[2])


def _signed(row: User, browser_id: str, signed_in_at: int) -> str:
    text = f"1.{row.id}.{browser_id}.{signed_in_at}"
    mac = hmac.digest(
        row.password_digest.encode(), f"known browser {text}".encode(), hashlib.sha256
    )
    return f"{text}.{mac.hex()}"
