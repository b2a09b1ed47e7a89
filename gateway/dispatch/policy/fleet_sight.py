"""The seams around placement: the fleet as it asks for it, and who decides (pure).

`FleetSight` shows few workers at a time: `gateway/dispatch/candidates.py` has it over an index, for
fleets of any size; `AllWorkers` shows every worker, for small fleets and to compare with. `Placer`
is the seam behind which the policy can be another.
"""

import math
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from gateway.dispatch.policy.fleet_view import (
    AskRate,
    Demand,
    LoadDecision,
    Outlook,
    WorkerView,
    load_seconds,
    nobody_asks,
)


class FleetSight(Protocol):
    """What is known of all workers, and a few of them to judge."""

    def __len__(self) -> int:
        """Workers that have sent a status."""
        ...

    def view(self, worker_id: str) -> WorkerView | None:
        """One worker; None: it is gone, or has sent no status."""
        ...

    def state(self, worker_id: str, model_id: str) -> str | None:
        """Where the model is there; None: the worker is gone."""
        ...

    def candidates(
        self, demand: Demand, avoid: Container[str] = (), *, and_failed: bool = False
    ) -> Sequence[WorkerView]:
        """Where a load might go. `avoid`: loads against models in demand are due there already;
        `and_failed`: also where an earlier load has failed."""
        ...

    def none_loadable(self, demand: Demand) -> None:
        """None of its candidates could load it: show others next time, if there are any."""
        ...

    def load_s(self, demand: Demand) -> float:
        """What a load would take where it takes least; inf where there is no candidate."""
        ...

    def with_room(self, demand: Demand) -> Iterator[WorkerView]:
        """Of a large fleet: workers that may have so many free bytes, the best first."""
        ...

    @property
    def is_large(self) -> bool:
        """There are more workers than candidates for one load."""
        ...

    def having(self, model_id: str, state: str) -> Collection[str]:
        """The workers where the model is in that state."""
        ...

    def taken(self, worker_id: str, num_bytes: int) -> None:
        """A load of so many bytes has been claimed there."""
        ...


def most_claims(sight: FleetSight, model_id: str) -> int:
    """Workers that may be told to load a model at a time: as many as have its bytes, and one."""
    return max(1, len(sight.having(model_id, "resident")) + len(sight.having(model_id, "warm")))


def least_load_s(demand: Demand, workers: Iterable[WorkerView]) -> float:
    """What a load takes where it takes least; inf where it can be nowhere."""
    models = (worker.model(demand) for worker in workers if worker.may_load(demand))
    return min(map(load_seconds, models), default=math.inf)


class AllWorkers:
    """A FleetSight of these workers: every one of them is a candidate."""

    def __init__(self, workers: Sequence[WorkerView]) -> None:
        self._workers = workers

    def __len__(self) -> int:
        return len(self._workers)

    def view(self, worker_id: str) -> WorkerView | None:
        """By its id."""
        return next((w for w in self._workers if w.worker_id == worker_id), None)

    def state(self, worker_id: str, model_id: str) -> str | None:
        """By its view."""
        view = self.view(worker_id)
        return None if view is None else view.state(model_id)

    def candidates(
        self, demand: Demand, avoid: Container[str] = (), *, and_failed: bool = False
    ) -> Sequence[WorkerView]:
        """All of them."""
        return self._workers

    def none_loadable(self, demand: Demand) -> None:
        """There are no others."""

    def load_s(self, demand: Demand) -> float:
        """Among all."""
        return least_load_s(demand, self._workers)

    def with_room(self, demand: Demand) -> Iterator[WorkerView]:
        """None first: all are judged anyway."""
        return iter(())

    @property
    def is_large(self) -> bool:
        """Never."""
        return False

    def having(self, model_id: str, state: str) -> Collection[str]:
        """By their views."""
        return [w.worker_id for w in self._workers if w.state(model_id) == state]

    def taken(self, worker_id: str, num_bytes: int) -> None:
        """Changes nothing: every worker is judged, and the caller counts what it has claimed."""


class Placer(Protocol):
    """Who loads what. `placement.Placement` is ours; `bench/sim/baselines` has one to compare."""

    def decide(
        self,
        now_s: float,
        demands: Sequence[Demand],
        sight: FleetSight,
        wanted: Container[str] = frozenset(),
        asks_s: AskRate = nobody_asks,
    ) -> list[LoadDecision]:
        """Loads to start now."""
        ...

    def claim(self, now_s: float, demand: Demand, sight: FleetSight) -> LoadDecision | None:
        """An operator's request."""
        ...

    def drop_claims(self, now_s: float, state_of: Callable[[str, str], str | None]) -> None:
        """End claims that are done or too old."""
        ...

    def loaded(self, worker_id: str, model_id: str, took_s: float, now_s: float) -> None:
        """A load has ended."""
        ...

    def lose_worker(self, worker_id: str) -> None:
        """A worker is gone."""
        ...

    def num_claims(self, model_id: str) -> int:
        """Workers that are to load the model."""
        ...

    def claimed(self, model_id: str, now_s: float) -> Outlook | None:
        """When the first claimed load is expected to end."""
        ...

    @property
    def is_busy(self) -> bool:
        """Whether any claim stands."""
        ...

    @property
    def outlooks(self) -> Mapping[str, Outlook]:
        """Of the models that `decide` was asked about last and that are not claimed."""
        ...
