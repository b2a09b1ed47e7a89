"""Loads, from the queue's side: what is in demand, what is fetched ahead, who would wait in vain.

Between dispatcher.py, which has the tickets, and fleet.py, which has the workers. Decides nothing:
policy/placement.py says what is loaded, policy/popularity.py what is fetched ahead of need. Here a
ticket is refused early whose load would not even begin before its time in the queue is up: loads
against models in demand have a bounded share of the time, so a long line of them is known
beforehand, and who asks is told when to come again.
"""

import math
from collections.abc import Iterable

from gateway.capacity import WorkerCapacity
from gateway.decisions import DecisionLog, DecisionRecord
from gateway.errors import UNAVAILABLE, ApiError
from gateway.fleet import Fleet
from gateway.matching import demands
from gateway.policy.fair_share import TenantOrder
from gateway.policy.fleet_view import AskRate, Demand, Outlook
from gateway.policy.popularity import Popularity, Prefetcher
from gateway.policy.reasons import Figures
from gateway.tickets import Ticket, TicketQueue
from gateway.types import HostedModel, ModelOutlook

PREFETCH_S = 1.0
"""How often something may be fetched ahead of need."""


class Loads:
    """One dispatcher's."""

    def __init__(
        self, queue: TicketQueue, share: TenantOrder, fleet: Fleet, decisions: DecisionLog
    ) -> None:
        self._queue = queue
        self._share = share
        self._fleet = fleet
        self._decisions = decisions
        self._popularity = Popularity()
        self._prefetcher = Prefetcher()
        self._prefetched_s = -math.inf
        self.num_refusals = 0

    def asked(self, ticket: Ticket) -> None:
        """A new ticket has come."""
        self._popularity.asked(ticket.model_name, ticket.prediction.service_s, ticket.arrival_s)

    def keep_models(self, models: Iterable[HostedModel]) -> None:
        """Forget the demand for models that are not hosted any more."""
        self._popularity.keep_models({model.name for model in models})

    def place(self, now_s: float) -> list[tuple[Ticket, ApiError]]:
        """Loads for models that wait and that not every worker offers.

        Called when a status brings news of models, and every tick for what time alone changes.
        Returns the tickets that would wait in vain, each with the answer it should have now.
        """
        waiting = self._queue.model_names
        wanting = self._fleet.wanting(waiting, now_s)
        wanted: list[Demand] = []
        if wanting:
            wanted = demands(self._queue, self._share, wanting, self._fleet.is_pinned, now_s)

        busy = self._fleet.place(now_s, wanted, waiting, self._asks(now_s))
        if not busy and now_s - self._prefetched_s >= PREFETCH_S:
            self._prefetched_s = now_s
            self._fetch_ahead(now_s)
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
            if not self._fleet.offering(name, now_s):
                eta_s = self.outlook(name, now_s).load_eta_s
                if eta_s is not None:
                    found[name] = eta_s
        return found

    def _asks(self, now_s: float) -> AskRate:
        return lambda model_id: self._popularity.asks_s(model_id, now_s)

    def _fetch_ahead(self, now_s: float) -> None:
        candidates = self._fleet.demand_of(self._popularity.known())
        views = self._fleet.views()
        for prefetch in self._prefetcher.decide(now_s, self._popularity, candidates, views):
            self._fleet.fetch(now_s, prefetch)

    def _hopeless(self, now_s: float, wanted: Iterable[Demand]) -> list[tuple[Ticket, ApiError]]:
        late: dict[str, Outlook] = {}
        for demand in wanted:
            if not self._fleet.offering(demand.model_id, now_s):
                outlook = self._fleet.outlook(demand.model_id, now_s)
                if outlook.sure and now_s < outlook.at_s < math.inf:
                    late[demand.model_id] = outlook
        if not late:
            return []
        found = []
        for ticket in self._queue:
            there = late.get(ticket.model_name)
            if there is None:
                continue
            # Not where the load would have begun by then: expected times are not that exact.
            if there.at_s - there.load_s > min(ticket.deadline_s, ticket.ends_by_s):
                found.append((ticket, self._refusal(now_s, ticket, there)))
        return found

    def _refusal(self, now_s: float, ticket: Ticket, outlook: Outlook) -> ApiError:
        eta_s = outlook.at_s - now_s
        self.num_refusals += 1
        self._decisions.add(
            DecisionRecord(
                now_s,
                "refusal",
                "eta beyond bound",
                ticket.model_name,
                outlook.worker_id,
                Figures(
                    eta_s=eta_s,
                    bound_s=ticket.deadline_s - ticket.arrival_s,
                    waited_s=now_s - ticket.arrival_s,
                    retry_after_s=eta_s,
                ),
                ticket.tenant_id,
            )
        )
        message = (
            f"the model {ticket.model_name!r} is expected to be loaded in {eta_s:.0f} s, later "
            "than this request may wait: try again then"
        )
        return ApiError(UNAVAILABLE, message, retry_after_s=max(1.0, eta_s))
