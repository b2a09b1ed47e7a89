"""Which worker a head of the fair queue goes to: the one where it ends first (stage 5).

Affinity chooses where the head goes, never who is the head. A worker costs a ticket seconds:
reading the part of the prompt of which no KV is there, and a share (DELAY_SHARE) of what the
requests there were predicted to use when they were granted. So load is a cost of each worker and no
gate: many requests with one beginning spread as soon as that costs more than reading it once more.

Where the worker with the KV is full, a ticket waits for it as long as that is expected to be sooner
than to begin elsewhere, and never longer than what the KV saves.

Tickets of which no worker has anything go to the least busy one, as all do where there is one.
"""

from collections.abc import Callable, Sequence

from gateway.dispatch.capacity import WorkerCapacity
from gateway.dispatch.fleet import Fleet
from gateway.dispatch.policy.prefix_places import PrefixPlaces
from gateway.dispatch.tickets import Ticket

DELAY_SHARE = 0.1
"""What runs on a worker delays a request that comes by so much of its device seconds: it is half
done, and decodes beside it. The share of prompt tokens found, on a trace of conversations at 94 %
of four devices: 20 % at 0.5, 27 % at 0.1, 25 % at 0.02 (docs/log.md)."""


class Affinity:
    """`unit_s(model)`: device seconds of a prompt token, as far as is known."""

    def __init__(self, fleet: Fleet, unit_s: Callable[[str], float]) -> None:
        self.places = PrefixPlaces()
        self._fleet = fleet
        self._unit_s = unit_s

    def order(
        self, ticket: Ticket, workers: Sequence[WorkerCapacity], now_s: float
    ) -> Sequence[WorkerCapacity]:
        """Those of these workers that it should go to rather than wait, the best first."""
        hits = self.places.hits(ticket.marks, ticket.model_name) if ticket.marks else None
        if not hits:
            return by_load(workers)
        unit_s = self._unit_s(ticket.model_name)

        def cost_s(worker: WorkerCapacity) -> float:
            hit = hits.get(worker.worker_id)
            to_read = ticket.request.num_prompt_tokens - (hit.num_tokens if hit else 0)
            return DELAY_SHARE * worker.ahead_s + unit_s * to_read

        limit_s = float("inf")
        for worker_id, hit in hits.items():
            worker = self._fleet.connected(worker_id)
            may_wait = now_s - ticket.queued_s < hit.num_tokens * unit_s
            if worker is None or not may_wait or not worker.leased(ticket.model_name, now_s):
                continue
            wait_s = 0.0 if worker.fits(ticket, now_s) else worker.lack(ticket) * worker.ahead_s
            limit_s = min(limit_s, cost_s(worker) + wait_s)
        costs = {worker.worker_id: cost_s(worker) for worker in workers}
        found = [worker for worker in workers if costs[worker.worker_id] <= limit_s]
        return sorted(found, key=lambda w: (costs[w.worker_id], w.num_running(), w.worker_id))

    def favourites(self, ticket: Ticket, now_s: float) -> list[WorkerCapacity]:
        """Workers with room that are likely to have KV of it."""
        if not ticket.marks:
            return []
        hits = self.places.hits(ticket.marks, ticket.model_name)
        found = [self._fleet.connected(worker_id) for worker_id in hits]
        return [w for w in found if w is not None and w.leased(ticket.model_name, now_s)]

    def unread_s(self, ticket: Ticket) -> float:
        """Of what it was predicted to use, what is left once its hit is taken off."""
        read_s = ticket.hit.num_tokens * self._unit_s(ticket.model_name) if ticket.hit else 0.0
        return max(0.0, ticket.prediction.service_s - read_s)

    def granted(self, ticket: Ticket, worker: WorkerCapacity, now_s: float) -> None:
        """It goes there."""
        if ticket.marks:
            hits = self.places.hits(ticket.marks, ticket.model_name)
            ticket.hit = hits.get(worker.worker_id)
            self.places.note(ticket.marks, worker.worker_id, now_s)

    def ended(self, ticket: Ticket, cached_tokens: int) -> None:
        """It found so much there."""
        hit = ticket.hit
        if hit is not None and 2 * cached_tokens < hit.num_tokens:
            self.places.void(ticket.worker_id, hit.granted_s, ticket.model_name)


def by_load(workers: Sequence[WorkerCapacity]) -> Sequence[WorkerCapacity]:
    """The least busy one first."""
    if len(workers) == 1:
        return workers
    return sorted(workers, key=lambda worker: (worker.num_running(), worker.worker_id))
