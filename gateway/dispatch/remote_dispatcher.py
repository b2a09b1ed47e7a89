"""The fair queue as a gateway process has it, where the dispatcher is another process (stage 5).

What the HTTP edge asks of a dispatcher, answered from what the dispatcher's process says of itself
(`State`), from what workers say over this process' own connections, and by remote_requests.py,
which has the requests. Refusals that only the dispatcher can know of (a full queue) come as a
request's first event. While there is no dispatcher requests wait, and the next one is told of them.
"""

import time
from collections.abc import Callable, Iterable, Sequence

from engine.protocol import Finish, SwapRecord, WorkerStatus
from gateway.dispatch.assignments import RESTART_WAIT_S
from gateway.dispatch.decisions import DecisionLog
from gateway.dispatch.dispatcher_client import DispatcherLink
from gateway.dispatch.dispatcher_protocol import (
    Denied,
    Granted,
    LoadShare,
    RunningSpec,
    State,
    TicketSpec,
    ToGateway,
)
from gateway.dispatch.remote_requests import RemoteRequests, RemoteWorkers
from gateway.dispatch.running import RequestStream
from gateway.dispatch.tickets import Ticket, misfit
from gateway.dispatch.worker_connection import WorkerClient
from gateway.errors import QUEUE_FULL, UNAVAILABLE, ApiError, model_failed
from gateway.policy.placement import Placement
from gateway.policy.service_estimate import Prediction
from gateway.services import DispatcherSnapshot
from gateway.settings import Settings
from gateway.types import HostedModel, ModelOutlook, PreparedRequest, Principal

_UNKNOWN = Prediction(0, 0.0)


