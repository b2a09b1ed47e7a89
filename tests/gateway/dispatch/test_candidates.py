"""The workers as policies see them, kept up as statuses come."""

import math
from dataclasses import replace
from typing import ClassVar

import pytest
from msgspec import structs

from engine.protocol import ResidencyState, SwapRecord, WorkerStatus
from gateway.dispatch.policy.fleet_view import Demand
from gateway.dispatch.policy.relief import MIN_REPLICA_IDLE_S
from gateway.dispatch.tickets import IntegrityError
from tests.gateway.scripted_worker import Rig, ScriptedWorker, hosted


async def test_views_follow_statuses_and_losses() -> None:
    rig = Rig()
    one = rig.worker("one", states={"m": "resident", "n": "warm"})
    two = rig.worker("two", states={"m": "loading"})
    candidates = rig.dispatcher._fleet.candidates
    assert (list(candidates.having("m", "resident")), len(candidates)) == (["one"], 2)
    assert candidates.state("two", "m") == "loading"
    assert candidates.residency("n") == "warm"
    assert {view.worker_id for view in candidates.candidates(Demand("n", 1, 0.1, False))} == {
        "one",
        "two",
    }
    two.states["m"] = "resident"
    two.status()
    assert candidates.replicated() == ["m"]
    one.die()
    assert list(candidates.having("m", "resident")) == ["two"]
    assert candidates.view("one") is None
    assert candidates.residency("n") == "cold"
    rig.dispatcher.check_integrity()


async def test_an_index_that_is_not_the_workers_is_found() -> None:
    rig = Rig()
    rig.worker("one")
    rig.dispatcher._fleet.candidates._index.note_states("one", {})
    with pytest.raises(IntegrityError, match="the index has"):
        rig.dispatcher.check_integrity()
    rig.dispatcher._fleet.candidates._index.note_states("one", {"m": "resident", "n": "cold"})


async def test_idle_copies_leave_one_by_one_and_the_last_one_stays() -> None:
    rig = Rig()
    workers = [rig.worker(f"w{n}", states={"m": "resident"}) for n in range(3)]
    rig.ask("r")
    (busy,) = [worker for worker in workers if worker.running]
    gone: list[str] = []
    for _ in range(30):
        for worker in workers:
            if "m" in worker.unloads and worker.worker_id not in gone:
                gone.append(worker.worker_id)
                worker.states["m"] = "warm"
            worker.status()
        rig.advance(1.0)
    assert len(gone) == 2
    assert busy.worker_id not in gone
    records = rig.dispatcher.decisions.recent("m")
    assert {r.reason for r in records if r.kind == "unload"} == {"surplus replica"}


async def test_copies_stay_where_somebody_waits_or_the_model_is_pinned() -> None:
    rig = Rig()
    workers = [rig.worker(f"w{n}", num_requests=1, states={"m": "resident"}) for n in range(2)]
    rig.dispatcher.set_catalog([hosted("m", pinned=True), hosted("n")])
    for worker in workers:
        worker.status()
    rig.advance(MIN_REPLICA_IDLE_S + 5.0)
    assert not any(worker.unloads for worker in workers)


class PartlyFull(ScriptedWorker):
    """Its weights lie in pages of its own, and `b` is always busy."""

    weights: ClassVar[dict[str, int]] = {"p": 90_000, "i": 70_000, "b": 20_000, "c": 60_000}

    def make_status(self, swaps: list[SwapRecord]) -> WorkerStatus:
        status = super().make_status(swaps)
        resident = [name for name, state in self.states.items() if state == "resident"]
        rows = [
            structs.replace(
                row, weight_bytes=self.weights[row.model_id], num_running=int(row.model_id == "b")
            )
            for row in status.models
        ]
        free = self.arena_bytes - sum(self.weights[name] for name in resident)
        pages = {f"{name}/weights": self.weights[name] for name in resident}
        return structs.replace(status, models=rows, free_kv_bytes=free, pages=pages)


def partly_full(rig: Rig, name: str, **states: ResidencyState) -> PartlyFull:
    worker = PartlyFull(name, states=states)
    rig.dispatcher.add_worker(worker)
    worker.connect()
    return worker


async def test_workers_that_pinned_models_fill_are_no_candidates() -> None:
    rig = Rig()
    big = replace(hosted("c"), weight_bytes=60_000)
    rig.dispatcher.set_catalog([hosted("p", pinned=True), hosted("i"), hosted("b"), big])
    full = [partly_full(rig, f"p{n:02}", p="resident") for n in range(40)]
    idle = [partly_full(rig, f"z{n:02}", i="resident", b="resident") for n in range(20)]
    demand = Demand("c", 1, 0.1, False, 60_000)
    shown = {view.worker_id for view in rig.dispatcher._fleet.candidates.candidates(demand)}
    assert len(shown & {worker.worker_id for worker in idle}) >= 16
    rig.advance(5.0)
    for worker in [*full, *idle]:
        worker.status()
    rig.ask("r", "t", "c")
    assert sum("c" in worker.loads for worker in idle) == 1


async def test_what_a_load_takes_is_known_where_most_workers_are_too_small() -> None:
    rig = Rig()
    for n in range(40):
        rig.worker(f"a{n:02}", arena_bytes=100, kv_tokens=2000, states={"n": "cold"})
    rig.worker("large", kv_tokens=10, states={"n": "cold"})
    demand = Demand("m", 1, 0.1, False, 1000)
    assert rig.dispatcher._fleet.candidates.load_s(demand) < math.inf
