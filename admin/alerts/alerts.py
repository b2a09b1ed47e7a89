"""Alerts: looks at what was spent, raises what is new, tells who wants to know. No request waits.

One loop a server, in the process that owns the database's background work; several at one database
do no harm: an alert is raised once (the table's key) and sent by whoever claims it. What is sent is
in the table before, so a restart sends what was not acknowledged. A receiver may
hear of an alert twice (its answer was lost), by the same id.

Spending is what the ledger says. The period that ended within the last hour is looked at too: what
was spent at its end is posted behind it.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from admin.alerts import webhook
from gateway.limits.limit_restore import owners_of
from gateway.limits.limits import Period, period_of
from registry.accounts import api_keys, quotas, tenants
from registry.base import new_id
from registry.errors import NotFound
from registry.money import alerts, rollups
from registry.money.alerts import Alert, AlertKind, AlertRule, Delivery
from registry.session import appending, reading

logger = logging.getLogger(__name__)

ACTOR = "gateway"
LATE_S = 3600.0
MAX_AT_ONCE = 20
CLAIM_S = 60.0
"""How long a message is its sender's; then another may send it."""


@dataclass(frozen=True, slots=True)
class Look:
    """One look: what is new of it, and how many are on their way."""

    raised: int
    waiting: int


class AlertWatch:
    """`deliver` sends one message and raises webhook.NotDelivered."""

    def __init__(
        self,
        engine: Engine,
        interval_s: float,
        registry: CollectorRegistry,
        deliver: Callable[..., Awaitable[None]] = webhook.deliver,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._interval_s = interval_s
        self._deliver = deliver
        self._wall_clock = wall_clock
        self._waiting = Gauge(
            "polyhost_alerts_waiting", "Alerts that are not acknowledged.", registry=registry
        )
        self._tries = Counter(
            "polyhost_alert_deliveries",
            "Alert delivery attempts, by result.",
            ["result"],
            registry=registry,
        )

    async def run(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self.look()
            except SQLAlchemyError as error:
                logger.warning(
                    "alerts: the database is unavailable, the next check tries again: %s", error
                )

    async def look(self) -> Look:
        """Once: raise what is new, tell what is due. Raises SQLAlchemyError."""
        raised = await asyncio.to_thread(self._raise)
        due = await asyncio.to_thread(self._claim)
        if due:
            await asyncio.gather(*(self._send(delivery) for delivery in due))
        waiting = await asyncio.to_thread(self._num_waiting)
        self._waiting.set(waiting)
        return Look(raised, waiting)

    def _raise(self) -> int:
        """In a thread."""
        now_at = self._wall_clock()
        with reading(self._engine) as session:
            rules = alerts.list_rules(session)
            if not rules:
                return 0
            kinds = {rule.kind for rule in rules}
            spans = {(k, period_of(k, at)) for k in kinds for at in (now_at - LATE_S, now_at)}
            had = alerts.raised(session, [period.number for _, period in spans])
            new = [
                alert
                for kind, period in spans
                for alert in _new_of(session, rules, kind, period, had, now_at)
            ]
        if not new:
            return 0
        with appending(self._engine, ACTOR) as session:
            return alerts.raise_alerts(session, new)

    def _claim(self) -> Sequence[Delivery]:
        now_at = self._wall_clock()
        with reading(self._engine) as session:
            if not alerts.num_waiting(session):
                return ()
        with appending(self._engine, ACTOR) as session:
            return alerts.claim(session, now_at, now_at + CLAIM_S, MAX_AT_ONCE)

    def _num_waiting(self) -> int:
        with reading(self._engine) as session:
            return alerts.num_waiting(session)

    async def _send(self, delivery: Delivery) -> None:
        alert, now_at = delivery.alert, self._wall_clock()
        body = alert.body.encode()
        try:
            await self._deliver(delivery.url, alert.id, delivery.secret, body, now_at)
        except webhook.NotDelivered as error:
            self._tries.labels("failed").inc()
            next_try_at = retry_at(alert.num_tries + 1, alert.raised_at, self._wall_clock())
            level = logging.INFO if next_try_at else logging.WARNING
            logger.log(level, "alert %s was not delivered: %s", alert.id, error)
            await asyncio.to_thread(self._failed, alert.id, str(error), next_try_at)
        else:
            self._tries.labels("delivered").inc()
            await asyncio.to_thread(self._delivered, alert.id)

    def _failed(self, alert_id: str, reason: str, next_try_at: float | None) -> None:
        with appending(self._engine, ACTOR) as session:
            alerts.failed(session, alert_id, reason, next_try_at)

    def _delivered(self, alert_id: str) -> None:
        with appending(self._engine, ACTOR) as session:
            alerts.delivered(session, alert_id, now_at=self._wall_clock())


def message(
    alert_id: str,
    rule: AlertRule,
    period: Period,
    percent: int,
    sums: tuple[int, int],
    name: str,
    now_at: float,
) -> str:
    """The JSON that is sent; `sums`: spent, and of what."""
    spent_nanos, budget_nanos = sums
    fields: Mapping[str, object] = {
        "id": alert_id,
        "type": "budget.threshold",
        "rule": rule.id,
        "scope": rule.scope,
        "owner": rule.owner,
        "name": name,
        "window": rule.kind,
        "period_began_at": int(period.began_at),
        "period_ends_at": int(period.ends_at),
        "percent": percent,
        "spent_nanos": spent_nanos,
        "budget_nanos": budget_nanos,
        "is_hard": not rule.budget_nanos,
        "created_at": int(now_at),
    }
    return msgspec.json.encode(fields).decode()


def name_of(session: Session, rule: AlertRule) -> str:
    """Of whose spending it is, for people; "" where they are gone."""
    try:
        if rule.scope == "tenant":
            return tenants.get_tenant(session, rule.owner).name
        if rule.scope == "key":
            key = api_keys.get_key(session, rule.owner)
            return f"{key.tenant_name}: {key.name}"
    except NotFound:
        return ""
    return rule.owner


def budget_of(session: Session, rule: AlertRule) -> int:
    """The sum its percents are of; 0: there is none at present."""
    if rule.budget_nanos:
        return rule.budget_nanos
    limits = quotas.get_limits(session, rule.scope, rule.owner)
    return limits.month_budget_nanos if rule.kind == "month" else limits.day_budget_nanos


def _new_of(
    session: Session,
    rules: Sequence[AlertRule],
    kind: AlertKind,
    period: Period,
    had: set[tuple[str, int, int]],
    now_at: float,
) -> list[Alert]:
    """Thresholds of that period that were reached and not raised yet."""
    watching = [
        rule
        for rule in rules
        if rule.kind == kind and any((rule.id, period.number, p) not in had for p in rule.percents)
    ]
    if not watching:
        return []
    before_at = period.ends_at if period.ends_at <= now_at else None
    sums: dict[tuple[str, str], int] = {}
    for row in rollups.spend_since(session, period.began_at, before_at):
        for owner in owners_of(row):
            sums[owner] = sums.get(owner, 0) + row.cost_nanos
    found = []
    for rule in watching:
        spent, budget = sums.get((rule.scope, rule.owner), 0), budget_of(session, rule)
        for percent in reached(rule.percents, spent, budget):
            if (rule.id, period.number, percent) in had:
                continue
            alert_id, name = new_id("alt"), name_of(session, rule)
            body = message(alert_id, rule, period, percent, (spent, budget), name, now_at)
            found.append(Alert(alert_id, rule.id, period.number, percent, body, now_at, now_at))
    return found


FIRST_RETRY_S = 10.0
LONGEST_RETRY_S = 3600.0
GIVE_UP_S = 3 * 86_400.0
"""After so long it is not sent any more; it stays in the list."""


def reached(percents: Iterable[int], spent_nanos: int, budget_nanos: int) -> list[int]:
    """Those percents, the lowest first."""
    if budget_nanos <= 0:
        return []
    return sorted(p for p in percents if spent_nanos * 100 >= p * budget_nanos)


def retry_at(num_tries: int, raised_at: float, now_at: float) -> float | None:
    """When to try again after `num_tries` failures: twice as long each time; None: never."""
    if now_at - raised_at >= GIVE_UP_S:
        return None
    return now_at + min(LONGEST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(num_tries - 1, 20))
