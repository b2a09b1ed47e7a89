"""One round of grants over the fair queue (stage 5).

The rule for a head that does not fit is in dispatcher.py's docstring; `GrantRound` is that rule. It
reads the queue (ticket_queue.py), the counters and the workers' capacities; `grant` does the rest.

A round is about a few workers (a status has come from one), or about all that have room. A head
never looks at all of a large fleet: FIRST_LOOK workers with room that offer its model are enough
to find one with little to do, and where none of them takes it, it looks at MOST_LOOKED. `open`
hands out other ones each time.
"""

import heapq
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol, TypeAlias

from gateway.dispatch.capacity import WorkerCapacity
from gateway.dispatch.policy.fair_share import TenantOrder
from gateway.dispatch.policy.kept_worker import expected_first
from gateway.dispatch.ticket_queue import TicketQueue
from gateway.dispatch.tickets import Ticket

FIRST_LOOK = 8
"""Workers that a head looks at to find the least busy one."""
MOST_LOOKED = 64
"""Workers that a head looks at in one round, where the first ones do not take it."""

MayTake: TypeAlias = Callable[[Ticket, WorkerCapacity, float, bool], bool]
"""(ticket, worker, now, whether its tenant is the first) -> it leaves what is kept for others."""


class Offers(Protocol):
    """The workers, as a round asks for them (fleet.py)."""

    def open(self, model_id: str, now_s: float, most: int) -> list[WorkerCapacity]:
        """So many workers with room that offer the model, other ones each time."""

    def open_models(self, model_ids: Iterable[str]) -> list[str]:
        """Of these models, those that a worker with room may offer."""

    def connected(self, worker_id: str) -> WorkerCapacity | None:
        """The worker, if it is connected."""

    def can_hold(self, ticket: Ticket, now_s: float) -> bool:
        """Whether a worker that offers its model could ever hold it."""


class Chooser(Protocol):
    """Which worker a head goes to (affinity.py)."""

    def order(self, ticket: Ticket, workers: Sequence[WorkerCapacity]) -> Sequence[WorkerCapacity]:
        """The best one first."""

    def favourites(
        self, ticket: Ticket, now_s: float, others: Collection[WorkerCapacity]
    ) -> list[WorkerCapacity]:
        """Workers beside these others that are likely to have KV of it and have room for it."""


