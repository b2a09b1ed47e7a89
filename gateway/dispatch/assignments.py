"""Tickets in the workers' hands: granting them, and what workers say about them (stage 5 -> 6).

    granted --tokens--> streaming        put into the request's stream
    granted --Refused-> waiting, at its old place, where the refusal is `retryable`, or the client
                        has tokens and another worker offers the model; otherwise ended
    granted, streaming --worker lost--> waiting as the next attempt, once
                       --lost again--> ended: with WorkerLost after tokens, else UNAVAILABLE;
                                       waiting once more if that is silence and others have its
                                       stream
                       --moved-------> waiting as the next attempt, however often
                       --finish------> ended

The next attempt goes on behind the tokens that the client has. The lost one's service is the
system's: the request is billed as if one attempt had made all of it.

Messages are matched by (request_id, attempt) and the worker's epoch; what matches nothing is late
and dropped, a late finish is acknowledged so that the worker forgets it. Service is charged when a
ticket is granted (predicted), while it runs and when it leaves: see usage_accounting.py.

`on_left` is called for every ticket that leaves a worker, in its new state, waiting or ended.
"""

import logging
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from engine.protocol import Abort, Finish, Refused, RequestService, TokenDelta, Usage
from gateway.dispatch.capacity import WorkerCapacity
from gateway.dispatch.fleet import Fleet
from gateway.dispatch.policy.fair_share import FRESH_S, Headroom, UsedService, Wanted
from gateway.dispatch.policy.model_history import Quarantine
from gateway.dispatch.policy.service_costs import ServiceEstimator
from gateway.dispatch.ticket_ends import (
    ABORTED_UNUSED,
    check_tokens,
    end_without_tokens,
    failed_end,
    loss_of,
    refusal_of,
)
from gateway.dispatch.tickets import (
    IntegrityError,
    StreamEnd,
    Ticket,
    TicketEvent,
    Unsendable,
    submit_of,
)
from gateway.dispatch.usage_accounting import UsageAccounting, UsageOutbox
from gateway.types import PreparedRequest

logger = logging.getLogger(__name__)


def nobodys(_request_id: str, _finish: Finish, _attempt: int) -> bool:
    """Of a finish that no request waits for, where no ledger could claim it."""
    return False


@dataclass(slots=True)
class AssignmentCounts:
    """Running totals for metrics."""

    retries: int = 0
    resumed: int = 0
    late: int = 0
    too_slow: int = 0


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