class RemoteDispatcher:
    """Implements services.RequestDispatcher.

    `claim_orphan` as in `dispatcher.Dispatcher`.
    """

    def __init__(
        self,
        settings: Settings,
        link: DispatcherLink,
        clock: Callable[[], float] = time.monotonic,
        claim_orphan: Callable[[str, Finish], bool] = lambda _request_id, _finish: False,
    ) -> None:
        self._settings = settings
        self._link = link
        self._clock = clock
        placement = Placement(settings.max_load_share, settings.gather_wait_s)
        self._workers = RemoteWorkers(placement, DecisionLog())
        self._requests = RemoteRequests(link, self._workers, clock, claim_orphan)
        self._models: dict[str, HostedModel] = {}
        self._state = State(False, {}, {})
        self._next_seq = 0
        self._stopping = False
        link.on_message.append(self._on_message)
        link.on_down.append(self._on_down)

    # What the edge and the front process call.

    @property
    def ready(self) -> bool:
        """A request could be served now: a dispatcher and a worker answer, here and there."""
        return (
            not self._stopping
            and self._link.is_up
            and self._state.ready
            and bool(self._workers.statuses())
        )

    @property
    def stopping(self) -> bool:
        """`begin_drain` was called."""
        return self._stopping

    def run(self, request: PreparedRequest, principal: Principal) -> RequestStream:
        """Queue a request. Raises ApiError where that is known at once; the dispatcher's own
        refusals come as the first event."""
        name = request.model.name
        if self._stopping and not request.continues:
            message = "the server is stopping: send the request again"
            raise ApiError(UNAVAILABLE, message, retry_after_s=RESTART_WAIT_S)
        error = misfit(request, self._models.get(name))
        if error is not None:
            raise error
        failure = self.model_failure(name)
        if failure is not None:
            raise model_failed(name, failure)
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id!r} is in use")
        num_waiting = self._requests.num_waiting
        if num_waiting >= self._settings.max_queue_total and not request.continues:
            text = f"the queue of this server is full ({num_waiting} wait): try later"
            raise ApiError(QUEUE_FULL, text, retry_after_s=RESTART_WAIT_S)
        ticket, stream = self._new_ticket(request, principal)
        self._requests.enter(ticket)
        return stream

    def add_worker(self, client: WorkerClient) -> None:
        """Begin to connect to one more worker."""
        self._workers.add(client, self._requests)

    def set_catalog(self, models: Sequence[HostedModel]) -> None:
        """The `ready` models. Requests of one that is gone or replaced are ended where they wait,
        by the dispatcher."""
        self._models = {model.name: model for model in models}
        self._workers.set_catalog(models)

    def model_failure(self, model_name: str) -> str | None:
        """Why a hosted model cannot be served now; None if it can."""
        return self._state.failures.get(model_name) or self._workers.failure(model_name)

    def model_outlook(self, model_name: str) -> ModelOutlook:
        """Where a hosted model is, and how soon it could answer."""
        now_s = self._clock()
        eta_s = self._state.etas_s.get(model_name)
        if eta_s is None:
            at_s = self._workers.outlook(model_name, now_s).at_s
            eta_s = None if at_s == float("inf") else max(0.0, at_s - now_s)
        return ModelOutlook(self._workers.residency(model_name), eta_s)

    def worker_statuses(self) -> list[WorkerStatus]:
        """None: the dispatcher's process tells them, or they would count once for each gateway."""
        return []

    def add_swap_listener(self, listener: Callable[[str, SwapRecord], None]) -> None:
        """Nobody is called: as with `worker_statuses`."""

    def snapshot(self) -> DispatcherSnapshot:
        """What is counted here; the dispatcher's process tells the rest."""
        return DispatcherSnapshot(
            num_waiting=0,
            num_running=0,
            waiting_by_model={},
            running_by_model={},
            waiting_by_tenant={},
            service_s_by_tenant={},
            num_queue_rejections=0,
            num_queue_timeouts=0,
            num_retries=0,
            num_clients_too_slow=self._requests.num_too_slow,
            num_workers_lost=0,
            num_late_messages=self._requests.num_late,
            quarantined={},
        )

    def ack_usage(self, request_ids: Iterable[str]) -> None:
        """Their usage is durable: the workers may forget it."""
        self._requests.unacked.ack(request_ids)

    def begin_drain(self) -> None:
        """Not ready any more; take nothing new, finish what is here."""
        self._stopping = True

    def abort_all(self) -> None:
        """End what is left."""
        self._requests.abort_all()

    def close(self) -> None:
        """Close the connections to workers; call it last."""
        self._workers.close()

    def tick(self) -> None:
        """Call it every TICK_S."""
        self._requests.tick()

    def waiting_specs(self) -> list[TicketSpec]:
        """What a dispatcher is to be told that does not know of it."""
        return self._requests.waiting_specs()

    def running_specs(self) -> list[RunningSpec]:
        """The same of what runs."""
        return self._requests.running_specs()

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the requests' books agree."""
        self._requests.check_integrity()

    def _on_message(self, message: ToGateway) -> None:
        if isinstance(message, Granted):
            self._requests.granted(message)
        elif isinstance(message, Denied):
            self._requests.denied(message)
        elif isinstance(message, LoadShare):
            self._requests.load_shares.told(message)
        elif isinstance(message, State):
            self._state = message

    def _on_down(self) -> None:
        self._state = State(False, self._state.failures, {})
        self._requests.load_shares.give_up()

    def _new_ticket(
        self, request: PreparedRequest, principal: Principal
    ) -> tuple[Ticket, RequestStream]:
        now_s, settings = self._clock(), self._settings

        def queue_s() -> float:
            until_s = self._clock() if ticket.granted_s is None else ticket.granted_s
            return until_s - ticket.arrival_s

        self._next_seq += 1
        stream = RequestStream(
            settings.max_stream_buffer_tokens, lambda: self._requests.abort(ticket), queue_s
        )
        ticket = Ticket(
            request=request,
            tenant_id=principal.tenant_id,
            weight=principal.weight,
            seq=self._next_seq,
            arrival_s=now_s,
            deadline_s=now_s + settings.queue_timeout_s,
            ends_by_s=now_s + settings.request_timeout_s,
            prediction=_UNKNOWN,
            stream=stream,
        )
        return ticket, stream
