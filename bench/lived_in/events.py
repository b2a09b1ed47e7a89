"""What operators did in those days: each deed at its time, by the product's own operations."""

import asyncio
import contextlib
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TypeAlias

from prometheus_client import CollectorRegistry
from sqlalchemy.orm import Session

from admin.alerts.alerts import AlertWatch
from admin.alerts.webhook import NotDelivered
from admin.operations import invoices, keys, limits, models, prices, tenants, users
from admin.operations.invoices import month_of
from bench.lived_in.world import (
    DAY_S,
    HOSTED,
    INTERNAL,
    LONG,
    PASSWORD,
    REFUSED,
    RENAMED,
    TENANTS,
    USD,
    World,
    price_of,
)
from registry.accounts.key_terms import KeyCache
from registry.models import catalog, revisions
from registry.models.catalog import NEXT
from registry.money import corrections, rollups
from registry.money.corrections import Right
from registry.session import appending

Deed: TypeAlias = Callable[[World], None]


def events(world: World) -> list[tuple[float, Deed]]:
    """All of them, in the order of their times."""
    planned: list[tuple[float, Deed]] = [
        (45.0, _found),
        (44.9, _list_models),
        (44.8, _let_in),
        (44.5, _agree_plans),
        (40.0, lambda w: _refuse(w, "pickled-llama")),
        (38.0, _bound),
        (31.0, lambda w: _refuse(w, "mystery-7b")),
        (30.0, _retire_legacy),
        (26.0, _second_name),
        (21.0, _raise_prices),
        (20.0, _watch_spending),
        (14.0, lambda w: _refuse(w, "custom-code-moe-with-its-own-modeling-file")),
        (12.0, _new_revision),
        (9.0, _revoke_and_rotate),
        (6.0, _raise_alerts),
        (5.0, _correct),
        (4.0, _pin),
        (2.0, _raise_alerts),
        (1.5, _disable),
        (0.4, lambda w: _refuse(w, "half-downloaded")),
        (0.08, _schedule_price),
        (0.02, _squeeze),
        (0.005, _raise_alerts),
    ]
    found = [(world.days(ago), deed) for ago, deed in planned]
    month_at = month_began(world.ends_at)
    if month_at > world.began_at:
        found.append((max(month_at, min(month_at + 1.3 * DAY_S, world.ends_at - 60.0)), _bill))
    return sorted(found, key=lambda each: each[0])


def month_began(at: float) -> float:
    """The first instant of the month, UTC."""
    when = datetime.fromtimestamp(at, UTC)
    return datetime(when.year, when.month, 1, tzinfo=UTC).timestamp()


def _found(world: World) -> None:
    """The installation's users; anna comes with her tenant."""
    users.create_user(world.by(""), "admin", PASSWORD, "owner")
    for name, role in (("vera", "admin"), ("otto", "viewer")):
        users.create_user(world.by("admin"), name, PASSWORD, role)


def _list_models(world: World) -> None:
    """What was registered on the first day, with its prices."""
    for name in (*HOSTED, "legacy-gpt"):
        _register(world, name, f"/srv/models/{name}")
        prices.set_price(world.by("vera"), price_of(name, 0.8))


def _let_in(world: World) -> None:
    """Tenants and keys; some keys expire some days from the end, and one has bounds."""
    context = world.by("vera")
    for tenant in TENANTS:
        tenants.create_tenant(context, tenant.name, tenant.weight, tenant.name == INTERNAL)
        if tenant.priority != "standard":
            tenants.update_tenant(context, tenant.name, priority=tenant.priority)
        for plan in tenant.keys:
            is_narrow = plan.name == "hive"
            left_s = world.ends_at - world.now_at + 3.2 * DAY_S
            world.keys[tenant.name, plan.name], secret = keys.create_key(
                context,
                tenant.name,
                plan.name,
                cache=KeyCache("exact", sampled=True) if plan.hits else None,
                expires_in_s=left_s if plan.name in ("mobile", "検証") else None,
                allowed_models=["sherlock"] if is_narrow else None,
                allowed_cidrs=["10.0.0.0/8", "2001:db8::/32"] if is_narrow else None,
            )
            world.secrets[f"{tenant.name}/{plan.name}"] = secret
    users.create_user(world.by("admin"), "anna", PASSWORD, "admin", "globex")


def _agree_plans(world: World) -> None:
    context = world.by("vera")
    prices.create_plan(context, "startup", 1500)
    prices.create_plan(context, "enterprise", 2000)
    prices.set_plan_price(context, "enterprise", "atlas-instruct", price_of("atlas-instruct", 0.6))
    for tenant in TENANTS:
        if tenant.plan:
            prices.set_terms(context, tenant.name, tenant.plan, tenant.discount_bp)


def _bound(world: World) -> None:
    """Limits of tenants, keys, a model and the gateway, and what is kept free."""
    context = world.by("vera")
    limits.set_limits(
        context, "tenant", "acme", {"requests_per_minute": 600, "month_budget_nanos": 50 * USD}
    )
    limits.set_limits(context, "tenant", "globex", {"max_concurrency": 8, "tokens_per_day": 10**7})
    limits.set_limits(context, "tenant", LONG, {"requests_per_day": 400, "max_output_tokens": 512})
    for place in ("web", "mobile"):
        key = world.keys["globex", place].id
        limits.set_limits(context, "key", key, {"requests_per_minute": 120, "max_concurrency": 4})
    limits.set_limits(context, "model", "atlas-instruct", {"max_concurrency": 16})
    limits.set_limits(context, "gateway", "", {"requests_per_minute": 6000, "max_concurrency": 256})
    tenants.update_tenant(context, "acme", reserved_share=0.2)
    tenants.set_model_floor(context, "stark-industries", 2 << 20, ["python"])