class GrantedTickets:
    """Tickets by request id, and what workers say of those that are granted or streaming.

    `live` has the waiting ones too: it is the one table of a process' tickets that have not ended,
    and its owner puts them in and takes them out. Iteration and `len` are of the granted and the
    streaming. The part that is the same wherever the fair queue is (cluster/remote_dispatcher.py).
    `claim_orphan(request_id, finish, attempt)`: see dispatcher.py.
    """

    def __init__(self, fleet: Fleet, claim_orphan: Callable[[str, Finish, int], bool]) -> None:
        self.counts = AssignmentCounts()
        self.unacked = UsageOutbox(fleet)
        self._fleet = fleet
        self._claim_orphan = claim_orphan
        self.live: dict[str, Ticket] = {}

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

    def abort(self, ticket: Ticket) -> None:
        """Ask the worker to stop it; its finish follows."""
        if not ticket.aborted:
            ticket.aborted = True
            self._fleet.send(ticket.worker_id, Abort(*ticket.key))

    def deltas(
        self, worker_id: str, epoch: str, deltas: Sequence[TokenDelta], now_s: float
    ) -> None:
        """One step's output."""
        for delta in deltas:
            ticket = self.find(delta.request_id, delta.attempt)
            if ticket is None or (ticket.worker_id, ticket.epoch) != (worker_id, epoch):
                self._late(worker_id, epoch, delta)
                continue
            if delta.token_ids:
                try:
                    token_ids = array("I", delta.token_ids)
                except OverflowError:  # one request must not lose the step of all others
                    logger.error("token ids out of range request=%s", delta.request_id)
                    self._fail(ticket, failed_end(ticket), now_s)
                    continue
                ticket.generated.extend(token_ids)
                self._tokens(ticket, delta)
            if delta.finish is not None:
                self._finish(ticket, delta.finish, delta.vectors, now_s)

    def _submit(self, ticket: Ticket, worker: WorkerCapacity, now_s: float) -> bool:
        """False: it cannot be reached. Raises Unsendable."""
        request = ticket.request
        assert isinstance(request, PreparedRequest)  # what waits in this process
        try:
            left_s = ticket.timeout_s(now_s)
            made = ticket.generated, ticket.cached_tokens
            submit = submit_of(request, ticket.tenant_id, ticket.attempt, left_s, *made)
            return self._fleet.send(worker.worker_id, submit)
        except Exception as error:  # one request must not end the round of all others
            logger.exception("cannot send request=%s", request.request_id)
            raise Unsendable from error

    def num_on(self, worker_id: str) -> int:
        """How many a worker has."""
        return sum(ticket.worker_id == worker_id for ticket in self)

    def lost_with(self, worker_id: str, epoch: str) -> list[Ticket]:
        """Those that a worker process had, in the order of their arrival."""
        mine = [t for t in self if (t.worker_id, t.epoch) == (worker_id, epoch)]
        return sorted(mine, key=lambda t: t.seq)

    def _refused(self, worker_id: str, refused: Refused) -> Ticket | None:
        """Whose Submit was not taken; None: of an earlier attempt or epoch."""
        ticket = self.find(refused.request_id, refused.attempt)
        if ticket is None or (ticket.worker_id, ticket.epoch) != (worker_id, refused.epoch):
            self.counts.late += 1
            return None
        return ticket

    def _refusal(
        self, ticket: Ticket, refused: Refused, now_s: float
    ) -> tuple[TicketEvent, StreamEnd | None]:
        """What a refusal is for it, as the workers of this process are."""
        if not refused.retryable:
            ticket.refused_by |= {ticket.worker_id}
        offering = self._fleet.offering(ticket.model_name, now_s)
        others = any(worker.worker_id not in ticket.refused_by for worker in offering)
        return refusal_of(ticket, refused, others_offer=others)

    def _tokens(self, ticket: Ticket, delta: TokenDelta) -> None:
        if ticket.state == "granted":
            ticket.on("token")
            if not ticket.has_tokens:
                ticket.cached_tokens = delta.cached_tokens
        ticket.num_tokens += len(delta.token_ids)
        taken = ticket.stream.put(delta.token_ids, delta.logprobs, delta.prompt_logprobs)
        if not taken and not ticket.aborted:
            self.counts.too_slow += 1
            logger.info(
                "aborted request=%s: the client reads too slowly", ticket.request.request_id
            )
            self.abort(ticket)

    def _finish(self, ticket: Ticket, finish: Finish, vectors: bytes, now_s: float) -> None:
        """Its worker has ended it."""
        raise NotImplementedError

    def _fail(self, ticket: Ticket, end: StreamEnd, now_s: float) -> None:
        """Its worker says what cannot be: it is aborted there and ends here."""
        raise NotImplementedError

    def _late(self, worker_id: str, epoch: str, delta: TokenDelta) -> None:
        """An earlier attempt, an earlier epoch, or a finish sent again after a Hello."""
        self.counts.late += 1
        if delta.finish is None or self.unacked.expects(delta.request_id, delta.attempt):
            return
        self._unclaimed((delta.request_id, delta.attempt), delta.finish.usage)
        if self._claim_orphan(delta.request_id, delta.finish, delta.attempt):
            self.unacked.expect(delta.request_id, delta.attempt, worker_id, epoch)
        else:
            self.unacked.ack_now(delta.request_id, delta.attempt, worker_id)

    def _unclaimed(self, key: tuple[str, int], usage: Usage) -> None:
        """What was used for nobody here."""


