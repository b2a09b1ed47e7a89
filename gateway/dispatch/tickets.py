"""Tickets and the queue they wait in: stage 5's bookkeeping, without any decision.

    waiting --grant--> granted --first token--> streaming --finish, worker lost--> ended
       ^                  |
       +-refused, worker lost (once)
    waiting, granted --finish, refusal, abort, time-out--> ended

The queue is ordered per (tenant, model): the lowest `priority` first, then by arrival; a ticket
that comes back from a worker takes its old place. A priority is among one tenant's requests and
nothing between tenants: which of these is next is policy/fair_share.py's, which worker takes it is
dispatcher.py's.
"""

import math
from bisect import insort
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from engine.protocol import TokenLogprobs
from gateway.dispatch.running import StreamEnd
from gateway.dispatch.submits import time_left_s
from gateway.errors import ApiError, model_gone, model_replaced
from gateway.policy.fair_share import NOTHING, Used
from gateway.policy.service_estimate import Prediction
from gateway.types import Asked, HostedModel

TicketState = Literal["waiting", "granted", "streaming", "ended"]

_TRANSITIONS: frozenset[tuple[TicketState, TicketState]] = frozenset(
    {
        ("waiting", "granted"),
        ("granted", "streaming"),
        ("granted", "waiting"),
        ("waiting", "ended"),
        ("granted", "ended"),
        ("streaming", "ended"),
    }
)


class IllegalTransition(Exception):
    """A ticket was asked to leave its state table (a bug); nothing was changed."""


class IntegrityError(Exception):
    """An invariant of the dispatcher does not hold (a bug)."""


class TicketStream(Protocol):
    """Where a ticket's events go: `running.RequestStream`, or another process."""

    def retry(self, attempt: int) -> None:
        """The events from now on are those of another try; no token has been put yet."""

    def put(
        self,
        token_ids: list[int],
        logprobs: Sequence[TokenLogprobs] = (),
        prompt_logprobs: Sequence[TokenLogprobs] = (),
    ) -> bool:
        """Add tokens. False: the consumer is too slow, they were dropped."""

    def finish(self, end: StreamEnd, vectors: bytes = b"") -> None:
        """The last event, or what is raised in its place."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One request as the dispatcher sees it, over all its attempts.

    `seq` is the order of arrival; `kv_tokens` the most it may hold (prompt plus max_tokens).
    `deadline_s` bounds its wait in the queue, `ends_by_s` the whole request, over all its attempts.
    `worker_id` and `epoch` name the worker process that has it, while it is granted or streaming.
    """

    request: Asked
    tenant_id: str
    weight: float
    seq: int
    arrival_s: float
    deadline_s: float
    prediction: Prediction
    stream: TicketStream
    ends_by_s: float = math.inf
    state: TicketState = "waiting"
    attempt: int = 1
    granted_s: float | None = None
    worker_id: str = ""
    epoch: str = ""
    aborted: bool = False
    num_tokens: int = 0
    """Tokens delivered so far (of this attempt)."""
    told: Used = NOTHING
    told_device_s: float = 0.0
    """What its worker has told of this attempt, and has been charged."""
    load_s: float = 0.0
    """Of its model's load, what this attempt has paid back, whoever is paid: it may be billed."""
    owes_load: bool = False
    """Of a dispatcher in another process: whether it will have a `load_s` to tell at the end."""
    expected: Used = NOTHING
    """What is left of its prediction."""

    @property
    def model_name(self) -> str:
        """The hosted model's public name, which is its id on the workers."""
        return self.request.model.name

    @property
    def kv_tokens(self) -> int:
        """Positions it takes at most."""
        return self.request.num_prompt_tokens + self.request.max_tokens

    @property
    def place(self) -> tuple[int, int]:
        """Its place among its tenant's."""
        return self.request.priority, self.seq

    @property
    def key(self) -> tuple[str, int]:
        """The name under which a worker's messages speak of it."""
        return self.request.request_id, self.attempt

    def misfit(self, model: HostedModel | None) -> ApiError | None:
        """As the function below."""
        return misfit(self.request, model)

    def timeout_s(self, now_s: float) -> float:
        """What is left of its time, as a Submit says it: 0 none, negative: it is over."""
        return time_left_s(self.ends_by_s, now_s)

    def move(self, state: TicketState) -> None:
        """Change state. Raises IllegalTransition, changing nothing."""
        if (self.state, state) not in _TRANSITIONS:
            raise IllegalTransition(f"request {self.key}: {self.state} -> {state}")
        self.state = state


def misfit(request: Asked, model: HostedModel | None) -> ApiError | None:
    """Why `model`, as hosted now under its name, is not the one it was prepared for."""
    if model is None:
        return model_gone(request.model.name)
    if model.revision != request.model.revision:
        return model_replaced(request.model.name)
    return None


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

    def is_newcomer(self, tenant_id: str) -> bool:
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
