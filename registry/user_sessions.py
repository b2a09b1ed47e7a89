"""Sessions of users who logged in: a random token that expires, stored as a digest only.

The token is 256 random bits, so one SHA-256 is enough (api_keys.py says why). A session ends when
its time is over, when it is revoked, and when its user is removed, disabled, or gets another
password. It is neither audited nor a change of the registry's version: no gateway caches it.
"""

import hashlib
import secrets

from sqlalchemy import ForeignKey, String, delete, update
from sqlalchemy.orm import Mapped, Session, mapped_column

from registry import users
from registry.base import Base, Id, Instant, OptionalInstant
from registry.users import UserRecord

_TOKEN_BYTES = 32


class UserSession(Base):
    """A session by the digest of its token."""

    __tablename__ = "user_sessions"

    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    user_id: Mapped[Id] = mapped_column(ForeignKey("users.id", ondelete="CASCADE"), index=True)
    created_at: Mapped[Instant]
    expires_at: Mapped[Instant]
    revoked_at: Mapped[OptionalInstant]


def begin(session: Session, user_id: str, lifetime_s: float, *, now_at: float) -> str:
    """A new session's token, which is nowhere to be had afterwards. Old sessions are cleared."""
    session.execute(delete(UserSession).where(UserSession.expires_at <= now_at))
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    session.add(
        UserSession(
            digest=_digest(token),
            user_id=user_id,
            created_at=now_at,
            expires_at=now_at + lifetime_s,
        )
    )
    session.flush()
    return token


def user_of(session: Session, token: str, *, now_at: float) -> UserRecord | None:
    """Whose session it is; None where it is none, or has ended."""
    row = session.get(UserSession, _digest(token))
    if row is None or row.revoked_at is not None or row.expires_at <= now_at:
        return None
    user = users.get_user(session, row.user_id)
    current = not user.disabled and user.password_set_at <= row.created_at
    return user if current else None


def revoke(session: Session, token: str, *, now_at: float) -> None:
    """Logged out; whoever has the token is refused from now on."""
    session.execute(
        update(UserSession)
        .where(UserSession.digest == _digest(token), UserSession.revoked_at.is_(None))
        .values(revoked_at=now_at)
        .execution_options(synchronize_session=False)
    )


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()
