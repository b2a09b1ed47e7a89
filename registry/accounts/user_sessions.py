"""Sessions of users who logged in, and failed sign-ins. Neither is audited or raises the registry's
version: no gateway caches them.

A session is a random token that expires, stored as a digest only. The token is 256 random bits, so
one SHA-256 is enough (api_keys.py says why). A session ends when its time is over, when it has not
been used for its idle time, when it is revoked, and when its user is removed, disabled, or gets
another password.

Failed sign-ins are counted by whoever they count against (one row a subject: an address, a user's
name, both together), so that passwords cannot be tried out. Rows are counted up before a password
is looked at, so that trying many at once gains nothing, by any number of gateway processes. How
long one waits after how many is admin/operations/policy/sign_in_guard.py's.
"""

import hashlib
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import ForeignKey, Select, String, delete, select, update
from sqlalchemy.orm import Mapped, Session, mapped_column

from registry.accounts import users
from registry.accounts.users import UserRecord
from registry.base import Base, Count, Id, Instant, OptionalInstant, record_of
from registry.errors import NotFound

_TOKEN_BYTES = 32
_ID_LEN = 16
MAX_ADDRESS_LEN: Final = 64
MAX_AGENT_LEN: Final = 256
MAX_SUBJECT_LEN: Final = 400
_BATCH = 1000


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session that has not ended. `id` tells it from others and opens nothing."""

    id: str
    user_id: str
    user_name: str
    created_at: float
    seen_at: float
    expires_at: float
    address: str
    agent: str
    issuer: str = ""
    """Of the identity provider that it began by; "": a password."""


class UserSession(Base):
    """A session by the digest of its token."""

    __tablename__ = "user_sessions"

    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    user_id: Mapped[Id] = mapped_column(ForeignKey("users.id", ondelete="CASCADE"), index=True)
    created_at: Mapped[Instant]
    expires_at: Mapped[Instant]
    revoked_at: Mapped[OptionalInstant]
    seen_at: Mapped[Instant] = mapped_column(server_default="0")
    address: Mapped[str] = mapped_column(String(MAX_ADDRESS_LEN), server_default="")
    agent: Mapped[str] = mapped_column(String(MAX_AGENT_LEN), server_default="")
    issuer: Mapped[str] = mapped_column(String(255), server_default="")


def begin(
    session: Session,
    user_id: str,
    lifetime_s: float,
    *,
    now_at: float,
    address: str = "",
    agent: str = "",
    issuer: str = "",
) -> str:
    """A new session's token, which is nowhere to be had afterwards. Old sessions are cleared."""
    session.execute(delete(UserSession).where(UserSession.expires_at <= now_at))
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    session.add(
        UserSession(
            digest=_digest(token),
            user_id=user_id,
            created_at=now_at,
            expires_at=now_at + lifetime_s,
            seen_at=now_at,
            address=address[:MAX_ADDRESS_LEN],
            agent=agent[:MAX_AGENT_LEN],
            issuer=issuer,
        )
    )
    session.flush()
    return token


def user_of(
    session: Session, token: str, *, now_at: float, idle_s: float = math.inf
) -> UserRecord | None:
    """Whose session it is; None where it is none, or has ended."""
    row = session.get(UserSession, _digest(token))
    return None if row is None else _user(session, row, now_at, idle_s)


def find(session: Session, token: str, *, now_at: float, idle_s: float) -> SessionRecord | None:
    """The session itself; None where it is none, or has ended."""
    row = session.get(UserSession, _digest(token))
    user = None if row is None else _user(session, row, now_at, idle_s)
    return None if row is None or user is None else _record(row, user)


def touch(session: Session, token: str, *, now_at: float) -> None:
    """It has been used just now."""
    session.execute(
        update(UserSession)
        .where(UserSession.digest == _digest(token), UserSession.seen_at < now_at)
        .values(seen_at=now_at)
        .execution_options(synchronize_session=False)
    )


def list_sessions(
    session: Session, user_id: str = "", *, now_at: float, idle_s: float
) -> list[SessionRecord]:
    """Those that have not ended, of one user or of all, the ones used last first."""
    query = select(UserSession).where(
        UserSession.revoked_at.is_(None),
        UserSession.expires_at > now_at,
        UserSession.seen_at > now_at - idle_s,
    )
    if user_id:
        query = query.where(UserSession.user_id == user_id)
    found = []
    for row in session.scalars(query.order_by(UserSession.seen_at.desc(), UserSession.digest)):
        user = _user(session, row, now_at, idle_s)
        if user is not None:
            found.append(_record(row, user))
    return found


def revoke(session: Session, token: str, *, now_at: float) -> None:
    """Logged out; whoever has the token is refused from now on."""
    _revoke(session, _digest(token), now_at)


def revoke_by_id(session: Session, session_id: str, *, now_at: float) -> None:
    """Ended by somebody who sees it in a list. Raises NotFound."""
    _revoke(session, _by_id(session, session_id).digest, now_at)


