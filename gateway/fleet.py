"""The workers as the dispatcher has them: connections, capacities, the catalog, loads on their way.

Between dispatcher.py (which tickets go) and worker_connection.py (one connection). Knows no tickets
beyond what capacity.py books for them; decides nothing: placement is policy/placement.py's.

Questions about one model must not cost a look at every worker: who offers it and where it failed
are kept by model, as statuses change them.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from engine.protocol import LoadModel, ModelSpec, SetCatalog, ToWorker, UnloadModel, WorkerStatus
from gateway.capacity import Changes, WorkerCapacity
from gateway.policy.placement import Decision, Demand, Placer, WorkerView, relieve, unplaceable
from gateway.tickets import IntegrityError
from gateway.types import HostedModel
from gateway.worker_connection import WorkerClient, WorkerListener, WorkerUnavailable

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Fleet:
    """All workers, connected or not. Used on the event loop only."""

    def __init__(self, placement: Placer) -> None:
        self._clients: dict[str, WorkerClient] = {}
        self._connected: dict[str, WorkerCapacity] = {}
        self._placement = placement
        self._models: dict[str, HostedModel] = {}
        self._specs: list[ModelSpec] = []
        self._pinned: frozenset[str] = frozenset()
        self._packs: dict[str, list[str]] = {}
        self._pack_of: dict[str, str] = {}  # of models that share theirs
        # By model, in the order in which the workers came.
        self._offering: dict[str, dict[str, WorkerCapacity]] = {}
        self._failed: dict[str, dict[str, str]] = {}  # worker -> why
        self._num_heard = 0  # workers with a status
        self._largest_arena_bytes = 0

    def add(self, client: WorkerClient, listener: WorkerListener) -> None:
        """Begin to connect to one more worker."""
        self._clients[client.worker_id] = client
        client.start(listener)

    def close(self) -> None:
        """Close every connection."""
        for client in self._clients.values():
            client.close()
        self._connected.clear()

    def set_catalog(self, models: Sequence[HostedModel]) -> None:
        """Tell every worker which models there are, now and whenever one connects."""
        self._models = {model.name: model for model in models}
        self._specs = [ModelSpec(m.name, m.pack_dir, m.pinned, m.weight) for m in models]
        self._pinned = frozenset(m.name for m in models if m.pinned)
        packs: dict[str, list[str]] = {}
        for model in models:
            packs.setdefault(model.pack_dir, []).append(model.name)
        self._packs = {pack: names for pack, names in packs.items() if len(names) > 1}
        self._pack_of = {name: pack for pack, names in self._packs.items() for name in names}
        for worker_id in self._connected:
            self.send(worker_id, SetCatalog(self._specs))

    def connect(self, worker_id: str, epoch: str, now_s: float) -> None:
        """A worker process answered. It offers nothing before its first status."""
        self._forget(worker_id)
        self._connected[worker_id] = WorkerCapacity(worker_id, epoch, now_s)
        self.send(worker_id, SetCatalog(self._specs))

    def lose(self, worker_id: str) -> None:
        """Its process is gone."""
        self._forget(worker_id)
        self._placement.lose_worker(worker_id)

    def update(self, worker: WorkerCapacity, status: WorkerStatus, now_s: float) -> Changes:
        """Take in a heartbeat."""
        if worker.status is None:
            self._num_heard += 1
        arena_bytes = status.num_pages * status.page_bytes
        self._largest_arena_bytes = max(self._largest_arena_bytes, arena_bytes)
        offered, failed = list(worker.offers), [model.model_id for model in worker.failures]
        changes = worker.update(status, now_s)
        if changes.offers:
            self._note_offers(worker, offered)
        if changes.states:
            self._note_failures(worker, failed)
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

    def send(self, worker_id: str, message: ToWorker) -> bool:
        """Queue a message; False where the connection is gone (`on_lost` comes or has come)."""
        try:
            self._clients[worker_id].send(message)
        except WorkerUnavailable as error:
            logger.info("not sent message=%s: %s", type(message).__name__, error)
            return False
        return True

    def __iter__(self) -> Iterator[WorkerCapacity]:
        """Connected workers."""
        return iter(self._connected.values())

    def __len__(self) -> int:
        return len(self._connected)

    def get(self, worker_id: str, epoch: str) -> WorkerCapacity | None:
        """The connected worker if it is still this process."""
        worker = self._connected.get(worker_id)
        return worker if worker is not None and worker.epoch == epoch else None

    def statuses(self) -> list[WorkerStatus]:
        """The last status of each connected worker."""
        return [worker.status for worker in self if worker.status is not None]

    def failure(self, model_name: str) -> str | None:
        """Why no connected worker can run the model; None if one may, or none is connected."""
        failed = self._failed.get(model_name)
        if failed and len(failed) == self._num_heard:
            return next(iter(failed.values())) or "it could not be loaded"
        model = self._models.get(model_name)
        return unplaceable(model.weight_bytes if model else 0, self._largest_arena_bytes)

    def wanting(self, model_names: Iterable[str], now_s: float) -> frozenset[str]:
        """Those that some worker does not offer and that nobody has been told to load."""
        return frozenset(
            name
            for name in model_names
            if self._placement.claimed_on(name) is None
            and len(self.offering(name, now_s)) < len(self._connected)
        )

    def place(self, now_s: float, demands: Sequence[Demand], waiting: Iterable[str]) -> None:
        """Start the loads that policy wants; `demands` as they should be served.

        Models somebody is `waiting` for are not idle anywhere.
        """
        self._placement.drop_claims(now_s, self._state_of)
        demanded = {demand.model_id for demand in demands}
        pins = [
            Demand(m, 0, 0.0, True, self._models[m].weight_bytes)
            for m in sorted(self._pinned - demanded)
            if m not in self._offering
        ]
        if demands or pins:
            wanted = self._with_packs(waiting)
            sized = [
                replace(d, weight_bytes=self._models[d.model_id].weight_bytes) for d in demands
            ]
            for decision in self._placement.decide(now_s, [*sized, *pins], self._views(), wanted):
                self._load(decision)

    def relieve(
        self, now_s: float, workers: Iterable[WorkerCapacity], waiting: Iterable[str]
    ) -> None:
        """Where KV memory is short, idle models make room."""
        short = [worker for worker in workers if worker.is_kv_short]
        if short:
            views = [view for worker in short if (view := self._view(worker)) is not None]
            for decision in relieve(views, now_s, self._with_packs(waiting)):
                self._unload(decision)

    def load(self, now_s: float, model_name: str) -> None:
        """An operator's wish; nothing happens where it is resident or cannot be."""
        if model_name not in self._models:
            return
        demand = Demand(model_name, 0, 0.0, False, self._models[model_name].weight_bytes)
        decision = self._placement.claim(now_s, demand, self._views())
        if decision is not None:
            self._load(decision)

    def unload(self, model_name: str) -> None:
        """An operator's wish, for every worker that has it."""
        for worker in self:
            if worker.state(model_name) in ("resident", "loading"):
                self._unload(Decision(model_name, worker.worker_id, "the operator asked for it"))

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
        if (kept, kept_failed) != (offering, failed):
            raise IntegrityError(f"offers {offering}, failures {failed}: kept are {kept}")
        if self._num_heard != len(self.statuses()):
            raise IntegrityError(f"{self._num_heard} workers have told a status")

    def _forget(self, worker_id: str) -> None:
        worker = self._connected.pop(worker_id, None)
        if worker is None or worker.status is None:
            return
        self._num_heard -= 1
        for model_id in worker.offers:
            _drop(self._offering, model_id, worker_id)
        for model in worker.failures:
            _drop(self._failed, model.model_id, worker_id)
        statuses = self.statuses()
        self._largest_arena_bytes = max((s.num_pages * s.page_bytes for s in statuses), default=0)

    def _note_offers(self, worker: WorkerCapacity, before: Iterable[str]) -> None:
        offered = set(worker.offers)
        for model_id in before:
            if model_id not in offered:
                _drop(self._offering, model_id, worker.worker_id)
        for model_id in worker.offers:
            self._offering.setdefault(model_id, {})[worker.worker_id] = worker

    def _note_failures(self, worker: WorkerCapacity, before: Iterable[str]) -> None:
        for model_id in before:
            _drop(self._failed, model_id, worker.worker_id)
        for model in worker.failures:
            self._failed.setdefault(model.model_id, {})[worker.worker_id] = model.reason

    def _state_of(self, worker_id: str, model_id: str) -> str | None:
        worker = self._connected.get(worker_id)
        return None if worker is None else worker.state(model_id)

    def _views(self) -> list[WorkerView]:
        return [view for worker in self if (view := self._view(worker)) is not None]

    def _view(self, worker: WorkerCapacity) -> WorkerView | None:
        view = worker.view(self._pinned)
        return view if view is None or not self._packs else self._by_pack(view)

    def _by_pack(self, view: WorkerView) -> WorkerView:
        """Models of one pack share its weights: idle together, and then counted once."""
        models = dict(view.models)
        for names in self._packs.values():
            known = [name for name in names if name in models]
            all_idle = all(models[name].idle for name in known)
            for name in known[1:] if all_idle else known:
                models[name] = replace(models[name], idle=False)
        return replace(view, models=models)

    def _with_packs(self, names: Iterable[str]) -> frozenset[str]:
        """These models and those that share their weights."""
        names = list(names)
        packs = {self._pack_of[name] for name in names if name in self._pack_of}
        return frozenset([*names, *(name for pack in packs for name in self._packs[pack])])

    def _load(self, decision: Decision) -> None:
        logger.info("load model=%s worker=%s: %s", *_words(decision))
        self.send(decision.worker_id, LoadModel(decision.model_id))

    def _unload(self, decision: Decision) -> None:
        logger.info("unload model=%s worker=%s: %s", *_words(decision))
        self.send(decision.worker_id, UnloadModel(decision.model_id))


def _words(decision: Decision) -> tuple[str, str, str]:
    return decision.model_id, decision.worker_id, decision.reason


def _drop(table: dict[str, dict[str, T]], model_id: str, worker_id: str) -> None:
    workers = table.get(model_id, {})
    workers.pop(worker_id, None)
    if not workers:
        table.pop(model_id, None)
