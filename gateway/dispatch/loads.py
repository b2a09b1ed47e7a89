"""Loads, from the queue's side: what is in demand, what is fetched ahead, who would wait in vain.

Between dispatcher.py, which has the tickets, and fleet.py, which has the workers. Decides nothing:
dispatch/policy/placement.py says what is loaded, dispatch/policy/model_history.py what is fetched
ahead of need. Here a ticket is refused early whose load would not even begin before its time in the
queue is up: loads against models in demand have a bounded share of the time, so a long line of them
is known beforehand, and who asks is told when to come again.

It is told to come a little before its turn, and its model keeps its place among equals until then.
Otherwise those who ask again and again would always stand in line before it, and who comes when it
is told would never be served.
"""

import math
from collections.abc import Iterable

from gateway.dispatch.batch_loads import BatchLoads, demands
from gateway.dispatch.capacity import WorkerCapacity
from gateway.dispatch.copies import Copies
from gateway.dispatch.decisions import DecisionLog, DecisionRecord
from gateway.dispatch.fleet import Fleet
from gateway.dispatch.lanes import Lanes
from gateway.dispatch.policy.fleet_view import AskRate, Demand, Outlook
from gateway.dispatch.policy.model_history import Popularity, Prefetcher
from gateway.dispatch.policy.reasons import DecisionFigures
from gateway.dispatch.tickets import Ticket
from gateway.errors import UNAVAILABLE, ApiError
from gateway.types import HostedModel, ModelOutlook

PREFETCH_S = 1.0
"""How often something may be fetched ahead of need or get one more copy, and surplus ones leave."""
EARLY_SHARE = 0.5
"""Who is refused is told to come so much of the time that it may wait before its load's turn."""
LOOK_PAUSE_S = 0.05
"""Pauses between looks at what waits begin here: a shorter one is none."""
PAUSE_PER_MODEL_S, PAUSE_PER_TICKET_S = 5e-4, 1e-5
"""A look takes about a tenth of that for each model and ticket that waits: so whoever asks for a
thousand cold models does not have the event loop think of nothing else."""


