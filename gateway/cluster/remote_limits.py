"""Counts of limits that live in the dispatcher's process: the store of several gateway processes
without a Redis.

Each call is a message (dispatcher_protocol.py) and its answer; the counts are a `MemoryStore` over
there. What a dispatcher's death does to them:

    open reservations   every gateway process hands its own in again (`carry`): no place at one
                        time leaks, no budget forgets what requests under way may still cost
    days and budgets    the next dispatcher begins with what the ledger knows, as after a restart,
                        and reads that again a moment later, for what was being posted just then
    minutes             begin anew, but for open reservations

Calls that were not answered are made again: a reservation is named by its request and closed once,
so that neither is counted twice. New requests wait meanwhile, at most WAIT_S, and leave nothing
where nobody can have heard of them; what ends is closed in the background after CLOSE_WAIT_S. So
what is kept for a dispatcher that does not come is bounded by what was open when the last one went.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import msgspec

from gateway.cluster.dispatcher_client import DispatcherLink
from gateway.cluster.dispatcher_protocol import (
    Add,
    Carry,
    Close,
    Done,
    Figure,
    LimitCall,
    Reserve,
    Restore,
    ToGateway,
)
from gateway.errors import UNAVAILABLE, ApiError
from gateway.limits.policy.rate_limit import Draw, LimitFigures, Reservation, UsedAmounts
from gateway.limits.store import LimitDecision, Loss, Past

WAIT_S = 5.0
CLOSE_WAIT_S = 1.0
SETTLED_KEEP_S = 2.0
"""So long a posting may take into the database and be known to the next dispatcher all the same."""
RESTORE_SLICE = 1000
"""Counts a message: a frame is bounded, and a connection would end at each attempt to say more."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Call:
    """`is_sent`: somebody may have heard of it."""

    message: LimitCall
    answer: "asyncio.Future[Done]"
    is_sent: bool = False


