"""Tickets in the workers' hands: granting them, and what gateways say of them (stage 5 -> 6).

    granted --tokens--> streaming
    granted --Refused-> waiting, at its old place, where the refusal is `retryable`, or the client
                        has tokens and another worker offers the model; otherwise ended
    granted, streaming --worker lost--> waiting as the next attempt, once
                       --lost again--> ended: with WorkerLost after tokens, else UNAVAILABLE;
                                       waiting once more if that is silence, which its gateway may
                                       not have seen
                       --moved-------> waiting as the next attempt, however often
                       --finish------> ended

The next attempt goes on behind the tokens that the client has. The lost one's service is the
system's: the request is billed as if one attempt had made all of it. Service is charged when a
ticket is granted (predicted), while it runs and when it leaves: see usage_accounting.py.

`on_left` is called for every ticket that leaves a worker, in its new state, waiting or ended.
"""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from engine.protocol import Finish, Refused, RequestService
from gateway.dispatch.affinity import Affinity
from gateway.dispatch.capacity import WorkerCapacity
from gateway.dispatch.fleet import Fleet
from gateway.dispatch.live_tickets import LiveTickets
from gateway.dispatch.policy.fair_share import FRESH_S, Headroom, UsedService, Wanted
from gateway.dispatch.policy.model_history import Quarantine
from gateway.dispatch.policy.service_costs import ServiceEstimator
from gateway.dispatch.ticket_ends import ABORTED_UNUSED, check_tokens, loss_of
from gateway.dispatch.tickets import IntegrityError, StreamEnd, Ticket
from gateway.dispatch.usage_accounting import UsageAccounting

logger = logging.getLogger(__name__)


class LostRequest(NamedTuple):
    """Of a request that its worker was lost with: its model and revision, and whether it had lost a
    worker before."""

    model: tuple[str, str]
    is_again: bool

    @classmethod
    def of(cls, ticket: Ticket) -> "LostRequest":
        """Before this loss is counted."""
        model = ticket.request.model
        return cls((model.name, model.revision), ticket.num_losses > 0)


