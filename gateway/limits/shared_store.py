"""Limits over several gateways: counts in Redis while it answers, this gateway's share otherwise.

    shared     every call goes to Redis, with a deadline; one that is late is made once more
    degraded   Redis does not answer: rates and places are counted here, against this gateway's
               share of each limit; budgets are refused (or granted unseen, where the operator has
               said so). One probe at a time finds out when it is back.

What this gateway grants is counted here as well, whoever has granted it: so a share that is used up
is known when Redis goes away. What Redis has not counted is reported before it is asked again, in
`shared` too, where one request may have been granted here because its two calls were late: Redis
never grants what this gateway has granted already. Where Redis has lost its counts (another epoch),
minutes, places and budgets begin with what each gateway reports; one of them restores the rest from
the ledger (`loss`), and until it has, budgets are as in `degraded`.

What a call has changed is not known where its answer did not come. So reservations go by the ids
of requests, and what is added by names: asking again changes nothing, and what Redis holds that
nobody here knows is given back. A gateway that dies keeps nothing: see limits.lua.

Which store a process opens, and what runs beside a shared one, is limit_stores.py's.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeVar

from gateway.limits.policy.rate_limit import (
    MINUTE_S,
    UNKNOWN_RETRY_S,
    Draw,
    LimitFigures,
    Refusal,
    Reservation,
    UsedAmounts,
)
from gateway.limits.redis_store import Answer, Lost, RedisLimits
from gateway.limits.shares import Shares, refusal_of
from gateway.limits.store import LimitDecision, Loss, MemoryStore, Past
from gateway.limits.unsynced_usage import EndedReservation, UnsyncedUsage
from gateway.redis.redis_script import Breaker, Unreachable

logger = logging.getLogger(__name__)

PATIENCE = (1.0, 4.0)
"""Times the deadline, for a request's first call and its second."""
CATCH_UP_S = 0.5
"""How long a request waits until Redis knows what was counted here."""
MAX_CLOCK_OFF_S = 60.0
PIECE = 100
"""Reservations or counts reported in one call: Redis serves nobody else meanwhile."""

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Backoff:
    """Seconds. `beat_s`: how often a gateway says that it lives; one that was silent for `lease_s`
    is dead, and its places are free. What a dead gateway's requests may still cost is counted for
    `orphan_s` at most. After a loss all gateways have reported within `grace_s` what is open and
    posted; one restores, for `lock_s` at most. `reconcile_s`: how often what Redis holds in our
    name is compared with what we hold."""

    beat_s: float = 1.0
    lease_s: float = 10.0
    orphan_s: float = 3600.0
    grace_s: float = 3.0
    lock_s: float = 30.0
    reconcile_s: float = 10.0


PACE = Backoff()


