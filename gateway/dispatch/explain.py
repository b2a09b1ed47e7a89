"""Why does this request wait? Read from the queue, the shares and the workers, as of now.

Nothing here decides or changes anything. The walk over the queue is a round of ticket_queue.py that
grants nothing: what it comes to is what held the last round up.

    a model that no worker offers  no worker connected | workers drained | loading |
                                   too few requests waiting | load budget used up |
                                   not enough memory | other loads in progress |
                                   no model can be evicted | load not decided yet
    a model on offer               behind older requests | worker held | capacity reserved |
                                   worker full | not enough KV memory | next
    either                         worker not responding | model failed; running: it does not wait

What placement and workers said about a load is taken from the decision log (decisions.py), where it
was said in the last FRESH_S. All times are seconds from now: nobody else has the dispatcher's
clock.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final

from gateway.dispatch.decisions import DecisionLog, DecisionRecord
from gateway.dispatch.fleet import Fleet
from gateway.dispatch.matching import MayTake, kept_for, place_of
from gateway.dispatch.policy.fair_share import TenantOrder
from gateway.dispatch.policy.reasons import OUTCOMES, WaitCode
from gateway.dispatch.ticket_queue import TicketQueue
from gateway.dispatch.tickets import Ticket
from gateway.dispatch.worker_room import Room, lacks

_ON_OFFER: Final[Collection[WaitCode]] = frozenset(
    ("next", "worker full", "not enough KV memory", "worker held", "capacity reserved")
)

_HELD: Final[Mapping[WaitCode, str]] = {
    "too few requests waiting": "too few requests wait for {model} to justify a load{when}",
    "load budget used up": "loads have used their share of the time of {where}{when}",
    "not enough memory": "pinned models and memory floors on {where} leave too little for {model}",
    "other loads in progress": "other models are being moved on {where}{when}",
    "no model can be evicted": "every model on {where} is worth more than {model}",
    "no worker connected": "no worker is connected to the dispatcher",
    "workers drained": "every worker is drained or about to restart",
}

FRESH_S = 1.0
"""Placement looks every tick: what it did not say again since then holds no more."""
MAX_TENANTS = 8
"""Tenants before this one that are named."""


@dataclass(frozen=True, slots=True)
class TenantAhead:
    """A tenant whose turn comes before: its counter, and how many of its requests wait."""

    tenant_id: str
    counter: float
    num_waiting: int


@dataclass(frozen=True, slots=True)
class WaitReason:
    """Why one request waits.

    left_s         until it ends as timed out (of one that runs: its whole time)
    worker         the worker that it is about, where it is about one
    until_s        when a bound ends this at the latest
    eta_s          when the model is expected to be there
    held_by        the earlier request that the worker is kept for
    own_ahead      older requests of the same tenant for the same model
    counter        its tenant's, and `tenants_ahead` of those before it, the next one first
    rooms          what each worker that offers the model has left, beside what this request takes
    """

    request_id: str
    tenant_id: str
    model: str
    waited_s: float
    left_s: float
    code: WaitCode
    text: str
    worker: str = ""
    until_s: float | None = None
    eta_s: float | None = None
    held_by: str = ""
    own_ahead: int = 0
    counter: float = 0.0
    num_tenants_ahead: int = 0
    tenants_ahead: tuple[TenantAhead, ...] = ()
    rooms: tuple[Room, ...] = ()


@dataclass(frozen=True, slots=True)
class WaitingGroup:
    """Requests of one tenant for one model: how many, the oldest one's wait, and its reason."""

    num_waiting: int
    head: WaitReason


@dataclass(frozen=True, slots=True)
class _Cause:
    code: WaitCode
    text: str
    worker: str = ""
    until_s: float | None = None
    eta_s: float | None = None
    held_by: str = ""
    rooms: tuple[Room, ...] = ()


