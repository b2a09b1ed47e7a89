"""Placement in a large fleet: what cannot be placed keeps nobody behind it from its turn."""

from collections.abc import Container, Iterator, Sequence

from gateway.dispatch.policy.fleet_index import MOST_CANDIDATES
from gateway.dispatch.policy.fleet_sight import AllWorkers
from gateway.dispatch.policy.fleet_view import Demand, ModelView, WorkerView
from gateway.dispatch.policy.placement import MOST_JUDGED, REJUDGE_S, Placement

GB = 10**9
LOOK_S = 0.05


class Large(AllWorkers):
    """The first workers are the candidates for every load."""

    def __init__(self, workers: Sequence[WorkerView]) -> None:
        super().__init__(workers)
        self.num_judged = 0

    @property
    def is_large(self) -> bool:
        return True

    def candidates(
        self, demand: Demand, avoid: Container[str] = (), *, and_failed: bool = False
    ) -> Sequence[WorkerView]:
        found = [w for w in self._workers if w.worker_id not in avoid][:MOST_CANDIDATES]
        self.num_judged += len(found)
        return found

    def with_room(self, demand: Demand) -> Iterator[WorkerView]:
        return (w for w in self._workers if w.free_bytes >= demand.weight_bytes)


def worker(number: int, num_hot: int) -> WorkerView:
    """Full of a busy model; each of the hot ones is on two of a hundred."""
    models = {"busy": ModelView("resident", 70 * GB, 1.0, idle=False, held_bytes=70 * GB)}
    if number % 50 < num_hot:
        models[f"hot{number % 50}"] = ModelView("resident", 5 * GB, 1.0, idle=False)
    return WorkerView(f"w{number:03}", 2 * GB, 80 * GB, models, cold_bytes_per_s=5.0 * GB)


def waits(name: str, num: int, each_s: float, num_bytes: int, now_s: float) -> Demand:
    backlog_s, waited_s = num * each_s, num * now_s
    return Demand(name, num, backlog_s, False, num_bytes, oldest_s=0.0, waited_s=waited_s)


def test_a_cold_model_has_its_turn_behind_hot_ones_that_fit_nowhere() -> None:
    for num_hot in (4, 16):
        sight = Large([worker(n, num_hot) for n in range(100)])
        placement, decided_s = Placement(0.2, 1.0), None
        for step in range(60):
            now_s, before = step * LOOK_S, sight.num_judged
            hot = [waits(f"hot{n}", 50, 10.0, 5 * GB, now_s) for n in range(num_hot)]
            found = placement.decide(now_s, [*hot, waits("cold", 5, 1.0, 10 * GB, now_s)], sight)
            assert sight.num_judged - before <= MOST_JUDGED
            if found and decided_s is None:
                decided_s = now_s
                assert [decision.model_id for decision in found] == ["cold"]
        assert decided_s is not None
        assert decided_s <= 1.0


def test_what_fits_nowhere_is_looked_at_again_and_is_told_meanwhile() -> None:
    placement = Placement(0.2, 1.0)
    pinned = ModelView("resident", 70 * GB, 1.0, idle=False, pinned=True, held_bytes=70 * GB)
    full = [WorkerView(f"w{n}", 2 * GB, 80 * GB, {"p": pinned}) for n in range(30)]
    asked = waits("cold", 1, 1.0, 20 * GB, 0.0)
    judged = []
    for step in range(int(REJUDGE_S / LOOK_S) + 2):
        sight = Large(full)
        assert not placement.decide(step * LOOK_S, [asked], sight)
        assert placement.outlooks["cold"].reason == "not enough memory"
        judged.append(sight.num_judged)
    assert [n for n, num in enumerate(judged) if num] == [0, int(REJUDGE_S / LOOK_S)]
    free = WorkerView("v", 50 * GB, 80 * GB, {})
    assert placement.decide(2.0, [asked], Large([*full, free])), "room is seen at once"
