"""The fair queue: tickets that wait.

Tickets are ordered per (tenant, model): the lowest `priority` first, then by arrival; a ticket that
comes back from a worker takes its old place. A priority is among one tenant's requests and nothing
between tenants: which tenant is next is dispatch/policy/fair_share.py's.

matching.py has a round of grants over it.
"""

import heapq
import math
from bisect import insort
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from gateway.dispatch.tickets import IntegrityError, Ticket

FEW_TENANTS = 64
"""Among so many that wait, somebody's first ticket is looked at as soon as it comes."""

MOST_GONE = 64
"""Arrivals of tickets that have gone, kept for each tenant beside as many as wait."""


@dataclass(slots=True)
class ModelBacklog:
    """What waits for one model. Sums, so that a look at what is in demand costs no walk.

    service_s   predicted
    arrived_s   sum of the times of arrival
    tenants     whose tickets these are
    """

    num: int = 0
    service_s: float = 0.0
    arrived_s: float = 0.0
    tenants: dict[str, None] = field(default_factory=dict)


class TicketQueue:
    """Waiting tickets by tenant and model."""

    def __init__(self) -> None:
        self._tenants: dict[str, dict[str, list[Ticket]]] = {}
        self._by_model: dict[str, ModelBacklog] = {}
        self._num_of_tenant: dict[str, int] = {}
        # Arrivals by tenant, the oldest first; those of tickets that have gone leave when they
        # come to the front.
        self._arrivals: dict[str, list[tuple[int, int, Ticket]]] = {}
        self._num_added = 0
        self._num_total = 0
        self._next_deadline_s = math.inf  # no ticket's is earlier
        self.backlog_s = 0.0
        """Predicted service of all that wait."""

    def __len__(self) -> int:
        return self._num_total

    def __iter__(self) -> Iterator[Ticket]:
        """All waiting tickets, in no particular order."""
        for models in self._tenants.values():
            for tickets in models.values():
                yield from tickets

    def add(self, ticket: Ticket) -> None:
        """Queue at its place by arrival."""
        models = self._tenants.setdefault(ticket.tenant_id, {})
        insort(models.setdefault(ticket.model_name, []), ticket, key=lambda t: t.place)
        about = self._by_model.setdefault(ticket.model_name, ModelBacklog())
        about.num += 1
        about.service_s += ticket.prediction.service_s
        about.arrived_s += ticket.queued_s
        about.tenants[ticket.tenant_id] = None
        self._num_of_tenant[ticket.tenant_id] = self.num_of_tenant(ticket.tenant_id) + 1
        self._num_added += 1
        arrivals = self._arrivals.setdefault(ticket.tenant_id, [])
        heapq.heappush(arrivals, (ticket.seq, self._num_added, ticket))
        ticket.queued_in = self
        self.backlog_s += ticket.prediction.service_s
        self._next_deadline_s = min(self._next_deadline_s, ticket.deadline_s)
        self._num_total += 1

    def remove(self, ticket: Ticket) -> None:
        """Take a waiting ticket out."""
        models = self._tenants[ticket.tenant_id]
        tickets = models[ticket.model_name]
        tickets.remove(ticket)
        ticket.queued_in = None
        about = self._by_model[ticket.model_name]
        about.num -= 1
        about.service_s -= ticket.prediction.service_s
        about.arrived_s -= ticket.queued_s
        self._num_of_tenant[ticket.tenant_id] -= 1
        if not tickets:
            del models[ticket.model_name]
            del about.tenants[ticket.tenant_id]
        if not about.num:
            del self._by_model[ticket.model_name]
        if not models:
            del self._tenants[ticket.tenant_id]
            del self._num_of_tenant[ticket.tenant_id]
            del self._arrivals[ticket.tenant_id]
        else:
            self._tidy_arrivals(ticket.tenant_id)
        self._num_total -= 1
        # Sums of floats drift; an empty queue has none.
        self.backlog_s = self.backlog_s - ticket.prediction.service_s if self._num_total else 0.0

    def _tidy_arrivals(self, tenant_id: str) -> None:
        """An old ticket at the front keeps all that have gone behind it."""
        arrivals = self._arrivals[tenant_id]
        if len(arrivals) > 2 * self._num_of_tenant[tenant_id] + MOST_GONE:
            arrivals[:] = [entry for entry in arrivals if entry[2].queued_in is self]
            heapq.heapify(arrivals)

    def tenants_of(self, model_names: Iterable[str]) -> list[str]:
        """Tenants that wait for one of these models."""
        tenants: dict[str, None] = {}
        for name in model_names:
            if name in self._by_model:
                tenants.update(self._by_model[name].tenants)
        return list(tenants)

    def overdue(self, now_s: float) -> list[Ticket]:
        """Tickets whose deadline has come. Looks at all of them only when one may have."""
        if now_s < self._next_deadline_s:
            return []
        self._next_deadline_s = min(
            (ticket.deadline_s for ticket in self if ticket.deadline_s > now_s), default=math.inf
        )
        return [ticket for ticket in self if now_s >= ticket.deadline_s]

    def heads(self, tenant_id: str, among: Collection[str] | None = None) -> list[Ticket]:
        """The tenant's first ticket of each model (`among` these), in its own order."""
        models = self._tenants.get(tenant_id, {})
        names: Iterable[str] = models
        if among is not None:
            names = among if len(among) < len(models) else (m for m in models if m in among)
        found = [tickets[0] for name in names if (tickets := models.get(name))]
        found.sort(key=lambda ticket: ticket.place)
        return found

    def oldest_seq(self, tenant_id: str) -> int:
        """The arrival of the tenant's oldest ticket, whatever its priority."""
        arrivals = self._arrivals[tenant_id]
        while arrivals[0][2].queued_in is not self:
            heapq.heappop(arrivals)
        return arrivals[0][0]

    def oldest_of_model(self, model_name: str) -> Ticket:
        """The first to have come of those that wait for the model."""
        mine = [
            self._tenants[tenant_id][model_name] for tenant_id in self._by_model[model_name].tenants
        ]
        oldest = (
            # Of one priority all: the first is the oldest.
            tickets[0]
            if tickets[0].request.priority == tickets[-1].request.priority
            else min(tickets, key=lambda ticket: ticket.seq)
            for tickets in mine
        )
        return min(oldest, key=lambda ticket: ticket.seq)

    def of_model(self, model_name: str) -> Iterator[Ticket]:
        """All tickets that wait for the model."""
        if model_name in self._by_model:
            for tenant_id in self._by_model[model_name].tenants:
                yield from self._tenants[tenant_id][model_name]

    def backlog_of(self, model_name: str) -> ModelBacklog | None:
        """What waits for the model, if anything does."""
        return self._by_model.get(model_name)

    def num_ahead(self, ticket: Ticket) -> int:
        """Tickets of its tenant for its model that go before it, of a ticket that waits."""
        return self._tenants[ticket.tenant_id][ticket.model_name].index(ticket)

    def num_like(self, ticket: Ticket) -> int:
        """Tickets of its tenant for its model, of a ticket that waits."""
        return len(self._tenants[ticket.tenant_id][ticket.model_name])

    def num_of_tenant(self, tenant_id: str) -> int:
        """Tickets of one tenant."""
        return self._num_of_tenant.get(tenant_id, 0)

    def is_new_tenant(self, tenant_id: str) -> bool:
        """Whether one ticket is all that the tenant waits for, among FEW_TENANTS."""
        return self.num_of_tenant(tenant_id) == 1 and len(self._tenants) <= FEW_TENANTS

    def num_of_model(self, model_name: str) -> int:
        """Tickets for one model."""
        about = self._by_model.get(model_name)
        return 0 if about is None else about.num

    @property
    def model_names(self) -> Collection[str]:
        """Models that tickets wait for, as of now."""
        return self._by_model.keys()

    def by_model(self) -> dict[str, int]:
        """Tickets by model, only models that have some."""
        return {name: about.num for name, about in self._by_model.items()}

    def by_tenant(self) -> dict[str, int]:
        """Tickets by tenant, only tenants that have some."""
        return dict(self._num_of_tenant)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless order, states and counts agree."""
        counted: dict[str, int] = {}
        for tenant_id, models in self._tenants.items():
            for model_name, tickets in models.items():
                if not tickets or [t.place for t in tickets] != sorted({t.place for t in tickets}):
                    raise IntegrityError(f"queue of {tenant_id}, {model_name} is out of order")
                for ticket in tickets:
                    if ticket.state != "waiting" or ticket.tenant_id != tenant_id:
                        raise IntegrityError(f"{ticket.key} waits but is {ticket.state}")
                counted[model_name] = counted.get(model_name, 0) + len(tickets)
        tenants_of = {
            name: {tenant for tenant, models in self._tenants.items() if name in models}
            for name in counted
        }
        if tenants_of != {name: set(about.tenants) for name, about in self._by_model.items()}:
            raise IntegrityError(f"tenants by model {self._by_model}, found {tenants_of}")
        if counted != self.by_model() or sum(counted.values()) != self._num_total:
            raise IntegrityError(f"counts {self.by_model()} are not those of {counted}")
        for name, about in self._by_model.items():
            service_s = sum(ticket.prediction.service_s for ticket in self.of_model(name))
            arrived_s = sum(ticket.queued_s for ticket in self.of_model(name))
            if not (_nearly(service_s, about.service_s) and _nearly(arrived_s, about.arrived_s)):
                raise IntegrityError(f"sums of {name}: {about}, found {service_s}, {arrived_s}")
        by_tenant = {
            tenant_id: sum(map(len, models.values())) for tenant_id, models in self._tenants.items()
        }
        if by_tenant != self._num_of_tenant:
            raise IntegrityError(f"counts {self._num_of_tenant}, found {by_tenant}")
        for tenant_id, models in self._tenants.items():
            oldest = min(ticket.seq for tickets in models.values() for ticket in tickets)
            if self.oldest_seq(tenant_id) != oldest:
                raise IntegrityError(f"the oldest ticket of {tenant_id} is {oldest}")


def _nearly(one: float, other: float) -> bool:
    """Sums of floats drift."""
    return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-6)
