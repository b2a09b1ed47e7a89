"""The dispatcher: one fair queue over all models and workers (stage 5).

    waiting -> granted -> streaming -> ended        (tickets.py has the table)

Tickets wait here and are granted at the last moment; the gateways that have their requests submit
them, and say what becomes of them (cluster/ticket_dispatcher.py). The workers say the rest. Of the
waiting tenants the one with the smallest counter goes first (dispatch/policy/fair_share.py), with
its oldest ticket. The rule for a head that does not fit:

- If workers offer its model (a lease, even a used-up one), the one where it is expected first is
  kept for it: no ticket behind it is granted there until it fits. All other workers go on, and
  where it fits on one of them sooner it goes there (dispatch/policy/kept_worker.py).
- If no worker offers its model, it holds nobody up. It makes a demand for its model, in its place
  in the fair order, and placement (dispatch/policy/placement.py) has the model loaded.

Tickets of class batch wait in a lane of their own, for what all others leave (lanes.py).

A dead worker loses no ticket. What was granted there waits again as attempt 2, at its old place,
and goes on behind the tokens that its client has; what a second worker dies with ends. A worker can
be emptied in the same way without any loss (`move_off`).

Everything runs on the event loop in plain calls. Time comes from the `clock` given; `tick` must be
called every TICK_S for time-outs, expired leases and loads.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from engine.protocol import Refused, SwapRecord, TokenDelta, WorkerStatus
from gateway.dispatch.affinity import Affinity
from gateway.dispatch.assignments import Assignments
from gateway.dispatch.capacity import WorkerCapacity
from gateway.dispatch.decisions import DecisionLog, DecisionRecord
from gateway.dispatch.explain import Look, WaitReason, find
from gateway.dispatch.fleet import Fleet
from gateway.dispatch.grant_choices import GrantChoices
from gateway.dispatch.integrity_check import CheckResult, check_workers
from gateway.dispatch.lanes import Lanes, is_late
from gateway.dispatch.loads import Loads
from gateway.dispatch.matching import FIRST_LOOK, MOST_LOOKED, GrantRound, place_alone
from gateway.dispatch.policy.fair_share import FairShare, Headroom, TenantOrder
from gateway.dispatch.policy.fleet_sight import Placer
from gateway.dispatch.policy.fleet_view import load_seconds
from gateway.dispatch.policy.model_history import Quarantine
from gateway.dispatch.policy.placement import Placement
from gateway.dispatch.policy.reasons import DecisionFigures, Kind, Reason
from gateway.dispatch.policy.service_costs import Prediction, ServiceEstimator
from gateway.dispatch.queue_bounds import QueueBounds
from gateway.dispatch.tickets import IntegrityError, StreamEnd, Ticket, check_hosted
from gateway.dispatch.usage_accounting import UsageAccounting
from gateway.dispatch.worker_drains import WorkerDrains
from gateway.errors import UNAVAILABLE, ApiError, model_failed
from gateway.protocols import DispatcherSnapshot
from gateway.settings.settings import Settings
from gateway.types import Asked, HostedModel, ModelOutlook
from gateway.workers.worker_client import LossCause, WorkerClient
from registry.models.residency_requests import ResidencyRequest

TICK_S = 0.05
PRESS_S = 1.0
"""How often it is looked for requests of class batch whose time runs out."""
MAX_ELSEWHERE = 64
"""Workers without a model that are looked at, for people."""
FEW_WORKERS = 16
"""Of so many each one is looked at where all are asked for; of more, those with room by model."""


class Dispatcher:
    """Implements worker_client.WorkerListener, of connections that observe."""

    def __init__(
        self,
        settings: Settings,
        send: Callable[[Ticket, WorkerCapacity], bool],
        recall: Callable[[Ticket], None],
        clock: Callable[[], float] = time.monotonic,
        share: TenantOrder | None = None,
        placement: Placer | None = None,
    ) -> None:
        """`send`, `recall`: see Assignments."""
        self._settings = settings
        self._clock = clock
        self.decisions = DecisionLog()
        self.headroom = Headroom()
        placement = placement or Placement(settings.max_load_share, settings.gather_wait_s)
        self._fleet = Fleet(placement, self.decisions)
        self.history = self._fleet.history
        self.batch_share = FairShare(settings.fair_share_max_lead_s)
        share = share or FairShare(settings.fair_share_max_lead_s)
        self._lanes = Lanes(share, self.batch_share)
        self._queue = self._lanes.live.queue
        about = (self._fleet, self.decisions, clock)
        self._bounds = [QueueBounds(settings, lane.queue, *about) for lane in self._lanes]
        self._loads = Loads(self._lanes, *about[:2], settings.max_load_share)
        self._book = UsageAccounting(self._lanes)
        self._estimators = ServiceEstimator(), ServiceEstimator()
        self._quarantine = Quarantine()
        self._affinity = Affinity(self._fleet, self._estimators[0].unit_s)
        books = (self._book, self.headroom, self._estimators, self._quarantine, self._affinity)
        self._running = Assignments(self._fleet, *books, self._left_worker, send, recall)
        ways = (self._running.num_on, self.move_off, self._queue.by_model)
        self.drains = WorkerDrains(self._fleet, *ways, settings.worker_drain_timeout_s)
        self._models: dict[str, HostedModel] = {}
        self._swap_listeners: list[Callable[[str, SwapRecord], None]] = []
        self._last_seq = 0
        self._num_timeouts = self._num_workers_lost = self._num_checks = 0
        self._pressed_s = -math.inf

    # What its process calls.

    @property
    def ready(self) -> bool:
        """A request could be served now: a worker takes some."""
        return any(worker.takes_requests and worker.status is not None for worker in self._fleet)

    def check(self, request: Asked, tenant_id: str, *, is_batch: bool = False) -> None:
        """Raises ApiError where it cannot be or a bound bites."""
        name = request.model.name
        check_hosted(request, self._models.get(name), is_stopping=False)
        failure = self.model_failure(name)
        if failure is not None:
            self._decide("refusal", "model failed", name, tenant_id, detail=failure)
            raise model_failed(name, failure)
        if not request.continues:  # what was admitted is not refused half way
            self._bounds[is_batch].check(tenant_id, name)

    def _predict(self, request: Asked, tenant_id: str, *, is_batch: bool) -> Prediction:
        """What it will use, as far as is known now."""
        return self._estimators[is_batch].predict(
            tenant_id, request.model.name, request.num_prompt_tokens, request.max_tokens
        )

    def _enter(self, ticket: Ticket) -> None:
        """A new ticket waits; what can be done for it at once is done."""
        name, now_s = ticket.model_name, self._clock()
        self._running.live[ticket.request.request_id] = ticket
        self._loads.asked(ticket)
        lane = self._lanes.of(ticket)
        if not len(self._queue) and not ticket.is_batch and self._pass(ticket, now_s):
            return
        lane.enter(ticket)
        if lane.queue.num_of_model(name) == 1 or lane.queue.is_new_tenant(ticket.tenant_id):
            # Behind others it waits for the next status or tick, as they do.
            self._match(now_s, self._fleet.open(name, now_s, MOST_LOOKED))
            if not self._fleet.is_offered(name, now_s):
                self._place(now_s)

    def add_worker(self, client: WorkerClient) -> None:
        """Begin to connect to one more worker."""
        self._fleet.add(client, self)

    def set_catalog(self, models: Sequence[HostedModel]) -> None:
        """The `ready` models. Waiting requests of a model that is gone or replaced are ended."""
        self._models = {model.name: model for model in models}
        self._quarantine.keep((model.name, model.revision) for model in models)
        for estimator in self._estimators:
            estimator.keep_models(frozenset(self._models))
        self._affinity.places.keep_models(self._models.keys())
        self._book.set_models(models)
        self._loads.keep_models(models)
        self._fleet.set_catalog(models)
        for ticket in list(self._lanes.tickets()):
            error = ticket.misfit(self._models.get(ticket.model_name))
            if error is not None:
                self._end_waiting(ticket, error)
        self._pump()

    def fulfil(self, wish: ResidencyRequest) -> None:
        """What an operator has asked for through the registry."""
        if wish.action == "load":
            self.load_model(wish.model)
        else:
            self.unload_model(wish.model)

    def set_reserved_shares(self, shares: Mapping[str, float]) -> None:
        """Tenants' shares of each worker that are kept free for them."""
        self.headroom.reserved = shares

    def load_model(self, name: str) -> None:
        """An operator wants it resident; a quarantine is lifted."""
        if self._quarantine.clear(name):
            self._decide("quarantine", "lifted", name)
        self._fleet.load(self._clock(), name)

    def move_off(self, worker_id: str, which: Callable[[str], bool] = lambda model: True) -> int:
        """Empty a worker that takes nothing new: its requests, for `which` models, go on elsewhere,
        from the tokens that they have. Returns how many there were; those that are about to end,
        end there."""
        now_s = self._clock()
        there = [ticket for ticket in self._running if ticket.worker_id == worker_id]
        moved = [self._running.move(t, now_s) for t in there if which(t.model_name)]
        if any(moved):
            self._pump()
        return sum(moved)

    def unload_model(self, name: str) -> None:
        """An operator wants its pages back. Waiting requests or a pin load it again."""
        self._loads.unloaded(name)
        self._fleet.unload(self._clock(), name)

    def model_failure(self, model_name: str) -> str | None:
        """Why a hosted model cannot be served now; None if it can."""
        model = self._models.get(model_name)
        reason = None
        if model is not None:
            reason = self._quarantine.reason(model.name, model.revision, self._clock())
        return reason or self._fleet.failure(model_name)

    @property
    def worker_ids(self) -> Collection[str]:
        """All workers, connected or not."""
        return self._fleet.worker_ids

    def num_on(self, worker_id: str) -> int:
        """Requests that a worker has."""
        return self._running.num_on(worker_id)

    def close(self) -> None:
        """Close the connections; call it last."""
        self._fleet.close()

    def tick(self) -> None:
        """Time-outs, and whatever became possible by time alone."""
        now_s = self._clock()
        for ticket in [t for lane in self._lanes for t in lane.queue.overdue(now_s)]:
            self._num_timeouts += 1
            waited_s = now_s - ticket.queued_s
            figures = DecisionFigures(
                waited_s=waited_s, bound_s=ticket.deadline_s - ticket.queued_s
            )
            self._decide("refusal", "queue timeout", ticket.model_name, ticket.tenant_id, figures)
            eta_s = self._loads.outlook(ticket.model_name, now_s).load_eta_s
            text = f"the request waited {waited_s:.0f} s in the queue and no worker was free"
            wait_s = (
                max(1.0, eta_s) if eta_s else self._bounds[0].wait_estimate_s(ticket.model_name)
            )
            end = ApiError(UNAVAILABLE, f"{text}: try again later", retry_after_s=wait_s)
            self._end_waiting(ticket, end)
        self.drains.tick(now_s)
        self._press(now_s)
        self._pump()

    def snapshot(self) -> DispatcherSnapshot:
        """Figures for metrics and the operator's pages."""
        running, now_s = self._running, self._clock()
        queues = [lane.queue for lane in self._lanes]
        by_model = sum((Counter(queue.by_model()) for queue in queues), Counter[str]())
        by_tenant = sum((Counter(queue.by_tenant()) for queue in queues), Counter[str]())
        return DispatcherSnapshot(
            num_waiting=by_model.total(),
            num_running=len(running),
            waiting_by_model=dict(by_model),
            running_by_model=dict(Counter(ticket.model_name for ticket in running)),
            waiting_by_tenant=dict(by_tenant),
            service_s_by_tenant=dict(self._book.service_s),
            num_queue_rejections=sum(bounds.num_rejections for bounds in self._bounds),
            num_queue_timeouts=self._num_timeouts,
            num_retries=running.counts.retries,
            num_resumed=running.counts.resumed,
            num_workers_lost=self._num_workers_lost,
            num_late_messages=running.counts.late,
            quarantined=self._quarantine.reasons(now_s),
            num_load_refusals=self._loads.num_refusals,
            decisions={f"{k}/{r}": n for (k, r), n in self.decisions.counts().items()},
            load_eta_s=self._loads.etas(now_s),
            accounts=self._book.accounts(),
        )

    def model_outlook(self, model_name: str) -> ModelOutlook:
        """Where a hosted model is, and how soon it could answer."""
        return self._loads.outlook(model_name, self._clock())

    def look(self, *, of_batch: bool = False) -> Look:
        """Why whatever waits in a lane does so. For operators: costs a walk over the queue."""
        lane = self._lanes.batch if of_batch else self._lanes.live
        parts = (*lane, self._fleet, self.decisions, self.model_failure)
        return Look(*parts, self._running.may_take, self._clock())

    @property
    def choices(self) -> GrantChoices:
        """Why requests went to their workers."""
        return self._affinity.choices

    def elsewhere(self, model_name: str) -> dict[str, float]:
        """Workers that do not have the model -> seconds that a load there is expected to take."""
        found = {}
        for demand in self._fleet.demand_of([model_name]):
            for view in self._fleet.candidates.all()[:MAX_ELSEWHERE]:
                if not view.has(model_name) and view.may_load(demand):
                    found[view.worker_id] = load_seconds(view.model(demand))
        return found

    def explain(self, request_id: str) -> list[WaitReason]:
        """Of a request and its choices; none where it is not here any more."""
        found = find(self._running.live.values(), request_id)
        return [self.look(of_batch=ticket.is_batch).reason(ticket) for ticket in found]

    def worker_statuses(self) -> list[WorkerStatus]:
        """The last status of each connected worker."""
        return self._fleet.statuses()

    def add_swap_listener(self, listener: Callable[[str, SwapRecord], None]) -> None:
        """Call `listener(worker_id, record)` once for every finished load or eviction."""
        self._swap_listeners.append(listener)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless queue, share, assignments and workers agree."""
        self._lanes.check_integrity()
        self._running.check_integrity()
        self._fleet.check_integrity()
        held = [*self._lanes.tickets(), *self._running]
        if sorted(map(id, held)) != sorted(map(id, self._running.live.values())):
            raise IntegrityError(
                f"{len(self._running.live)} live requests, {len(held)} tickets held"
            )

    async def check_workers(self) -> dict[str, CheckResult]:
        """Have each worker check its own books."""
        self._num_checks += 1
        return await check_workers(self._fleet, self._num_checks)

    # What workers say (worker_client.WorkerListener).

    def on_connected(self, worker_id: str, epoch: str) -> None:
        """A worker process answered."""
        self._fleet.connect(worker_id, epoch, self._clock())
        self._affinity.places.void(worker_id, self._clock())

    def on_status(self, worker_id: str, status: WorkerStatus) -> None:
        """A heartbeat: leases, residency, swaps."""
        worker = self._fleet.get(worker_id, status.epoch)
        if worker is None:
            return
        now_s = self._clock()
        is_first = worker.status is None
        changes = self._fleet.update(worker, status, now_s)
        self._running.progress(worker, status.service)
        self.drains.look(worker, now_s)
        if changes.states:
            self._book.status(worker_id, status, now_s)
        self.decisions.add_choices(worker_id, status.choices, now_s)
        for swap in status.swaps:
            if swap.kind == "evict":
                self._affinity.places.void(worker_id, now_s, swap.model_id)
            for listener in self._swap_listeners:
                listener(worker_id, swap)
        if is_first:
            self._fail_hopeless(self._model_names())
        elif changes.states:
            self._fail_hopeless(model.model_id for model in worker.failures)
            self._move_batch_off(worker, now_s)
        self._match(now_s, [worker])
        if changes.states:
            self._place(now_s)

    def on_deltas(self, worker_id: str, epoch: str, deltas: Sequence[TokenDelta]) -> None:
        """None come: nothing is submitted from here."""

    def on_refused(self, worker_id: str, refused: Refused) -> None:
        """None come, either."""

    def on_lost(self, worker_id: str, epoch: str, reason: str, cause: LossCause) -> None:
        """A worker process is gone, with all it was running. Only one that ended by itself says
        anything about its models."""
        self._num_workers_lost += 1
        self._fleet.lose(worker_id, self._clock())
        self._book.loads.lose_worker(worker_id)
        about_loss = (worker_id, epoch, reason, self._clock())
        lost = self._running.lost(*about_loss, is_silent=cause == "silence")
        if cause == "process":
            blamed = {one.model for one in lost}
            again = {one.model for one in lost if one.is_again}
            about = (blamed, reason, worker_id, self._clock(), again)
            for name in self._quarantine.worker_died(*about):
                self._decide("quarantine", "workers crashed", name, detail=reason)
        self._fail_hopeless(self._model_names())
        self._pump()

    # The queue.

    def _decide(
        self,
        kind: Kind,
        reason: Reason,
        model: str,
        tenant_id: str = "",
        figures: DecisionFigures | None = None,
        detail: str = "",
    ) -> None:
        about = (model, "", figures, tenant_id, detail)
        self.decisions.add(DecisionRecord(self._clock(), kind, reason, *about))

    def _pump(self) -> None:
        """Grant what can be granted, then see to the models that nobody offers."""
        now_s = self._clock()
        self._match(now_s, self._fleet if len(self._fleet) <= FEW_WORKERS else None)
        self._place(now_s)

    def _match(self, now_s: float, workers: Iterable[WorkerCapacity] | None) -> None:
        """Grant what these workers can take (None: all, of a large fleet); where KV memory is
        short, make room."""
        with_room = None if workers is None else [w for w in workers if w.has_room(now_s)]
        for lane in self._lanes:  # class batch last: it has what the other one leaves
            if not len(lane.queue) or not (with_room is None or with_room):
                continue
            about = (*lane, self._fleet, now_s)
            rules = (self._running.may_take, self._affinity)
            matching = GrantRound(*about, self._grant, *rules, with_room)
            matching.run()
            if lane is self._lanes.live:
                self._loads.relieve(now_s, with_room or matching.looked.values())

    def _place(self, now_s: float) -> None:
        """Loads for models that wait: at news of models, and every tick for what time changes."""
        for ticket, error in self._loads.place(now_s):
            self._end_waiting(ticket, error)

    def _grant(self, ticket: Ticket, worker: WorkerCapacity) -> bool:
        """False: it waits on."""
        lane = self._lanes.of(ticket)
        lane.leave(ticket)
        if self._running.grant(ticket, worker, self._clock()):
            return True
        lane.come_back(ticket)
        return False

    def _press(self, now_s: float) -> None:
        """What is of class batch, and whose time runs out, is so no longer: it waits in the other
        lane, or, where it runs beside others that it gives way to, as the next attempt."""
        if now_s - self._pressed_s < PRESS_S:
            return
        self._pressed_s = now_s
        for ticket in [t for t in self._lanes.batch.queue if is_late(t, now_s)]:
            self._lanes.batch.leave(ticket)
            ticket.is_batch = False
            self._lanes.live.enter(ticket)
        busy = {ticket.worker_id for ticket in self._running if not ticket.is_batch}
        for ticket in [t for t in self._running if t.worker_id in busy and is_late(t, now_s)]:
            self._running.move(ticket, now_s)

    def _move_batch_off(self, worker: WorkerCapacity, now_s: float) -> None:
        """Requests of class batch do not wait where their model has left."""
        for ticket in [t for t in self._running if t.is_batch and t.epoch == worker.epoch]:
            if worker.state(ticket.model_name) in ("cold", "warm"):
                self._running.move(ticket, now_s)

    def _pass(self, ticket: Ticket, now_s: float) -> bool:
        """Grant it without a queue, where nobody waits."""
        offering = self._fleet.open(ticket.model_name, now_s, FIRST_LOOK)
        rules = (self._running.may_take, self._affinity)
        worker = place_alone(ticket, offering, now_s, *rules)
        if worker is None:
            return False
        share = self._lanes.live.share
        share.enqueue(ticket.tenant_id, ticket.weight)
        share.dequeue(ticket.tenant_id)
        return self._running.grant(ticket, worker, now_s)

    def _left_worker(self, ticket: Ticket) -> None:
        """A ticket is on no worker any more: it waits again or has ended."""
        if ticket.state == "ended":
            self._forget(ticket)
            return
        if is_late(ticket, self._clock()):
            ticket.is_batch = False
            self._lanes.live.enter(ticket)
        else:
            self._lanes.of(ticket).come_back(ticket)
        error = ticket.misfit(self._models.get(ticket.model_name))
        if error is not None:
            self._end_waiting(ticket, error)

    def _end_waiting(self, ticket: Ticket, end: StreamEnd) -> None:
        ticket.on("give_up")
        self._lanes.of(ticket).leave(ticket)
        self._forget(ticket)
        ticket.stream.finish(end)

    def _forget(self, ticket: Ticket) -> None:
        del self._running.live[ticket.request.request_id]

    def _fail_hopeless(self, names: Iterable[str]) -> None:
        """End waiting tickets of those of these models that failed to load or are quarantined."""
        for name in list(names):
            waiting = [t for lane in self._lanes for t in lane.queue.of_model(name)]
            failure = self.model_failure(name) if waiting else None
            if failure is not None:
                for ticket in waiting:
                    self._end_waiting(ticket, model_failed(name, failure))

    def _model_names(self) -> set[str]:
        """Models that tickets wait for."""
        return {name for lane in self._lanes for name in lane.queue.model_names}
