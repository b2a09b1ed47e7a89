"""Which worker a head of the fair queue goes to: the one where it ends first (stage 5).

Affinity chooses where the head goes, never who is the head and never when: of the workers with room
it goes to the one that costs it the fewest seconds. These are reading the part of the prompt of
which no KV is there, and a share (DELAY_SHARE) of what the requests there were predicted to use
when they were granted. So load is a cost of each worker and no gate: many requests with one
beginning spread as soon as that costs more than reading it once more.

Tickets of which no worker has anything go to the least busy one, as all do where there is one.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from gateway.dispatch.capacity import WorkerCapacity
from gateway.dispatch.fleet import Fleet
from gateway.dispatch.grant_choices import GrantChoices
from gateway.dispatch.policy.prefix_places import PrefixPlaces
from gateway.dispatch.tickets import Ticket

DELAY_SHARE = 0.1
"""What runs on a worker delays a request that comes by so much of its device seconds: it is half
done, and decodes beside it. The share of prompt tokens found, on a trace of conversations at 94 %
of four devices: 20 % at 0.5, 27 % at 0.1, 25 % at 0.02 (docs/log.md)."""


class _Ranked(NamedTuple):
    """What `order` came to last."""

    ticket: Ticket
    workers: Sequence[WorkerCapacity]
    hits: Mapping[str, int]
    unit_s: float


class Affinity:
    """`unit_s(model)`: device seconds of a prompt token, as far as is known."""

    def __init__(self, fleet: Fleet, unit_s: Callable[[str], float]) -> None:
        self.places = PrefixPlaces()
        self.choices = GrantChoices()
        self._ranked: _Ranked | None = None
        self._fleet = fleet
        self._unit_s = unit_s

    def order(self, ticket: Ticket, workers: Sequence[WorkerCapacity]) -> Sequence[WorkerCapacity]:
        """The best one first."""
        if len(workers) < 2:
            self._ranked = None
            return workers
        hits = self.places.hits(ticket.marks, ticket.model_name) if ticket.marks else {}
        unit_s = self._unit_s(ticket.model_name)

        def cost_s(worker: WorkerCapacity) -> float:
            to_read = ticket.request.num_prompt_tokens - hits.get(worker.worker_id, 0)
            return DELAY_SHARE * worker.ahead_s + unit_s * to_read

        def load(worker: WorkerCapacity) -> tuple[int, int, str]:
            num_running = worker.num_running()  # class batch delays by a step at most
            return num_running - worker.num_batch(), num_running, worker.worker_id

        if hits:
            ranked = sorted(workers, key=lambda w: (cost_s(w), load(w)))
        else:
            ranked = sorted(workers, key=load)
        self._ranked = _Ranked(ticket, ranked, hits, unit_s)
        return ranked

    def favourites(
        self, ticket: Ticket, now_s: float, others: Collection[WorkerCapacity]
    ) -> list[WorkerCapacity]:
        """Workers beside these others that are likely to have KV of it and have room for it."""
        if not ticket.marks:
            return []
        seen = {worker.worker_id for worker in others}
        hits = self.places.hits(ticket.marks, ticket.model_name)
        found = [self._fleet.connected(worker_id) for worker_id in hits if worker_id not in seen]
        return [
            worker
            for worker in found
            if worker is not None
            and worker.leased(ticket.model_name, now_s)
            and worker.fits(ticket, now_s)
        ]

    def granted(self, ticket: Ticket, worker: WorkerCapacity, now_s: float) -> None:
        """It goes there. What it was predicted to use, less its hit, is ahead of who comes next."""
        ranked, self._ranked = self._ranked, None
        if ranked is not None and ranked.ticket is ticket and worker in ranked.workers:
            about = (ranked.workers, ranked.hits, DELAY_SHARE, ranked.unit_s)
            self.choices.note(ticket, worker, *about, now_s)
        ticket.ahead_s = ticket.prediction.service_s
        if ticket.marks:
            hits = self.places.hits(ticket.marks, ticket.model_name)
            hit_s = hits.get(worker.worker_id, 0) * self._unit_s(ticket.model_name)
            ticket.ahead_s = max(0.0, ticket.ahead_s - hit_s)
            self.places.note(ticket.marks, worker.worker_id, now_s)
        if ticket.is_batch:  # it delays nobody
            ticket.ahead_s = 0.0