class GrantRound:
    """Smallest counter first, until every worker is full or kept for a head that does not fit.

    `workers` are those with room that the round is about; None: all. Only tenants that want
    something of theirs are asked. `grant` takes the ticket out of the queue and charges its tenant;
    where the worker cannot be reached it puts the ticket back and returns False. `may_take` says
    whether it leaves what is kept for others: a head that may not take the room there is keeps no
    worker from those behind it. Costs O((tenants + grants) log tenants): capacity only falls within
    a round, so a tenant whose heads do not fit is not asked again.
    """

    def __init__(
        self,
        queue: TicketQueue,
        share: TenantOrder,
        fleet: Offers,
        now_s: float,
        grant: Callable[[Ticket, WorkerCapacity], bool],
        may_take: MayTake,
        affinity: Chooser,
        workers: Sequence[WorkerCapacity] | None = None,
    ) -> None:
        self._queue = queue
        self._share = share
        self._fleet = fleet
        self._now_s = now_s
        self._grant = grant
        self._may_take = may_take
        self._affinity = affinity
        self._workers = workers
        self._kept: set[str] = set()
        self.looked: dict[str, WorkerCapacity] = {}
        """Workers that some head has looked at."""

    def run(self) -> None:
        """Grant what can be granted."""
        queue, share = self._queue, self._share
        offered = self._offered()
        tenants = [place_of(queue, share, t) for t in queue.tenants_of(offered)]
        heapq.heapify(tenants)
        first = True
        while tenants and not self._all_kept():
            tenant_id = heapq.heappop(tenants)[2]
            granted = self._grant_one(queue.heads(tenant_id, offered), first)
            first &= granted  # who comes next after one that had to leave its room is second
            if granted and queue.num_of_tenant(tenant_id):
                heapq.heappush(tenants, place_of(queue, share, tenant_id))

    def _offered(self) -> Collection[str]:
        if self._workers is None:
            return set(self._fleet.open_models(self._queue.model_names))
        return {model_id for worker in self._workers for model_id in worker.offers}

    def _all_kept(self) -> bool:
        """Of a round about all this is not asked: there are more workers than heads that wait."""
        if self._workers is None:
            return False
        return all(worker.worker_id in self._kept for worker in self._workers)

    def _grant_one(self, heads: Sequence[Ticket], first: bool) -> bool:
        """Grant the oldest head that fits somewhere; keep a worker for each of those before it."""
        for ticket in heads:
            lacking: list[WorkerCapacity] = []
            for candidates in self._looks(ticket):
                for worker in self._affinity.order(ticket, candidates):
                    if not worker.fits(ticket, self._now_s):
                        lacking.append(worker)
                    elif self._grant_there(ticket, worker, first):
                        return True
            if self._grant_to_refuse(ticket, lacking, first):
                return True
            self._keep(ticket, lacking)
        return False

    def _grant_to_refuse(
        self, ticket: Ticket, lacking: Sequence[WorkerCapacity], first: bool
    ) -> bool:
        """What no worker can ever hold goes to one that says so, in its own words."""
        asked = [worker for worker in lacking if worker.may_refuse(ticket, self._now_s)]
        if not asked or self._fleet.can_hold(ticket, self._now_s):
            return False
        return any(self._grant_there(ticket, worker, first) for worker in asked)

    def _grant_there(self, ticket: Ticket, worker: WorkerCapacity, first: bool) -> bool:
        # Where it fits and may not go, the room is for others: it keeps nobody from it.
        if not self._may_take(ticket, worker, self._now_s, first):
            return False
        is_short = worker.lacks_kv(ticket, self._now_s)
        if not self._grant(ticket, worker):
            self._kept.add(worker.worker_id)  # it cannot be reached, whoever asks
            return False
        if is_short:
            worker.note_kv_short()
        ticket.kept_on = ""
        return True

    def _looks(self, ticket: Ticket) -> Iterable[list[WorkerCapacity]]:
        """The workers that offer its model and are not kept, first a few of them."""
        model_id = ticket.model_name
        if self._workers is not None:
            own = [w for w in self._workers if w.leased(model_id, self._now_s)]
            yield self._free(own + self._affinity.favourites(ticket, self._now_s, own))
            return
        few = self._fleet.open(model_id, self._now_s, FIRST_LOOK)
        likely = self._affinity.favourites(ticket, self._now_s, few)
        yield self._free([*few, *likely])
        if len(few) == FIRST_LOOK:
            seen = {worker.worker_id for worker in (*few, *likely)}
            more = self._fleet.open(model_id, self._now_s, MOST_LOOKED)
            yield self._free(w for w in more if w.worker_id not in seen)

    def _free(self, workers: Iterable[WorkerCapacity]) -> list[WorkerCapacity]:
        found = [worker for worker in workers if worker.worker_id not in self._kept]
        for worker in found:
            self.looked[worker.worker_id] = worker
        return found

    def _keep(self, ticket: Ticket, lacking: Sequence[WorkerCapacity]) -> None:
        """Keep one worker for a head that fits nowhere."""
        ticket.kept_on = kept_for(ticket, lacking, self._fleet, self._kept, self._now_s)
        if not ticket.kept_on:
            return
        self._kept.add(ticket.kept_on)
        worker = self._fleet.connected(ticket.kept_on)
        # No other worker makes room for it.
        if worker is not None and worker.lacks_kv(ticket, self._now_s):
            worker.note_kv_short()
            self.looked[worker.worker_id] = worker


def kept_for(
    ticket: Ticket,
    lacking: Iterable[WorkerCapacity],
    fleet: Offers,
    kept: Iterable[str],
    now_s: float,
) -> str:
    """The worker to keep for a head that fits on none of those `lacking`; empty: there is none. Of
    those `kept` for others none is taken, nor any that can never hold it while one that offers its
    model can; the one it had before is, as long as it offers the model."""
    free = [w for w in lacking if w.worker_id not in kept]
    before = fleet.connected(ticket.kept_on) if ticket.kept_on else None
    if before is not None:
        is_free = before.worker_id not in kept and before.leased(ticket.model_name, now_s)
        free += [before] if is_free else []
    fit = [w for w in free if w.can_hold(ticket)]
    if len(fit) < len(free) and fleet.can_hold(ticket, now_s):
        free = fit
    lacks = {w.worker_id: w.lack(ticket) for w in free}
    return expected_first(lacks, ticket.kept_on)


def place_of(queue: TicketQueue, share: TenantOrder, tenant_id: str) -> tuple[float, int, str]:
    """What waiting tenants are ordered by; its last part is the tenant."""
    return share.counter(tenant_id), queue.oldest_seq(tenant_id), tenant_id


def place_alone(
    ticket: Ticket,
    offering: Sequence[WorkerCapacity],
    now_s: float,
    may_take: MayTake,
    affinity: Chooser,
) -> WorkerCapacity | None:
    """What a round comes to where nobody else waits: as `GrantRound`, without its books. None: it
    is to wait; also where KV memory is short, for then idle models are to make room, too: a round
    sees to that."""
    likely = affinity.favourites(ticket, now_s, offering)
    for worker in affinity.order(ticket, [*offering, *likely]):
        fits = worker.fits(ticket, now_s) and not worker.lacks_kv(ticket, now_s)
        if fits and may_take(ticket, worker, now_s, True):
            return worker
    return None
