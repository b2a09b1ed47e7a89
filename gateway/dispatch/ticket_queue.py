"""The fair queue: tickets that wait.

Tickets are ordered per (tenant, model): the lowest `priority` first, then by arrival; a ticket that
comes back from a worker takes its old place. A priority is among one tenant's requests and nothing
between tenants: which tenant is next is dispatch/policy/fair_share.py's.

matching.py has a round of grants over it.
"""

import math
from bisect import insort
from collections.abc import Collection, Iterable, Iterator

from gateway.dispatch.tickets import IntegrityError, Ticket

FEW_TENANTS = 64
"""Among so many that wait, somebody's first ticket is looked at as soon as it comes."""


class TicketQueue:
    """Waiting tickets by tenant and model."""

    def __init__(self) -> None:
        self._tenants: dict[str, dict[str, list[Ticket]]] = {}
        self._num_by_model: dict[str, int] = {}
        self._tenants_of_model: dict[str, dict[str, None]] = {}
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
        self._tenants_of_model.setdefault(ticket.model_name, {})[ticket.tenant_id] = None
        self.backlog_s += ticket.prediction.service_s
        self._next_deadline_s = min(self._next_deadline_s, ticket.deadline_s)
        self._num_by_model[ticket.model_name] = self._num_by_model.get(ticket.model_name, 0) + 1
        self._num_total += 1

    def remove(self, ticket: Ticket) -> None:
        """Take a waiting ticket out."""
        models = self._tenants[ticket.tenant_id]
        tickets = models[ticket.model_name]
        tickets.remove(ticket)
        if not tickets:
            del models[ticket.model_name]
            tenants = self._tenants_of_model[ticket.model_name]
            del tenants[ticket.tenant_id]
            if not tenants:
                del self._tenants_of_model[ticket.model_name]
        if not models:
            del self._tenants[ticket.tenant_id]
        self._num_by_model[ticket.model_name] -= 1
        if not self._num_by_model[ticket.model_name]:
            del self._num_by_model[ticket.model_name]
        self._num_total -= 1
        # Sums of floats drift; an empty queue has none.
        self.backlog_s = self.backlog_s - ticket.prediction.service_s if self._num_total else 0.0

    def tenants_of(self, model_names: Iterable[str]) -> list[str]:
        """Tenants that wait for one of these models."""
        tenants: dict[str, None] = {}
        for name in model_names:
            tenants.update(self._tenants_of_model.get(name, {}))
        return list(tenants)

    def overdue(self, now_s: float) -> list[Ticket]:
        """Tickets whose deadline has come. Looks at all of them only when one may have."""
        if now_s < self._next_deadline_s:
            return []
        self._next_deadline_s = min(
            (ticket.deadline_s for ticket in self if ticket.deadline_s > now_s), default=math.inf
        )
        return [ticket for ticket in self if now_s >= ticket.deadline_s]

    def heads(self, tenant_id: str) -> list[Ticket]:
        """The tenant's first ticket of each model, in its own order."""
        models = self._tenants.get(tenant_id, {})
        return sorted((tickets[0] for tickets in models.values()), key=lambda t: t.place)

    def oldest_seq(self, tenant_id: str) -> int:
        """The arrival of the tenant's oldest ticket, whatever its priority."""
        return min(
            # Of one priority all: the first is the oldest.
            tickets[0].seq
            if tickets[0].request.priority == tickets[-1].request.priority
            else min(ticket.seq for ticket in tickets)
            for tickets in self._tenants[tenant_id].values()
        )

    def num_ahead(self, ticket: Ticket) -> int:
        """Tickets of its tenant for its model that go before it, of a ticket that waits."""
        return self._tenants[ticket.tenant_id][ticket.model_name].index(ticket)

    def num_like(self, ticket: Ticket) -> int:
        """Tickets of its tenant for its model, of a ticket that waits."""
        return len(self._tenants[ticket.tenant_id][ticket.model_name])

    def num_of_tenant(self, tenant_id: str) -> int:
        """Tickets of one tenant."""
        return sum(len(tickets) for tickets in self._tenants.get(tenant_id, {}).values())

    def is_new_tenant(self, tenant_id: str) -> bool:
        """Whether one ticket is all that the tenant waits for, among FEW_TENANTS."""
        return self.num_of_tenant(tenant_id) == 1 and len(self._tenants) <= FEW_TENANTS

    def num_of_model(self, model_name: str) -> int:
        """Tickets for one model."""
        return self._num_by_model.get(model_name, 0)

    @property
    def model_names(self) -> Collection[str]:
        """Models that tickets wait for, as of now."""
        return self._num_by_model.keys()

    def by_model(self) -> dict[str, int]:
        """Tickets by model, only models that have some."""
        return dict(self._num_by_model)

    def by_tenant(self) -> dict[str, int]:
        """Tickets by tenant, only tenants that have some."""
        return {tenant_id: self.num_of_tenant(tenant_id) for tenant_id in self._tenants}

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
        if tenants_of != {name: set(kept) for name, kept in self._tenants_of_model.items()}:
            raise IntegrityError(f"tenants by model {self._tenants_of_model}, found {tenants_of}")
        if counted != self._num_by_model or sum(counted.values()) != self._num_total:
            raise IntegrityError(f"counts {self._num_by_model} are not those of {counted}")