class RemoteStore:
    """See limits/store.py. Of one gateway process, on its event loop. The time of a call is the
    dispatcher's: this machine's clock may have begun elsewhere."""

    def __init__(self, link: DispatcherLink) -> None:
        self._link = link
        self._calls: dict[int, _Call] = {}
        self._open: dict[str, Reservation] = {}
        self._settled: deque[tuple[float, Reservation]] = deque()
        self._last_call = 0
        link.on_message.append(self._on_message)
        link.on_up.append(self._on_up)

    async def reserve(
        self, reservation_id: str, draws: Sequence[Draw], now_s: float
    ) -> LimitDecision:
        """See LimitStore. Raises ApiError UNAVAILABLE where nobody answers in time."""
        done = await self._ask(lambda call: Reserve(call, reservation_id, list(draws)), WAIT_S)
        if done is None or done.decision is None:
            message = "rate limits cannot be checked at the moment: try again later"
            raise ApiError(UNAVAILABLE, message, retry_after_s=1.0)
        return done.decision

    async def settle(self, reservation: Reservation, used: UsedAmounts) -> None:
        """See LimitStore."""
        await self._ask(lambda call: Close(call, reservation, used), CLOSE_WAIT_S, keep=True)

    async def release(self, reservation: Reservation) -> None:
        """See LimitStore."""
        await self._ask(lambda call: Close(call, reservation, None), CLOSE_WAIT_S, keep=True)

    async def figures(self, draws: Sequence[Draw], now_s: float) -> list[LimitFigures]:
        """See LimitStore; none where nobody answers."""
        done = await self._ask(lambda call: Figure(call, list(draws)), WAIT_S)
        return [] if done is None else done.figures

    async def carry(self, reservations: Sequence[Reservation], now_s: float) -> None:
        """See LimitStore."""
        held = list(reservations)
        self._open.update((one.id, one) for one in held)
        await self._ask(lambda call: Carry(call, held), WAIT_S, keep=True)

    async def restore(self, pasts: Sequence[Past], now_s: float) -> None:
        """See LimitStore."""
        for begin in range(0, len(pasts), RESTORE_SLICE):
            some = list(pasts[begin : begin + RESTORE_SLICE])
            await self._ask(partial(Restore, pasts=some), WAIT_S, keep=True)

    async def add(self, pasts: Sequence[Past], now_s: float) -> None:
        """See LimitStore."""
        await self._ask(lambda call: Add(call, list(pasts)), WAIT_S, keep=True)

    async def loss(self) -> Loss | None:
        """The dispatcher's process restores what it needs."""
        return None

    async def restore_loss(self, loss: Loss, pasts: Sequence[Past], now_s: float) -> None:
        """Never asked for."""
        raise NotImplementedError

    @property
    def is_degraded(self) -> bool:
        """Nobody keeps the counts at the moment."""
        return not self._link.is_up

    @property
    def num_open(self) -> int:
        """Reservations of this process that nobody has closed yet."""
        return len(self._open)

    def open_reservations(self) -> list[Reservation]:
        """What a dispatcher is to be told that does not know of it; those that are being closed
        too, for their Close comes again."""
        return list(self._open.values())

    def settled(self) -> list[Reservation]:
        """Money that was spent a moment ago: the next dispatcher holds it until it has read the
        ledger again."""
        self._forget_settled()
        return [spent for _, spent in self._settled]

    def _forget_settled(self) -> None:
        until_s = asyncio.get_running_loop().time() - SETTLED_KEEP_S
        while self._settled and self._settled[0][0] < until_s:
            self._settled.popleft()

    async def _ask(
        self, make: Callable[[int], LimitCall], wait_s: float, *, keep: bool = False
    ) -> Done | None:
        """The answer; None where it does not come in time. `keep`: it is asked for all the same."""
        self._last_call += 1
        number = self._last_call
        call = _Call(make(number), asyncio.get_running_loop().create_future())
        self._calls[number] = call
        self._send(call)
        is_heard = False
        try:
            done, _ = await asyncio.wait([call.answer], timeout=wait_s)
            is_heard = bool(done)
        finally:
            # Also where the answer has come, and in the same turn whoever waited was cancelled.
            if not keep and not is_heard:
                self._calls.pop(number, None)
                if call.is_sent:
                    self._give_up(call.message)
        return call.answer.result() if is_heard else None

    def _send(self, call: _Call) -> None:
        """Once a connection: what is asked before the Welcome is asked after it. A Reserve that is
        refused and then granted would hold what nobody knows of."""
        if self._link.is_up:
            call.is_sent = True
            self._link.send(call.message)

    def _give_up(self, message: LimitCall) -> None:
        """Nobody waits any more for what may be reserved: if it is, it is given back."""
        if isinstance(message, Reserve):
            reservation = Reservation(message.reservation_id, ())
            self._last_call += 1
            call = _Call(Close(self._last_call, reservation, None), asyncio.Future())
            self._calls[self._last_call] = call
            self._send(call)

    def _on_message(self, message: ToGateway) -> None:
        if not isinstance(message, Done):
            return
        call = self._calls.pop(message.call, None)
        if call is None:
            return
        if isinstance(call.message, Close):
            self._open.pop(call.message.reservation.id, None)
            spent = _spent(call.message)
            if spent is not None:
                self._forget_settled()
                self._settled.append((asyncio.get_running_loop().time(), spent))
        elif message.decision is not None and message.decision.reservation is not None:
            self._open[message.decision.reservation.id] = message.decision.reservation
        if not call.answer.done():
            call.answer.set_result(message)

    def _on_up(self, is_other: bool) -> None:
        for number, call in list(self._calls.items()):
            if is_other and isinstance(call.message, Add):
                # It was posted before, so that dispatcher has read of it.
                del self._calls[number]
                if not call.answer.done():
                    call.answer.set_result(Done(number))
            else:
                if is_other and isinstance(call.message, Close):
                    spent = _spent(call.message)
                    call.message = msgspec.structs.replace(call.message, spent=spent)
                self._send(call)


def _spent(close: Close) -> Reservation | None:
    """The money of it, in the periods in which it is posted."""
    used = close.used
    if used is None or not used.cost_nanos:
        return None
    money = tuple(
        replace(
            taken,
            cost=used.cost_nanos,
            slot=(used.month if taken.kind == "month" else used.day) or taken.slot,
        )
        for taken in close.reservation.taken
        if taken.meter == "cost"
    )
    return Reservation(close.reservation.id, money) if money else None
