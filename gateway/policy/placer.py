"""What the fleet asks of placement: the seam behind which the policy can be another (pure)."""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Protocol

from gateway.policy.fleet_view import AskRate, Decision, Demand, Outlook, WorkerView, nobody_asks


class Placer(Protocol):
    """Who loads what. `placement.Placement` is ours; `bench/sim/baselines` has one to compare."""

    def decide(
        self,
        now_s: float,
        demands: Sequence[Demand],
        workers: Sequence[WorkerView],
        wanted: Container[str] = frozenset(),
        asks_s: AskRate = nobody_asks,
    ) -> list[Decision]:
        """Loads to start now."""
        ...

    def claim(self, now_s: float, demand: Demand, workers: Sequence[WorkerView]) -> Decision | None:
        """An operator's wish."""
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

    def claimed_on(self, model_id: str) -> str | None:
        """The worker that is to load the model."""
        ...

    def claimed(self, model_id: str, now_s: float) -> Outlook | None:
        """When the claimed load is expected to end."""
        ...

    @property
    def is_busy(self) -> bool:
        """Whether any claim stands."""
        ...

    @property
    def outlooks(self) -> Mapping[str, Outlook]:
        """Of the models that `decide` was asked about last and that are not claimed."""
        ...
