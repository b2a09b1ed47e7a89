"""The requests of a gateway process whose dispatcher is another process (stages 5 and 6).

    waiting -> granted -> streaming -> ended        (tickets.py has the table)

Here is the doing of what the dispatcher decides: a granted request is submitted to its worker over
this process' own connection, tokens come straight back, and what becomes of it is told
(dispatcher_protocol.py). While there is no dispatcher, what streams goes on, and what waits waits.

What may cross, and what becomes of it:

    a grant for a request whose client has left      Leave: the dispatcher's books are cleared
    a grant whose worker is not connected here       Returned, as if the worker had refused it
    the worker dies between grant and Submit         the same; or lost, and tried a second time
    a grant of attempt 2 while attempt 1 runs        the dispatcher saw a worker die that did not:
    (no token yet)                                   attempt 1 is aborted, attempt 2 submitted
    a grant for a request that streams               Leave: it goes on, off the dispatcher's books
    a refusal (Denied) for a request that runs       nothing: the same

Of a model whose load is not paid back yet, a request's end waits for what the dispatcher says of
its share (load_shares.py).
"""

import logging
from collections.abc import Callable, Sequence

from engine.protocol import (
    Abort,
    Finish,
    Refused,
    SetCatalog,
    TokenDelta,
    ToWorker,
    WorkerStatus,
)
from gateway.dispatch.assignments import (
    ABORTED_UNUSED,
    MAX_ATTEMPTS,
    RESTART_WAIT_S,
    end_without_tokens,
    refusal_of,
)
from gateway.dispatch.dispatcher_client import DispatcherLink
from gateway.dispatch.dispatcher_protocol import (
    TOKENS_EVERY_S,
    Ask,
    Denied,
    Ended,
    Granted,
    Leave,
    Returned,
    RunningSpec,
    TicketSpec,
    Tokens,
)
from gateway.dispatch.fleet import Fleet
from gateway.dispatch.load_shares import LoadShares
from gateway.dispatch.running import StreamEnd
from gateway.dispatch.submits import submit_of
from gateway.dispatch.tickets import IntegrityError, Ticket
from gateway.dispatch.unacked import UnackedFinishes
from gateway.errors import UNAVAILABLE, ApiError, WorkerLost
from gateway.types import PreparedRequest

logger = logging.getLogger(__name__)

LATE_S = 2.0
"""So long after its time in the queue a request is given up here, if the dispatcher has not."""