class Look:
    """The queue at one moment. Costs a sort of the waiting tenants, and a walk in their order as
    far as is asked about or until every worker is kept for somebody: the rest waits for that."""

    def __init__(
        self,
        queue: TicketQueue,
        share: TenantOrder,
        fleet: Fleet,
        decisions: DecisionLog,
        failure: Callable[[str], str | None],
        may_take: MayTake,
        now_s: float,
    ) -> None:
        self._queue = queue
        self._fleet = fleet
        self._decisions = decisions
        self._failure = failure
        self._may_take = may_take
        self._now_s = now_s
        places = sorted(place_of(queue, share, tenant) for tenant, _ in share.waiting())
        self._tenants = [
            TenantAhead(tenant_id, counter, queue.num_of_tenant(tenant_id))
            for counter, _, tenant_id in places
        ]
        self._places = {one.tenant_id: place for place, one in enumerate(self._tenants)}
        self._num_workers = sum(1 for _ in fleet)
        self._kept_for: dict[str, Ticket] = {}
        self._causes: dict[tuple[str, str], _Cause] = {}
        self._num_walked = 0

    def reason(self, ticket: Ticket) -> WaitReason:
        """Of a live ticket."""
        if ticket.state != "waiting":
            return self._running(ticket)
        cause = self._cause(ticket)
        own_ahead = self._queue.num_ahead(ticket)
        if own_ahead and cause.code in _ON_OFFER:
            text = (
                f"{own_ahead} older requests of the same tenant for {ticket.model_name} go first; "
                f"{cause.text}"
            )
            cause = _Cause("behind older requests", text, cause.worker, rooms=cause.rooms)
        place = self._places[ticket.tenant_id]
        return WaitReason(
            request_id=ticket.request.request_id,
            tenant_id=ticket.tenant_id,
            model=ticket.model_name,
            waited_s=self._now_s - ticket.queued_s,
            left_s=ticket.deadline_s - self._now_s,
            code=cause.code,
            text=cause.text,
            worker=cause.worker,
            until_s=cause.until_s,
            eta_s=cause.eta_s,
            held_by=cause.held_by,
            own_ahead=own_ahead,
            counter=self._tenants[place].counter,
            num_tenants_ahead=place,
            tenants_ahead=tuple(self._tenants[max(0, place - MAX_TENANTS) : place][::-1]),
            rooms=cause.rooms,
        )

    def groups(
        self, model: str | None = None, tenant_id: str | None = None, most: int | None = None
    ) -> list[WaitingGroup]:
        """What waits, by tenant and model, in the order of their turns: the first so many."""
        heads = islice(self._heads(model, tenant_id), most)
        return [WaitingGroup(self._queue.num_like(head), self.reason(head)) for head in heads]

    def num_waiting(self, model: str | None = None, tenant_id: str | None = None) -> int:
        """Requests of all these groups."""
        return sum(map(self._queue.num_like, self._heads(model, tenant_id)))

    def _heads(self, model: str | None, tenant_id: str | None) -> Iterator[Ticket]:
        for tenant in self._tenants:
            if tenant_id is None or tenant.tenant_id == tenant_id:
                for head in self._queue.heads(tenant.tenant_id):
                    if model is None or head.model_name == model:
                        yield head

    def _running(self, ticket: Ticket) -> WaitReason:
        granted_s = self._now_s if ticket.granted_s is None else ticket.granted_s
        text = (
            f"running on {ticket.worker_id} for {self._now_s - granted_s:.1f} s, "
            f"{ticket.num_before + ticket.num_tokens} tokens generated so far"
        )
        return WaitReason(
            ticket.request.request_id,
            ticket.tenant_id,
            ticket.model_name,
            ticket.queue_s(self._now_s),
            ticket.ends_by_s - self._now_s,
            "running",
            text,
            ticket.worker_id,
        )

    def _cause(self, ticket: Ticket) -> _Cause:
        """What holds the oldest request of its tenant for its model up."""
        key, place = (ticket.tenant_id, ticket.model_name), self._places[ticket.tenant_id]
        while self._num_walked <= place and len(self._kept_for) < self._num_workers:
            for head in self._queue.heads(self._tenants[self._num_walked].tenant_id):
                self._look_at(head, is_first=not self._num_walked)
            self._num_walked += 1
        if key not in self._causes:
            heads = self._queue.heads(ticket.tenant_id)
            head = next(head for head in heads if head.model_name == ticket.model_name)
            self._look_at(head, is_first=not place)
        return self._causes.get(key) or self._not_offered(ticket.model_name)

    def _look_at(self, head: Ticket, *, is_first: bool) -> None:
        """At one whose model is on offer: what keeps it, and which worker it keeps."""
        offering = self._fleet.offering(head.model_name, self._now_s)
        if not offering:
            return
        kept, may = self._kept_for, self._may_take
        rooms = [room for w in offering if (room := w.room(head, self._now_s))]
        free = [room for room in rooms if room.worker_id not in kept]
        fitting = {room.worker_id for room in free if lacks(room) is None}
        allowed = {
            w.worker_id
            for w in offering
            if w.worker_id in fitting and may(head, w, self._now_s, is_first)
        }
        cause = _on_offer(head, rooms, free, allowed, kept)
        if cause.code != "next":
            lacking = {room.worker_id for room in free if lacks(room) is not None}
            those = [w for w in offering if w.worker_id in lacking]
            worker_id = kept_for(head, those, self._fleet, kept, self._now_s)
            if worker_id:
                kept[worker_id] = head
        self._causes[head.tenant_id, head.model_name] = cause

    def _not_offered(self, model: str) -> _Cause:
        failure = self._failure(model)
        if failure is not None:
            return _Cause("model failed", f"{model} cannot be served: {failure}")
        if not self._fleet.statuses():
            return _Cause("no worker connected", _HELD["no worker connected"])
        loading = self._loading_on(model)
        if loading:
            return self._loading(model, loading)
        if not any(worker.takes_loads for worker in self._fleet):
            return _Cause("workers drained", _HELD["workers drained"])
        for worker in self._fleet:
            state = worker.state(model)
            if state == "resident" and worker.takes_requests:
                text = f"{worker.worker_id} has {model} but offers no capacity at the moment"
                return _Cause("worker not responding", text, worker.worker_id)
        said = self._last_said(model)
        if said is None:
            text = f"{model} is on no worker, and no load has been decided yet"
            return _Cause("load not decided yet", text)
        return self._held(model, said)

    def _loading_on(self, model: str) -> str:
        claimed = self._fleet.claimed_on(model, self._now_s)
        if claimed is not None:
            return claimed
        return next((w.worker_id for w in self._fleet if w.state(model) == "loading"), "")

    def _loading(self, model: str, worker_id: str) -> _Cause:
        decision = next((r for r in self._decisions.recent(model) if r.kind == "load"), None)
        why = (
            f" ({decision.reason})" if decision is not None and decision.worker == worker_id else ""
        )
        at_s = self._fleet.outlook(model, self._now_s).at_s
        eta_s = None if at_s == math.inf else max(0.0, at_s - self._now_s)
        stays = self._staying(model, worker_id)
        if stays:
            text = f"{worker_id} is to load {model}{why}, but can evict no model: {stays}"
            return _Cause("no model can be evicted", text, worker_id, eta_s=eta_s)
        when = "" if eta_s is None else f", {eta_s:.1f} s left"
        text = f"{model} is being loaded on {worker_id}{why}{when}"
        return _Cause("loading", text, worker_id, eta_s=eta_s)

    def _staying(self, model: str, worker_id: str) -> str:
        """What keeps everybody there, where the worker's last word on the load was that.

        A worker says so once and not again while it holds.
        """
        state = next((w.state(model) for w in self._fleet if w.worker_id == worker_id), "")
        said = self._decisions.recent(model, 1)
        if state != "loading" or not said or said[0].reason != "no model can be evicted":
            return ""
        return ", ".join(
            f"{c.model_id} ({OUTCOMES[c.outcome].removeprefix('kept: ')})"
            for c in said[0].candidates
        )

    def _last_said(self, model: str) -> DecisionRecord | None:
        held = (
            record
            for record in self._decisions.recent(model)
            if record.kind == "held" and self._now_s - record.last_s <= FRESH_S
        )
        return max(held, key=lambda record: record.last_s, default=None)

    def _held(self, model: str, said: DecisionRecord) -> _Cause:
        figures = said.figures or {}
        until_s = figures.get("until_s")
        left_s = None if until_s is None else max(0.0, until_s - self._now_s)
        when = "" if left_s is None else f", for at most {left_s:.1f} s more"
        where = said.worker or "the workers"
        code: WaitCode = next((c for c in _HELD if c == said.reason), "load not decided yet")
        text = _HELD.get(code, "{model} is on no worker: {reason}")
        text = text.format(model=model, where=where, when=when, reason=said.reason)
        if said.detail:
            text += f" ({said.detail})"
        eta_s = figures.get("eta_s")
        if eta_s is not None:
            eta_s = max(0.0, eta_s - (self._now_s - said.last_s))
        return _Cause(code, text, said.worker, left_s, eta_s)


