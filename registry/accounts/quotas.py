"""Limits that the operator set: of a key, a tenant, a model, and of the whole gateway.

A request has to pass all of them. The arithmetic is not here (gateway/limits/policy/rate_limit.py).
Windows slide: a day is any 24 hours. Budgets are of calendar days and months.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Literal, TypeAlias, get_args

from sqlalchemy import String, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from registry import audit
from registry.base import Base, Count, Name, Nanos
from registry.errors import InvalidValue

MAX_LIMIT = 2**53

LimitScope: TypeAlias = Literal["key", "tenant", "model", "gateway"]
"""Whose limits: `owner` is the key's or tenant's id, the model's name, or "" for the gateway."""


@dataclass(frozen=True, slots=True)
class Limits:
    """0 means unlimited.

    input_tokens are of prompts, output_tokens of answers, tokens both; max_concurrency is requests
    at one time; max_prompt_tokens and max_output_tokens are of one request (of each answer);
    budgets are money of a calendar day or month (UTC), never overrun.
    """

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_concurrency: int = 0
    requests_per_day: int = 0
    tokens_per_day: int = 0
    input_tokens_per_minute: int = 0
    input_tokens_per_day: int = 0
    output_tokens_per_minute: int = 0
    output_tokens_per_day: int = 0
    max_prompt_tokens: int = 0
    max_output_tokens: int = 0
    day_budget_nanos: int = 0
    month_budget_nanos: int = 0


LIMIT_NAMES = tuple(field.name for field in fields(Limits))
UNLIMITED = Limits()


class Quota(Base):
    """See Limits. Who has no row is unlimited."""

    __tablename__ = "limits"

    scope: Mapped[str] = mapped_column(String(16), primary_key=True)
    owner: Mapped[Name] = mapped_column(primary_key=True)
    requests_per_minute: Mapped[Count]
    tokens_per_minute: Mapped[Count]
    max_concurrency: Mapped[Count]
    requests_per_day: Mapped[Count]
    tokens_per_day: Mapped[Count]
    input_tokens_per_minute: Mapped[Count]
    input_tokens_per_day: Mapped[Count]
    output_tokens_per_minute: Mapped[Count]
    output_tokens_per_day: Mapped[Count]
    max_prompt_tokens: Mapped[Count]
    max_output_tokens: Mapped[Count]
    day_budget_nanos: Mapped[Nanos]
    month_budget_nanos: Mapped[Nanos]


def limits_of(row: Quota | None) -> Limits:
    """The row as a value."""
    return UNLIMITED if row is None else Limits(*(getattr(row, name) for name in LIMIT_NAMES))


def get_limits(session: Session, scope: LimitScope, owner: str = "") -> Limits:
    """Unlimited where none were set."""
    return limits_of(session.get(Quota, (scope, owner)))


def all_limits(session: Session, scope: LimitScope) -> dict[str, Limits]:
    """By owner, for those that have some."""
    rows = session.scalars(select(Quota).where(Quota.scope == scope).order_by(Quota.owner))
    return {row.owner: limits_of(row) for row in rows}


def has_any(session: Session, scope: LimitScope, owners: Collection[str]) -> bool:
    """Was ever a limit set of one of these?"""
    query = select(Quota.owner).where(Quota.scope == scope, Quota.owner.in_(sorted(owners)))
    return session.scalar(query.limit(1)) is not None


def set_limits(
    session: Session,
    scope: LimitScope,
    owner: str,
    changes: Mapping[str, int],
    *,
    now_at: float,
) -> Limits:
    """Change those that are named (fields of Limits). The owner must exist. Raises InvalidValue."""
    unknown = sorted(set(changes) - set(LIMIT_NAMES))
    if unknown or scope not in get_args(LimitScope):
        raise InvalidValue(f"unknown limit {unknown[0] if unknown else scope!r}")
    before = get_limits(session, scope, owner)
    after = replace(before, **changes)
    if after != before:
        put(session, scope, owner, after)
        subject = owner or scope
        audit.record(session, now_at, "limits.set", subject, asdict(before), asdict(after))
    return after


def put(session: Session, scope: LimitScope, owner: str, limits: Limits) -> None:
    """Store limits without a trace: for `set_limits` and for the creation of a key."""
    check(limits)
    session.merge(Quota(scope=scope, owner=owner, **asdict(limits)))
    session.flush()


def check(limits: Limits) -> None:
    """Raises InvalidValue for a limit below 0 or absurdly high."""
    for name, value in asdict(limits).items():
        if not 0 <= value <= MAX_LIMIT:
            raise InvalidValue(f"{name} must be between 0 (unlimited) and {MAX_LIMIT}")
