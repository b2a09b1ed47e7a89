"""The two lanes of tickets: those of class batch, and all others (stage 5).

A lane is a queue with a fair order of its own, over all models and workers. What waits in the lane
of class batch has what the other lane leaves: its tickets are granted after all of the other lane's
that can be, and a worker's figures count what it runs of them as free (capacity.py). So nothing
that the dispatcher decides for the other lane depends on it: not the counters and floors of the
fair order, not the bounds of the queue, not the rates by which models are kept, not who is light.
Among themselves tenants share by the same rules and weights.

`charge` knows a lane's tenant by one name (`flow`), because loads are paid by those that caused
them, of both lanes.
"""

from collections.abc import Iterator
from typing import NamedTuple

from gateway.dispatch.policy.batch_class import Window, is_pressed
from gateway.dispatch.policy.fair_share import TenantOrder, UsedService
from gateway.dispatch.ticket_queue import TicketQueue
from gateway.dispatch.tickets import IntegrityError, Ticket

_BATCH = "\n"
"""What the flow of a tenant's requests of class batch begins with: no tenant's id does."""


class Lane(NamedTuple):
    """Tickets that wait, and whose turn it is among them."""

    queue: TicketQueue
    share: TenantOrder

    def enter(self, ticket: Ticket) -> None:
        """A new ticket waits, or one that comes from the other lane."""
        self.queue.add(ticket)
        self.share.enqueue(ticket.tenant_id, ticket.lane_weight)

    def leave(self, ticket: Ticket) -> None:
        """It waits no more. Out of the queue first: a tenant that leaves it sets the floor at what
        it had before."""
        self.queue.remove(ticket)
        self.share.dequeue(ticket.tenant_id)

    def come_back(self, ticket: Ticket) -> None:
        """A granted ticket waits again through no doing of its tenant."""
        self.queue.add(ticket)
        self.share.restore(ticket.tenant_id)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless queue and share agree."""
        self.queue.check_integrity()
        self.share.check_integrity()
        if dict(self.share.waiting()) != self.queue.by_tenant():
            raise IntegrityError(f"share counts {dict(self.share.waiting())}")


class Lanes:
    """Both lanes of one dispatcher."""

    def __init__(self, share: TenantOrder, batch_share: TenantOrder) -> None:
        self.live = Lane(TicketQueue(), share)
        self.batch = Lane(TicketQueue(), batch_share)

    def __iter__(self) -> Iterator[Lane]:
        yield self.live
        yield self.batch

    def of(self, ticket: Ticket) -> Lane:
        """The lane that its class says."""
        return self.batch if ticket.is_batch else self.live

    def tickets(self) -> Iterator[Ticket]:
        """All that wait, in no particular order."""
        for lane in self:
            yield from lane.queue

    def charge(self, flow: str, used: UsedService) -> None:
        """Charge a tenant in one of its lanes."""
        if flow.startswith(_BATCH):
            self.batch.share.charge(flow.removeprefix(_BATCH), used)
        else:
            self.live.share.charge(flow, used)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless each lane holds its own tickets, and its books agree."""
        for lane in self:
            lane.check_integrity()
            for ticket in lane.queue:
                if self.of(ticket) is not lane:
                    raise IntegrityError(f"{ticket.key} waits in the wrong lane")


def is_late(ticket: Ticket, now_s: float) -> bool:
    """Whether it is of class batch and should be so no longer, as its time runs out."""
    if not ticket.is_batch:
        return False
    window, left_s = Window(ticket.queued_s, ticket.deadline_s), ticket.prediction.service_s
    if ticket.batch_window is not None:
        window = Window(ticket.batch_window.began_s, ticket.batch_window.ends_s)
        left_s += ticket.batch_window.behind_s
    elif ticket.is_on_worker:
        return False  # its time in the queue was enough
    return is_pressed(window, now_s, left_s)


def flow_of(ticket: Ticket) -> str:
    """A tenant's name in one of its lanes."""
    return _BATCH + ticket.tenant_id if ticket.is_batch else ticket.tenant_id


def tenant_of(flow: str) -> str:
    """The tenant of a flow."""
    return flow.removeprefix(_BATCH)
