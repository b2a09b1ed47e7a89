"""Operations on limits, and on alerts when spending reaches a part of a budget."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy.orm import Session

from admin.alerts import webhook
from admin.alerts.alerts import budget_of, message, name_of
from admin.context.operation import operation
from admin.context.operator_context import OperatorContext, find_key, find_tenant, require, visible
from admin.context.optimistic_lock import ChangedMeanwhile, setters
from gateway.limits.limits import period_of
from registry.accounts import api_keys, quotas, tenants
from registry.accounts.quotas import Limits, LimitScope
from registry.base import new_id
from registry.errors import RegistryError
from registry.models import catalog
from registry.money import alerts
from registry.money.alerts import Alert, AlertKind, AlertRule


@dataclass(frozen=True, slots=True)
class OwnedLimits:
    """Limits and whose they are. `name` is for people."""

    scope: LimitScope
    owner: str
    name: str
    limits: Limits


class LimitsChanged(ChangedMeanwhile):
    """Somebody else has set a limit since it was looked at; nothing was changed. `now` holds, and
    `by` says who set each of those that clash."""

    def __init__(self, now: Limits, by: Mapping[str, str]) -> None:
        super().__init__("another user changed these limits in the meantime; nothing was saved")
        self.now = now
        self.by = by


@operation("limits.write", audit=("limits.set",))
def set_limits(
    context: OperatorContext,
    scope: LimitScope,
    owner: str,
    changes: Mapping[str, int],
    seen: Limits | None = None,
) -> OwnedLimits:
    """Change the limits that are named (fields of Limits); 0 means unlimited.

    `owner`: a key's id or public id, a tenant's id or name, a model's name, "" for the gateway.
    `seen`: what held when they were chosen. Raises LimitsChanged where one of them holds no
    more and is not what is wanted anyway.
    """
    with context.writing() as session:
        owner, name = resolve_owner(context, session, scope, owner)
        if seen is not None:
            _check_unchanged(session, scope, owner, changes, seen)
        limits = quotas.set_limits(session, scope, owner, changes, now_at=context.clock())
        return OwnedLimits(scope, owner, name, limits)


@operation("limits.read", on="tenant")
def show_limits(context: OperatorContext, scope: LimitScope, owner: str) -> OwnedLimits:
    """As `set_limits` names them."""
    with context.reading() as session:
        owner, name = resolve_owner(context, session, scope, owner)
        return OwnedLimits(scope, owner, name, quotas.get_limits(session, scope, owner))


@operation("limits.read", on="tenant")
def list_limits(context: OperatorContext) -> list[OwnedLimits]:
    """Everybody's who has some: the gateway's, then models', tenants' and keys'.

    To who may see tenants only: theirs.
    """
    seen = visible(context, "limits.read")
    with context.reading() as session:
        keys = [k for k in api_keys.list_keys(session) if seen is None or k.tenant_id in seen]
        owners = [t for t in tenants.list_tenants(session) if seen is None or t.id in seen]
        names = {
            "key": {k.id: f"{k.tenant_name}: {k.name}" for k in keys},
            "tenant": {t.id: t.name for t in owners},
        }
        scopes: tuple[LimitScope, ...] = ("gateway", "model", "tenant", "key")
        return [
            OwnedLimits(scope, owner, names.get(scope, {}).get(owner, owner or scope), limits)
            for scope in scopes
            for owner, limits in quotas.all_limits(session, scope).items()
            if limits != quotas.UNLIMITED and (seen is None or owner in names.get(scope, {}))
        ]


def _check_unchanged(
    session: Session, scope: LimitScope, owner: str, changes: Mapping[str, int], seen: Limits
) -> None:
    now = quotas.get_limits(session, scope, owner)
    clashing = {
        name
        for name, value in changes.items()
        if getattr(now, name) not in (getattr(seen, name), value)
    }
    if not clashing:
        return
    raise LimitsChanged(now, setters(session, "limits.set", owner or scope, clashing))


def resolve_owner(
    context: OperatorContext, session: Session, scope: LimitScope, owner: str
) -> tuple[str, str]:
    """The owner's id and its name. Raises NotFound, or Forbidden where they may not be seen."""
    if scope == "key":
        key = find_key(context, session, owner, "limits.read")
        return key.id, f"{key.tenant_name}: {key.name}"
    if scope == "tenant":
        tenant = find_tenant(context, session, owner, "limits.read")
        return tenant.id, tenant.name
    require(context, "limits.read")
    if scope == "model":
        return (catalog.get_model(session, owner).name,) * 2
    return "", "gateway"


class WebhookFailed(RegistryError):
    """A test message was not taken."""


@dataclass(frozen=True, slots=True)
class NamedRule:
    """A rule with what people call its owner, and the sum its percents are of at present."""

    rule: AlertRule
    name: str
    budget_nanos: int


@operation("limits.write", audit=("alert.add",))
def add_alert(
    context: OperatorContext,
    scope: LimitScope,
    owner: str,
    kind: AlertKind,
    budget_nanos: int,
    percents: Sequence[int],
    url: str,
) -> tuple[NamedRule, str]:
    """Watch spending; the secret that signs messages is shown here and nowhere else.

    `owner` as in `set_limits`; `budget_nanos` 0: the hard budget in force.
    """
    with context.writing() as session:
        owner, name = resolve_owner(context, session, scope, owner)
        rule, secret = alerts.add_rule(
            session, scope, owner, kind, budget_nanos, percents, url, now_at=context.clock()
        )
        return NamedRule(rule, name, budget_of(session, rule)), secret


@operation("limits.read")
def list_alerts(context: OperatorContext) -> list[NamedRule]:
    """All rules."""
    with context.reading() as session:
        return [
            NamedRule(rule, name_of(session, rule), budget_of(session, rule))
            for rule in alerts.list_rules(session)
        ]


@operation("limits.write", audit=("alert.remove",))
def remove_alert(context: OperatorContext, rule_id: str) -> None:
    """And all it has raised. Raises NotFound."""
    with context.writing() as session:
        alerts.remove_rule(session, rule_id, now_at=context.clock())


@operation("limits.read")
def alert_log(context: OperatorContext, limit: int) -> list[Alert]:
    """What was raised, newest first."""
    with context.reading() as session:
        return alerts.list_alerts(session, limit)


@operation("limits.read")
def num_failing_alerts(context: OperatorContext) -> int:
    """How many could not be delivered and are tried again."""
    with context.reading() as session:
        return alerts.num_failing(session)


@operation("limits.write")
def send_test(context: OperatorContext, rule_id: str) -> None:
    """Send a message as if the lowest threshold had just been reached; nothing is recorded.

    Raises NotFound, or WebhookFailed with the reason.
    """
    now_at = context.clock()
    with context.reading() as session:
        rule, secret = alerts.get_rule(session, rule_id), alerts.secret_of(session, rule_id)
        name, budget = name_of(session, rule), budget_of(session, rule)
    alert_id, percent = new_id("test"), rule.percents[0]
    period, sums = period_of(rule.kind, now_at), (budget * percent // 100, budget)
    body = message(alert_id, rule, period, percent, sums, name, now_at).encode()

    async def send() -> None:
        await webhook.deliver(rule.url, alert_id, secret, body, now_at)

    try:
        asyncio.run(send())
    except webhook.NotDelivered as error:
        raise WebhookFailed(f"{rule.url} could not be reached: {error}") from error