class Assignments(GrantedTickets):
    """Those of the dispatcher, with the books that go by them."""

    def __init__(
        self,
        fleet: Fleet,
        book: UsageAccounting,
        headroom: Headroom,
        estimator: ServiceEstimator,
        quarantine: Quarantine,
        on_left: Callable[[Ticket], None],
        claim_orphan: Callable[[str, Finish, int], bool],
        send: Callable[[Ticket, WorkerCapacity, float], bool] | None = None,
        recall: Callable[[Ticket], None] | None = None,
    ) -> None:
        """`send` has a granted request submitted, `recall` has it aborted where it is; without
        them it is done from here."""
        super().__init__(fleet, claim_orphan)
        self._book = book
        self._estimator = estimator
        self._quarantine = quarantine
        self._on_left = on_left
        self._is_elsewhere = send is not None
        self._send = send or self._submit
        self._recall = recall or self._abort_there
        self._adopted: set[tuple[str, int]] = set()
        self._lost_there: dict[tuple[str, str], list[LostRequest]] = {}
        self._headroom = headroom

    def grant(self, ticket: Ticket, worker: WorkerCapacity, now_s: float) -> bool:
        """Send the request. False: the worker cannot be reached, nothing was changed. Raises
        Unsendable, and nothing was changed."""
        if not self._send(ticket, worker, now_s):
            return False
        self._book_grant(ticket, worker, now_s)
        worker.grant(ticket)
        return True

    def _book_grant(self, ticket: Ticket, worker: WorkerCapacity, now_s: float) -> None:
        request = ticket.request
        ticket.grant(worker.worker_id, worker.epoch, now_s)
        ticket.prediction = self._estimator.predict(
            ticket.tenant_id,
            ticket.model_name,
            request.num_prompt_tokens,
            request.max_tokens,
            ticket.num_before,
        )
        self._book.grant(ticket)
        room = worker.room(ticket, now_s)
        ticket.kv_bytes = 0 if room is None else room.wanted_kv_bytes
        self._headroom.take(worker.worker_id, ticket.tenant_id, ticket.kv_bytes, now_s)

    def may_take(self, ticket: Ticket, worker: WorkerCapacity, now_s: float, first: bool) -> bool:
        """Whether a grant there leaves what is kept for others. `first`: its tenant's turn."""
        room = worker.room(ticket, now_s)
        if room is None:
            return True
        fresh = first and now_s - ticket.arrival_s <= FRESH_S
        wanted = Wanted(room.wanted_kv_bytes, room.free_requests, room.free_kv_bytes, fresh)
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
        ticket = self._refused(worker_id, refused)
        if ticket is None:
            return
        event, end = self._refusal(ticket, refused, now_s)
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
        """A worker process is gone. Returns whose requests it was running. Where others have their
        streams, one that is silent here may be heard there: they say whether that is the end."""
        mine = self.lost_with(worker_id, epoch)
        found = [LostRequest.of(ticket) for ticket in mine]
        for ticket in mine:
            self._lost(ticket, reason, now_s, may_live=is_silent and self._is_elsewhere)
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
            held[ticket.worker_id] = held.get(ticket.worker_id, 0) + 1
        self._headroom.check_integrity(held)
        if running != {place: count for place, count in counted.items() if count}:
            raise IntegrityError(f"running {running}, workers count {counted}")

    # What other processes say about requests of theirs (ticket_dispatcher.py).

    def adopt(self, ticket: Ticket, worker: WorkerCapacity, num_tokens: int, now_s: float) -> None:
        """Another dispatcher granted it, and its worker's status counts it."""
        self._book_grant(ticket, worker, now_s)
        worker.adopt(ticket.model_name)
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

    def _fail(self, ticket: Ticket, end: StreamEnd, now_s: float) -> None:
        ticket.on("give_up")
        self._take_back(ticket, now_s)
        self._book.fail(ticket)
        self._end(ticket, end)
        self._abort_there(ticket)

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

    def _abort_there(self, ticket: Ticket) -> None:
        self._fleet.send(ticket.worker_id, Abort(*ticket.key))

    def _finish(self, ticket: Ticket, finish: Finish, vectors: bytes, now_s: float) -> None:
        ticket.on("finish")
        self._close_books(ticket, finish, now_s)
        if ticket.load_s:
            usage = msgspec.structs.replace(finish.usage, load_s=ticket.load_s)
            finish = msgspec.structs.replace(finish, usage=usage)
        request_id = ticket.request.request_id
        if ticket.has_tokens or vectors:
            self.unacked.expect(request_id, ticket.attempt, ticket.worker_id, ticket.epoch)
            self._end(ticket, finish, vectors)
        else:
            self.unacked.ack_now(request_id, ticket.attempt, ticket.worker_id)
            self._end(ticket, end_without_tokens(ticket, finish))
        if finish.reason == "error":
            logger.error("worker failed request=%s: %s", request_id, finish.error)

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
            self._estimator.observe(
                ticket.tenant_id, model.name, uncached, usage.generated_tokens, usage.service_s
            )

    def _unclaimed(self, key: tuple[str, int], usage: Usage) -> None:
        self._book.late(key, usage)

    def _take_back(self, ticket: Ticket, now_s: float) -> None:
        """It is on no worker any more."""
        self._adopted.discard(ticket.key)
        self._headroom.give_back(ticket.worker_id, ticket.tenant_id, ticket.kv_bytes)
        worker = self._fleet.get(ticket.worker_id, ticket.epoch)
        if worker is not None:
            worker.release(ticket.model_name, now_s)

    def _end(self, ticket: Ticket, end: StreamEnd, vectors: bytes = b"") -> None:
        ticket.stream.finish(end, vectors)
        self._on_left(ticket)
