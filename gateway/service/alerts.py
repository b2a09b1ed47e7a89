"""The verbs on alerts, for the CLI and, later, the admin API and pages (control.py)."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from gateway.alerts import webhook
from gateway.alerts.alerts import budget_of, message, name_of
from gateway.limits.periods import period_of
from gateway.service.control import Control, require
from gateway.service.limits import resolve_owner
from registry import alerts
from registry.alerts import Alert, AlertKind, AlertRule
from registry.base import new_id
from registry.errors import RegistryError
from registry.quotas import LimitScope


class WebhookFailed(RegistryError):
    """A test message was not taken."""


@dataclass(frozen=True, slots=True)
class NamedRule:
    """A rule with what people call its owner, and the sum its percents are of at present."""

    rule: AlertRule
    name: str
    budget_nanos: int


def add_alert(
    control: Control,
    scope: LimitScope,
    owner: str,
    kind: AlertKind,
    budget_nanos: int,
    percents: Sequence[int],
    url: str,
) -> tuple[NamedRule, str]:
    """Watch spending; the secret that signs messages is told here and nowhere else.

    `owner` as in `set_limits`; `budget_nanos` 0: the hard budget in force.
    """
    require(control, "limits.write")
    with control.writing() as session:
        owner, name = resolve_owner(control, session, scope, owner)
        rule, secret = alerts.add_rule(
            session, scope, owner, kind, budget_nanos, percents, url, now_at=control.clock()
        )
        return NamedRule(rule, name, budget_of(session, rule)), secret


def list_alerts(control: Control) -> list[NamedRule]:
    """All rules."""
    require(control, "limits.read")
    with control.reading() as session:
        return [
            NamedRule(rule, name_of(session, rule), budget_of(session, rule))
            for rule in alerts.list_rules(session)
        ]


def remove_alert(control: Control, rule_id: str) -> None:
    """And all it has raised. Raises NotFound."""
    require(control, "limits.write")
    with control.writing() as session:
        alerts.remove_rule(session, rule_id, now_at=control.clock())


def alert_log(control: Control, limit: int) -> list[Alert]:
    """What was raised, newest first."""
    require(control, "limits.read")
    with control.reading() as session:
        return alerts.list_alerts(session, limit)


def send_test(
    control: Control,
    rule_id: str,
    deliver: Callable[..., Awaitable[None]] = webhook.deliver,
) -> None:
    """Send a message as if the lowest threshold had just been reached; nothing is recorded.

    Raises NotFound, or WebhookFailed with the reason.
    """
    require(control, "limits.write")
    now_at = control.clock()
    with control.reading() as session:
        rule, secret = alerts.get_rule(session, rule_id), alerts.secret_of(session, rule_id)
        name, budget = name_of(session, rule), budget_of(session, rule)
    alert_id, percent = new_id("test"), rule.percents[0]
    period, sums = period_of(rule.kind, now_at), (budget * percent // 100, budget)
    body = message(alert_id, rule, period, percent, sums, name, now_at).encode()

    async def send() -> None:
        await deliver(rule.url, alert_id, secret, body, now_at)

    try:
        asyncio.run(send())
    except webhook.NotDelivered as error:
        raise WebhookFailed(f"{rule.url} was not told: {error}") from error