def revoke_all(session: Session, user_id: str, *, now_at: float) -> None:
    """All of a user's: they do not come back when the user is let in again."""
    session.execute(
        update(UserSession)
        .where(UserSession.user_id == user_id, UserSession.revoked_at.is_(None))
        .values(revoked_at=now_at)
        .execution_options(synchronize_session=False)
    )


def owner_of(session: Session, session_id: str) -> str:
    """The id of the user whose session it is. Raises NotFound."""
    return _by_id(session, session_id).user_id


def _by_id(session: Session, session_id: str) -> UserSession:
    row = None
    if len(session_id) == _ID_LEN and session_id.isalnum():
        row = session.scalar(select(UserSession).where(UserSession.digest.startswith(session_id)))
    if row is None:
        raise NotFound("unknown session: it may have ended")
    return row


def _revoke(session: Session, digest: str, now_at: float) -> None:
    session.execute(
        update(UserSession)
        .where(UserSession.digest == digest, UserSession.revoked_at.is_(None))
        .values(revoked_at=now_at)
        .execution_options(synchronize_session=False)
    )


def _user(session: Session, row: UserSession, now_at: float, idle_s: float) -> UserRecord | None:
    if row.revoked_at is not None or row.expires_at <= now_at or row.seen_at <= now_at - idle_s:
        return None
    user = users.get_user(session, row.user_id)
    current = not user.disabled and user.password_set_at <= row.created_at
    return user if current else None


def _record(row: UserSession, user: UserRecord) -> SessionRecord:
    return record_of(SessionRecord, row, id=row.digest[:_ID_LEN], user_name=user.name)


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


@dataclass(frozen=True, slots=True)
class Failures:
    """How many there were, and when the last was."""

    num_failed: int = 0
    failed_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Turn:
    """One failure of each subject, counted ahead at `at`; `before`: what there was until then."""

    subjects: tuple[str, ...]
    before: tuple[Failures, ...]
    at: float


class SignInFailureRow(Base):
    """See Failures."""

    __tablename__ = "sign_in_failures"

    subject: Mapped[str] = mapped_column(String(MAX_SUBJECT_LEN), primary_key=True)
    num_failed: Mapped[Count]
    failed_at: Mapped[Instant]


def failures(session: Session, subjects: Sequence[str]) -> list[Failures]:
    """What is remembered of each."""
    rows = {row.subject: row for row in session.scalars(_of(subjects))}
    return [
        Failures(rows[name].num_failed, rows[name].failed_at) if name in rows else Failures()
        for name in _keys(subjects)
    ]


def count_up(session: Session, subjects: Sequence[str], *, now_at: float, forget_s: float) -> Turn:
    """One more for each. What is older than `forget_s` is forgotten, of all subjects."""
    before = tuple(failures(session, subjects))
    session.execute(delete(SignInFailureRow).where(SignInFailureRow.failed_at <= now_at - forget_s))
    rows = {row.subject: row for row in session.scalars(_of(subjects))}
    for name in _keys(subjects):
        row = rows.get(name)
        if row is None:
            session.add(SignInFailureRow(subject=name, num_failed=1, failed_at=now_at))
        else:
            row.num_failed += 1
            row.failed_at = now_at
    session.flush()
    return Turn(tuple(subjects), before, now_at)


def take_back(session: Session, turn: Turn) -> None:
    """It was no failure. Where it is the last that was counted, the one before it is the last
    again: else all who share an address would wait anew behind each of them who signs in."""
    before = dict(zip(_keys(turn.subjects), turn.before, strict=True))
    for row in session.scalars(_of(turn.subjects)):
        row.num_failed -= 1
        if row.failed_at == turn.at:
            row.failed_at = before[row.subject].failed_at
        if row.num_failed <= 0:
            session.delete(row)
    session.flush()


def forget(session: Session, subject: str) -> None:
    """Nothing is held against this one any more."""
    session.execute(delete(SignInFailureRow).where(SignInFailureRow.subject.in_(_keys([subject]))))


def most_failed(session: Session, at_least: int, limit: int) -> list[tuple[str, Failures]]:
    """Subjects that failed so often, the last one first."""
    query = select(SignInFailureRow).where(SignInFailureRow.num_failed >= at_least)
    rows = session.scalars(query.order_by(SignInFailureRow.failed_at.desc()).limit(limit))
    return [(row.subject, Failures(row.num_failed, row.failed_at)) for row in rows]


def forget_all(session: Session, holds: Callable[[str], bool]) -> int:
    """Nothing is held against these subjects any more. Returns how many there were."""
    found = [name for name in session.scalars(select(SignInFailureRow.subject)) if holds(name)]
    for first in range(0, len(found), _BATCH):
        some = found[first : first + _BATCH]
        session.execute(delete(SignInFailureRow).where(SignInFailureRow.subject.in_(some)))
    return len(found)


def _keys(subjects: Sequence[str]) -> list[str]:
    return [name[:MAX_SUBJECT_LEN] for name in subjects]


def _of(subjects: Sequence[str]) -> Select[SignInFailureRow]:
    return select(SignInFailureRow).where(SignInFailureRow.subject.in_(_keys(subjects)))
