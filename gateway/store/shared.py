"""Limits over several gateways: counts in Redis while it answers, this gateway's share otherwise.

    shared     every call goes to Redis, with a deadline
    degraded   Redis does not answer: rates and places are counted here, against this gateway's
               share of each limit; budgets are refused (or granted unseen, where the operator has
               said so). One probe at a time finds out when it is back.

Back in `shared`, what is open is told to Redis, and what was used of days and budgets meanwhile.
Where Redis has lost its counts (another epoch), places and budgets begin with what is open at each
gateway; one of them restores the rest from the ledger (`loss`), and until it has, budgets are as in
`degraded`.

What a call has changed is not known where its answer did not come. So reservations go by the ids
of requests, and what is added by names: asking again changes nothing, and what Redis holds that
nobody here knows is given back. A gateway that dies keeps nothing: see limits.lua.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, TypeVar

from gateway.policy.rate_limit import Draw, Figures, Refusal, Reservation, Used
from gateway.store.arrears import Arrears, Ended
from gateway.store.base import Decision, Loss, Past
from gateway.store.breaker import Breaker
from gateway.store.memory import MemoryStore
from gateway.store.pace import PACE, Pace
from gateway.store.redis import Answer, Lost, RedisLimits, Unreachable

logger = logging.getLogger(__name__)

UNKNOWN_RETRY_S = 1.0
AGAIN = "/again"
"""Behind the id of what is counted here because nobody knows whether Redis has counted it."""
PIECE = 100
"""Reservations or counts told in one call: Redis serves nobody else meanwhile."""

_Item = TypeVar("_Item")


class SharedStore:
    """See store/base.py. `fail_open`: budgets are granted unseen while nobody can tell them.
    `num_gateways`: how many share the limits, as far as is known; at first, what is assumed."""

    def __init__(
        self,
        redis: RedisLimits,
        clock: Callable[[], float],
        fail_open: bool = False,
        num_gateways: int = 1,
        pace: Pace = PACE,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._redis = redis
        self._clock, self._wall_clock = clock, wall_clock
        self._fail_open = fail_open
        self.num_gateways = num_gateways
        self._pace = pace
        self._breaker = Breaker()
        self._failure: Exception | None = None
        self._epoch, self._is_ready = "", False
        self._local = MemoryStore()
        self._arrears = Arrears()
        self._joining, self._paying = asyncio.Lock(), asyncio.Lock()

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

    async def reserve(self, reservation_id: str, draws: Sequence[Draw], now_s: float) -> Decision:
        """See LimitStore."""
        if not draws:
            return Decision((), Reservation(reservation_id, ()))
        if not self._breaker.is_open:
            try:
                answer = await self._ask(
                    "reserve", id=reservation_id, draws=draws, fail_open=self._fail_open
                )
            except Unreachable as error:
                self._on_failure(error)
                self._arrears.in_doubt(reservation_id)
                reservation_id += AGAIN
            except asyncio.CancelledError:
                self._arrears.in_doubt(reservation_id)
                raise
            else:
                return self._decision(reservation_id, draws, answer)
        return await self._reserve_locally(reservation_id, draws, now_s)

    async def settle(self, reservation: Reservation, used: Used) -> None:
        """See LimitStore."""
        await self._close(reservation, used)

    async def release(self, reservation: Reservation) -> None:
        """See LimitStore."""
        await self._close(reservation, None)

    async def figures(self, draws: Sequence[Draw], now_s: float) -> list[Figures]:
        """See LimitStore."""
        if not self._breaker.is_open:
            try:
                return list((await self._ask("figures", draws=draws)).figures)
            except Unreachable as error:
                self._on_failure(error)
        figures = await self._local.figures([self._share(draw) for draw in draws], now_s)
        return [replace(f, limit=d.limit) for f, d in zip(figures, draws, strict=True)]

    async def carry(self, reservations: Sequence[Reservation], now_s: float) -> None:
        """See LimitStore. What cannot be told now is told when Redis is back."""
        self._arrears.open.update((one.id, one) for one in reservations)
        try:
            for piece in _pieces(reservations):
                await self._maintain("carry", reservations=piece)
        except Unreachable as error:
            self._on_failure(error)
            # Those that were not closed meanwhile.
            left = [one for one in reservations if one.id in self._arrears.open]
            self._arrears.local_ids.update(one.id for one in left)
            await self._local.carry(left, now_s)

    async def restore(self, pasts: Sequence[Past], now_s: float) -> None:
        """See LimitStore."""
        try:
            for piece in _pieces(pasts):
                await self._maintain("restore", pasts=piece)
        except Unreachable as error:
            self._on_failure(error)
            self._arrears.pasts.update((past.name, past) for past in pasts)

    async def add(self, pasts: Sequence[Past], now_s: float) -> None:
        """See LimitStore."""
        for past in pasts:
            self._arrears.owe(past, self._wall_clock())
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
        logger.info("limits: what Redis had lost is restored, counts=%d", len(pasts))

    @property
    def is_degraded(self) -> bool:
        """See LimitStore; also while budgets cannot be told."""
        return self.is_out_of_reach or not self._is_ready

    @property
    def num_open(self) -> int:
        """See LimitStore."""
        return len(self._arrears.open)

    @property
    def is_out_of_reach(self) -> bool:
        """Redis does not answer."""
        return self._breaker.is_open

    @property
    def num_behind(self) -> int:
        """Ends of reservations that Redis has not been told."""
        return len(self._arrears.ended)

    async def _ask(self, name: str, **args: Any) -> Answer:
        """For a request that waits. Raises Unreachable."""
        for _ in range(2):
            epoch = self._epoch
            try:
                answer = await self._redis.call(name, epoch, **args)
            except Lost:
                await self._join(epoch)
            else:
                self._breaker.num_late = 0
                return answer
        raise Unreachable("its counts are lost again and again")

    async def _maintain(self, name: str, **args: Any) -> Answer:
        """For nobody who waits. Raises Unreachable."""
        if self._breaker.is_open:
            raise Unreachable("it was not asked")
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
            self.num_gateways = max(1, answer.num_gateways)
            self._is_ready = answer.ready
            if answer.epoch != self._epoch:
                self._begin_epoch(answer)
            try:
                await self._tell_pasts()  # First: a budget that is new would be granted unseen.
                if self._breaker.is_open:
                    logger.info("limits: Redis answers, counts are shared again")
                self._breaker.succeeded()  # From here on nothing is counted locally that is new.
                if self._arrears.is_behind:
                    await self._tell_open()
            except Lost as error:
                raise Unreachable("its counts are lost again") from error

    def _begin_epoch(self, answer: Answer) -> None:
        """All that is open is to be told again; of what has ended, what no ledger will."""
        if self._epoch:
            logger.warning("limits: Redis has lost its counts, they are restored")
        self._epoch = answer.epoch
        self._arrears.begin_epoch(answer.began_at or 0.0, answer.ready)

    async def _tell_pasts(self) -> None:
        """What counts begin with and could not be told. Raises Unreachable or Lost."""
        for piece in _pieces(list(self._arrears.pasts.values())):
            await self._redis.maintain("restore", self._epoch, pasts=piece)
            self._arrears.restored(piece)

    async def _tell_open(self) -> None:
        """What is counted here only. Raises Unreachable or Lost."""
        arrears = self._arrears
        while arrears.local_ids:
            ids = list(islice(arrears.local_ids, PIECE))
            told = [arrears.open[one] for one in ids]
            await self._redis.maintain("carry", self._epoch, reservations=told)
            arrears.told(ids)
        self._local = MemoryStore()
        await self._pay()

    async def _pay(self) -> None:
        """What is owed. Told again where no answer came. Raises Unreachable or Lost."""
        async with self._paying:
            while owed := self._arrears.bundle(secrets.token_hex(8), PIECE):
                await self._redis.maintain("add", self._epoch, bundle=owed[0], pasts=owed[1])
                self._arrears.paid(owed[0])

    def _decision(self, reservation_id: str, draws: Sequence[Draw], answer: Answer) -> Decision:
        if answer.taken is not None:
            reservation = self._arrears.open[reservation_id] = Reservation(
                reservation_id, answer.taken
            )
            if answer.epoch != self._epoch:  # which ended while the answer was under way
                self._arrears.local_ids.add(reservation_id)
            return Decision(answer.figures, reservation)
        if answer.unknown is not None:
            return _unknown(draws[answer.unknown])
        if answer.refused is None:
            raise AssertionError("Redis neither granted nor refused")
        refusal = Refusal(draws[answer.refused], answer.used, answer.wait_s)
        return Decision(answer.figures, refusal=refusal)

    async def _reserve_locally(
        self, reservation_id: str, draws: Sequence[Draw], now_s: float
    ) -> Decision:
        if not self._fail_open:
            budget = next((draw for draw in draws if draw.meter == "cost"), None)
            if budget is not None:
                return _unknown(budget)
        shares = [self._share(draw) for draw in draws]
        decision = await self._local.reserve(reservation_id, shares, now_s)
        figures = tuple(
            replace(f, limit=d.limit) for f, d in zip(decision.figures, draws, strict=True)
        )
        if decision.refusal is not None:
            whole = draws[shares.index(decision.refusal.draw)]
            return Decision(figures, refusal=replace(decision.refusal, draw=whole))
        if decision.reservation is not None:
            self._arrears.open[reservation_id] = decision.reservation
            self._arrears.local_ids.add(reservation_id)
        return Decision(figures, decision.reservation)

    def _share(self, draw: Draw) -> Draw:
        """What one of the gateways may grant; never less than one request that fits the whole."""
        if draw.meter == "cost":  # granted unseen
            return replace(draw, limit=max(draw.limit, draw.cost))
        share = max(draw.limit // self.num_gateways, min(draw.cost, draw.limit), 1)
        return replace(draw, limit=share)

    async def _close(self, reservation: Reservation, used: Used | None) -> None:
        held = self._arrears.open.pop(reservation.id, None)
        if held is None:
            return
        if reservation.id in self._arrears.local_ids:
            self._arrears.local_ids.discard(reservation.id)
            if used is None:
                await self._local.release(held)
            else:
                await self._local.settle(held, used)
                self._arrears.owe_used(held, used)
            return
        ended = self._arrears.ended[held.id] = Ended(held, used)
        try:
            await self._tell_ends([ended])  # Of others, who tell of themselves, nothing.
        except Unreachable as error:
            self._on_failure(error)

    async def _flush(self) -> None:
        """Tell what has ended by now. Raises Unreachable; then it is told later."""
        for piece in _pieces(list(self._arrears.ended.values())):
            await self._tell_ends(piece)

    async def _tell_ends(self, ended: Sequence[Ended]) -> None:
        if not self._breaker.is_open:
            told = [{"id": one.reservation.id, "used": one.used} for one in ended]
            await self._ask("close", ended=told)
            self._arrears.told_ends(ended)

    async def _reconcile(self) -> None:
        """Give back what Redis holds in our name and nobody here knows, seen twice."""
        if self._breaker.is_open:
            return
        try:
            self._arrears.compare((await self._maintain("own")).ids)
            await self._flush()
        except Unreachable as error:
            self._on_failure(error)

    def _on_failure(self, error: Unreachable) -> None:
        is_another = error is not self._failure  # one call's failure is that of all requests in it
        self._failure = error
        if is_another and self._breaker.failed(self._clock(), error.is_late):
            says = "limits: Redis is out of reach (%s), this gateway counts its share: one of %d"
            logger.warning(says, error, self.num_gateways)


def _unknown(draw: Draw) -> Decision:
    return Decision((), refusal=Refusal(draw, 0, UNKNOWN_RETRY_S, True))


def _pieces(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    return (items[start : start + PIECE] for start in range(0, len(items), PIECE))
