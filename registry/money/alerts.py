"""Alerts on spending: rules of who is watched and where alerts go, and the alerts raised.

A rule belongs to a key, a tenant, a model or the gateway, and to calendar days or months. Its sum
is a soft budget: nothing is refused; or 0, then it is the hard budget's. For each of its percents
there is one alert a period at most: the table holds it to that, whoever looks and however often.

    raised -> waiting (next_try_at) -> delivered | given up (neither a next try nor a delivery)

When a threshold is reached is admin/alerts/alerts.py's, sending is
admin/alerts/webhook.py's.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

from sqlalchemy import (
    JSON,
    ForeignKey,
    String,
    Text,
    UniqueConstraint,
    delete,
    func,
    select,
    update,
)
from sqlalchemy.orm import Mapped, Session, mapped_column

from registry import audit
from registry.accounts.quotas import MAX_LIMIT, LimitScope
from registry.base import (
    Base,
    Count,
    Id,
    Instant,
    JsonObject,
    Name,
    Nanos,
    OptionalInstant,
    new_id,
    record_of,
    values_of,
)
from registry.errors import InvalidValue, NotFound
from registry.session import insert_new

AlertKind: TypeAlias = Literal["day", "month"]

MAX_PERCENTS = 10
MAX_PERCENT = 1000
MAX_URL = 2048
SECRET_PREFIX = "whsec_"
MAX_ERROR = 256


@dataclass(frozen=True, slots=True)
class AlertRule:
    """What is watched, at which percents of which sum, and where alerts go. `budget_nanos` 0: the
    hard budget in force. `owner`: as in Quota."""

    id: str
    scope: LimitScope
    owner: str
    kind: AlertKind
    budget_nanos: int
    percents: tuple[int, ...]
    url: str
    created_at: float


@dataclass(frozen=True, slots=True)
class Alert:
    """One threshold reached in one period; `body` is what is sent. `next_try_at` None: sent, or
    given up."""

    id: str
    rule_id: str
    period: int
    percent: int
    body: str
    raised_at: float
    next_try_at: float | None
    num_tries: int = 0
    delivered_at: float | None = None
    last_error: str = ""


@dataclass(frozen=True, slots=True)
class Delivery:
    """An alert on its way, and what it takes to send it."""

    alert: Alert
    url: str
    secret: str


class AlertRuleRow(Base):
    """See AlertRule. The secret signs what is sent; it leaves here once, and for signing."""

    __tablename__ = "alert_rules"

    id: Mapped[Id] = mapped_column(primary_key=True)
    scope: Mapped[str] = mapped_column(String(16))
    owner: Mapped[Name]
    kind: Mapped[str] = mapped_column(String(16))
    budget_nanos: Mapped[Nanos]
    percents: Mapped[list[int]] = mapped_column(JSON)
    url: Mapped[str] = mapped_column(String(MAX_URL))
    secret: Mapped[str] = mapped_column(String(128))
    created_at: Mapped[Instant]


class AlertRow(Base):
    """See Alert."""

    __tablename__ = "alerts"
    __table_args__ = (UniqueConstraint("rule_id", "period", "percent"),)

    id: Mapped[Id] = mapped_column(primary_key=True)
    rule_id: Mapped[Id] = mapped_column(ForeignKey("alert_rules.id", ondelete="CASCADE"))
    period: Mapped[Count]
    percent: Mapped[Count]
    body: Mapped[str] = mapped_column(Text)
    raised_at: Mapped[Instant]
    next_try_at: Mapped[OptionalInstant] = mapped_column(index=True)
    num_tries: Mapped[Count]
    delivered_at: Mapped[OptionalInstant]
    last_error: Mapped[str] = mapped_column(String(MAX_ERROR))


def add_rule(
    session: Session,
    scope: LimitScope,
    owner: str,
    kind: AlertKind,
    budget_nanos: int,
    percents: Sequence[int],
    url: str,
    *,
    now_at: float,
) -> tuple[AlertRule, str]:
    """A new rule and its secret, which is nowhere to be had afterwards. The owner must exist.
    Raises InvalidValue."""
    if not 0 <= budget_nanos <= MAX_LIMIT:
        raise InvalidValue("the sum must be 0 (use the hard budget) or more")
    wanted = sorted(set(percents))
    if not wanted or len(wanted) > MAX_PERCENTS or not 1 <= wanted[0] <= wanted[-1] <= MAX_PERCENT:
        raise InvalidValue(f"give 1 to {MAX_PERCENTS} percentages between 1 and {MAX_PERCENT}")
    secret = SECRET_PREFIX + secrets.token_urlsafe(32)
    row = AlertRuleRow(
        id=new_id("alr"),
        scope=scope,
        owner=owner,
        kind=kind,
        budget_nanos=budget_nanos,
        percents=wanted,
        url=_checked(url),
        secret=secret,
        created_at=now_at,
    )
    session.add(row)
    session.flush()
    audit.record(session, now_at, "alert.add", row.id, None, _public(row))
    return _rule(row), secret


def remove_rule(session: Session, rule_id: str, *, now_at: float) -> None:
    """And all it has raised. Raises NotFound."""
    row = _row(session, rule_id)
    before = _public(row)
    session.execute(delete(AlertRow).where(AlertRow.rule_id == rule_id))
    session.delete(row)
    session.flush()
    audit.record(session, now_at, "alert.remove", rule_id, before, None)


def get_rule(session: Session, rule_id: str) -> AlertRule:
    """Raises NotFound."""
    return _rule(_row(session, rule_id))


def list_rules(session: Session) -> list[AlertRule]:
    """Oldest first."""
    query = select(AlertRuleRow).order_by(AlertRuleRow.created_at, AlertRuleRow.id)
    return [_rule(row) for row in session.scalars(query)]


def raised(session: Session, periods: Sequence[int]) -> set[tuple[str, int, int]]:
    """(rule, period, percent) of what was raised in these periods."""
    rows = session.execute(
        select(AlertRow.rule_id, AlertRow.period, AlertRow.percent).where(
            AlertRow.period.in_(periods)
        )
    )
    return {(rule_id, period, percent) for rule_id, period, percent in rows}


def raise_alerts(session: Session, alerts: Sequence[Alert]) -> int:
    """Those that are new are to be sent from now on. Returns how many."""
    rows = [
        (a.id, a.rule_id, a.period, a.percent, a.body, a.raised_at, a.next_try_at, 0, None, "")
        for a in alerts
    ]
    names = [field.name for field in fields(Alert)]
    return insert_new(session, AlertRow, "rule_id, period, percent", names, rows)


def list_alerts(session: Session, limit: int) -> list[Alert]:
    """Newest first."""
    query = select(AlertRow).order_by(AlertRow.raised_at.desc(), AlertRow.id).limit(limit)
    return [record_of(Alert, row) for row in session.scalars(query)]


def num_waiting(session: Session) -> int:
    """Raised and neither sent nor given up."""
    query = select(func.count()).select_from(AlertRow).where(AlertRow.next_try_at.is_not(None))
    return session.scalar(query) or 0


def num_failing(session: Session) -> int:
    """Of those, how many have been tried in vain."""
    waiting = (AlertRow.next_try_at.is_not(None), AlertRow.last_error != "")
    return session.scalar(select(func.count()).select_from(AlertRow).where(*waiting)) or 0


def claim(session: Session, now_at: float, again_at: float, limit: int) -> list[Delivery]:
    """Those whose time has come, which are this caller's until `again_at`."""
    rows = session.execute(
        select(AlertRow, AlertRuleRow)
        .join(AlertRuleRow, AlertRuleRow.id == AlertRow.rule_id)
        .where(AlertRow.next_try_at <= now_at)
        .order_by(AlertRow.next_try_at)
        .limit(limit)
    ).all()
    claimed = []
    for row, rule in rows:
        mine = session.execute(
            update(AlertRow)
            .where(AlertRow.id == row.id, AlertRow.next_try_at == row.next_try_at)
            .values(next_try_at=again_at)
            .execution_options(synchronize_session=False)
            .returning(AlertRow.id)
        ).all()
        if mine:
            claimed.append(Delivery(record_of(Alert, row), rule.url, rule.secret))
    return claimed


