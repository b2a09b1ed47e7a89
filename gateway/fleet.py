"""The workers as the dispatcher has them: connections, capacities, the catalog, loads on their way.

Between dispatcher.py (which tickets go) and worker_client.py (one socket). Knows no tickets beyond
what capacity.py books for them; decides nothing: placement is policy/placement.py's.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from engine.protocol import LoadModel, ModelSpec, SetCatalog, ToWorker, UnloadModel, WorkerStatus
from gateway.capacity import WorkerCapacity
from gateway.policy.placement import Decision, Demand, Placement, WorkerView, relieve, unplaceable
from gateway.types import HostedModel
from gateway.worker_client import WorkerClient, WorkerListener, WorkerUnavailable

logger = logging.getLogger(__name__)


class Fleet:
    """All workers, connected or not. Used on the event loop only."""

    def __init__(self, max_load_share: float) -> None:
        self._clients: dict[str, WorkerClient] = {}
        self._connected: dict[str, WorkerCapacity] = {}
        self._placement = Placement(max_load_share)
        self._specs: list[ModelSpec] = []
        self._pinned: frozenset[str] = frozenset()
        self._packs: dict[str, list[str]] = {}

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
        self._specs = [ModelSpec(m.name, m.pack_dir, m.pinned, m.weight) for m in models]
        self._pinned = frozenset(m.name for m in models if m.pinned)
        packs: dict[str, list[str]] = {}
        for model in models:
            packs.setdefault(model.pack_dir, []).append(model.name)
        self._packs = {pack: names for pack, names in packs.items() if len(names) > 1}
        for worker_id in self._connected:
            self.send(worker_id, SetCatalog(self._specs))

    def connect(self, worker_id: str, epoch: str, now_s: float) -> None:
        """A worker process answered. It offers nothing before its first status."""
        self._connected[worker_id] = WorkerCapacity(worker_id, epoch, now_s)
        self.send(worker_id, SetCatalog(self._specs))

    def lose(self, worker_id: str) -> None:
        """Its process is gone."""
        self._connected.pop(worker_id, None)
        self._placement.lose_worker(worker_id)

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
        known = [model for worker in self if (model := worker.model(model_name)) is not None]
        if known and all(model.state == "failed" for model in known):
            return known[0].reason or "it could not be loaded"
        return unplaceable(model_name, self._views({}, 0.0))

    def wanting(self, model_names: Iterable[str], now_s: float) -> frozenset[str]:
        """Those that some worker does not offer and that nobody has been told to load."""
        return frozenset(
            name
            for name in model_names
            if self._placement.claimed_on(name) is None
            and not all(worker.leased(name, now_s) for worker in self)
        )

    def place(self, now_s: float, demands: Sequence[Demand], waiting: Mapping[str, int]) -> None:
        """Start the loads and unloads that policy wants; `demands` as they should be served."""
        views = self._views(waiting, now_s)
        demanded = {demand.model_id for demand in demands}
        pins = [Demand(m, 0, 0.0, True) for m in sorted(self._pinned - demanded)]
        for decision in self._placement.decide(now_s, [*demands, *pins], views):
            self._load(decision)
        for decision in relieve(views):
            self._unload(decision)

    def load(self, now_s: float, model_name: str) -> None:
        """An operator's wish; nothing happens where it is resident or cannot be."""
        decision = self._placement.claim(now_s, model_name, self._views({}, now_s))
        if decision is not None:
            self._load(decision)

    def unload(self, model_name: str) -> None:
        """An operator's wish, for every worker that has it."""
        for worker in self:
            model = worker.model(model_name)
            if model is not None and model.state in ("resident", "loading"):
                self._unload(Decision(model_name, worker.worker_id, "the operator asked for it"))

    def check_integrity(self) -> None:
        """Raises IntegrityError if a worker's books do not agree."""
        for worker in self:
            worker.check_integrity()

    def _views(self, waiting: Mapping[str, int], now_s: float) -> list[WorkerView]:
        views = (worker.view(waiting, self._pinned, now_s) for worker in self)
        return [self._by_pack(view) for view in views if view is not None]

    def _by_pack(self, view: WorkerView) -> WorkerView:
        """Models of one pack share its weights: idle together, and then counted once."""
        models = dict(view.models)
        for names in self._packs.values():
            known = [name for name in names if name in models]
            all_idle = all(models[name].idle for name in known)
            for name in known[1:] if all_idle else known:
                models[name] = replace(models[name], idle=False)
        return replace(view, models=models)

    def _load(self, decision: Decision) -> None:
        logger.info("load model=%s worker=%s: %s", *_words(decision))
        self.send(decision.worker_id, LoadModel(decision.model_id))

    def _unload(self, decision: Decision) -> None:
        logger.info("unload model=%s worker=%s: %s", *_words(decision))
        self.send(decision.worker_id, UnloadModel(decision.model_id))


def _words(decision: Decision) -> tuple[str, str, str]:
    return decision.model_id, decision.worker_id, decision.reason