def _refuse(world: World, name: str) -> None:
    """A registration that ends badly."""
    source, code, reason = REFUSED[name]
    with world.by("vera").writing() as session:
        model = catalog.add_model(session, name, source, now_at=world.now_at)
        catalog.fail(session, model.registration, code, reason, now_at=world.now_at)


def _retire_legacy(world: World) -> None:
    with world.by("vera").writing() as session:
        revisions.remove(session, "legacy-gpt", now_at=world.now_at)
    del world.packs["legacy-gpt"]


def _second_name(world: World) -> None:
    world.packs[RENAMED] = world.packs["sherlock"]
    _register(world, RENAMED, "/srv/models/sherlock")
    prices.set_price(world.by("vera"), price_of(RENAMED))


def _raise_prices(world: World) -> None:
    for name in HOSTED:
        prices.set_price(world.by("vera"), price_of(name))


def _watch_spending(world: World) -> None:
    context, url = world.by("vera"), "https://hooks.example.com/polyhost"
    key = world.keys["stark-industries", "jarvis"].id
    limits.add_alert(context, "tenant", "acme", "month", 2 * USD, (50, 80, 100), url)
    limits.add_alert(context, "tenant", "hooli", "month", 0, (80, 100), f"{url}/hooli")
    limits.add_alert(context, "key", key, "day", USD // 20, (100,), "https://broken.example.net/")
    limits.add_alert(context, "gateway", "", "month", 10 * USD, (50, 90), url)


def _raise_alerts(world: World) -> None:
    """The product's own watch, once; one receiver never answers."""

    async def deliver(url: str, *_: object) -> None:
        if "broken" in url:
            raise NotDelivered("the connection was refused")

    watch = AlertWatch(world.base.engine, 60.0, CollectorRegistry(), deliver, lambda: world.now_at)
    asyncio.run(watch.look())


def _bill(world: World) -> None:
    """The month that is over, for most."""
    over = datetime.fromtimestamp(month_began(world.now_at) - 1, UTC)
    month = month_of(f"{over:%Y-%m}")
    for tenant in TENANTS[:-2]:
        with contextlib.suppress(invoices.NothingOwed):
            invoices.create_invoice(world.by("vera"), tenant.name, month)


def _new_revision(world: World) -> None:
    """Of python, where there is another pack of it."""
    facts = world.packs.get(f"python{NEXT}")
    if facts is not None:
        with world.by("vera").writing() as session:
            now_at = world.now_at
            job = revisions.begin_update(
                session, "python", "/srv/models/python", dtype="auto", now_at=now_at
            )
            revisions.finish(session, job.registration, facts, keep=3, now_at=now_at)
        world.packs["python"] = facts


def _revoke_and_rotate(world: World) -> None:
    context = world.by("vera")
    old = world.keys.pop(("soylent", "before the audit"))
    keys.revoke_key(context, old.id)
    for name, grace_s in (("production", 12 * DAY_S), ("staging", 0.0)):
        record = world.keys["acme", name]
        _, world.secrets[f"acme/{name}"] = keys.rotate_key(context, record.id, grace_s)


def _correct(world: World) -> None:
    if world.last_request:
        with appending(world.base.engine, "cli:root") as session:
            right = Right(cost_nanos=0)
            corrections.correct(session, world.last_request, right, now_at=world.now_at)


def _pin(world: World) -> None:
    models.set_pinned(world.by("vera"), "sherlock", True)


def _disable(world: World) -> None:
    tenants.update_tenant(world.by("admin"), "umbrella", disabled=True)
    world.keys.pop(("umbrella", "hive"))


def _schedule_price(world: World) -> None:
    """One that is still to come."""
    starts_at = world.ends_at + 8 * DAY_S
    prices.set_price(world.by("vera"), price_of("atlas-instruct", 1.25), float(int(starts_at)))


def _squeeze(world: World) -> None:
    """Budgets by what was spent: one nearly gone, one overrun, one of fractions of a cent."""
    with world.base.reading() as session:
        month = _spent(session, month_began(world.now_at))
        day = _spent(session, world.now_at // DAY_S * DAY_S)
    ids = {name: key.tenant_id for (name, _), key in world.keys.items()}
    for name, kind, spent, part in (
        ("hooli", "month", month, 0.97),
        ("soylent", "day", day, 1.3),
        ("globex", "month", month, 0.62),
        ("q", "month", month, 0.4),
    ):
        nanos = int(spent.get(ids[name], 0) / part) or 1000
        limits.set_limits(world.by("otto"), "tenant", name, {f"{kind}_budget_nanos": nanos})


def _spent(session: Session, since_at: float) -> dict[str, int]:
    sums: dict[str, int] = {}
    for row in rollups.spend_since(session, since_at):
        sums[row.tenant_id] = sums.get(row.tenant_id, 0) + row.cost_nanos
    return sums


def _register(world: World, name: str, source: str) -> None:
    with world.by("vera").writing() as session:
        model = catalog.add_model(session, name, source, now_at=world.now_at)
        catalog.finish(session, model.registration, world.packs[name], now_at=world.now_at)
