"""Counts that begin with what the ledger knows: who has begun, what is read, when it is reported.

Minutes are soon counted anew. Counts by the day and budgets are new where an operator has just set
them, where a tenant or key becomes known (again), everywhere at a start, and where a shared store
has lost them: they begin with what the ledger says was used and spent. It is read once for all that
are new together, in a thread. Until the store has been told, requests that draw on them wait
(`UnreadPasts`): counted from 0 meanwhile, a tenant that has used up its budget would get another.
Changes of keys and other requests do not wait. At the start nothing is served before.

What an earlier life of this gateway left open counts at the most that it may cost, under its
request's id, until recovery posts it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from gateway.limits.limits import (
    PERIOD_KINDS,
    PeriodKind,
    Rate,
    UnreadPasts,
    budget_name,
    budgets_of,
    count_name,
    limited,
    period_of,
)
from gateway.limits.policy.rate_limit import DAY_S, SLOTS, Reservation, Taken, UsedAmounts
from gateway.limits.store import LimitStore, Past
from registry.accounts.quotas import Limits, LimitScope
from registry.money import ledger, rollups
from registry.money.ledger import OpenRecord, Posting, SlotUsage, SpendRow
from registry.session import reading

logger = logging.getLogger(__name__)

SLOT_S = DAY_S // SLOTS
RETRY_S = 1.0
MOST_TENANTS = 200
"""New at once, whose part of the ledger is read by itself."""

Owner: TypeAlias = tuple[LimitScope, str]
Counts: TypeAlias = dict[str, Rate | PeriodKind]
"""By the name a store counts them under: what is counted by the day, and budgets."""


@dataclass(frozen=True, slots=True)
class Owned:
    """Limits and whose they are. `tenant_id`: a key's or a tenant's."""

    scope: LimitScope
    owner: str
    limits: Limits
    tenant_id: str = ""

    @property
    def counts(self) -> Counts:
        """Those of its counts that have a past."""
        found: Counts = {
            count_name(self.scope, self.owner, rate): rate
            for rate, _ in limited(self.limits)
            if rate.window_s == DAY_S
        }
        for kind, _ in budgets_of(self.limits):
            found[budget_name(self.scope, self.owner, kind)] = kind
        return found


def spent_of(
    names: Iterable[str], usage: Mapping[PeriodKind, Iterable[SpendRow]]
) -> dict[str, int]:
    """What was spent of each budget; `usage` is that of the present periods."""
    sums = dict.fromkeys(names, 0)
    for kind, rows in usage.items():
        for row in rows:
            for scope, owner in owners_of(row):
                name = budget_name(scope, owner, kind)
                if name in sums:
                    sums[name] += row.cost_nanos
    return sums


def owners_of(
    row: SlotUsage | SpendRow | Posting | OpenRecord,
) -> tuple[tuple[LimitScope, str], ...]:
    """All whose limits it counts against."""
    return (
        ("key", row.key_id),
        ("tenant", row.tenant_id),
        ("model", row.model),
        ("gateway", ""),
    )


def day_amounts(
    rates: Mapping[str, Rate], usage: Iterable[SlotUsage]
) -> dict[str, list[tuple[float, int]]]:
    """(begin of the slot, what was used in it) by name, the oldest first."""
    sums: dict[str, dict[float, int]] = {name: {} for name in rates}
    kinds = set(rates.values())
    for row in usage:
        used = UsedAmounts(row.prompt_tokens, row.completion_tokens)
        for scope, owner in owners_of(row):
            for rate in kinds:
                by_slot = sums.get(count_name(scope, owner, rate))
                if by_slot is not None:
                    amount = row.num_requests if rate.meter == "requests" else used.of(rate.meter)
                    by_slot[row.began_at] = by_slot.get(row.began_at, 0) + amount
    return {name: sorted(by_slot.items()) for name, by_slot in sums.items()}


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Counts of one owner that are to begin. `tenant_id` "": they are of all tenants."""

    counts: Counts
    tenant_id: str


