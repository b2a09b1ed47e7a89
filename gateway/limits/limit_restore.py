"""Counts that begin with what the ledger knows: who has begun, what is read, when it is told.

Counts by the day and budgets are new where an operator has just set them, everywhere at a start,
and where a shared store has lost them. The ledger is read once for all that are new together, in a
thread; until that has been told, such a limit does not hold (`begun` leaves it out), and changes of
keys do not wait for it. At the start nothing is served before.

What an earlier life of this gateway left open counts at the most that it may cost, under its
request's id, until recovery posts it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from gateway.limits import limit_history
from gateway.limits.limit_history import SLOT_S, Budget, DayCount
from gateway.limits.periods import PERIOD_KINDS, period_of
from gateway.policy.rate_limit import DAY_S, Reservation, Taken, Used
from gateway.store.base import LimitStore, Past
from registry import ledger, spending
from registry.ledger import OpenRecord, Posting
from registry.quotas import Limits, LimitScope
from registry.session import reading

logger = logging.getLogger(__name__)

RETRY_S = 1.0

Owner: TypeAlias = tuple[LimitScope, str]
Counts: TypeAlias = dict[str, DayCount | Budget]


@dataclass(frozen=True, slots=True)
class Owned:
    """Limits and whose they are."""

    scope: LimitScope
    owner: str
    limits: Limits

    @property
    def counts(self) -> Counts:
        """Those of its counts that have a past, by name."""
        return limit_history.counts_of(self.scope, self.owner, self.limits)


class LimitRestore:
    """Everything on the event loop but the reading. `on_begun(owners)` is called when limits of
    theirs that had not begun do now."""

    def __init__(
        self,
        engine: Engine,
        store: LimitStore,
        on_begun: Callable[[frozenset[Owner]], None],
        gateway_id: str = "",
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._store = store
        self._on_begun = on_begun
        self._gateway_id = gateway_id
        self._wall_clock = wall_clock
        self._clock = clock
        self._begun: dict[Owner, Counts] = {}
        self._wanted: dict[Owner, Counts] = {}
        self._left: dict[str, Reservation] = {}
        self._reading: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Future[None]] = set()

    def forget(self) -> None:
        """All are new again."""
        self._begun.clear()

    async def begin(self, owned: Iterable[Owned]) -> None:
        """Begin these now; returns when they have. Raises SQLAlchemyError."""
        counts = {(one.scope, one.owner): one.counts for one in owned}
        await self._tell({name: c for found in counts.values() for name, c in found.items()})
        self._begun.update((owner, found) for owner, found in counts.items() if found)

    async def carry_left(self) -> None:
        """Count what an earlier life of this gateway left open. Raises SQLAlchemyError."""
        if not self._gateway_id:
            return
        now_at = self._wall_clock()
        for record in await asyncio.to_thread(self._read_left):
            taken = tuple(self._taken(record, now_at))
            if taken:
                self._left[record.request_id] = Reservation(record.request_id, taken)
        if self._left:
            await self._store.carry(list(self._left.values()), self._clock())

    def begun(self, owned: Owned) -> Limits:
        """The limits that hold now: all but those that have yet to begin, which are wanted from
        here on. What is not limited any more has to begin anew when it is again."""
        owner, counts = (owned.scope, owned.owner), owned.counts
        had = self._begun.get(owner, {})
        kept = {name: count for name, count in counts.items() if name in had}
        if kept:
            self._begun[owner] = kept
        else:
            self._begun.pop(owner, None)
        new = {name: count for name, count in counts.items() if name not in had}
        self._wanted.pop(owner, None)
        if not new:
            return owned.limits
        self._wanted[owner] = new
        self._work()
        return replace(owned.limits, **dict.fromkeys((count.field for count in new.values()), 0))

    def drop(self, owner: Owner) -> None:
        """Nobody can draw on its limits any more; should somebody again, they begin anew."""
        self._begun.pop(owner, None)
        self._wanted.pop(owner, None)

    async def settled(self) -> None:
        """Returns when nothing is wanted any more."""
        while self._reading is not None and not self._reading.done():
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
        used = Used(
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

    def _unreserved(self, posting: Posting, used: Used, held: frozenset[str]) -> list[Past]:
        pasts = []
        for owner in limit_history.owners_of(posting):
            for name, count in self._begun.get(owner, {}).items():
                if isinstance(count, DayCount):
                    amount = used.of(count.rate.meter)
                    pasts.append(Past(name, DAY_S, ((0.0, amount),)))
                elif name not in held:
                    period = used.month if count.kind == "month" else used.day
                    pasts.append(Past(name, 0, period=period, spent=used.cost_nanos))
        return pasts

    def _taken(self, record: OpenRecord, now_at: float) -> Iterable[Taken]:
        for owner in limit_history.owners_of(record):
            for name, count in self._begun.get(owner, {}).items():
                if isinstance(count, Budget) and record.reserved_nanos:
                    period = period_of(count.kind, now_at).number
                    yield Taken(name, "cost", 0, period, record.reserved_nanos, count.kind)

    def _work(self) -> None:
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._begin_wanted(), name="limits-history")

    async def _begin_wanted(self) -> None:
        while self._wanted:
            await asyncio.sleep(0)  # All of one view together.
            wanted, self._wanted = self._wanted, {}
            try:
                await self._tell({n: c for counts in wanted.values() for n, c in counts.items()})
            except SQLAlchemyError as error:
                logger.warning("limits that are new wait for the ledger: %s", error)
                self._wanted = {**wanted, **self._wanted}
                await asyncio.sleep(RETRY_S)
                continue
            for owner, counts in wanted.items():
                self._begun[owner] = {**self._begun.get(owner, {}), **counts}
            self._on_begun(frozenset(wanted))

    async def _tell(self, counts: Mapping[str, DayCount | Budget]) -> None:
        if counts:
            pasts = await asyncio.to_thread(self._read, counts, None)
            await self._store.restore(pasts, self._clock())

    def _read(
        self, counts: Mapping[str, DayCount | Budget], before_at: float | None
    ) -> Sequence[Past]:
        """In a thread: one look at the ledger for all of them."""
        now_at = self._wall_clock()
        days = {name: c for name, c in counts.items() if isinstance(c, DayCount)}
        budgets = {name: c for name, c in counts.items() if isinstance(c, Budget)}
        periods = {k: period_of(k, now_at) for k in PERIOD_KINDS}
        amounts: dict[str, list[tuple[float, int]]] = {}
        with reading(self._engine) as session:
            if days:
                usage = ledger.usage_by_slot(session, now_at - DAY_S - SLOT_S, SLOT_S)
                if before_at is not None:
                    usage = [row for row in usage if row.began_at < before_at]
                amounts = limit_history.amounts(days, usage)
            spent = limit_history.spent(
                budgets,
                {
                    kind: spending.spend_since(session, periods[kind].began_at, before_at)
                    for kind in {budget.kind for budget in budgets.values()}
                },
            )
        # As if all of a slot had come at its end: a store cuts its slots elsewhere.
        return [
            Past(name, DAY_S, tuple((max(0.0, now_at - at - SLOT_S), n) for at, n in by_slot))
            for name, by_slot in amounts.items()
        ] + [
            Past(name, 0, period=periods[budgets[name].kind].number, spent=nanos)
            for name, nanos in spent.items()
        ]

    def _read_left(self) -> list[OpenRecord]:
        with reading(self._engine) as session:
            return ledger.open_left(session, self._gateway_id)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
