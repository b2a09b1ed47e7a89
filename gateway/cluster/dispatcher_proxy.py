"""The fair queue as a gateway has it: its own requests, and what the dispatcher says (stage 5).

    waiting -> granted -> streaming -> ended        (tickets.py has the table)

The dispatcher is another process, or an object of this one (local_dispatcher.py): the messages are
the same. What the HTTP edge asks of a dispatcher is answered from what the dispatcher says of
itself (`State`) and from what workers say over this gateway's own connections. What the dispatcher
decides is done here: a granted request is submitted to its worker, tokens come straight back, and
what becomes of it is reported (dispatcher_protocol.py). Refusals that only the dispatcher can know
of (a full queue) come as a request's first event. While there is no dispatcher, what streams goes
on, what waits waits, and the next dispatcher is told of it.

What may cross, and what becomes of it:

    a grant for a request whose client has left      Leave: the dispatcher's books are cleared
    a grant whose worker is not connected here       Returned, as if the worker had refused it
    the worker dies between grant and Submit         the same; or lost, and tried a second time
    the worker dies, whoever sees it first           Returned: it waits as the next attempt, behind
                                                     the tokens it has; both count one loss
    a grant of attempt 2 while attempt 1 runs        the dispatcher saw a worker die that did not:
                                                     attempt 1 is aborted, attempt 2 submitted from
                                                     the tokens that have come until then
    tokens, or the end, of attempt 1 after that      late: dropped, acknowledged, nobody's
    the end of attempt 1 before that                 Ended; the grant finds nobody: Leave
    Moved for an attempt that has ended, was lost    nothing: what was said of it (Ended, Returned)
    or is being aborted                              is on its way; the next grant says the rest
    a refusal (Denied) for a request that runs       nothing: it goes on, off the dispatcher's books
    another dispatcher                               is told the attempt, the tokens of the attempts
                                                     before, and the losses (TicketSpec)

Of a model whose load is not paid back yet, a request's end waits for what the dispatcher says of
its share (`LoadShares`).
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from engine.protocol import (
    Abort,
    AdoptUsage,
    Finish,
    Refused,
    SwapRecord,
    TokenDelta,
    Usage,
    WorkerStatus,
)
from gateway.cluster.dispatcher_client import DispatcherLink
from gateway.cluster.dispatcher_protocol import (
    TOKENS_EVERY_S,
    Aborted,
    Ask,
    Denied,
    Ended,
    Granted,
    Leave,
    LoadShare,
    Moved,
    Returned,
    RunningSpec,
    State,
    TicketSpec,
    ToGateway,
    Tokens,
    Unclaimed,
)
from gateway.cluster.gateway_workers import GatewayWorkers
from gateway.cluster.granted_requests import GrantedRequests, nobodys
from gateway.cluster.load_shares import LoadShares
from gateway.dispatch.policy.prefix_places import prefix_marks
from gateway.dispatch.policy.service_costs import Prediction
from gateway.dispatch.ticket_ends import (
    aborted_end,
    check_tokens,
    end_without_tokens,
    loss_of,
)
from gateway.dispatch.tickets import (
    RESTART_WAIT_S,
    IntegrityError,
    RequestStream,
    StreamEnd,
    Ticket,
    TicketEvent,
    Unsendable,
    check_hosted,
    new_ticket,
    unsendable,
)
from gateway.errors import QUEUE_FULL, UNAVAILABLE, ApiError
from gateway.protocols import DispatcherSnapshot
from gateway.settings.settings import Settings
from gateway.types import HostedModel, ModelOutlook, PreparedRequest, Principal
from gateway.workers.worker_client import LossCause, WorkerClient

logger = logging.getLogger(__name__)

LATE_S = 2.0
"""So long after its time in the queue a request is given up here, if the dispatcher has not."""

_UNKNOWN = Prediction(0, 0.0)


class DispatcherProxy(GrantedRequests):
    """Live tickets by request id, and those that workers have. Implements
    protocols.RequestDispatcher and worker_client.WorkerListener."""

    def __init__(
        self,
        settings: Settings,
        link: DispatcherLink,
        clock: Callable[[], float] = time.monotonic,
        claim_orphan: Callable[[str, Finish, int], bool] = nobodys,
    ) -> None:
        super().__init__(GatewayWorkers(), claim_orphan)
        self._settings = settings
        self._link = link
        self._clock = clock
        self._load_shares = LoadShares()
        self._reported: dict[tuple[str, int], int] = {}
        self._first: list[tuple[str, int, int]] = []  # tokens of this turn that were the first
        self._next_report_s = 0.0
        self._models: dict[str, HostedModel] = {}
        self._state = State(False, {}, {})
        self._next_seq = 0
        # Of `live`, by whether they are of class batch: where a queue is full, every request asks.
        self._num_waiting = Counter[bool]()
        self._stopping = False
        self.marks_prompts = True
        """Whether tickets say how their prompts begin, where there are several workers."""
        link.on_message.append(self._on_message)
        link.on_down.append(self._on_down)

    # What the edge and the gateway process call.

    @property
    def ready(self) -> bool:
        """A request could be served now: a dispatcher and a worker answer, here and there."""
        return (
            not self._stopping and self._link.is_up and self._state.ready and self._workers.is_heard
        )

    @property
    def stopping(self) -> bool:
        """`begin_drain` was called."""
        return self._stopping

    def run(self, request: PreparedRequest, principal: Principal) -> RequestStream:
        """Queue a request. Raises ApiError where that is known at once; the dispatcher's own
        refusals come as the first event."""
        model = self._models.get(request.model.name)
        check_hosted(request, model, is_stopping=self._stopping)
        if request.request_id in self.live:
            raise ValueError(f"request id {request.request_id!r} is in use")
        self._check(request, principal)
        self._next_seq += 1
        about = (request, principal, self._next_seq, _UNKNOWN)
        ticket, stream = new_ticket(*about, self._settings, self._clock, self._abort)
        reads_kv = request.encode is None and request.prompt_logprobs < 0
        if self.marks_prompts and reads_kv and len(self._workers) > 1:
            about_prompt = (principal.tenant_id, request.model.name, request.prompt_token_ids)
            ticket.marks = prefix_marks(*about_prompt)
        self.live[request.request_id] = ticket
        self._num_waiting[ticket.is_batch] += 1
        self._link.send(Ask(_spec(ticket, self._clock())))
        return stream

    def _check(self, request: PreparedRequest, principal: Principal) -> None:
        """Raises ApiError where the queue is full, for each connected worker as the dispatcher's
        (dispatch/queue_bounds.py)."""
        if request.continues:
            return
        num_waiting = self._num_waiting[principal.is_batch or request.is_batch]
        if num_waiting >= self._settings.max_queue_total * max(1, len(self._workers)):
            text = f"the queue of this server is full ({num_waiting} requests wait)"
            raise ApiError(QUEUE_FULL, f"{text}: try again later", retry_after_s=RESTART_WAIT_S)

    def add_worker(self, client: WorkerClient) -> None:
        """Begin to connect to one more worker."""
        self._workers.add(client, self)

    def set_catalog(self, models: Sequence[HostedModel]) -> None:
        """The `ready` models. Requests of one that is gone or replaced are ended where they wait,
        by the dispatcher."""
        self._models = {model.name: model for model in models}

    def model_failure(self, model_name: str) -> str | None:
        """Why a hosted model cannot be served now; None if it can."""
        failure, model = self._state.failures.get(model_name), self._models.get(model_name)
        return self._workers.failure(model) if failure is None and model is not None else failure

    def model_outlook(self, model_name: str) -> ModelOutlook:
        """Where a hosted model is, and how soon it could answer."""
        eta_s, model = self._state.etas_s.get(model_name), self._models.get(model_name)
        if eta_s is None and model is not None:
            eta_s = self._workers.load_s(model)
        return ModelOutlook(self._workers.residency(model_name), eta_s)

    def worker_statuses(self) -> list[WorkerStatus]:
        """None: the dispatcher's process tells them, or they would count once for each gateway."""
        return []

    def add_swap_listener(self, listener: Callable[[str, SwapRecord], None]) -> None:
        """Nobody is called: as with `worker_statuses`."""

    def snapshot(self) -> DispatcherSnapshot:
        """What is counted here; the dispatcher's process tells the rest."""
        return DispatcherSnapshot(
            num_clients_too_slow=self.counts.too_slow,
            num_late_messages=self.counts.late,
        )

    def ack_usage(self, request_ids: Iterable[str]) -> None:
        """Their usage is durable: the workers may forget it."""
        self.unacked.ack(request_ids)

    def adopt_usage(self, gateway_id: str, request_ids: list[str]) -> None:
        """Another gateway is lost with its server, and these open records of it are this one's: ask
        the workers for the finishes that they keep of them."""
        self._workers.send_all(AdoptUsage(gateway_id, request_ids))

    def is_gone(self, gateway_id: str) -> bool:
        """Whether the active dispatcher says that this gateway is not connected to it."""
        gateways = self._state.gateways
        return gateways is not None and gateway_id not in gateways

    def begin_drain(self) -> None:
        """Not ready any more; take nothing new, finish what is here."""
        self._stopping = True

    def abort_all(self) -> None:
        """End what is left."""
        for ticket in list(self.live.values()):
            self._abort(ticket)
        self._load_shares.give_up()

    def close(self) -> None:
        """Close the connections to workers; call it last."""
        self._workers.close()

    def tick(self) -> None:
        """Counts of tokens for the dispatcher; requests that nobody answers in time."""
        now_s = self._clock()
        self._load_shares.tick(now_s)
        if now_s < self._next_report_s:
            return
        self._next_report_s = now_s + TOKENS_EVERY_S
        news = [
            (*ticket.key, ticket.num_tokens)
            for ticket in self
            if self._reported.get(ticket.key) != ticket.num_tokens
        ]
        if news:
            self._reported.update((news_of[:2], news_of[2]) for news_of in news)
            self._link.send(Tokens(news))
        for ticket in [t for t in self.live.values() if t.state == "waiting"]:
            if now_s > ticket.deadline_s + LATE_S:
                text = "no worker was free in time: try again later"
                self._give_up(ticket, ApiError(UNAVAILABLE, text, retry_after_s=RESTART_WAIT_S))

    def waiting_specs(self) -> list[TicketSpec]:
        """What a dispatcher is to be told that does not know of it."""
        return [
            _spec(ticket, self._clock())
            for ticket in self.live.values()
            if ticket.state == "waiting"
        ]

    def running_specs(self) -> list[RunningSpec]:
        """The same of what runs."""
        return [
            RunningSpec(
                _spec(ticket, self._clock()), ticket.worker_id, ticket.epoch, ticket.num_tokens
            )
            for ticket in self
        ]

    def check_integrity(self) -> None:
        """Raises IntegrityError unless reports, tokens and the count of who waits are of live
        tickets."""
        running = {ticket.key for ticket in self}
        if self._reported.keys() - running:
            raise IntegrityError(f"running {sorted(running)}, reported {sorted(self._reported)}")
        if self._num_waiting.total() != len(self.live) - len(running):
            raise IntegrityError(f"{self._num_waiting} of {len(self.live)} requests wait?")
        check_tokens(self.live.values())

    # What the dispatcher says.

    def _on_message(self, message: ToGateway) -> None:
        if isinstance(message, Granted):
            self._granted(message)
        elif isinstance(message, Moved):
            self._moved(message)
        elif isinstance(message, Denied):
            self._denied(message)
        elif isinstance(message, LoadShare):
            self._load_shares.report(message)
        elif isinstance(message, State):
            self._state = message

    def _on_down(self) -> None:
        self._state = State(False, self._state.failures, {})
        self._load_shares.give_up()

    def _denied(self, denial: Denied) -> None:
        """It will not be granted."""
        ticket = self.live.get(denial.request_id)
        if ticket is not None and ticket.state == "waiting":
            self._change(ticket, "give_up")
            ticket.stream.finish(denial.error())

    def _granted(self, grant: Granted) -> None:
        """Submit it, unless something has come in between: see the module."""
        ticket = self.live.get(grant.request_id)
        if ticket is None or ticket.aborted:
            self._link.send(Leave(grant.request_id))
            return
        if ticket.is_on_worker:
            if grant.attempt <= ticket.attempt:
                return  # said twice
            self._give_up_attempt(ticket, "worker_lost")
        if grant.attempt < ticket.attempt:  # of a worker that was lost meanwhile
            self._link.send(
                Returned(grant.request_id, grant.attempt, None, _spec(ticket, self._clock()))
            )
            return
        now_s = self._clock()
        ticket.num_losses = max(ticket.num_losses, grant.num_losses)
        self._num_waiting[ticket.is_batch] -= 1
        ticket.is_batch = grant.is_batch
        self._num_waiting[ticket.is_batch] += 1
        if grant.attempt > ticket.attempt:
            ticket.next_attempt(now_s, grant.attempt)
        is_there = self._workers.has(grant.worker_id, grant.worker_epoch)
        try:
            is_sent = is_there and self._submit(ticket, grant.worker_id, now_s)
        except Unsendable:
            self._give_up(ticket, unsendable())
            return
        if not is_sent:
            text = "the gateway process of the request is not connected to this worker"
            refused = Refused(grant.worker_epoch, *ticket.key, "not_resident", text, True)
            self._link.send(Returned(*ticket.key, refused, _spec(ticket, self._clock())))
            return
        ticket.grant(grant.worker_id, grant.worker_epoch, now_s)
        self._num_waiting[ticket.is_batch] -= 1
        ticket.owes_load = grant.owes_load

    def _moved(self, moved: Moved) -> None:
        """It waits for another worker, unless something has come in between: see the module."""
        ticket = self.find(moved.request_id, moved.attempt)
        if ticket is not None and not ticket.aborted:
            self._give_up_attempt(ticket, "move")
            ticket.next_attempt(self._clock())

    def _give_up_attempt(self, ticket: Ticket, event: TicketEvent) -> None:
        """Its worker may be there all the same."""
        before = ticket.worker_id, Abort(*ticket.key)
        self._change(ticket, event)
        self._workers.send(*before)

    # What workers say (worker_client.WorkerListener).

    def on_connected(self, worker_id: str, epoch: str) -> None:
        """A worker process answered; nothing is running there for this process."""
        self._workers.connect(worker_id, epoch)

    def on_status(self, worker_id: str, status: WorkerStatus) -> None:
        """A heartbeat: for the routes that show where models are."""
        self._workers.update(worker_id, status, self._clock())

    def on_deltas(self, worker_id: str, epoch: str, deltas: Sequence[TokenDelta]) -> None:
        """One step's output."""
        self.deltas(worker_id, epoch, deltas, self._clock())
        if self._first:
            self._link.send(Tokens(self._first))
            self._first = []

    def on_refused(self, worker_id: str, refused: Refused) -> None:
        """A Submit that was not taken."""
        ticket = self.refused_ticket(worker_id, refused)
        if ticket is None:
            return
        event, end = self.refusal(ticket, refused, self._clock())
        self._change(ticket, event)
        self._link.send(Returned(*ticket.key, refused, _spec(ticket, self._clock())))
        if end is not None:
            self._leave(ticket, end)

    def on_lost(self, worker_id: str, epoch: str, reason: str, cause: LossCause) -> None:
        """A worker process is gone, with all it was running."""
        self._workers.lose(worker_id)
        for ticket in self.lost_with(worker_id, epoch):
            key, (event, end) = ticket.key, loss_of(ticket, reason)
            self._change(ticket, event)
            ticket.num_losses += 1
            if end is not None:
                self._leave(ticket, end, is_lost=not ticket.aborted)
            else:
                ticket.next_attempt(self._clock())
                self._link.send(Returned(*key, None, _spec(ticket, self._clock())))

    # The rest.

    def _tokens(self, ticket: Ticket, delta: TokenDelta) -> None:
        if ticket.state == "granted":
            self._first.append((*ticket.key, len(delta.token_ids)))
        super()._tokens(ticket, delta)

    def _finish(self, ticket: Ticket, finish: Finish, vectors: bytes, now_s: float) -> None:
        request_id = ticket.request.request_id
        self._change(ticket, "finish")
        has_output = ticket.has_tokens or bool(vectors)
        asks_load = ticket.owes_load and has_output and self._link.is_up
        self._link.send(Ended(*ticket.key, finish, ticket.num_tokens, asks_load))
        if has_output:
            self.unacked.expect(request_id, ticket.attempt, ticket.worker_id, ticket.epoch)
            if asks_load:
                self._load_shares.wait(ticket, finish, vectors, now_s)
            else:
                ticket.stream.finish(finish, vectors)
        else:
            self.unacked.ack_now(request_id, ticket.attempt, ticket.worker_id)
            ticket.stream.finish(end_without_tokens(ticket, finish))
        if finish.reason == "error":
            logger.error("worker failed request=%s: %s", request_id, finish.error)

    def _unclaimed(self, key: tuple[str, int], usage: Usage) -> None:
        self._link.send(Unclaimed(*key, usage))

    def _fail(self, ticket: Ticket, end: StreamEnd, now_s: float) -> None:
        self._give_up(ticket, end)
        self._workers.send(ticket.worker_id, Abort(*ticket.key))

    def abort(self, ticket: Ticket) -> None:
        """Ask the worker to stop it; its finish follows."""
        if not ticket.aborted:
            self._link.send(Aborted(*ticket.key))
        super().abort(ticket)

    def _abort(self, ticket: Ticket) -> None:
        """Its client wants it no more."""
        if ticket.state == "waiting":
            self._give_up(ticket, aborted_end(ticket))
        elif ticket.state != "ended":
            self.abort(ticket)

    def _change(self, ticket: Ticket, event: TicketEvent) -> None:
        """It is on no worker any more, and waits again or has ended."""
        was_waiting = ticket.state == "waiting"
        ticket.on(event)
        self._num_waiting[ticket.is_batch] += (ticket.state == "waiting") - was_waiting
        self._reported.pop(ticket.key, None)
        if ticket.state == "ended":
            del self.live[ticket.request.request_id]

    def _give_up(self, ticket: Ticket, end: StreamEnd) -> None:
        self._change(ticket, "give_up")
        self._leave(ticket, end)

    def _leave(self, ticket: Ticket, end: StreamEnd, *, is_lost: bool = False) -> None:
        """It has ended here, whatever the dispatcher thinks of it."""
        self._link.send(Leave(ticket.request.request_id, is_lost))
        ticket.stream.finish(end)


def _spec(ticket: Ticket, now_s: float) -> TicketSpec:
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
        age_s=now_s - ticket.arrival_s,
        wait_left_s=ticket.deadline_s - now_s,
        left_s=ticket.ends_by_s - now_s,
        continues=request.continues,
        queued_for_s=now_s - ticket.queued_s,
        num_before=ticket.num_before,
        num_losses=ticket.num_losses,
        marks=list(ticket.marks),
        is_batch=ticket.is_batch,
        batch_weight=ticket.batch_weight,
        batch_window=ticket.batch_window and ticket.batch_window.shifted(-now_s),
    )
