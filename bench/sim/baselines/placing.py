"""Every model at home on one worker: what ours (gateway/dispatch/policy/placement.py) is compared
to.

Homes are dealt out beforehand by size, each model to the worker with the fewest bytes so far, the
largest first: what an operator without figures of demand would do. There is never a second copy,
and a worker that is idle never helps another.
"""

from collections.abc import Callable, Container, Mapping, Sequence

from gateway.dispatch.policy.fleet_sight import AllWorkers, FleetSight
from gateway.dispatch.policy.fleet_view import (
    AskRate,
    Demand,
    LoadDecision,
    Outlook,
    nobody_asks,
)
from gateway.dispatch.policy.placement import Placement

NO_BOUND = 1.0
"""Of the loads' share of a worker's time: at home a model always may be loaded. Without homes it is
the policy `eager`: every model that is asked for is loaded at once."""


def deal_homes(num_bytes: Mapping[str, int], worker_ids: Sequence[str]) -> dict[str, str]:
    """Model -> worker."""
    filled = dict.fromkeys(worker_ids, 0)
    homes = {}
    for model_id in sorted(num_bytes, key=lambda name: (-num_bytes[name], name)):
        homes[model_id] = min(filled, key=lambda worker_id: (filled[worker_id], worker_id))
        filled[homes[model_id]] += num_bytes[model_id]
    return homes


class StaticSplit:
    """A Placer: ours for each worker by itself, with the models that are at home there."""

    def __init__(self, homes: Mapping[str, str]) -> None:
        self._homes = homes
        self._placements = {worker_id: Placement(NO_BOUND) for worker_id in set(homes.values())}

    def decide(
        self,
        now_s: float,
        demands: Sequence[Demand],
        sight: FleetSight,
        wanted: Container[str] = frozenset(),
        asks_s: AskRate = nobody_asks,
    ) -> list[LoadDecision]:
        """Loads at home; a model whose home is away waits for it."""
        del asks_s  # nothing is held back
        by_home: dict[str, list[Demand]] = {}
        for demand in demands:
            by_home.setdefault(self._homes[demand.model_id], []).append(demand)
        return [
            decision
            for worker_id, mine in by_home.items()
            if (view := sight.view(worker_id)) is not None
            for decision in self._placements[worker_id].decide(
                now_s, mine, AllWorkers([view]), wanted
            )
        ]

    def claim(self, now_s: float, demand: Demand, sight: FleetSight) -> LoadDecision | None:
        """An operator's request, at home only."""
        home = self._homes[demand.model_id]
        view = sight.view(home)
        there = AllWorkers([] if view is None else [view])
        return self._placements[home].claim(now_s, demand, there)

    def drop_claims(self, now_s: float, state_of: Callable[[str, str], str | None]) -> None:
        """End claims that are done or too old."""
        for placement in self._placements.values():
            placement.drop_claims(now_s, state_of)

    def lose_worker(self, worker_id: str) -> None:
        """Its claims are void."""
        if worker_id in self._placements:
            self._placements[worker_id].lose_worker(worker_id)

    def num_claims(self, model_id: str) -> int:
        """One, if its home is to load it."""
        return self._placements[self._homes[model_id]].num_claims(model_id)

    def claimed(self, model_id: str, now_s: float) -> Outlook | None:
        """When its load at home is expected to end."""
        return self._placements[self._homes[model_id]].claimed(model_id, now_s)

    def loaded(self, worker_id: str, model_id: str, took_s: float, now_s: float) -> None:
        """A load has ended."""
        if worker_id in self._placements:
            self._placements[worker_id].loaded(worker_id, model_id, took_s, now_s)

    @property
    def outlooks(self) -> Mapping[str, Outlook]:
        """Of all homes."""
        return {
            model_id: outlook
            for placement in self._placements.values()
            for model_id, outlook in placement.outlooks.items()
        }

    @property
    def is_busy(self) -> bool:
        """Whether any claim stands at any home."""
        return any(placement.is_busy for placement in self._placements.values())