class Loads:
    """One dispatcher's."""

    def __init__(
        self, lanes: Lanes, fleet: Fleet, decisions: DecisionLog, max_load_share: float
    ) -> None:
        queue, self._share = lanes.live
        self._queue = queue
        self._batch = BatchLoads(lanes, fleet, max_load_share)
        self._fleet = fleet
        self._decisions = decisions
        self._popularity = Popularity()
        self._prefetcher = Prefetcher()
        self._copies = Copies(queue, fleet, self._popularity, decisions)
        self._prefetched_s = -math.inf
        self._next_look_s = -math.inf
        # Of models whose requests were refused: the place of the first, and how long it is kept.
        self._places: dict[str, tuple[int, float]] = {}
        self.num_refusals = 0

    def asked(self, ticket: Ticket) -> None:
        """A new ticket has come. What class batch asks for makes no model popular."""
        if ticket.is_batch:
            return
        self._popularity.asked(ticket.model_name, ticket.prediction.service_s, ticket.arrival_s)

    def keep_models(self, models: Iterable[HostedModel]) -> None:
        """Forget the demand for models that are not hosted any more."""
        hosted = {model.name for model in models}
        self._popularity.keep_models(hosted)
        self._places = {name: kept for name, kept in self._places.items() if name in hosted}

    def unloaded(self, model_name: str) -> None:
        """An operator wants its pages back: it is not fetched ahead before somebody asks for it."""
        self._popularity.forget(model_name)

    def place(self, now_s: float) -> list[tuple[Ticket, ApiError]]:
        """Loads for models that wait and that not every worker offers.

        Called when a status brings news of models, and every tick for what time alone changes.
        Returns the tickets that would wait in vain, each with the answer it should have now. Where
        very much waits, most calls come to nothing.
        """
        if now_s < self._next_look_s:
            return []
        waiting = self._queue.model_names
        pause_s = len(waiting) * PAUSE_PER_MODEL_S + len(self._queue) * PAUSE_PER_TICKET_S
        self._next_look_s = now_s + pause_s if pause_s > LOOK_PAUSE_S else now_s
        wanting = self._fleet.wanting(waiting, now_s)
        wanted: list[Demand] = []
        if wanting:
            places = self._kept_places(now_s)
            is_pinned = self._fleet.is_pinned
            wanted = demands(self._queue, self._share, wanting, is_pinned, now_s, places)

        busy = self._fleet.place(now_s, wanted, waiting, self._asks(now_s))
        self._batch.place(now_s, self._asks(now_s), others_load=busy)
        if now_s - self._prefetched_s >= PREFETCH_S:
            self._prefetched_s = now_s
            if not busy:
                self._fetch_ahead(now_s)
                self._copies.spread(now_s)
            self._copies.give_up(now_s)
        return self._hopeless(now_s, wanted)

    def relieve(self, now_s: float, workers: Iterable[WorkerCapacity]) -> None:
        """Where KV memory is short, idle models make room."""
        self._fleet.relieve(now_s, workers, self._queue.model_names, self._asks(now_s))

    def outlook(self, model_name: str, now_s: float) -> ModelOutlook:
        """Of a hosted model, for a request that would come now."""
        at_s = self._fleet.outlook(model_name, now_s).at_s
        eta_s = None if at_s == math.inf else max(0.0, at_s - now_s)
        return ModelOutlook(self._fleet.residency(model_name), eta_s)

    def etas(self, now_s: float) -> dict[str, float]:
        """Of the models that somebody waits for and that are not there: seconds until they are."""
        found = {}
        for name in self._queue.model_names:
            if not self._fleet.is_offered(name, now_s):
                eta_s = self.outlook(name, now_s).load_eta_s
                if eta_s is not None:
                    found[name] = eta_s
        return found

    def _asks(self, now_s: float) -> AskRate:
        return lambda model_id: self._popularity.asks_s(model_id, now_s)

    def _fetch_ahead(self, now_s: float) -> None:
        there = self._fleet.candidates.is_on_device
        asked = [name for name in self._popularity.known() if not there(name)]
        candidates, views = self._fleet.demand_of(asked), self._fleet.candidates.for_prefetch()
        for prefetch in self._prefetcher.decide(now_s, self._popularity, candidates, views):
            self._fleet.fetch(now_s, prefetch)

    def _kept_places(self, now_s: float) -> dict[str, int]:
        """Until a load begins, or those who were told to come have not."""
        for name, (_, until_s) in list(self._places.items()):
            if now_s >= until_s or self._fleet.claimed_on(name, now_s) is not None:
                del self._places[name]
        return {name: place for name, (place, _) in self._places.items()}

    def _hopeless(self, now_s: float, wanted: Iterable[Demand]) -> list[tuple[Ticket, ApiError]]:
        late: dict[str, Outlook] = {}
        for demand in wanted:
            outlook = self._fleet.held_back(demand.model_id)
            if outlook is None or not outlook.sure or not now_s < outlook.at_s < math.inf:
                continue
            if not self._fleet.is_offered(demand.model_id, now_s):
                late[demand.model_id] = outlook
        found = []
        for name, there in late.items():
            for ticket in self._queue.of_model(name):
                # Not where the load would have begun by then: expected times are not that exact.
                if there.at_s - there.load_s > min(ticket.deadline_s, ticket.ends_by_s):
                    found.append((ticket, self._refusal(now_s, ticket, there)))
        return found

    def _refusal(self, now_s: float, ticket: Ticket, outlook: Outlook) -> ApiError:
        eta_s = outlook.at_s - now_s
        bound_s = min(ticket.deadline_s, ticket.ends_by_s) - ticket.queued_s
        come_s = max(1.0, eta_s - outlook.load_s - EARLY_SHARE * bound_s)
        place, until_s = self._places.get(ticket.model_name, (ticket.seq, 0.0))
        until_s = max(until_s, now_s + come_s + bound_s)
        self._places[ticket.model_name] = min(place, ticket.seq), until_s
        self.num_refusals += 1
        self._decisions.add(
            DecisionRecord(
                now_s,
                "refusal",
                "expected wait too long",
                ticket.model_name,
                outlook.worker_id,
                DecisionFigures(
                    eta_s=eta_s,
                    bound_s=bound_s,
                    waited_s=now_s - ticket.queued_s,
                    retry_after_s=come_s,
                ),
                ticket.tenant_id,
            )
        )
        message = (
            f"the model {ticket.model_name!r} will be loaded in about {eta_s:.0f} s, longer than "
            f"the request may wait in the queue: try again in {come_s:.0f} s"
        )
        return ApiError(UNAVAILABLE, message, retry_after_s=come_s)
