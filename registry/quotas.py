"""Limits per key: requests and tokens a minute, requests at a time. 0 means unlimited.

The arithmetic of limits is not here (gateway/policy/rate_limit.py); this is what the operator set.
"""

from dataclasses import asdict, dataclass, replace

from sqlalchemy import BigInteger, ForeignKey
from sqlalchemy.orm import Mapped, Session, mapped_column

from registry import audit
from registry.base import Base, Count, Id
from registry.errors import InvalidValue

MAX_LIMIT = 2**53


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of one key; the fields of gateway.types.Limits."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_concurrency: int = 0


class Quota(Base):
    """See KeyLimits. A key without a row is unlimited."""

    __tablename__ = "quotas"

    key_id: Mapped[Id] = mapped_column(
        ForeignKey("api_keys.id", ondelete="CASCADE"), primary_key=True
    )
    requests_per_minute: Mapped[Count]
    tokens_per_minute: Mapped[Count]
    max_concurrency: Mapped[int] = mapped_column(BigInteger)


def limits_of(row: Quota) -> KeyLimits:
    """The row as a value."""
    return KeyLimits(row.requests_per_minute, row.tokens_per_minute, row.max_concurrency)


def get_limits(session: Session, key_id: str) -> KeyLimits:
    """The key's limits; unlimited where none were set."""
    row = session.get(Quota, key_id)
    return KeyLimits() if row is None else limits_of(row)


def set_limits(
    session: Session,
    key_id: str,
    *,
    requests_per_minute: int | None = None,
    tokens_per_minute: int | None = None,
    max_concurrency: int | None = None,
    now_at: float,
) -> KeyLimits:
    """Change what is given. The key must exist. Raises InvalidValue."""
    before = get_limits(session, key_id)
    given = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "max_concurrency": max_concurrency,
    }
    after = replace(before, **{name: value for name, value in given.items() if value is not None})
    put(session, key_id, after)
    audit.record(session, now_at, "limits.set", key_id, asdict(before), asdict(after))
    return after


def put(session: Session, key_id: str, limits: KeyLimits) -> None:
    """Store limits without a trace: for `set_limits` and for the creation of a key."""
    check(limits)
    session.merge(Quota(key_id=key_id, **asdict(limits)))
    session.flush()


def check(limits: KeyLimits) -> None:
    """Raises InvalidValue for a limit below 0 or absurdly high."""
    for name, value in asdict(limits).items():
        if not 0 <= value <= MAX_LIMIT:
            raise InvalidValue(f"{name} must be 0 (unlimited) or more, got {value}")
