"""The dispatcher: one fair queue over all models and workers (stage 5).

    run -> waiting -> granted -> streaming -> ended        (gateway/tickets.py has the table)

Tickets wait here and are granted at the last moment. Of the waiting tenants the one with the
smallest counter goes first (policy/fair_share.py), with its oldest ticket. The rule for a head
that does not fit:

- If some worker offers its model (a lease, even a used-up one), that worker is kept for it: no
  ticket behind it is granted there until it fits. It is waited for and never overtaken on a worker
  that could run it; workers that do not have its model go on.
- If no worker offers its model, it holds nobody up. It makes a demand for its model, in its place
  in the fair order, and placement (policy/placement.py) has the model loaded.

A dead worker loses no waiting ticket. What was granted there and had no token waits again as
attempt 2, at its old place; what had tokens ends with WorkerLost. Messages are matched by
(request_id, attempt) and the worker's epoch; others are late and dropped.

Everything runs on the event loop in plain calls. Time comes from the `clock` given; `tick` must be
called every TICK_S for time-outs, expired leases and loads.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from engine.protocol import Finish, Refused, SwapRecord, TokenDelta, WorkerStatus
from gateway.assignments import ABORTED_UNUSED, RESTART_WAIT_S, Assignments
from gateway.capacity import WorkerCapacity
from gateway.config import Settings
from gateway.errors import QUEUE_FULL, UNAVAILABLE, ApiError, model_failed
from gateway.fleet import Fleet
from gateway.matching import demands, grant_round
from gateway.policy.fair_share import FairShare, TenantOrder
from gateway.policy.placement import Demand, Placement, Placer
from gateway.policy.quarantine import Quarantine
from gateway.policy.service_estimate import ServiceEstimator, estimate_wait_s
from gateway.running import RequestStream, StreamEnd
from gateway.services import DispatcherSnapshot
from gateway.tickets import IntegrityError, Ticket, TicketQueue, misfit
from gateway.types import HostedModel, PreparedRequest, Principal
from gateway.unacked import UnackedFinishes
from gateway.worker_connection import WorkerClient

logger = logging.getLogger(__name__)

TICK_S = 0.05


class Dispatcher:
    """Implements services.RequestDispatcher and worker_connection.WorkerListener.

    `claim_orphan(request_id, finish)` is asked about a finish that no request here waits for; True
    means that its usage will be posted and acknowledged through `ack_usage`.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Callable[[], float] = time.monotonic,
        claim_orphan: Callable[[str, Finish], bool] = lambda _request_id, _finish: False,
        share: TenantOrder | None = None,
        placement: Placer | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._fleet = Fleet(placement or Placement(settings.max_load_share))
        self._queue = TicketQueue()
        self._share = share or FairShare(settings.fair_share_max_lead_s)
        self._estimator = ServiceEstimator()
        self._quarantine = Quarantine()
        self._unacked = UnackedFinishes(self._fleet)
        self._running = Assignments(
            self._fleet,
            self._share,
            self._estimator,
            self._quarantine,
            self._unacked,
            self._left_worker,
            claim_orphan,
        )
        self._models: dict[str, HostedModel] = {}
        self._live: dict[str, Ticket] = {}
        self._swap_listeners: list[Callable[[str, SwapRecord], None]] = []
        self._stopping = False
        self._next_seq = 0
        self._num_rejections = 0
        self._num_timeouts = 0
        self._num_workers_lost = 0

    # What the edge and the supervisor call.

    @property
    def ready(self) -> bool:
        """A request could be served now: a worker answers and the gateway is not stopping."""
        return not self._stopping and bool(self._fleet.statuses())

    @property
    def stopping(self) -> bool:
        """`begin_drain` was called."""
        return self._stopping

    def run(self, request: PreparedRequest, principal: Principal) -> RequestStream:
        """Queue a request. Raises ApiError at once where it cannot be or a bound bites."""
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
        if request.request_id in self._live:
            raise ValueError(f"request id {request.request_id!r} is in use")
        if not request.continues:  # what was admitted is not refused half way
            self._check_bounds(principal.tenant_id)
        ticket = self._new_ticket(request, principal)
        self._live[request.request_id] = ticket
        self._queue.add(ticket)
        self._share.enqueue(ticket.tenant_id, ticket.weight)
        if self._queue.num_of_model(name) == 1:
            # Behind others it waits for the next status or tick, as they do.
            offering = self._fleet.offering(name, ticket.arrival_s)
            self._match(ticket.arrival_s, offering)
            if not offering:
                self._place(ticket.arrival_s)
        return ticket.stream

    def add_worker(self, client: WorkerClient) -> None:
        """Begin to connect to one more worker."""
        self._fleet.add(client, self)

    def set_catalog(self, models: Sequence[HostedModel]) -> None:
        """The `ready` models. Waiting requests of a model that is gone or replaced are ended."""
        self._models = {model.name: model for model in models}
        self._quarantine.keep((model.name, model.revision) for model in models)
        self._estimator.keep_models(frozenset(self._models))
        self._fleet.set_catalog(models)
        for ticket in list(self._queue):
            error = ticket.misfit(self._models.get(ticket.model_name))
            if error is not None:
                self._end_waiting(ticket, error)
        self._pump()

    def load_model(self, name: str) -> None:
        """An operator wants it resident; a quarantine is lifted."""
        self._quarantine.clear(name)
        self._fleet.load(self._clock(), name)

    def unload_model(self, name: str) -> None:
        """An operator wants its pages back. Waiting requests or a pin load it again."""
        self._fleet.unload(name)

    def model_failure(self, model_name: str) -> str | None:
        """Why a hosted model cannot be served now; None if it can."""
        model = self._models.get(model_name)
        reason = None
        if model is not None:
            reason = self._quarantine.reason(model.name, model.revision, self._clock())
        return reason or self._fleet.failure(model_name)

    def ack_usage(self, request_ids: Iterable[str]) -> None:
        """Their usage is durable: the workers may forget it."""
        self._unacked.ack(request_ids)

    def begin_drain(self) -> None:
        """Not ready any more; take nothing new, finish what is here."""
        self._stopping = True

    def abort_all(self) -> None:
        """End what is left."""
        for ticket in list(self._live.values()):
            self._abort(ticket)

    def close(self) -> None:
        """Close the connections; call it last."""
        self._fleet.close()

    def tick(self) -> None:
        """Time-outs, and whatever became possible by time alone."""
        now_s = self._clock()
        for ticket in self._queue.overdue(now_s):
            self._num_timeouts += 1
            waited_s = now_s - ticket.arrival_s
            message = f"no worker could take the request within {waited_s:.0f} s: try again later"
            self._end_waiting(
                ticket, ApiError(UNAVAILABLE, message, retry_after_s=self._wait_estimate_s())
            )
        self._pump()

    def snapshot(self) -> DispatcherSnapshot:
        """Figures for metrics."""
        running = Counter(ticket.model_name for ticket in self._running)
        return DispatcherSnapshot(
            num_waiting=len(self._queue),
            num_running=len(self._running),
            waiting_by_model=self._queue.by_model(),
            running_by_model=dict(running),
            waiting_by_tenant=self._queue.by_tenant(),
            service_s_by_tenant=dict(self._running.service_s),
            num_queue_rejections=self._num_rejections,
            num_queue_timeouts=self._num_timeouts,
            num_retries=self._running.counts.retries,
            num_clients_too_slow=self._running.counts.too_slow,
            num_workers_lost=self._num_workers_lost,
            num_late_messages=self._running.counts.late,
            quarantined=self._quarantine.reasons(self._clock()),
        )

    def worker_statuses(self) -> list[WorkerStatus]:
        """The last status of each connected worker."""
        return self._fleet.statuses()

    def add_swap_listener(self, listener: Callable[[str, SwapRecord], None]) -> None:
        """Call `listener(worker_id, record)` once for every finished load or eviction."""
        self._swap_listeners.append(listener)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless queue, share, assignments and workers agree."""
        self._queue.check_integrity()
        self._share.check_integrity()
        self._running.check_integrity()
        self._fleet.check_integrity()
        if dict(self._share.waiting()) != self._queue.by_tenant():
            raise IntegrityError(f"share counts {dict(self._share.waiting())}")
        held = [*self._queue, *self._running]
        if {id(t) for t in held} != {id(t) for t in self._live.values()} or len(held) != len(
            self._live
        ):
            raise IntegrityError(f"{len(self._live)} live requests, {len(held)} tickets held")

    # What workers say (worker_connection.WorkerListener).

    def on_connected(self, worker_id: str, epoch: str) -> None:
        """A worker process answered; nothing is running there for this gateway."""
        self._fleet.connect(worker_id, epoch, self._clock())

    def on_status(self, worker_id: str, status: WorkerStatus) -> None:
        """A heartbeat: leases, residency, swaps."""
        worker = self._fleet.get(worker_id, status.epoch)
        if worker is None:
            return
        now_s = self._clock()
        changes = self._fleet.update(worker, status, now_s)
        for swap in status.swaps:
            for listener in self._swap_listeners:
                listener(worker_id, swap)
        if changes.states:
            self._fail_hopeless()
        self._match(now_s, [worker])
        if changes.states:
            self._place(now_s)

    def on_deltas(self, worker_id: str, epoch: str, deltas: Sequence[TokenDelta]) -> None:
        """One step's output. What it freed is granted when the worker's status says so."""
        self._running.deltas(worker_id, epoch, deltas, self._clock())

    def on_refused(self, worker_id: str, refused: Refused) -> None:
        """A Submit that was not taken."""
        self._running.refused(worker_id, refused, self._clock())

    def on_lost(self, worker_id: str, epoch: str, reason: str) -> None:
        """A worker process is gone, with all it was running."""
        self._num_workers_lost += 1
        self._fleet.lose(worker_id)
        blamed = self._running.lost(worker_id, epoch, reason, self._clock())
        for name in self._quarantine.worker_died(blamed, reason, self._clock()):
            logger.error("model quarantined model=%s", name)
        self._fail_hopeless()
        self._pump()

    # The queue.

    def _new_ticket(self, request: PreparedRequest, principal: Principal) -> Ticket:
        now_s = self._clock()
        self._next_seq += 1
        stream = RequestStream(
            self._settings.max_stream_buffer_tokens,
            on_abort=lambda: self._abort(ticket),
            queue_s=lambda: self._queue_s(ticket),
        )
        ticket = Ticket(
            request=request,
            tenant_id=principal.tenant_id,
            weight=principal.weight,
            seq=self._next_seq,
            arrival_s=now_s,
            deadline_s=now_s + self._settings.queue_timeout_s,
            ends_by_s=now_s + self._settings.request_timeout_s,
            prediction=self._estimator.predict(
                principal.tenant_id,
                request.model.name,
                len(request.prompt_token_ids),
                request.max_tokens,
            ),
            stream=stream,
        )
        return ticket

    def _check_bounds(self, tenant_id: str) -> None:
        mine, all_ = self._queue.num_of_tenant(tenant_id), len(self._queue)
        settings = self._settings
        if mine < settings.max_queue_per_tenant and all_ < settings.max_queue_total:
            return
        self._num_rejections += 1
        whose = "your tenant" if mine >= settings.max_queue_per_tenant else "this server"
        raise ApiError(
            QUEUE_FULL,
            f"the queue of {whose} is full ({mine} of yours wait, {all_} in all): try later",
            retry_after_s=self._wait_estimate_s(),
        )

    def _wait_estimate_s(self) -> float:
        longest_s = self._settings.queue_timeout_s
        return estimate_wait_s(self._queue.backlog_s, len(self._fleet), longest_s)

    def _pump(self) -> None:
        """Grant what can be granted, then see to the models that nobody offers."""
        now_s = self._clock()
        self._match(now_s, list(self._fleet))
        self._place(now_s)

    def _match(self, now_s: float, workers: Sequence[WorkerCapacity]) -> None:
        """Grant what these workers can take; where KV memory is short, make room."""
        if not len(self._queue):
            return
        with_room = [worker for worker in workers if worker.has_room(now_s)]
        if with_room:
            offering = self._fleet.offering
            grant_round(self._queue, self._share, with_room, offering, now_s, self._grant)
            self._fleet.relieve(now_s, with_room, self._queue.model_names)

    def _place(self, now_s: float) -> None:
        """Loads for models that wait and that not every worker offers.

        Called when a status brings news of models, and every tick for what time alone changes.
        """
        waiting = self._queue.model_names
        wanting = self._fleet.wanting(waiting, now_s)
        wanted: list[Demand] = []
        if wanting:
            wanted = demands(
                self._queue, self._share, wanting, lambda name: self._models[name].pinned
            )
        self._fleet.place(now_s, wanted, waiting)

    def _grant(self, ticket: Ticket, worker: WorkerCapacity) -> bool:
        # Out of the queue first: a tenant that leaves it sets the floor at what it had before.
        self._queue.remove(ticket)
        self._share.dequeue(ticket.tenant_id)
        if self._running.grant(ticket, worker, self._clock()):
            return True
        self._queue.add(ticket)
        self._share.restore(ticket.tenant_id)
        return False

    def _left_worker(self, ticket: Ticket) -> None:
        """A ticket is on no worker any more: it waits again or has ended."""
        if ticket.state == "ended":
            del self._live[ticket.request.request_id]
            return
        self._queue.add(ticket)
        self._share.restore(ticket.tenant_id)
        error = ticket.misfit(self._models.get(ticket.model_name))
        if error is not None:
            self._end_waiting(ticket, error)

    def _abort(self, ticket: Ticket) -> None:
        if ticket.state == "waiting":
            self._end_waiting(ticket, ABORTED_UNUSED)
        elif ticket.state != "ended":
            self._running.abort(ticket)

    def _end_waiting(self, ticket: Ticket, end: StreamEnd) -> None:
        self._queue.remove(ticket)
        self._share.dequeue(ticket.tenant_id)
        ticket.move("ended")
        del self._live[ticket.request.request_id]
        ticket.stream.finish(end)

    def _fail_hopeless(self) -> None:
        """End waiting tickets of models that failed to load or are quarantined."""
        for name in list(self._queue.model_names):
            failure = self.model_failure(name)
            if failure is not None:
                for ticket in [t for t in self._queue if t.model_name == name]:
                    self._end_waiting(ticket, model_failed(name, failure))

    def _queue_s(self, ticket: Ticket) -> float:
        until_s = self._clock() if ticket.granted_s is None else ticket.granted_s
        return until_s - ticket.arrival_s
