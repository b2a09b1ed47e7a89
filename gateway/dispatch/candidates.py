"""The workers as policies see them, and which few are worth a look (stage 5).

Implements policy/fleet_sight.py's `FleetSight` over what fleet.py knows: a view of a worker is made
when somebody looks and kept until it changes, and policy/fleet_index.py is kept up as statuses
come. So a decision about one model costs the same in a fleet of ten workers and of a thousand.
"""

import math
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from gateway.dispatch.capacity import WorkerCapacity
from gateway.dispatch.policy.fleet_index import MOST_CANDIDATES, FleetIndex
from gateway.dispatch.policy.fleet_sight import least_load_s
from gateway.dispatch.policy.fleet_view import NEAREST, Demand, WorkerView
from gateway.dispatch.policy.relief import IdleCopy
from gateway.dispatch.tickets import IntegrityError
from gateway.types import HostedModel

_FEW = 12
"""Of the emptiest workers, and of others, that are looked at for what is fetched ahead."""
_COPIES_SEEN = 64
"""Workers with a model that are looked at for one to give it up."""


class Candidates:
    """Of the connected workers, which its owner keeps."""

    def __init__(self, connected: Mapping[str, WorkerCapacity]) -> None:
        self._connected = connected
        self._models: Mapping[str, HostedModel] = {}
        self._packs: dict[str, list[str]] = {}
        self._pack_of: dict[str, str] = {}  # of models that share theirs
        self._index = FleetIndex()

    def set_catalog(self, models: Sequence[HostedModel]) -> None:
        """The hosted models."""
        self._models = {model.name: model for model in models}
        packs: dict[str, list[str]] = {}
        for model in models:
            packs.setdefault(model.pack_dir, []).append(model.name)
        self._packs = {pack: names for pack, names in packs.items() if len(names) > 1}
        self._pack_of = {name: pack for pack, names in self._packs.items() for name in names}

    def note(self, worker: WorkerCapacity, *, states: bool) -> None:
        """A status has come, or the worker leaves or stays; `states`: models are in other states
        than before. One that leaves is nobody's candidate, and its models are not there."""
        if not worker.takes_loads:
            self._index.lose(worker.worker_id)
            return
        if states:
            self._index.note_states(worker.worker_id, worker.states())
        self._index.note_bytes(worker.worker_id, *worker.room_bytes())

    def lose(self, worker_id: str) -> None:
        """A worker is gone."""
        self._index.lose(worker_id)

    # FleetSight.

    def __len__(self) -> int:
        return len(self._index)

    def view(self, worker_id: str) -> WorkerView | None:
        """One worker; None: it is gone, or has sent no status."""
        worker = self._connected.get(worker_id)
        return self.view_of(worker) if worker is not None and worker.takes_loads else None

    def state(self, worker_id: str, model_id: str) -> str | None:
        """Where the model is there; None: the worker is gone."""
        worker = self._connected.get(worker_id)
        return None if worker is None else worker.state(model_id)

    def candidates(
        self, demand: Demand, avoid: Container[str] = (), *, and_failed: bool = False
    ) -> list[WorkerView]:
        """Where a load might go."""
        names = self._index.candidates(demand.model_id, avoid, and_failed=and_failed)
        return self._views(names)

    def none_loadable(self, demand: Demand) -> None:
        """None of its candidates could load it: others are shown next time."""
        if self.is_large:
            self._index.none_loadable(demand.model_id)

    def load_s(self, demand: Demand) -> float:
        """Where it is warm, or in a few other places: loads from the disk take the same in most.
        Where none of these can load it, the first worker that can is asked; inf: there is none."""
        found_s = least_load_s(demand, self._views(self._index.nearest(demand.model_id)))
        if found_s < math.inf or not self.is_large:
            return found_s
        each_s = (least_load_s(demand, [view]) for view in map(self.view, self._connected) if view)
        return next((load_s for load_s in each_s if load_s < math.inf), math.inf)

    def with_room(self, demand: Demand) -> Iterator[WorkerView]:
        """Workers that had so many free bytes, by their last status."""
        for worker_id in list(
            islice(self._index.with_room(demand.model_id, demand.weight_bytes), MOST_CANDIDATES)
        ):
            view = self.view(worker_id)
            if view is not None:
                yield view

    @property
    def is_large(self) -> bool:
        """There are more workers than candidates for one load."""
        return len(self._index) > MOST_CANDIDATES

    def having(self, model_id: str, state: str) -> Collection[str]:
        """The workers where the model is in that state."""
        return self._index.having(model_id, state)

    def taken(self, worker_id: str, num_bytes: int) -> None:
        """A load of so many bytes has been claimed there."""
        self._index.take(worker_id, num_bytes)

    # For others.

    def view_of(self, worker: WorkerCapacity) -> WorkerView | None:
        """None before its first status."""
        view = worker.view(self._models)
        return view if view is None or not self._packs else self._by_pack(view)

    def all(self) -> list[WorkerView]:
        """Every worker that has sent a status: for people, and costs what they are."""
        return self._views(self._connected)

    def for_prefetch(self) -> list[WorkerView]:
        """The emptiest workers and some others, other ones each time."""
        return self._views(self._index.spread(_FEW))

    def replicated(self) -> list[list[str]]:
        """Models that are resident on two workers and more; those of one pack together."""
        names = self._index.replicated()
        packs = dict.fromkeys(self._pack_of[name] for name in names if name in self._pack_of)
        alone = [[name] for name in names if name not in self._pack_of]
        return [*alone, *(self._packs[pack] for pack in packs)]

    def idle_copies(self, names: Sequence[str]) -> list[IdleCopy]:
        """Copies of this model, or of these of one pack, that run nothing: of the first
        _COPIES_SEEN workers that have it."""
        copies = (
            self._idle_copy(self._connected[worker_id], names)
            for worker_id in islice(self.copies(names), _COPIES_SEEN)
        )
        return [copy for copy in copies if copy is not None]

    def copies(self, names: Sequence[str]) -> Collection[str]:
        """Workers where the weights of these models of one pack are on the device."""
        if len(names) == 1:
            return self.having(names[0], "resident")
        return {worker_id: None for n in names for worker_id in self.having(n, "resident")}.keys()

    def _idle_copy(self, worker: WorkerCapacity, names: Sequence[str]) -> IdleCopy | None:
        there = [name for name in names if worker.state(name) == "resident"]
        copies = [copy for name in there if (copy := worker.idle_copy(name)) is not None]
        if not copies or len(copies) < len(there):
            return None
        return max(copies, key=lambda copy: copy.idle_since_s)

    def is_on_device(self, model_id: str) -> bool:
        """Whether any worker has it, or is loading it."""
        return self._index.is_on_device(model_id)

    def residency(self, model_id: str) -> str:
        """Where a model is, on the worker that has it nearest; that one may be leaving."""
        leaving = (w for w in self._connected.values() if not w.takes_loads)
        found = {worker.state(model_id) for worker in leaving}
        return next((s for s in NEAREST if s in found or self.having(model_id, s)), "cold")

    def with_packs(self, names: Iterable[str]) -> frozenset[str]:
        """These models and those that share their weights."""
        names = list(names)
        packs = {self._pack_of[name] for name in names if name in self._pack_of}
        return frozenset([*names, *(name for pack in packs for name in self._packs[pack])])

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the index is of the workers as they are."""
        states = {
            worker.worker_id: worker.states()
            for worker in self._connected.values()
            if worker.status is not None and worker.takes_loads
        }
        try:
            self._index.check_integrity(states)
        except ValueError as error:
            raise IntegrityError(str(error)) from error

    def _views(self, worker_ids: Iterable[str]) -> list[WorkerView]:
        views = (self.view(worker_id) for worker_id in worker_ids)
        return [view for view in views if view is not None]

    def _by_pack(self, view: WorkerView) -> WorkerView:
        """Models of one pack share its weights: idle together, and then counted once."""
        models = dict(view.models)
        # A worker tells of a few models, the catalog may have thousands of packs.
        packs = {self._pack_of[name]: None for name in models if name in self._pack_of}
        for pack in packs:
            known = [name for name in self._packs[pack] if name in models]
            all_idle = all(models[name].idle for name in known)
            for name in known[1:] if all_idle else known:
                models[name] = models[name]._replace(idle=False)
        return replace(view, models=models)