class SharedStore:
    """See LimitStore. `fail_open`: budgets are granted unseen while nobody can tell them.
    `num_gateways`: how many share the limits, as far as is known; at first, what is assumed."""

    def __init__(
        self,
        redis: RedisLimits,
        clock: Callable[[], float],
        fail_open: bool = False,
        num_gateways: int = 1,
        pace: Backoff = PACE,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._redis = redis
        self._clock, self._wall_clock = clock, wall_clock
        self._fail_open = fail_open
        self._shares = Shares(num_gateways)
        self._pace = pace
        self._breaker = Breaker()
        self._failure: Exception | None = None
        self._epoch, self._is_ready = "", False
        self._local = MemoryStore()
        self._unsynced = UnsyncedUsage()
        self._joining, self._paying = asyncio.Lock(), asyncio.Lock()
        self._catching_up: asyncio.Task[None] | None = None
        self._is_clock_off = False

    async def start(self) -> None:
        """Meet the other gateways, and free what an earlier life of this one held."""
        try:
            await self._join()
            await self._maintain("start")
        except Unreachable as error:
            self._on_failure(error)

    async def run(self) -> None:
        """For ever: say that this gateway lives, find Redis again, tell what is behind."""
        reconciled_s = self._clock()
        while True:
            now_s = self._clock()
            wait_s = (
                self._breaker.probe_at_s - now_s if self._breaker.is_open else self._pace.beat_s
            )
            await asyncio.sleep(max(0.01, wait_s))
            await self.beat()
            if self._clock() - reconciled_s >= self._pace.reconcile_s:
                reconciled_s = self._clock()
                await self._reconcile()

    async def beat(self) -> None:
        """Once of `run`; the probe while Redis is out of reach."""
        is_probe = self._breaker.is_open
        try:
            await self._join()
            await self._flush()
        except Unreachable as error:
            if is_probe:
                self._breaker.probe_failed(self._clock())
            else:
                self._on_failure(error)

    async def close(self) -> None:
        """At the end of the process."""
        await self._redis.close()

    async def reserve(
        self, reservation_id: str, draws: Sequence[Draw], now_s: float
    ) -> LimitDecision:
        """See LimitStore."""
        args = {"id": reservation_id, "draws": draws, "fail_open": self._fail_open}
        was_asked = False
        self._unsynced.asked.add(reservation_id)
        try:
            for patience in PATIENCE:
                if self._breaker.is_open or not await self._is_caught_up():
                    break
                was_asked = True
                try:
                    answer = await self._ask("reserve", patience, **args)
                except Unreachable as error:
                    self._on_failure(error)
                    continue
                decision = self._decision(reservation_id, draws, answer)
                if decision.reservation is not None:
                    await self._local.carry([_without_money(decision.reservation)], now_s)
                here = await self._local.figures(draws, now_s)
                self._shares.note(draws, decision.figures, here, now_s)
                return decision
        except asyncio.CancelledError:
            if was_asked:
                self._unsynced.in_doubt(reservation_id)
            raise
        finally:
            self._unsynced.asked.discard(reservation_id)
        decision = await self._reserve_locally(reservation_id, draws, now_s)
        if was_asked:
            self._unsynced.in_doubt(reservation_id)
        return decision

    async def settle(self, reservation: Reservation, used: UsedAmounts) -> None:
        """See LimitStore."""
        await self._close(reservation, used)

    async def release(self, reservation: Reservation) -> None:
        """See LimitStore."""
        await self._close(reservation, None)

    async def figures(self, draws: Sequence[Draw], now_s: float) -> list[LimitFigures]:
        """See LimitStore."""
        if not self._breaker.is_open:
            try:
                return list((await self._ask("figures", draws=draws)).figures)
            except Unreachable as error:
                self._on_failure(error)
        shares = [self._shares.of(draw, now_s) for draw in draws]
        figures = await self._local.figures(shares, now_s)
        return [replace(f, limit=d.limit) for f, d in zip(figures, draws, strict=True)]

    async def carry(self, reservations: Sequence[Reservation], now_s: float) -> None:
        """See LimitStore. What cannot be reported now is reported when Redis is back."""
        self._unsynced.open.update((one.id, one) for one in reservations)
        try:
            for piece in _pieces(reservations):
                await self._maintain("carry", reservations=piece)
        except Unreachable as error:
            self._on_failure(error)
            # Those that were not closed meanwhile.
            left = [one for one in reservations if one.id in self._unsynced.open]
            self._unsynced.local_ids.update(one.id for one in left)
            await self._local.carry(left, now_s)

    async def restore(self, pasts: Sequence[Past], now_s: float) -> None:
        """See LimitStore."""
        try:
            for piece in _pieces(pasts):
                await self._maintain("restore", pasts=piece)
        except Unreachable as error:
            self._on_failure(error)
            self._unsynced.pasts.update((past.name, past) for past in pasts)

    async def add(self, pasts: Sequence[Past], now_s: float) -> None:
        """See LimitStore."""
        for past in pasts:
            self._unsynced.owe(past, self._wall_clock())
        try:
            if not self._breaker.is_open:
                await self._pay()
        except Lost:
            await self.beat()  # which joins again, and tells what is behind
        except Unreachable as error:
            self._on_failure(error)

    async def loss(self) -> Loss | None:
        """See LimitStore. Redis lets one gateway at a time, when all have had time to be heard."""
        if self._is_ready or self._breaker.is_open:
            return None
        try:
            pace = self._pace
            answer = await self._maintain("claim", grace_s=pace.grace_s, lock_s=pace.lock_s)
        except Unreachable as error:
            self._on_failure(error)
            return None
        return None if answer.began_at is None else Loss(answer.epoch, answer.began_at)

    async def restore_loss(self, loss: Loss, pasts: Sequence[Past], now_s: float) -> None:
        """See LimitStore. What is interrupted is claimed again, by this gateway or another."""
        pieces = list(_pieces(pasts)) or [()]
        try:
            for number, piece in enumerate(pieces, 1):
                done = number == len(pieces)
                await self._redis.maintain("restore_loss", loss.epoch, pasts=piece, done=done)
        except Lost:
            return
        except Unreachable as error:
            self._on_failure(error)
            return
        self._is_ready = self._epoch == loss.epoch
        logger.info("limits: restored the counts that Redis had lost, counts=%d", len(pasts))

    @property
    def is_degraded(self) -> bool:
        """See LimitStore; also while budgets are not known."""
        return self.is_out_of_reach or not self._is_ready

    @property
    def num_open(self) -> int:
        """See LimitStore."""
        return len(self._unsynced.open)

    @property
    def num_gateways(self) -> int:
        """How many share the limits, as far as is known."""
        return self._shares.num_gateways

    @property
    def is_out_of_reach(self) -> bool:
        """Redis does not answer."""
        return self._breaker.is_open

    @property
    def num_behind(self) -> int:
        """Ends of reservations that Redis has not been told."""
        return len(self._unsynced.ended)

    async def _is_caught_up(self) -> bool:
        """Whether Redis knows all that was counted here. What it does not is reported first: it
        would grant that a second time."""
        if self._unsynced.is_behind:
            if self._catching_up is None or self._catching_up.done():
                self._catching_up = asyncio.create_task(self._catch_up(), name="limits-catch-up")
            await asyncio.wait([self._catching_up], timeout=CATCH_UP_S)
        return not self._unsynced.is_behind and not self._breaker.is_open

    async def _catch_up(self) -> None:
        try:
            async with self._joining:
                if not self._breaker.is_open:
                    await self._report_pasts()
                    await self._report_open()
            await self._flush()  # What Redis may hold twice. Unlocked: it may have to join.
        except Lost:
            await self.beat()  # which joins again, and tells what is behind
        except Unreachable as error:
            self._on_failure(error)

    async def _ask(self, name: str, patience: float = 1.0, **args: Any) -> Answer:
        """For a request that waits. Raises Unreachable."""
        for _ in range(2):
            epoch = self._epoch
            try:
                answer = await self._redis.call(name, epoch, patience, **args)
            except Lost:
                await self._join(epoch)
            else:
                self._breaker.num_late = 0
                return answer
        raise Unreachable("its counts are lost again and again")

    async def _maintain(self, name: str, **args: Any) -> Answer:
        """For nobody who waits. Raises Unreachable."""
        self._check_reachable()
        for _ in range(2):
            epoch = self._epoch
            try:
                return await self._redis.maintain(name, epoch, **args)
            except Lost:
                await self._join(epoch)
        raise Unreachable("its counts are lost again and again")

    async def _join(self, lost: str | None = None) -> None:
        """Say that we live; where the epoch is another, or Redis was away, tell what is open.
        `lost`: an epoch that is over; nothing is to be done where we know. Raises Unreachable."""
        async with self._joining:
            if lost is not None and lost != self._epoch:
                return
            pace = self._pace
            answer = await self._redis.join(lease_s=pace.lease_s, orphan_s=pace.orphan_s)
            self._shares.num_gateways = max(1, answer.num_gateways)
            self._compare_clocks(answer.at_s)
            self._is_ready = answer.ready
            if answer.epoch != self._epoch:
                self._begin_epoch(answer)
            try:
                await self._report_pasts()  # First: a budget that is new would be granted unseen.
                if self._breaker.is_open:
                    logger.info("limits: Redis is back, counts are shared again")
                self._breaker.succeeded()  # From here on nothing is counted locally that is new.
                if self._unsynced.is_behind:
                    await self._report_open()
            except Lost as error:
                raise Unreachable("its counts are lost again") from error

    def _begin_epoch(self, answer: Answer) -> None:
        """All that is open is to be reported again; of what has ended, what no ledger will."""
        if self._epoch:
            logger.warning("limits: Redis has lost its counts, restoring them")
        self._epoch = answer.epoch
        self._unsynced.begin_epoch(answer.began_at or 0.0, answer.ready)
        for past in self._local.settled_in(MINUTE_S, self._clock()):
            self._unsynced.owe(past, self._wall_clock())

    def _compare_clocks(self, redis_at: float) -> None:
        """Budgets go by this gateway's clock, as its postings do."""
        ahead_s = self._wall_clock() - redis_at
        was_off, self._is_clock_off = self._is_clock_off, abs(ahead_s) > MAX_CLOCK_OFF_S
        if self._is_clock_off and not was_off:
            says = "limits: the clock of this gateway is %.0f s ahead of Redis's: set the wrong one"
            logger.warning(says, ahead_s)

    async def _report_pasts(self) -> None:
        """What counts begin with and could not be reported. Raises Unreachable or Lost."""
        for piece in _pieces(list(self._unsynced.pasts.values())):
            await self._redis.maintain("restore", self._epoch, pasts=piece)
            self._unsynced.restored(piece)

    async def _report_open(self) -> None:
        """What is counted here only. Raises Unreachable or Lost."""
        unsynced = self._unsynced
        while unsynced.local_ids:
            self._check_reachable()
            ids = list(islice(unsynced.local_ids, PIECE))
            reported = [unsynced.open[one] for one in ids]
            await self._redis.maintain("carry", self._epoch, reservations=reported)
            unsynced.report(ids)
        await self._pay()

    def _check_reachable(self) -> None:
        """While everything is counted here, reporting that would never end. Raises Unreachable."""
        if self._breaker.is_open:
            raise Unreachable("it was not asked")

    async def _pay(self) -> None:
        """What is owed. Reported again where no answer came. Raises Unreachable or Lost."""
        async with self._paying:
            while owed := self._unsynced.bundle(secrets.token_hex(8), PIECE, self._wall_clock()):
                self._check_reachable()
                await self._redis.maintain("add", self._epoch, bundle=owed[0], pasts=owed[1])
                self._unsynced.paid(owed[0])

    def _decision(
        self, reservation_id: str, draws: Sequence[Draw], answer: Answer
    ) -> LimitDecision:
        if answer.taken is not None:
            reservation = self._unsynced.open[reservation_id] = Reservation(
                reservation_id, answer.taken
            )
            if answer.epoch != self._epoch:  # which ended while the answer was under way
                self._unsynced.local_ids.add(reservation_id)
            return LimitDecision(answer.figures, reservation)
        if answer.unknown is not None:
            return _unknown(draws[answer.unknown], is_past=answer.is_past)
        if answer.refused is None:
            raise AssertionError("Redis neither granted nor refused")
        refusal = Refusal(draws[answer.refused], answer.used, answer.wait_s)
        return LimitDecision(answer.figures, refusal=refusal)

    async def _reserve_locally(
        self, reservation_id: str, draws: Sequence[Draw], now_s: float
    ) -> LimitDecision:
        if not self._fail_open:
            budget = next((draw for draw in draws if draw.meter == "cost"), None)
            if budget is not None:
                return _unknown(budget)
        shares = [self._shares.of(draw, now_s) for draw in draws]
        decision = await self._local.reserve(reservation_id, shares, now_s)
        figures = tuple(
            replace(f, limit=d.limit) for f, d in zip(decision.figures, draws, strict=True)
        )
        if decision.refusal is not None:
            whole = draws[shares.index(decision.refusal.draw)]
            return LimitDecision(figures, refusal=refusal_of(whole, decision.refusal))
        if decision.reservation is not None:
            self._unsynced.open[reservation_id] = decision.reservation
            self._unsynced.local_ids.add(reservation_id)
        return LimitDecision(figures, decision.reservation)

    async def _close(self, reservation: Reservation, used: UsedAmounts | None) -> None:
        held = self._unsynced.open.pop(reservation.id, None)
        if held is None:
            return
        if used is None:
            await self._local.release(held)
        else:
            await self._local.settle(held, used)
        if reservation.id in self._unsynced.local_ids:
            self._unsynced.end_local(held, used)
            return
        ended = self._unsynced.ended[held.id] = EndedReservation(held, used)
        try:
            await self._report_ends([ended])  # Others report theirs themselves.
        except Unreachable as error:
            self._on_failure(error)

    async def _flush(self) -> None:
        """Report what has ended by now. Raises Unreachable; then it is reported later."""
        for piece in _pieces(list(self._unsynced.ended.values())):
            await self._report_ends(piece)

    async def _report_ends(self, ended: Sequence[EndedReservation]) -> None:
        if not self._breaker.is_open:
            reported = [{"id": one.reservation.id, "used": one.used} for one in ended]
            await self._ask("close", ended=reported)
            self._unsynced.report_ends(ended)

    async def _reconcile(self) -> None:
        """Give back what Redis holds in our name and nobody here knows, seen twice."""
        if self._breaker.is_open:
            return
        try:
            self._unsynced.compare((await self._maintain("own")).ids)
            await self._flush()
        except Unreachable as error:
            self._on_failure(error)

    def _on_failure(self, error: Unreachable) -> None:
        is_another = error is not self._failure  # one call's failure is that of all requests in it
        self._failure = error
        if is_another and self._breaker.failed(self._clock(), error.is_late):
            says = "limits: Redis is out of reach (%s), this gateway counts its share: one of %d"
            logger.warning(says, error, self.num_gateways)


def _without_money(reservation: Reservation) -> Reservation:
    """Of budgets nobody has a share."""
    rates = tuple(taken for taken in reservation.taken if taken.meter != "cost")
    return Reservation(reservation.id, rates)


def _unknown(draw: Draw, *, is_past: bool = False) -> LimitDecision:
    return LimitDecision((), refusal=Refusal(draw, 0, UNKNOWN_RETRY_S, True, is_past))


def _pieces(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    return (items[start : start + PIECE] for start in range(0, len(items), PIECE))
