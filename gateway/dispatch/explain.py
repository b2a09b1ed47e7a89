"""Why does this request wait? Read from the queue, the shares and the workers, as of now.

Nothing here decides or changes anything. The walk over the queue is a round of matching.py that
grants nothing: what it comes to is what held the last round up.

    a model that nobody offers     no worker | loading | gathering | load budget | no room |
                                   loads under way | nobody gives way | not decided
    a model on offer               behind own | kept | reserved | worker full | KV short | next
    either                         worker silent | failed; running: it does not wait

What placement and workers said about a load is taken from the decision log (decisions.py), where it
was said in the last FRESH_S. All times are seconds from now: nobody else has the dispatcher's
clock.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal, TypeAlias

from gateway.dispatch.capacity import Room
from gateway.dispatch.decisions import DecisionLog, DecisionRecord
from gateway.dispatch.fleet import Fleet
from gateway.dispatch.matching import MayTake, place_of
from gateway.dispatch.tickets import Ticket, TicketQueue
from gateway.policy.fair_share import TenantOrder

WaitCode: TypeAlias = Literal[
    "no worker",
    "failed",
    "loading",
    "gathering",
    "load budget",
    "no room",
    "loads under way",
    "nobody gives way",
    "not decided",
    "behind own",
    "kept",
    "reserved",
    "worker silent",
    "worker full",
    "KV short",
    "next",
    "running",
]

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
        if own_ahead and cause.code in ("next", "worker full", "KV short", "kept", "reserved"):
            text = f"{own_ahead} older of the same tenant for {ticket.model_name} go first; {{}}"
            cause = _Cause("behind own", text.format(cause.text), cause.worker, rooms=cause.rooms)
        place = self._places[ticket.tenant_id]
        return WaitReason(
            request_id=ticket.request.request_id,
            tenant_id=ticket.tenant_id,
            model=ticket.model_name,
            waited_s=self._now_s - ticket.arrival_s,
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
            f"it does not wait: {ticket.worker_id} has had it for {self._now_s - granted_s:.1f} s, "
            f"{ticket.num_tokens} tokens came"
        )
        return WaitReason(
            ticket.request.request_id,
            ticket.tenant_id,
            ticket.model_name,
            granted_s - ticket.arrival_s,
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
        """At one whose model is on offer: what keeps it, and which workers it keeps."""
        offering = self._fleet.offering(head.model_name, self._now_s)
        if not offering:
            return
        kept_for, may = self._kept_for, self._may_take
        rooms = [room for w in offering if (room := w.room(head, self._now_s))]
        free = [room for room in rooms if room.worker_id not in kept_for]
        fitting = {room.worker_id for room in free if lacks(room) is None}
        allowed = {
            w.worker_id
            for w in offering
            if w.worker_id in fitting and may(head, w, self._now_s, is_first)
        }
        cause = _on_offer(head, rooms, free, allowed, kept_for)
        if cause.code != "next":
            kept_for.update({r.worker_id: head for r in free if lacks(r) is not None})
        self._causes[head.tenant_id, head.model_name] = cause

    def _not_offered(self, model: str) -> _Cause:
        failure = self._failure(model)
        if failure is not None:
            return _Cause("failed", f"{model} cannot be served: {failure}")
        if not self._fleet.statuses():
            return _Cause("no worker", "no worker is connected")
        loading = self._loading_on(model)
        if loading:
            return self._loading(model, loading)
        for worker in self._fleet:
            state = worker.state(model)
            if state == "resident":
                text = f"{worker.worker_id} has {model} and offers none of it at the moment"
                return _Cause("worker silent", text, worker.worker_id)
        said = self._last_said(model)
        if said is None:
            return _Cause("not decided", f"{model} is on no worker; no load has been decided on")
        return self._held(model, said)

    def _loading_on(self, model: str) -> str:
        claimed = self._fleet.claimed_on(model)
        if claimed is not None:
            return claimed
        return next((w.worker_id for w in self._fleet if w.state(model) == "loading"), "")

    def _loading(self, model: str, worker_id: str) -> _Cause:
        told = next((r for r in self._decisions.recent(model) if r.kind == "load"), None)
        why = f" ({told.reason})" if told is not None and told.worker == worker_id else ""
        at_s = self._fleet.outlook(model, self._now_s).at_s
        eta_s = None if at_s == math.inf else max(0.0, at_s - self._now_s)
        stays = self._staying(model, worker_id)
        if stays:
            text = f"{worker_id} is to load {model}{why}, but nobody there gives way: {stays}"
            return _Cause("nobody gives way", text, worker_id, eta_s=eta_s)
        when = "" if eta_s is None else f", {eta_s:.1f} s to go"
        text = f"{model} is being loaded on {worker_id}{why}{when}"
        return _Cause("loading", text, worker_id, eta_s=eta_s)

    def _staying(self, model: str, worker_id: str) -> str:
        """What keeps everybody there, where the worker's last word on the load was that.

        A worker says so once and not again while it holds.
        """
        state = next((w.state(model) for w in self._fleet if w.worker_id == worker_id), "")
        said = self._decisions.recent(model, 1)
        if state != "loading" or not said or said[0].reason != "nobody gives way":
            return ""
        kept = (f"{c.model_id} ({c.outcome.removeprefix('kept: ')})" for c in said[0].candidates)
        return ", ".join(kept)

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
        when = "" if left_s is None else f", {left_s:.1f} s more at most"
        where = said.worker or "the workers"
        code: WaitCode
        if said.reason == "gathering":
            code, text = "gathering", f"requests for {model} gather until a load pays{when}"
        elif said.reason == "load budget":
            code, text = "load budget", f"loads have had their share of the time of {where}{when}"
        elif said.reason == "no room":
            code, text = "no room", f"what is pinned or kept on {where} leaves {model} no room"
        elif said.reason == "loads under way":
            code, text = "loads under way", f"{where} moves other models{when}"
        elif said.reason == "nobody gives way":
            code, text = "nobody gives way", f"every model on {where} is worth more than {model}"
        elif said.reason == "no worker":
            code, text = "no worker", "no worker is connected"
        else:
            code, text = "not decided", f"{model} is on no worker: {said.reason}"
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


def lacks(room: Room) -> WaitCode | None:
    """What keeps a request from going there; None where it fits. As capacity.py's `fits`."""
    if not room.fresh:
        return "worker silent"
    if room.free_requests < 1 or room.leased_requests < 1:
        return "worker full"
    short = room.wanted_tokens > room.leased_tokens or room.wanted_kv_bytes > room.free_kv_bytes
    return "KV short" if short and room.running_model else None


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
            f"{worker_id} is kept for {first.request.request_id} ({first.model_name}), whose turn "
            "is earlier and which does not fit yet"
        )
        return _Cause("kept", text, worker_id, held_by=first.request.request_id, rooms=every)
    for room in free:
        if room.worker_id in allowed:
            return _Cause("next", f"{room.worker_id} has room", room.worker_id, rooms=every)
        if lacks(room) is None:
            text = (
                f"the room that {room.worker_id} has left is kept for others: tenants with "
                "reserved capacity, or who ask seldom"
            )
            return _Cause("reserved", text, room.worker_id, rooms=every)
    # The worker that comes nearest to taking it says what is missing.
    room = min(free, key=lambda room: (lacks(room) != "KV short", lacks(room) == "worker silent"))
    code = lacks(room)
    assert code is not None
    if code == "worker silent":
        text = f"{room.worker_id} has not been heard of for a while"
    elif code == "worker full":
        text = (
            f"{room.worker_id} is full: it runs {room.running} requests, offers "
            f"{max(0, room.free_requests)} more in all and {max(0, room.leased_requests)} more of "
            f"{head.model_name}"
        )
    else:
        text = (
            f"{room.worker_id} is short of KV memory: the request may take {room.wanted_tokens} "
            f"tokens ({room.wanted_kv_bytes} bytes), {max(0, room.leased_tokens)} tokens of "
            f"{head.model_name}'s lease and {max(0, room.free_kv_bytes)} bytes are free"
        )
    return _Cause(code, text, room.worker_id, rooms=every)