def find(live: Iterable[Ticket], request_id: str) -> list[Ticket]:
    """A request's own ticket, or those of its choices and pieces (`ID#0`, `ID#1`, ...)."""
    choices = f"{request_id}#"
    found = (
        ticket
        for ticket in live
        if ticket.request.request_id == request_id or ticket.request.request_id.startswith(choices)
    )
    return sorted(found, key=lambda ticket: ticket.seq)


def _distance(room: Room) -> tuple[bool, bool, bool]:
    """How far a worker is from taking a request: the least is the nearest."""
    lacking = lacks(room)
    return lacking != "not enough KV memory", lacking == "worker not responding", not room.can_hold


def _on_offer(
    head: Ticket,
    rooms: list[Room],
    free: list[Room],
    allowed: Collection[str],
    kept_for: dict[str, Ticket],
) -> _Cause:
    every = tuple(rooms)
    if not free:
        worker_id = rooms[0].worker_id
        first = kept_for[worker_id]
        text = (
            f"{worker_id} is held for the earlier request {first.request.request_id} "
            f"({first.model_name}), which does not fit yet"
        )
        return _Cause("worker held", text, worker_id, held_by=first.request.request_id, rooms=every)
    for room in free:
        if room.worker_id in allowed:
            return _Cause(
                "next", f"{room.worker_id} has free capacity", room.worker_id, rooms=every
            )
        if lacks(room) is None:
            text = (
                f"the free capacity of {room.worker_id} is reserved for other tenants: those with "
                "reserved capacity, and those that send few requests"
            )
            return _Cause("capacity reserved", text, room.worker_id, rooms=every)
    # The worker that comes nearest to taking it says what is missing.
    room = min(free, key=_distance)
    code = lacks(room)
    assert code is not None
    if code == "worker not responding":
        text = f"{room.worker_id} has sent no status for a while"
    elif code == "worker full":
        text = (
            f"{room.worker_id} is full: it runs {room.running} requests and has capacity for "
            f"{max(0, room.free_requests)} more in total, {max(0, room.leased_requests)} more of "
            f"{head.model_name}"
        )
    else:
        text = (
            f"{room.worker_id} has too little KV memory: the request may need "
            f"{room.wanted_tokens} tokens ({room.wanted_kv_bytes} bytes), and "
            f"{max(0, room.leased_tokens)} tokens of {head.model_name}'s lease and "
            f"{max(0, room.free_kv_bytes)} bytes are free"
        )
    return _Cause(code, text, room.worker_id, rooms=every)
