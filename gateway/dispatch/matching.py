"""One round of the fair queue: which waiting tickets go to which workers, and what is in demand.

The rule for a head that does not fit is in dispatcher.py's docstring; this file is that rule. It
reads the queue, the counters and the workers' capacities; `grant` does the rest.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from gateway.dispatch.capacity import WorkerCapacity
from gateway.dispatch.tickets import Ticket, TicketQueue
from gateway.policy.fair_share import TenantOrder
from gateway.policy.fleet_view import Demand

Offering: TypeAlias = Callable[[str, float], list[WorkerCapacity]]
"""(model, now) -> the workers that offer it, full or not."""
MayTake: TypeAlias = Callable[[Ticket, WorkerCapacity, float, bool], bool]
"""(ticket, worker, now, whether its tenant is the first) -> it leaves what is kept for others."""
NO_PLACES: Mapping[str, int] = {}


def grant_round(
    queue: TicketQueue,
    share: TenantOrder,
    workers: Sequence[WorkerCapacity],
    offering: Offering,
    now_s: float,
    grant: Callable[[Ticket, WorkerCapacity], bool],
    may_take: MayTake = lambda ticket, worker, now_s, first: True,
) -> None:
    """Smallest counter first, until every worker is full or kept for a head that does not fit.

    `workers` are those with room that the round is about; who offers a model says `offering`. Only
    tenants that want something of theirs are asked. `grant` takes the ticket out of the queue and
    charges its tenant; where the worker cannot be reached it puts the ticket back and returns
    False. `may_take` says whether it leaves what is kept for others: a head that may not take the
    room there is keeps no worker from those behind it. Costs O((tenants + grants) log tenants):
    capacity only falls within a round, so a tenant whose heads do not fit is not asked again.
    """

    names = {worker.worker_id for worker in workers}
    offered = {model_id for worker in workers for model_id in worker.offers}
    tenants = [place_of(queue, share, tenant_id) for tenant_id in queue.tenants_of(offered)]
    heapq.heapify(tenants)
    kept_back: set[str] = set()
    first = True
    while tenants and len(kept_back) < len(workers):
        tenant_id = heapq.heappop(tenants)[2]
        heads = queue.heads(tenant_id)
        granted = _grant_head(heads, names, offering, kept_back, now_s, grant, may_take, first)
        first &= granted  # who comes next in order after one that had to leave its room is second
        if granted and queue.heads(tenant_id):
            heapq.heappush(tenants, place_of(queue, share, tenant_id))


def place_of(queue: TicketQueue, share: TenantOrder, tenant_id: str) -> tuple[float, int, str]:
    """What waiting tenants are ordered by; its last part is the tenant."""
    return share.counter(tenant_id), queue.oldest_seq(tenant_id), tenant_id


def place_alone(
    ticket: Ticket, offering: Sequence[WorkerCapacity], now_s: float, may_take: MayTake
) -> WorkerCapacity | None:
    """What a round comes to where nobody else waits: as `_grant_head`, without its books. None: it
    is to wait; also where KV memory is short, for then idle models are to make room, too."""
    allowed = [
        worker
        for worker in offering
        if worker.fits(ticket, now_s)
        and not worker.is_kv_short
        and may_take(ticket, worker, now_s, True)
    ]
    return _least_busy(allowed) if allowed else None


def demands(
    queue: TicketQueue,
    share: TenantOrder,
    wanting: frozenset[str],
    is_pinned: Callable[[str], bool],
    now_s: float,
    places: Mapping[str, int] = NO_PLACES,
) -> list[Demand]:
    """Of the models `wanting`, in the order of the smallest counter that waits for each.

    Equal counters (one tenant that waits for several models, or one that came back and was lifted)
    go by the oldest ticket, or by the place that a model has kept.
    """
    oldest = dict(places)
    counters: dict[str, float] = {}
    backlog_s: dict[str, float] = {}
    arrived_s: dict[str, float] = {}
    waited_s: dict[str, float] = {}
    for ticket in queue:
        name = ticket.model_name
        if name not in wanting:
            continue
        counter = share.counter(ticket.tenant_id)
        counters[name] = min(counters.get(name, counter), counter)
        oldest[name] = min(oldest.get(name, ticket.seq), ticket.seq)
        backlog_s[name] = backlog_s.get(name, 0.0) + ticket.prediction.service_s
        arrived_s[name] = min(arrived_s.get(name, ticket.arrival_s), ticket.arrival_s)
        waited_s[name] = waited_s.get(name, 0.0) + now_s - ticket.arrival_s
    num_waiting = queue.by_model()
    return [
        Demand(
            name,
            num_waiting[name],
            backlog_s[name],
            is_pinned(name),
            oldest_s=arrived_s[name],
            waited_s=waited_s[name],
        )
        for name in sorted(counters, key=lambda name: (counters[name], oldest[name]))
    ]


def _grant_head(
    heads: Sequence[Ticket],
    names: set[str],
    offering: Offering,
    kept_back: set[str],
    now_s: float,
    grant: Callable[[Ticket, WorkerCapacity], bool],
    may_take: MayTake,
    first: bool,
) -> bool:
    """Grant the oldest head that fits somewhere; keep workers back for those before it."""
    for ticket in heads:
        candidates = [
            worker
            for worker in offering(ticket.model_name, now_s)
            if worker.worker_id in names and worker.worker_id not in kept_back
        ]
        fitting = [worker for worker in candidates if worker.fits(ticket, now_s)]
        allowed = [worker for worker in fitting if may_take(ticket, worker, now_s, first)]
        if allowed and grant(ticket, _least_busy(allowed)):
            return True
        # Where it fits and may not go, the room is for others: it does not stand in their way.
        kept_back.update(
            worker.worker_id for worker in candidates if worker in allowed or worker not in fitting
        )
    return False


def _least_busy(workers: Sequence[WorkerCapacity]) -> WorkerCapacity:
    if len(workers) == 1:
        return workers[0]
    return min(workers, key=lambda worker: (worker.num_running(), worker.worker_id))