def delivered(session: Session, alert_id: str, *, now_at: float) -> None:
    """It was acknowledged."""
    _tried(session, alert_id, delivered_at=now_at, next_try_at=None, last_error="")


def failed(session: Session, alert_id: str, reason: str, next_try_at: float | None) -> None:
    """It was not; None: that was the last try."""
    _tried(session, alert_id, next_try_at=next_try_at, last_error=reason[:MAX_ERROR])


def _tried(session: Session, alert_id: str, **values: object) -> None:
    mine = update(AlertRow).where(AlertRow.id == alert_id)
    session.execute(mine.values(num_tries=AlertRow.num_tries + 1, **values))


def secret_of(session: Session, rule_id: str) -> str:
    """For signing. Raises NotFound."""
    return _row(session, rule_id).secret


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InvalidValue(f"{url!r} is not a URL: {error}") from error
    is_plain = url.isascii() and url.isprintable() and " " not in url and port != 0
    if parts.scheme not in ("http", "https") or not parts.hostname or not is_plain:
        raise InvalidValue("a webhook must be an http:// or https:// URL without spaces")
    if parts.username is not None or parts.fragment or len(url) > MAX_URL:
        raise InvalidValue("a webhook URL must not contain a user, password or fragment")
    return url


def _row(session: Session, rule_id: str) -> AlertRuleRow:
    row = session.get(AlertRuleRow, rule_id)
    if row is None:
        raise NotFound(f"unknown alert {rule_id!r}: see `polyhost alerts list`")
    return row


def _rule(row: AlertRuleRow) -> AlertRule:
    return record_of(AlertRule, row, percents=tuple(row.percents))


def _public(row: AlertRuleRow) -> JsonObject:
    """What the audit log may hold: no secret, which many a webhook has behind its host."""
    parts = urlsplit(row.url)
    shown = values_of(row, "scope", "owner", "kind", "budget_nanos", "percents")
    return shown | {"url": f"{parts.scheme}://{parts.netloc}/"}
