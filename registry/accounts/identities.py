"""What identity providers know users as: an issuer's subject is bound to one user, for good.

A user has one subject of an issuer at most, and a subject one user: whoever takes over an e-mail
address at the provider takes over nobody here. Sign-ins are used once: their digests are kept
as long as they could come again.
"""

from dataclasses import dataclass

from sqlalchemy import ForeignKey, String, UniqueConstraint, delete, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from registry import audit
from registry.accounts import users
from registry.accounts.users import UserRecord
from registry.base import Base, Id, Instant, JsonObject, record_of
from registry.errors import AlreadyExists, InvalidValue, NotFound
from registry.session import insert_new

MAX_LEN = 255


@dataclass(frozen=True, slots=True)
class IdentityRecord:
    """An issuer's subject, bound to a user."""

    issuer: str
    subject: str
    user_id: str
    bound_at: float


class UserIdentity(Base):
    """See IdentityRecord."""

    __tablename__ = "user_identities"
    __table_args__ = (UniqueConstraint("user_id", "issuer"),)

    issuer: Mapped[str] = mapped_column(String(MAX_LEN), primary_key=True)
    subject: Mapped[str] = mapped_column(String(MAX_LEN), primary_key=True)
    user_id: Mapped[Id] = mapped_column(ForeignKey("users.id", ondelete="CASCADE"))
    bound_at: Mapped[Instant]


class UsedSignIn(Base):
    """A sign-in by an identity provider that has made a session: it makes no other."""

    __tablename__ = "used_sign_ins"

    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    used_at: Mapped[Instant] = mapped_column(index=True)


def find_user(session: Session, issuer: str, subject: str) -> UserRecord | None:
    """Whose it is."""
    row = session.get(UserIdentity, (issuer, subject))
    return None if row is None else users.get_user(session, row.user_id)


def identities_of(session: Session, user_id: str) -> list[IdentityRecord]:
    """By issuer."""
    query = select(UserIdentity).where(UserIdentity.user_id == user_id)
    return [_record(row) for row in session.scalars(query.order_by(UserIdentity.issuer))]


def bind(
    session: Session, name: str, issuer: str, subject: str, *, now_at: float
) -> IdentityRecord:
    """The subject is this user from now on. Raises NotFound, InvalidValue or AlreadyExists."""
    for what, text in (("issuer", issuer), ("subject", subject)):
        if not text or len(text) > MAX_LEN or not text.isprintable() or text != text.strip():
            raise InvalidValue(f"the {what} must have 1 to {MAX_LEN} printable characters")
    user = users.get_user(session, name)
    other = find_user(session, issuer, subject)
    if other is not None:
        raise AlreadyExists(f"this subject is already bound to the user {other.name!r}")
    if any(one.issuer == issuer for one in identities_of(session, user.id)):
        raise AlreadyExists(
            f"{user.name!r} is bound to another subject of this issuer: unbind it first"
        )
    row = UserIdentity(issuer=issuer, subject=subject, user_id=user.id, bound_at=now_at)
    session.add(row)
    session.flush()
    audit.record(session, now_at, "user.bind", user.name, None, _public(row))
    return _record(row)


def unbind(session: Session, name: str, issuer: str, *, now_at: float) -> UserRecord:
    """The user has no subject of that issuer any more. Raises NotFound."""
    user = users.get_user(session, name)
    query = select(UserIdentity).where(
        UserIdentity.user_id == user.id, UserIdentity.issuer == issuer
    )
    row = session.scalar(query)
    if row is None:
        raise NotFound(f"{user.name!r} is not bound to a subject of {issuer!r}")
    before = _public(row)
    session.delete(row)
    session.flush()
    audit.record(session, now_at, "user.unbind", user.name, before, None)
    return user


def use_up(session: Session, digest: str, *, now_at: float, forget_s: float) -> bool:
    """Whether this sign-in is used for the first time. What is older than `forget_s` goes."""
    session.execute(delete(UsedSignIn).where(UsedSignIn.used_at <= now_at - forget_s))
    row = (digest, now_at)
    return insert_new(session, UsedSignIn, "digest", ("digest", "used_at"), [row]) == 1


def _record(row: UserIdentity) -> IdentityRecord:
    return record_of(IdentityRecord, row)


def _public(row: UserIdentity) -> JsonObject:
    return {"issuer": row.issuer, "subject": row.subject}