class Assignments(LiveTickets):
    """The dispatcher's tickets, with the books that go by them."""

    def __init__(
        self,
        fleet: Fleet,
        book: UsageAccounting,
        headroom: Headroom,
        estimators: tuple[ServiceEstimator, ServiceEstimator],
        quarantine: Quarantine,
        affinity: Affinity,
        on_left: Callable[[Ticket], None],
        send: Callable[[Ticket, WorkerCapacity], bool],
        recall: Callable[[Ticket], None],
    ) -> None:
        """`estimators`: that of class batch is the second. `send` has a granted request submitted
        (False: its gateway is gone), `recall` has it aborted where it is."""
        super().__init__(fleet.offering_ids)
        self._fleet = fleet
        self._book = book
        self._estimators = estimators
        self._quarantine = quarantine
        self._affinity = affinity
        self._on_left = on_left
        self._send = send
        self._recall = recall
        self._adopted: set[tuple[str, int]] = set()
        self._lost_there: dict[tuple[str, str], list[LostRequest]] = {}
        self._headroom = headroom

    def grant(self, ticket: Ticket, worker: WorkerCapacity, now_s: float) -> bool:
        """Have it submitted there. False: its gateway is gone, nothing was changed."""
        if not self._send(ticket, worker):
            return False
        self._book_grant(ticket, worker, now_s)
        worker.grant(ticket)
        return True

    def _book_grant(self, ticket: Ticket, worker: WorkerCapacity, now_s: float) -> None:
        request = ticket.request
        ticket.grant(worker.worker_id, worker.epoch, now_s)
        ticket.prediction = self._estimators[ticket.is_batch].predict(
            ticket.tenant_id,
            ticket.model_name,
            request.num_prompt_tokens,
            request.max_tokens,
            ticket.num_before,
        )
        self._affinity.granted(ticket, worker, now_s)
        self._book.grant(ticket)
        ticket.kv_bytes = worker.wanted_kv_bytes(ticket) or 0
        if not ticket.is_batch:
            self._headroom.take(worker.worker_id, ticket.tenant_id, ticket.kv_bytes, now_s)

    def may_take(self, ticket: Ticket, worker: WorkerCapacity, now_s: float, first: bool) -> bool:
        """Whether a grant there leaves what is kept for others. `first`: its tenant's turn."""
        kv_bytes = worker.wanted_kv_bytes(ticket)
        if kv_bytes is None or ticket.is_batch:  # class batch gives all of it back
            return True
        fresh = first and now_s - ticket.arrival_s <= FRESH_S
        wanted = Wanted(kv_bytes, worker.free_requests(), worker.free_kv_bytes(), fresh)
        return self._headroom.may_take(worker.worker_id, ticket.tenant_id, wanted, now_s)

    def progress(self, worker: WorkerCapacity, service: Sequence[RequestService]) -> None:
        """What requests have had so far: it counts while they run."""
        for so_far in service:
            ticket = self.find(so_far.request_id, so_far.attempt)
            if ticket is None or ticket.epoch != worker.epoch:
                continue
            if ticket.key in self._adopted:  # what it had before has been charged there
                self._adopted.discard(ticket.key)
                ticket.reported = UsedService(so_far.service_s)
                ticket.reported_device_s = so_far.device_s
            self._book.progress(ticket, so_far)

    def refused(self, worker_id: str, refused: Refused, now_s: float) -> None:
        """A Submit was not taken; nothing ran."""
        ticket = self.refused_ticket(worker_id, refused)
        if ticket is None:
            return
        event, end = self.refusal(ticket, refused, now_s)
        ticket.on(event)
        worker = self._fleet.get(worker_id, refused.epoch)
        if worker is not None:
            self._fleet.refuse(worker, ticket.key, ticket.model_name)
        self._take_back(ticket, now_s)
        self._book.fail(ticket)
        if end is None:
            logger.info("refused request=%s code=%s: requeued", refused.request_id, refused.code)
            self._on_left(ticket)
        else:
            self._end(ticket, end)

    def lost(
        self, worker_id: str, epoch: str, reason: str, now_s: float, *, is_silent: bool = False
    ) -> list[LostRequest]:
        """A worker process is gone. Returns whose requests it was running. One that is silent here
        may be heard by the gateways that have the streams: they say whether that is the end."""
        mine = self.lost_with(worker_id, epoch)
        found = [LostRequest.of(ticket) for ticket in mine]
        for ticket in mine:
            self._lost(ticket, reason, now_s, may_live=is_silent)
        return found + self._lost_there.pop((worker_id, epoch), [])

    def move(self, ticket: Ticket, now_s: float) -> bool:
        """Take it off its worker, which is to be emptied: it waits at its old place and goes on
        elsewhere. That is nobody's failure and may happen any number of times. False: it is on no
        worker, or about to end. The caller has seen to it that the worker gets nothing new."""
        if not ticket.is_on_worker or ticket.aborted:
            return False
        self._recall(ticket)
        ticket.on("move")
        self._take_back(ticket, now_s)
        self._book.fail(ticket)
        self._again(ticket, now_s)
        return True

    def check_integrity(self) -> None:
        """Raises IntegrityError unless keys, states, tokens and workers' counts agree."""
        check_tokens(self.live.values())
        running: dict[tuple[str, str], int] = {}
        for ticket in self:
            if ticket.state == "granted" and ticket.num_tokens:
                raise IntegrityError(f"{ticket.key} has tokens but is not streaming")
            place = (ticket.worker_id, ticket.epoch)
            running[place] = running.get(place, 0) + 1
        counted = {(w.worker_id, w.epoch): w.num_running() for w in self._fleet}
        held: dict[str, int] = {}
        for ticket in self:
            if not ticket.is_batch:
                held[ticket.worker_id] = held.get(ticket.worker_id, 0) + 1
        self._headroom.check_integrity(held)
        if running != {place: count for place, count in counted.items() if count}:
            raise IntegrityError(f"running {running}, workers count {counted}")

    # What gateways say about requests of theirs (ticket_dispatcher.py).

    def adopt(self, ticket: Ticket, worker: WorkerCapacity, num_tokens: int, now_s: float) -> None:
        """Another dispatcher granted it, and its worker's status counts it."""
        self._book_grant(ticket, worker, now_s)
        worker.adopt(ticket)
        self._adopted.add(ticket.key)
        self.reported_tokens(ticket, num_tokens)

    def reported_tokens(self, ticket: Ticket, num_tokens: int) -> None:
        """So many tokens have come, all in all."""
        if num_tokens:
            ticket.on("token")
        ticket.num_tokens = num_tokens

    def reported_finish(
        self, ticket: Ticket, finish: Finish, num_tokens: int, now_s: float
    ) -> None:
        """Its worker has ended it; whoever has it sees to the rest."""
        ticket.on("finish")
        ticket.num_tokens = num_tokens
        self._close_books(ticket, finish, now_s)
        self._end(ticket, finish)

    def reported_lost(self, ticket: Ticket, reason: str, now_s: float) -> None:
        """Its worker was lost where it is."""
        self._blame(ticket)
        self._withdraw(ticket)
        self._lost(ticket, reason, now_s)

    def reported_gone(self, ticket: Ticket, now_s: float, *, is_lost: bool) -> None:
        """Nobody waits for it any more; what its worker still does about it is an abort."""
        ticket.on("give_up")
        if is_lost:
            self._blame(ticket)
        self._withdraw(ticket)
        self._take_back(ticket, now_s)
        self._book.fail(ticket)
        self._end(ticket, ABORTED_UNUSED)

    def _blame(self, ticket: Ticket) -> None:
        """Others may see a worker die before this process does."""
        place = ticket.worker_id, ticket.epoch
        self._lost_there.setdefault(place, []).append(LostRequest.of(ticket))

    def _withdraw(self, ticket: Ticket) -> None:
        worker = self._fleet.get(ticket.worker_id, ticket.epoch)
        if worker is not None:
            worker.withdraw(ticket.key)

    def _lost(self, ticket: Ticket, reason: str, now_s: float, *, may_live: bool = False) -> None:
        event, end = loss_of(ticket, reason)
        if may_live and not ticket.aborted:
            event, end = "worker_lost", None
        ticket.on(event)
        ticket.num_losses += 1
        self._take_back(ticket, now_s)
        self._book.fail(ticket)
        if end is not None:
            self._end(ticket, end)
        else:
            self._again(ticket, now_s)

    def _again(self, ticket: Ticket, now_s: float) -> None:
        """It waits as the next attempt."""
        if ticket.has_tokens:
            self.counts.resumed += 1
        else:
            self.counts.retries += 1
        ticket.next_attempt(now_s)
        self._on_left(ticket)

    def _close_books(self, ticket: Ticket, finish: Finish, now_s: float) -> None:
        usage = finish.usage
        self._take_back(ticket, now_s)
        if finish.reason == "error":
            self._book.fail(ticket, usage.device_s)
        else:
            self._book.end(ticket, usage)
        model = ticket.request.model
        if finish.reason in ("stop", "length"):
            self._quarantine.served(model.name, model.revision)
        if finish.reason in ("stop", "length") and not ticket.num_before:
            uncached = usage.prompt_tokens - usage.cached_tokens
            self._estimators[ticket.is_batch].observe(
                ticket.tenant_id, model.name, uncached, usage.generated_tokens, usage.service_s
            )

    def _take_back(self, ticket: Ticket, now_s: float) -> None:
        """It is on no worker any more."""
        self._adopted.discard(ticket.key)
        if not ticket.is_batch:
            self._headroom.give_back(ticket.worker_id, ticket.tenant_id, ticket.kv_bytes)
        worker = self._fleet.get(ticket.worker_id, ticket.epoch)
        if worker is not None:
            worker.release(ticket, now_s)

    def _end(self, ticket: Ticket, end: StreamEnd) -> None:
        ticket.stream.finish(end)
        self._on_left(ticket)
