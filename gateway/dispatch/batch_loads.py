"""Models that a lane waits for, and loads that only requests of class batch wait for (stage 5).

policy/batch_class.py says where and when. They come after all that other requests want: a look is
taken once in LOOK_S, while no other load is wanted or under way, and begins one load at most. What
of them other requests come to wait for as well is told to its worker as any load.
"""

import math
from collections.abc import Callable, Mapping

from engine.protocol import LoadModel
from gateway.dispatch.fleet import Fleet
from gateway.dispatch.lanes import Lanes
from gateway.dispatch.policy.batch_class import worker_for
from gateway.dispatch.policy.fair_share import TenantOrder
from gateway.dispatch.policy.fleet_view import AskRate, Demand
from gateway.dispatch.ticket_queue import TicketQueue

LOOK_S = 0.5


class BatchLoads:
    """One dispatcher's."""

    def __init__(self, lanes: Lanes, fleet: Fleet, max_load_share: float) -> None:
        self._lanes = lanes
        self._fleet = fleet
        self._max_load_share = max_load_share
        self._looked_s = -math.inf
        self._begun: dict[str, str] = {}  # of class batch alone: the worker of a model's load

    def place(self, now_s: float, asks_s: AskRate, *, others_load: bool) -> None:
        """Begin a load, where one pays. `others_load`: other requests have some to wait for."""
        live, batch = self._lanes
        for name, worker_id in list(self._begun.items()):
            if self._fleet.claimed_on(name, now_s) != worker_id:
                del self._begun[name]
            elif live.queue.num_of_model(name):
                del self._begun[name]
                self._fleet.send(worker_id, LoadModel(name))
        if others_load or not len(batch.queue) or now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        names = (
            name for name in batch.queue.model_names if not self._fleet.is_offered(name, now_s)
        )
        wanting = self._fleet.wanting(names, now_s)
        is_pinned = self._fleet.is_pinned
        wanted = self._fleet.candidates.with_packs(live.queue.model_names)
        found = demands(batch.queue, batch.share, wanting, is_pinned, now_s, {})
        for demand in self._fleet.with_sizes(found):
            views = self._fleet.candidates.candidates(demand)
            about = (wanted, asks_s, self._max_load_share, now_s)
            worker = worker_for(demand, views, *about)
            if worker is not None:
                self._begun[demand.model_id] = worker.worker_id
                self._fleet.load_for_batch(now_s, demand, worker)
                return


def demands(
    queue: TicketQueue,
    share: TenantOrder,
    wanting: frozenset[str],
    is_pinned: Callable[[str], bool],
    now_s: float,
    places: Mapping[str, int],
) -> list[Demand]:
    """Of the models `wanting`, in the order of the smallest counter that waits for each.

    Equal counters (one tenant that waits for several models, or one that came back and was lifted)
    go by the oldest ticket, or by the place that a model has kept.
    """
    counters, oldest, found = {}, {}, {}
    for name in wanting:
        waiting = queue.backlog_of(name)
        if waiting is None:
            continue
        first = queue.oldest_of_model(name)
        counters[name] = min(map(share.counter, waiting.tenants))
        oldest[name] = min(first.seq, places.get(name, first.seq))
        found[name] = Demand(
            name,
            waiting.num,
            max(0.0, waiting.service_s),
            is_pinned(name),
            oldest_s=first.queued_s,
            waited_s=max(0.0, waiting.num * now_s - waiting.arrived_s),
        )
    return [found[name] for name in sorted(found, key=lambda n: (counters[n], oldest[n]))]
