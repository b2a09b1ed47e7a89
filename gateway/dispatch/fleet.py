"""The workers as the dispatcher has them: connections, capacities, the catalog, loads on their way.

Between dispatcher.py (which tickets go) and worker_client.py (one connection). Knows no tickets
beyond what capacity.py books for them; decides nothing: placement is
dispatch/policy/placement.py's.

Questions about one model must not cost a look at every worker: who offers it and where it failed
are kept by model, as statuses change them.
"""

import logging
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from engine.protocol import (
    LoadModel,
    ModelSpec,
    SetCatalog,
    ToWorker,
    UnloadModel,
    WarmModel,
    WorkerStatus,
)
from gateway.dispatch.candidates import Candidates
from gateway.dispatch.capacity import Changes, WorkerCapacity
from gateway.dispatch.decisions import DecisionLog, DecisionRecord, ResidencyLog
from gateway.dispatch.policy.fleet_sight import AllWorkers, Placer, most_claims
from gateway.dispatch.policy.fleet_view import (
    AskRate,
    Demand,
    LoadDecision,
    Outlook,
    WorkerView,
)
from gateway.dispatch.policy.model_history import Prefetch
from gateway.dispatch.policy.reasons import DecisionFigures, Kind
from gateway.dispatch.policy.relief import relieve, unplaceable
from gateway.dispatch.tickets import IntegrityError, Ticket
from gateway.types import HostedModel
from gateway.workers.worker_client import WorkerClient, WorkerListener, is_sent

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Fleet:
    """All workers, connected or not. Used on the event loop only."""

    def __init__(self, placement: Placer, decisions: DecisionLog) -> None:
        self._clients: dict[str, WorkerClient] = {}
        self._connected: dict[str, WorkerCapacity] = {}
        self._placement = placement
        self._decisions = decisions
        self.history = ResidencyLog()
        self._models: dict[str, HostedModel] = {}
        self._specs: list[ModelSpec] = []
        self._pinned: frozenset[str] = frozenset()
        self.candidates = Candidates(self._connected)
        # By model, in the order in which the workers came.
        self._offering: dict[str, dict[str, WorkerCapacity]] = {}
        # Of these, workers that had room when they were last looked at; the next look at one that
        # has none takes it out, its next status puts it in again.
        self._open: dict[str, dict[str, WorkerCapacity]] = {}
        self._failed: dict[str, dict[str, str]] = {}  # worker -> why
        self._num_heard = 0  # workers with a status
        self._largest_arena_bytes = 0

    def add(self, client: WorkerClient, listener: WorkerListener) -> None:
        """Begin to connect to one more worker."""
        self._clients[client.worker_id] = client
        client.start(listener)

    @property
    def worker_ids(self) -> Collection[str]:
        """All of them, connected or not."""
        return self._clients.keys()

    def is_here(self, worker_id: str) -> bool:
        """Whether it is connected, and has sent a status."""
        worker = self._connected.get(worker_id)
        return worker is not None and worker.status is not None

    def away(self) -> Collection[str]:
        """Those that are not."""
        if self._num_heard == len(self._clients):
            return ()
        return [name for name in self._clients if not self.is_here(name)]

    def close(self) -> None:
        """Close every connection."""
        for client in self._clients.values():
            client.close()
        for worker_id in list(self._connected):
            self._forget(worker_id)

    def set_catalog(self, models: Sequence[HostedModel]) -> None:
        """Tell every worker which models there are, now and whenever one connects."""
        self._models = {model.name: model for model in models}
        self._specs = [ModelSpec(m.name, m.pack_dir, m.pinned, m.weight, m.floors) for m in models]
        self._pinned = frozenset(m.name for m in models if m.pinned)
        self.candidates.set_catalog(models)
        for worker in self:
            worker.pinned = self._pinned
            self.send(worker.worker_id, SetCatalog(self._specs))

    def connect(self, worker_id: str, epoch: str, now_s: float) -> None:
        """A worker process answered. It offers nothing before its first status."""
        self._forget(worker_id)
        self._connected[worker_id] = worker = WorkerCapacity(worker_id, epoch, now_s)
        worker.pinned = self._pinned
        self.send(worker_id, SetCatalog(self._specs))

    def lose(self, worker_id: str, now_s: float) -> None:
        """Its process is gone."""
        self._forget(worker_id)
        self.history.lose(worker_id, now_s)
        self._placement.lose_worker(worker_id)

    def update(self, worker: WorkerCapacity, status: WorkerStatus, now_s: float) -> Changes:
        """Take in a heartbeat."""
        if worker.status is None:
            self._num_heard += 1
        arena_bytes = status.num_pages * status.page_bytes
        self._largest_arena_bytes = max(self._largest_arena_bytes, arena_bytes)
        offered, failed = list(worker.offers), [model.model_id for model in worker.failures]
        changes = worker.update(status, now_s)
        self.history.note(status, changes.states, now_s)
        if changes.offers:
            self._note_offers(worker, offered)
        if worker.has_room(now_s):
            self._note_open(worker)
        if changes.states:
            self._note_failures(worker, failed)
        self.candidates.note(worker, states=changes.states)
        for swap in status.swaps:
            if swap.kind == "load":
                self._placement.loaded(worker.worker_id, swap.model_id, swap.duration_s, now_s)
        return changes

    def refuse(self, worker: WorkerCapacity, key: tuple[str, int], model_id: str) -> None:
        """The worker did not take a Submit: it offers nothing of the model until it says so."""
        worker.refuse(key, model_id)
        self._note_offers(worker, [model_id])

    def offering(self, model_id: str, now_s: float) -> list[WorkerCapacity]:
        """Workers that offer the model, full or not."""
        offering = self._offering.get(model_id)
        if offering is None:
            return []
        return [worker for worker in offering.values() if worker.leased(model_id, now_s)]

    def offering_ids(self, model_id: str, now_s: float) -> list[str]:
        """The names of these."""
        return [worker.worker_id for worker in self.offering(model_id, now_s)]

    def is_elsewhere(self, model_id: str) -> bool:
        """Whether a worker that stays has the model."""
        return bool(self.candidates.having(model_id, "resident"))

    def let(self, worker: WorkerCapacity, *, load: bool, serve: bool) -> None:
        """Whether the worker may be given loads, and requests: not where it leaves. Nothing is
        changed for a process that is gone."""
        if self._connected.get(worker.worker_id) is not worker:
            return
        if serve and not worker.takes_requests:
            self._note_open(worker)
        worker.takes_requests = serve
        if worker.takes_loads != load:
            worker.takes_loads = load
            self.candidates.note(worker, states=True)

    def num_offering(self, model_id: str) -> int:
        """Workers that offer the model, full or not, by their last status."""
        return len(self._offering.get(model_id, ()))

    def is_offered(self, model_id: str, now_s: float) -> bool:
        """Whether a worker offers the model, full or not."""
        workers = self._offering.get(model_id, {})
        return any(worker.leased(model_id, now_s) for worker in workers.values())

    def can_hold(self, ticket: Ticket, now_s: float) -> bool:
        """Whether a worker that offers its model could ever hold a request."""
        return any(worker.can_hold(ticket) for worker in self.offering(ticket.model_name, now_s))

    def open(self, model_id: str, now_s: float, most: int) -> list[WorkerCapacity]:
        """So many workers with room that offer the model, at most; other ones each time, where
        there are more."""
        known = self._open.get(model_id, {})
        found, full = [], []
        for worker in known.values():
            if not (worker.has_room(now_s) and worker.leased(model_id, now_s)):
                full.append(worker.worker_id)
                continue
            found.append(worker)
            if len(found) == most:
                break
        for worker_id in full:
            _drop(self._open, model_id, worker_id)
        if len(found) < len(known):
            for worker in found:
                known[worker.worker_id] = known.pop(worker.worker_id)
        return found

    def open_models(self, model_ids: Iterable[str]) -> list[str]:
        """Of these models, those that a worker with room may offer."""
        return [model_id for model_id in model_ids if model_id in self._open]

    def connected(self, worker_id: str) -> WorkerCapacity | None:
        """The worker, if it is connected."""
        return self._connected.get(worker_id)

    def send(self, worker_id: str, message: ToWorker) -> bool:
        """Queue a message; False where the connection is gone (`on_lost` comes or has come)."""
        return is_sent(self._clients[worker_id], message)

    def __iter__(self) -> Iterator[WorkerCapacity]:
        """Connected workers."""
        return iter(self._connected.values())

    def __len__(self) -> int:
        return len(self._connected)

    def get(self, worker_id: str, epoch: str) -> WorkerCapacity | None:
        """The connected worker if it is still this process."""
        worker = self._connected.get(worker_id)
        return worker if worker is not None and worker.epoch == epoch else None

    def claimed_on(self, model_name: str, now_s: float) -> str | None:
        """The worker that has been told to load the model and is expected to have done so first."""
        claim = self._placement.claimed(model_name, now_s)
        return None if claim is None else claim.worker_id

    @property
    def is_heard(self) -> bool:
        """A worker has sent a status."""
        return self._num_heard > 0

    def statuses(self) -> list[WorkerStatus]:
        """The last status of each connected worker."""
        return [worker.status for worker in self if worker.status is not None]

    def failure(self, model_name: str) -> str | None:
        """Why no connected worker can run the model; None if one may, or none is connected."""
        failed = self._failed.get(model_name)
        if failed and len(failed) == self._num_heard:
            return next(iter(failed.values())) or "loading failed"
        model = self._models.get(model_name)
        return unplaceable(model.weight_bytes if model else 0, self._largest_arena_bytes)

    def wanting(self, model_names: Iterable[str], now_s: float) -> frozenset[str]:
        """Those that some worker does not offer, and that more workers may be told to load."""
        return frozenset(
            name
            for name in model_names
            if self._placement.num_claims(name) < most_claims(self.candidates, name)
            and (
                len(self._offering.get(name, ())) < len(self._connected)
                or len(self.offering(name, now_s)) < len(self._connected)
            )
        )

    def place(
        self, now_s: float, demands: Sequence[Demand], waiting: Iterable[str], asks_s: AskRate
    ) -> bool:
        """Start the loads that policy wants; `demands` as they should be served.

        Models somebody is `waiting` for are not idle anywhere. Returns whether any load is wanted
        or under way.
        """
        self._placement.drop_claims(now_s, self.candidates.state)
        demanded = {demand.model_id for demand in demands}
        unserved = (m for m in sorted(self._pinned - demanded) if m not in self._offering)
        pins = self.demand_of(unserved)
        if demands or pins or self._placement.outlooks:
            wanted = self.candidates.with_packs(waiting)
            sized = self.with_sizes(demands)
            all_ = [*sized, *pins]
            sight = self.candidates
            for decision in self._placement.decide(now_s, all_, sight, wanted, asks_s):
                self._load(decision, now_s)
            for demand in sized:
                outlook = self._placement.outlooks.get(demand.model_id)
                if outlook is not None:
                    self._decisions.add(_held(now_s, demand, outlook))
        return bool(demands or pins or self._placement.is_busy)

    def with_sizes(self, demands: Iterable[Demand]) -> list[Demand]:
        """The same with what is known of their models."""
        hosted = [(demand, self._models[demand.model_id]) for demand in demands]
        return [replace(d, weight_bytes=m.weight_bytes, floors=m.floors) for d, m in hosted]

    def fetch(self, now_s: float, prefetch: Prefetch) -> None:
        """Bring a model nearer ahead of need."""
        on_device = prefetch.tier == "device"
        figures = DecisionFigures(demand=prefetch.asks_s, load_s=prefetch.load_s)
        record = DecisionRecord(
            now_s,
            "load" if on_device else "warm",
            "prefetch",
            prefetch.model_id,
            prefetch.worker_id,
            figures,
        )
        self._decisions.add(record)
        if on_device:
            self.load_ahead(prefetch.worker_id, prefetch.model_id)
        else:
            self.send(prefetch.worker_id, WarmModel(prefetch.model_id))

    def load_ahead(self, worker_id: str, model_name: str) -> None:
        """Nobody waits for it there: only where that costs nobody."""
        self.send(worker_id, LoadModel(model_name, prefetch=True))

    def demand_of(self, model_names: Iterable[str]) -> list[Demand]:
        """Hosted ones of these, with their sizes; nobody waits."""
        hosted = (self._models.get(name) for name in model_names)
        return [
            Demand(m.name, 0, 0.0, m.pinned, m.weight_bytes, floors=m.floors)
            for m in hosted
            if m is not None
        ]

    def is_pinned(self, model_name: str) -> bool:
        """Whether it is to stay on the device."""
        return model_name in self._pinned

    def outlook(self, model_name: str, now_s: float) -> Outlook:
        """When the model is there for a request that comes now; `reason` where a load waits."""
        if model_name in self._models and self.candidates.having(model_name, "resident"):
            return Outlook(model_name, now_s)
        known = self._placement.claimed(model_name, now_s)
        known = known or self._placement.outlooks.get(model_name)
        if known is not None:
            return known
        load_s = min(map(self.candidates.load_s, self.demand_of([model_name])), default=math.inf)
        return Outlook(model_name, now_s + load_s)

    def held_back(self, model_name: str) -> Outlook | None:
        """When a load that waits is expected to be through; None: none waits."""
        return self._placement.outlooks.get(model_name)

    def held_back_on(self) -> frozenset[str]:
        """The workers that loads wait for; an empty name: one waits for memory on any."""
        return frozenset(outlook.worker_id for outlook in self._placement.outlooks.values())

    def residency(self, model_name: str) -> str:
        """Where its weights are, on the worker that has it nearest."""
        return self.candidates.residency(model_name)

    def relieve(
        self,
        now_s: float,
        workers: Iterable[WorkerCapacity],
        waiting: Iterable[str],
        asks_s: AskRate,
    ) -> None:
        """Where KV memory is short, idle models make room."""
        short = [worker for worker in workers if worker.is_kv_short]
        if short:
            views = [v for worker in short if (v := self.candidates.view_of(worker)) is not None]
            for decision in relieve(views, now_s, self.candidates.with_packs(waiting), asks_s):
                self.unload_copy(now_s, decision)

    def load(self, now_s: float, model_name: str) -> None:
        """An operator's request; nothing happens where it is resident or cannot be."""
        if model_name not in self._models:
            return
        (demand,) = self.demand_of([model_name])
        decision = self._placement.claim(now_s, demand, self.candidates)
        if decision is not None:
            self._load(decision, now_s)

    def load_for_batch(self, now_s: float, demand: Demand, worker: WorkerView) -> None:
        """Only requests of class batch wait for it."""
        decision = self._placement.claim(now_s, demand, AllWorkers([worker]))
        if decision is not None:
            self._load(replace(decision, reason="batch requests waiting"), now_s, is_batch=True)

    def unload(self, now_s: float, model_name: str) -> None:
        """An operator's request, for every worker that has it."""
        for worker in self:
            if worker.state(model_name) in ("resident", "loading"):
                self.unload_copy(now_s, LoadDecision(model_name, worker.worker_id, "operator"))

    def check_integrity(self) -> None:
        """Raises IntegrityError if a worker's books, or what is kept by model, do not agree."""
        offering: dict[str, set[str]] = {}
        failed: dict[str, set[str]] = {}
        for worker in self:
            worker.check_integrity()
            for model_id in worker.offers:
                offering.setdefault(model_id, set()).add(worker.worker_id)
            for model in worker.failures:
                failed.setdefault(model.model_id, set()).add(worker.worker_id)
        kept = {model_id: set(workers) for model_id, workers in self._offering.items()}
        kept_failed = {model_id: set(workers) for model_id, workers in self._failed.items()}
        for model_id, workers in self._open.items():
            if not workers or not workers.keys() <= kept.get(model_id, set()):
                raise IntegrityError(f"{model_id} has room on {workers.keys()} and is not offered")
        if (kept, kept_failed) != (offering, failed):
            raise IntegrityError(f"offers {offering}, failures {failed}: kept are {kept}")
        self.candidates.check_integrity()
        if self._num_heard != len(self.statuses()):
            raise IntegrityError(f"{self._num_heard} workers have sent a status")

    def _forget(self, worker_id: str) -> None:
        worker = self._connected.pop(worker_id, None)
        if worker is None or worker.status is None:
            return
        self.candidates.lose(worker_id)
        self._num_heard -= 1
        for model_id in worker.offers:
            _drop(self._offering, model_id, worker_id)
            _drop(self._open, model_id, worker_id)
        for model in worker.failures:
            _drop(self._failed, model.model_id, worker_id)
        statuses = self.statuses()
        self._largest_arena_bytes = max((s.num_pages * s.page_bytes for s in statuses), default=0)

    def _note_open(self, worker: WorkerCapacity) -> None:
        for model_id in worker.offers:
            self._open.setdefault(model_id, {})[worker.worker_id] = worker

    def _note_offers(self, worker: WorkerCapacity, before: Iterable[str]) -> None:
        offered = set(worker.offers)
        for model_id in before:
            if model_id not in offered:
                _drop(self._offering, model_id, worker.worker_id)
                _drop(self._open, model_id, worker.worker_id)
        for model_id in worker.offers:
            self._offering.setdefault(model_id, {})[worker.worker_id] = worker

    def _note_failures(self, worker: WorkerCapacity, before: Iterable[str]) -> None:
        for model_id in before:
            _drop(self._failed, model_id, worker.worker_id)
        for model in worker.failures:
            self._failed.setdefault(model.model_id, {})[worker.worker_id] = model.reason
            if model.model_id not in before:  # tenants are not told the paths in it
                logger.error(
                    "worker=%s cannot serve model=%s: %s",
                    worker.worker_id,
                    model.model_id,
                    model.reason,
                )

    def _load(self, decision: LoadDecision, now_s: float, *, is_batch: bool = False) -> None:
        figures = DecisionFigures(
            waited_s=decision.waited_s,
            backlog_s=decision.backlog_s,
            load_s=decision.load_s,
            num_waiting=decision.num_waiting,
        )
        self._decisions.add(_record(now_s, "load", decision, figures))
        message = LoadModel(
            decision.model_id,
            waited_s=decision.waited_s,
            backlog_s=decision.backlog_s,
            forced=decision.forced,
            is_batch=is_batch,
        )
        self.send(decision.worker_id, message)

    def unload_copy(self, now_s: float, decision: LoadDecision) -> None:
        """Have a model leave a worker."""
        self._decisions.add(_record(now_s, "unload", decision))
        self.send(decision.worker_id, UnloadModel(decision.model_id))


def _record(
    now_s: float, kind: Kind, decision: LoadDecision, figures: DecisionFigures | None = None
) -> DecisionRecord:
    about = (kind, decision.reason, decision.model_id, decision.worker_id, figures)
    return DecisionRecord(now_s, *about, workers=decision.options)


def _held(now_s: float, demand: Demand, outlook: Outlook) -> DecisionRecord:
    assert outlook.reason is not None
    figures = DecisionFigures(
        waited_s=max(0.0, now_s - demand.oldest_s), num_waiting=demand.num_waiting
    )
    if outlook.at_s < math.inf:
        figures |= DecisionFigures(
            until_s=outlook.until_s, eta_s=outlook.at_s - now_s, load_s=outlook.load_s
        )
    return DecisionRecord(
        now_s, "held", outlook.reason, demand.model_id, outlook.worker_id, figures
    )


def _drop(table: dict[str, dict[str, T]], model_id: str, worker_id: str) -> None:
    workers = table.get(model_id, {})
    workers.pop(worker_id, None)
    if not workers:
        table.pop(model_id, None)