class RemoteRequests:
    """Live tickets by request id. Implements worker_connection.WorkerListener."""

    def __init__(
        self,
        link: DispatcherLink,
        workers: Fleet,
        clock: Callable[[], float],
        claim_orphan: Callable[[str, Finish], bool],
    ) -> None:
        self._link = link
        self._workers = workers
        self._clock = clock
        self._claim_orphan = claim_orphan
        self.unacked = UnackedFinishes(workers)
        self.load_shares = LoadShares()
        self._live: dict[str, Ticket] = {}
        self._running: dict[tuple[str, int], Ticket] = {}
        self._told: dict[tuple[str, int], int] = {}
        self._next_tell_s = 0.0
        self.num_too_slow = 0
        self.num_late = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    @property
    def num_waiting(self) -> int:
        """Requests that no worker has."""
        return len(self._live) - len(self._running)

    def enter(self, ticket: Ticket) -> None:
        """A new one: the dispatcher is asked."""
        self._live[ticket.request.request_id] = ticket
        self._link.send(Ask(_spec(ticket)))

    def abort(self, ticket: Ticket) -> None:
        """Its client wants it no more."""
        if ticket.state == "waiting":
            self._leave(ticket, ABORTED_UNUSED)
        elif ticket.state != "ended" and not ticket.aborted:
            ticket.aborted = True
            self._workers.send(ticket.worker_id, Abort(*ticket.key))

    def abort_all(self) -> None:
        """End what is left."""
        for ticket in list(self._live.values()):
            self.abort(ticket)
        self.load_shares.give_up()

    def tick(self) -> None:
        """Counts of tokens for the dispatcher; requests that nobody answers in time."""
        now_s = self._clock()
        self.load_shares.tick(now_s)
        if now_s < self._next_tell_s:
            return
        self._next_tell_s = now_s + TOKENS_EVERY_S
        news = [
            (*key, ticket.num_tokens)
            for key, ticket in self._running.items()
            if self._told.get(key) != ticket.num_tokens
        ]
        if news:
            self._told.update((news_of[:2], news_of[2]) for news_of in news)
            self._link.send(Tokens(news))
        for ticket in [t for t in self._live.values() if t.state == "waiting"]:
            if now_s > ticket.deadline_s + LATE_S:
                text = "nobody could take the request in time: try again later"
                self._link.send(Leave(ticket.request.request_id))
                self._end(ticket, ApiError(UNAVAILABLE, text, retry_after_s=RESTART_WAIT_S))

    def waiting_specs(self) -> list[TicketSpec]:
        """What a dispatcher is to be told that does not know of it."""
        return [_spec(ticket) for ticket in self._live.values() if ticket.state == "waiting"]

    def running_specs(self) -> list[RunningSpec]:
        """The same of what runs."""
        return [
            RunningSpec(_spec(ticket), ticket.worker_id, ticket.epoch, ticket.num_tokens)
            for ticket in self._running.values()
        ]

    def check_integrity(self) -> None:
        """Raises IntegrityError unless what runs is what was granted and has not ended."""
        running = {t.key for t in self._live.values() if t.state in ("granted", "streaming")}
        if running != self._running.keys() or self._told.keys() - self._running.keys():
            raise IntegrityError(f"running {sorted(running)}, kept {sorted(self._running)}")

    # What the dispatcher says.

    def denied(self, denial: Denied) -> None:
        """It will not be granted."""
        ticket = self._live.get(denial.request_id)
        if ticket is not None and ticket.state == "waiting":
            self._end(ticket, denial.error())

    def granted(self, grant: Granted) -> None:
        """Submit it, unless something has come in between: see the module."""
        ticket = self._live.get(grant.request_id)
        if ticket is None or ticket.state in ("streaming", "ended") or ticket.aborted:
            self._link.send(Leave(grant.request_id))
            return
        if ticket.state == "granted":
            if grant.attempt <= ticket.attempt:
                return  # said twice
            before = ticket.worker_id, Abort(*ticket.key)
            self._take_back(ticket)
            self._workers.send(*before)
        if grant.attempt < ticket.attempt:  # of a worker that was lost meanwhile
            self._link.send(Returned(grant.request_id, grant.attempt, None, _spec(ticket)))
            return
        if grant.attempt > ticket.attempt:
            ticket.attempt = grant.attempt
            ticket.stream.retry(grant.attempt)
        now_s = self._clock()
        worker = self._workers.get(grant.worker_id, grant.worker_epoch)
        submit = submit_of(
            _prepared(ticket), ticket.tenant_id, ticket.attempt, ticket.timeout_s(now_s)
        )
        if worker is None or not self._workers.send(grant.worker_id, submit):
            text = "its gateway is not connected to this worker"
            refused = Refused(grant.worker_epoch, *ticket.key, "not_resident", text, True)
            self._link.send(Returned(*ticket.key, refused, _spec(ticket)))
            return
        ticket.move("granted")
        ticket.granted_s = now_s
        ticket.worker_id, ticket.epoch = grant.worker_id, grant.worker_epoch
        ticket.owes_load = grant.owes_load
        self._running[ticket.key] = ticket

    # What workers say (worker_connection.WorkerListener).

    def on_connected(self, worker_id: str, epoch: str) -> None:
        """A worker process answered; nothing is running there for this process."""
        self._workers.connect(worker_id, epoch, self._clock())

    def on_status(self, worker_id: str, status: WorkerStatus) -> None:
        """A heartbeat: for the routes that show where models are."""
        worker = self._workers.get(worker_id, status.epoch)
        if worker is not None:
            self._workers.update(worker, status, self._clock())

    def on_deltas(self, worker_id: str, epoch: str, deltas: Sequence[TokenDelta]) -> None:
        """One step's output."""
        first: list[tuple[str, int, int]] = []
        for delta in deltas:
            ticket = self._running.get((delta.request_id, delta.attempt))
            if ticket is None or (ticket.worker_id, ticket.epoch) != (worker_id, epoch):
                self._late(worker_id, epoch, delta)
                continue
            if delta.token_ids:
                if ticket.state == "granted":
                    ticket.move("streaming")
                    first.append((*ticket.key, len(delta.token_ids)))
                self._tokens(ticket, delta)
            if delta.finish is not None:
                self._finish(ticket, delta.finish, delta.vectors)
        if first:
            self._link.send(Tokens(first))

    def on_refused(self, worker_id: str, refused: Refused) -> None:
        """A Submit that was not taken."""
        ticket = self._running.get((refused.request_id, refused.attempt))
        if ticket is None or (ticket.worker_id, ticket.epoch) != (worker_id, refused.epoch):
            self.num_late += 1
            return
        self._take_back(ticket)
        self._link.send(Returned(*ticket.key, refused, _spec(ticket)))
        if ticket.aborted:
            self._leave(ticket, ABORTED_UNUSED)
        elif not refused.retryable:
            self._leave(ticket, refusal_of(ticket, refused))

    def on_lost(self, worker_id: str, epoch: str, reason: str) -> None:
        """A worker process is gone, with all it was running."""
        self._workers.lose(worker_id, self._clock())
        mine = [t for t in self._running.values() if (t.worker_id, t.epoch) == (worker_id, epoch)]
        for ticket in mine:
            if ticket.state == "streaming":
                del self._running[ticket.key]
                self._told.pop(ticket.key, None)
                self._leave(ticket, WorkerLost(reason), is_lost=True)
                continue
            self._take_back(ticket)
            if ticket.aborted:
                self._leave(ticket, ABORTED_UNUSED)
            elif ticket.attempt < MAX_ATTEMPTS:
                now_s, key = self._clock(), ticket.key
                ticket.attempt += 1
                ticket.deadline_s = now_s + (ticket.deadline_s - ticket.arrival_s)
                ticket.stream.retry(ticket.attempt)
                self._link.send(Returned(*key, None, _spec(ticket)))
            else:
                text = f"{MAX_ATTEMPTS} workers ended while they had the request: try again later"
                end = ApiError(UNAVAILABLE, text, retry_after_s=RESTART_WAIT_S)
                self._leave(ticket, end, is_lost=True)

    # The rest.

    def _tokens(self, ticket: Ticket, delta: TokenDelta) -> None:
        ticket.num_tokens += len(delta.token_ids)
        taken = ticket.stream.put(delta.token_ids, delta.logprobs, delta.prompt_logprobs)
        if not taken and not ticket.aborted:
            self.num_too_slow += 1
            logger.info("client too slow request=%s: aborted", ticket.request.request_id)
            self.abort(ticket)

    def _finish(self, ticket: Ticket, finish: Finish, vectors: bytes) -> None:
        request_id = ticket.request.request_id
        del self._running[ticket.key]
        self._told.pop(ticket.key, None)
        has_output = ticket.num_tokens > 0 or bool(vectors)
        asks_load = ticket.owes_load and has_output and self._link.is_up
        self._link.send(Ended(*ticket.key, finish, ticket.num_tokens, asks_load))
        if has_output:
            self.unacked.expect(request_id, ticket.attempt, ticket.worker_id, ticket.epoch)
            if asks_load:
                self._close(ticket)
                self.load_shares.wait(ticket, finish, vectors, self._clock())
            else:
                self._end(ticket, finish, vectors)
        else:
            self.unacked.ack_now(request_id, ticket.attempt, ticket.worker_id)
            self._end(ticket, end_without_tokens(ticket, finish))
        if finish.reason == "error":
            logger.error("worker failed request=%s: %s", request_id, finish.error)

    def _late(self, worker_id: str, epoch: str, delta: TokenDelta) -> None:
        """An earlier attempt, an earlier epoch, or a finish told again after a Hello."""
        self.num_late += 1
        if delta.finish is None or self.unacked.expects(delta.request_id, delta.attempt):
            return
        if self._claim_orphan(delta.request_id, delta.finish):
            self.unacked.expect(delta.request_id, delta.attempt, worker_id, epoch)
        else:
            self.unacked.ack_now(delta.request_id, delta.attempt, worker_id)

    def _take_back(self, ticket: Ticket) -> None:
        del self._running[ticket.key]
        self._told.pop(ticket.key, None)
        ticket.move("waiting")
        ticket.num_tokens = 0

    def _leave(self, ticket: Ticket, end: StreamEnd, *, is_lost: bool = False) -> None:
        """It is over here, whatever the dispatcher thinks of it."""
        self._link.send(Leave(ticket.request.request_id, is_lost))
        self._end(ticket, end)

    def _end(self, ticket: Ticket, end: StreamEnd, vectors: bytes = b"") -> None:
        self._close(ticket)
        ticket.stream.finish(end, vectors)

    def _close(self, ticket: Ticket) -> None:
        ticket.move("ended")
        del self._live[ticket.request.request_id]


class RemoteWorkers(Fleet):
    """Connections and what their workers say of models. The dispatcher tells them the catalog."""

    def send(self, worker_id: str, message: ToWorker) -> bool:
        """As there."""
        return isinstance(message, SetCatalog) or super().send(worker_id, message)


def _prepared(ticket: Ticket) -> PreparedRequest:
    assert isinstance(ticket.request, PreparedRequest)  # it came through `run`
    return ticket.request


def _spec(ticket: Ticket) -> TicketSpec:
    request = ticket.request
    return TicketSpec(
        request_id=request.request_id,
        attempt=ticket.attempt,
        tenant_id=ticket.tenant_id,
        weight=ticket.weight,
        priority=request.priority,
        model=request.model.name,
        revision=request.model.revision,
        num_prompt_tokens=request.num_prompt_tokens,
        max_tokens=request.max_tokens,
        arrived_s=ticket.arrival_s,
        deadline_s=ticket.deadline_s,
        ends_by_s=ticket.ends_by_s,
        continues=request.continues,
    )