class LimitRestore:
    """Everything on the event loop but the reading. Counts that have yet to begin are in
    `unread`."""

    def __init__(
        self,
        engine: Engine,
        store: LimitStore,
        unread: UnreadPasts,
        gateway_id: str = "",
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._store = store
        self._unread = unread
        unread.read_again = self._read_again
        self._gateway_id = gateway_id
        self._wall_clock = wall_clock
        self._clock = clock
        self._begun: dict[Owner, Counts] = {}
        self._wanted: dict[Owner, _Wanted] = {}
        self._left: dict[str, Reservation] = {}
        self._reading: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Future[None]] = set()

    async def begin(self, owned: Iterable[Owned]) -> None:
        """These are all there are, and begin now; returns when they have. Raises
        SQLAlchemyError."""
        counts = {(one.scope, one.owner): one.counts for one in owned}
        await self._report({name: c for found in counts.values() for name, c in found.items()})
        self._begun = {owner: found for owner, found in counts.items() if found}

    async def carry_left(self) -> None:
        """Count what an earlier life of this gateway left open. Raises SQLAlchemyError."""
        if not self._gateway_id:
            return
        await self.carry(await asyncio.to_thread(self._read_left, self._gateway_id))

    async def carry(self, records: Iterable[OpenRecord]) -> None:
        """Count what these, which another life or gateway left open, may cost at most; until
        `count_posting`."""
        carried = [reservation for _, reservation in self._reservations(records)]
        self._left.update((reservation.id, reservation) for reservation in carried)
        if carried:
            await self._store.carry(carried, self._clock())

    async def read_open(self) -> list[tuple[str, Reservation]]:
        """What every gateway has open in the ledger and may cost at most, with the gateway's id.
        Nothing is counted. Raises SQLAlchemyError."""
        return self._reservations(await asyncio.to_thread(self._read_left, None))

    def _reservations(self, records: Iterable[OpenRecord]) -> list[tuple[str, Reservation]]:
        now_at = self._wall_clock()
        taken = [(record, tuple(self._taken(record, now_at))) for record in records]
        return [(one.gateway_id, Reservation(one.request_id, what)) for one, what in taken if what]

    def watch(self, owned: Owned) -> None:
        """These limits hold from now on: counts that have yet to begin are unread until they have.
        What is not limited any more has to begin anew when it is again."""
        owner, counts = (owned.scope, owned.owner), owned.counts
        had = self._begun.pop(owner, {})
        kept = {name: count for name, count in counts.items() if name in had}
        if kept:
            self._begun[owner] = kept
        new = {name: count for name, count in counts.items() if name not in had}
        self._want(owner, _Wanted(new, owned.tenant_id))

    def drop(self, owner: Owner) -> None:
        """Nobody can draw on its limits any more; should somebody again, they begin anew."""
        self._begun.pop(owner, None)
        self._want(owner, _Wanted({}, ""))

    async def settled(self) -> None:
        """Returns when nothing is wanted any more."""
        if self._reading is not None:
            await asyncio.wait([self._reading])

    async def restore_loss(self) -> None:
        """What a shared store has lost, if it is for us to restore. Raises SQLAlchemyError."""
        loss = await self._store.loss()
        if loss is None:
            return
        counts = {name: c for found in self._begun.values() for name, c in found.items()}
        pasts = await asyncio.to_thread(self._read, counts, loss.before_at)
        await self._store.restore_loss(loss, pasts, self._clock())

    def count_posting(self, posting: Posting) -> None:
        """A request that an earlier life left open was posted: budgets count it at its most since
        the start, or not at all where they are newer, limits by the day not at all."""
        left = self._left.pop(posting.request_id, None)
        used = UsedAmounts(
            posting.prompt_tokens,
            posting.completion_tokens,
            posting.cost_nanos,
            period_of("day", posting.posted_at).number,
            period_of("month", posting.posted_at).number,
            posting.posted_at,
        )
        if left is not None:
            self._spawn(self._store.settle(left, used))
        if posting.outcome != "failed":
            held = frozenset(taken.name for taken in left.taken) if left else frozenset[str]()
            self._spawn(self._store.add(self._unreserved(posting, used, held), self._clock()))

    def _unreserved(self, posting: Posting, used: UsedAmounts, held: frozenset[str]) -> list[Past]:
        pasts = []
        for owner in owners_of(posting):
            for name, count in self._begun.get(owner, {}).items():
                if isinstance(count, Rate):
                    pasts.append(Past(name, DAY_S, ((0.0, used.of(count.meter)),)))
                elif name not in held:
                    period = used.month if count == "month" else used.day
                    pasts.append(Past(name, 0, period=period, spent=used.cost_nanos))
        return pasts

    def _taken(self, record: OpenRecord, now_at: float) -> Iterable[Taken]:
        for owner in owners_of(record):
            for name, count in self._begun.get(owner, {}).items():
                if not isinstance(count, Rate) and record.reserved_nanos:
                    period = period_of(count, now_at).number
                    yield Taken(name, "cost", 0, period, record.reserved_nanos, count)

    def _read_again(self, name: str) -> None:
        """Of a count that has begun: the clock says another period than it began in."""
        found = next((owner for owner, counts in self._begun.items() if name in counts), None)
        if found is None:
            return
        counts = self._begun.pop(found)
        count = counts.pop(name)
        if counts:
            self._begun[found] = counts
        others = self._wanted[found].counts if found in self._wanted else {}
        self._want(found, _Wanted({**others, name: count}, ""))

    def _want(self, owner: Owner, new: _Wanted) -> None:
        old = self._wanted.get(owner)
        if old == new:  # What is being read stays wanted as it is.
            return
        self._wanted.pop(owner, None)
        self._unread.change(old.counts if old else (), new.counts)
        if new.counts:
            self._wanted[owner] = new
            if self._reading is None or self._reading.done():
                self._reading = asyncio.create_task(self._begin_wanted(), name="limits-history")

    async def _begin_wanted(self) -> None:
        while self._wanted:
            await asyncio.sleep(0)  # All of one view together.
            wanted = dict(self._wanted)
            tenants = {one.tenant_id for one in wanted.values()}
            some = tenants if "" not in tenants and len(tenants) <= MOST_TENANTS else None
            try:
                await self._report(
                    {n: c for w in wanted.values() for n, c in w.counts.items()}, some
                )
            except SQLAlchemyError as error:
                logger.warning("cannot read the ledger for new limits, trying again: %s", error)
                await asyncio.sleep(RETRY_S)
                continue
            except Exception:  # Requests would be refused for ever.
                logger.exception("cannot begin new limits, trying again")
                await asyncio.sleep(RETRY_S)
                continue
            for owner, one in wanted.items():
                if self._wanted.get(owner) is one:  # or it was lifted or changed meanwhile
                    del self._wanted[owner]
                    self._begun[owner] = {**self._begun.get(owner, {}), **one.counts}
                    self._unread.change(one.counts, ())

    async def _report(self, counts: Counts, tenants: Collection[str] | None = None) -> None:
        if counts:
            pasts = await asyncio.to_thread(self._read, counts, None, tenants)
            await self._store.restore(pasts, self._clock())

    def _read(
        self, counts: Counts, before_at: float | None, tenants: Collection[str] | None = None
    ) -> Sequence[Past]:
        """In a thread: one look at the ledger for all of them. `tenants`: whose they are, where
        not everybody's postings count."""
        now_at = self._wall_clock()
        days = {name: count for name, count in counts.items() if isinstance(count, Rate)}
        budgets = {name: count for name, count in counts.items() if not isinstance(count, Rate)}
        periods = {k: period_of(k, now_at) for k in PERIOD_KINDS}
        amounts: dict[str, list[tuple[float, int]]] = {}
        with reading(self._engine) as session:
            if days:
                usage = ledger.usage_by_slot(session, now_at - DAY_S - SLOT_S, SLOT_S, tenants)
                if before_at is not None:
                    usage = [row for row in usage if row.began_at < before_at]
                amounts = day_amounts(days, usage)
            spent = spent_of(
                budgets,
                {
                    kind: rollups.spend_since(session, periods[kind].began_at, before_at, tenants)
                    for kind in set(budgets.values())
                },
            )
        # As if all of a slot had come at its end: a store cuts its slots elsewhere.
        return [
            Past(name, DAY_S, tuple((max(0.0, now_at - at - SLOT_S), n) for at, n in by_slot))
            for name, by_slot in amounts.items()
        ] + [
            Past(name, 0, period=periods[budgets[name]].number, spent=nanos)
            for name, nanos in spent.items()
        ]

    def _read_left(self, gateway_id: str | None) -> list[OpenRecord]:
        with reading(self._engine) as session:
            return ledger.open_left(session, gateway_id)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
