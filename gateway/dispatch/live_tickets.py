"""Tickets that have not ended, by request id: the one table that a gateway, and the dispatcher for
all gateways, keeps of them (stage 5 -> 6).

Its owner puts them in and takes them out. Iteration and `len` are of those that workers have,
granted or streaming: a worker's messages name them by (request id, attempt) and come from an epoch.
What matches nothing is late: an earlier attempt, an earlier process.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from engine.protocol import Refused
from gateway.dispatch.ticket_ends import refusal_of
from gateway.dispatch.tickets import StreamEnd, Ticket, TicketEvent


@dataclass(slots=True)
class TicketCounts:
    """Running totals for metrics."""

    retries: int = 0
    resumed: int = 0
    late: int = 0
    too_slow: int = 0


class LiveTickets:
    """See the module. `offering(model, now_s)` names the workers that offer a model."""

    def __init__(self, offering: Callable[[str, float], Iterable[str]]) -> None:
        self.counts = TicketCounts()
        self.live: dict[str, Ticket] = {}
        self._offering = offering

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[Ticket]:
        return (ticket for ticket in self.live.values() if ticket.is_on_worker)

    def find(self, request_id: str, attempt: int) -> Ticket | None:
        """A granted ticket by the name under which its worker has it."""
        ticket = self.live.get(request_id)
        if ticket is None or ticket.attempt != attempt or not ticket.is_on_worker:
            return None
        return ticket

    def num_on(self, worker_id: str) -> int:
        """How many a worker has."""
        return sum(ticket.worker_id == worker_id for ticket in self)

    def lost_with(self, worker_id: str, epoch: str) -> list[Ticket]:
        """Those that a worker process had, in the order of their arrival."""
        mine = [t for t in self if (t.worker_id, t.epoch) == (worker_id, epoch)]
        return sorted(mine, key=lambda t: t.seq)

    def refused_ticket(self, worker_id: str, refused: Refused) -> Ticket | None:
        """Whose Submit was not taken; None: of an earlier attempt or epoch."""
        ticket = self.find(refused.request_id, refused.attempt)
        if ticket is None or (ticket.worker_id, ticket.epoch) != (worker_id, refused.epoch):
            self.counts.late += 1
            return None
        return ticket

    def refusal(
        self, ticket: Ticket, refused: Refused, now_s: float
    ) -> tuple[TicketEvent, StreamEnd | None]:
        """What a refusal is for it, as the workers are seen from here."""
        if not refused.retryable:
            ticket.refused_by |= {ticket.worker_id}
        offering = self._offering(ticket.model_name, now_s)
        others = any(worker_id not in ticket.refused_by for worker_id in offering)
        return refusal_of(ticket, refused, others_offer=others)
