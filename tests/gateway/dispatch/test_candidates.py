"""The workers as policies see them, kept up as statuses come."""

import math
from dataclasses import replace
from typing import ClassVar
from unittest import mock

import pytest
from msgspec import structs

from engine.protocol import ResidencyState, SwapRecord, WorkerStatus
from gateway.dispatch.policy.fleet_view import Demand, Outlook
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
    assert candidates.replicated() == [["m"]]
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


async def run_on(
    rig: Rig, workers: list[ScriptedWorker], seconds: int, *, obeys: bool = True
) -> list[str]:
    """Statuses and ticks; whose copies of what were told to leave, in that order."""
    told: list[str] = []
    for _ in range(seconds):
        for worker in workers:
            for name in worker.unloads[sum(one.startswith(worker.worker_id) for one in told) :]:
                told.append(f"{worker.worker_id} {name}")
                if obeys:
                    for one in worker.states:
                        worker.states[one] = "warm"
            worker.status()
        rig.advance(1.0)
    return told


async def test_of_a_pinned_model_one_copy_stays() -> None:
    rig = Rig()
    rig.dispatcher.set_catalog([hosted("m", pinned=True), hosted("n")])
    workers = [rig.worker(f"w{n}", states={"m": "resident"}) for n in range(3)]
    assert len(await run_on(rig, workers, 30)) == 2
    assert sum(worker.states["m"] == "resident" for worker in workers) == 1


async def test_copies_stay_where_somebody_waits() -> None:
    rig = Rig()
    workers = [rig.worker(f"w{n}", num_requests=0, states={"m": "resident"}) for n in range(2)]
    rig.ask("waits")
    assert not await run_on(rig, workers, int(MIN_REPLICA_IDLE_S) + 5)


async def test_a_copy_is_told_once_in_a_while_and_the_last_one_never() -> None:
    rig = Rig()
    workers = [rig.worker(f"w{n}", states={"m": "resident"}) for n in range(2)]
    told = await run_on(rig, workers, 30, obeys=False)
    assert 2 <= len(told) <= 3
    assert len(set(told)) == 1


async def test_a_copy_stays_where_memory_is_free_until_a_load_waits_for_it() -> None:
    rig = Rig()
    big = {"kv_tokens": 1000, "arena_bytes": 20_000}
    workers = [rig.worker(f"w{n}", states={"m": "resident"}, **big) for n in range(2)]
    assert not await run_on(rig, workers, 20)
    outlook = Outlook("n", math.inf, "not enough memory")
    fleet = rig.dispatcher._fleet
    with mock.patch.object(type(fleet._placement), "outlooks", {"n": outlook}):
        rig.dispatcher._loads._copies.give_up(rig.clock.now_s)
    assert [worker.unloads for worker in workers] in ([["m"], []], [[], ["m"]])


@pytest.mark.parametrize("pinned", ["", "a", "b"])
async def test_models_of_one_pack_leave_together(pinned: str) -> None:
    rig = Rig()
    models = [hosted(name, pack="p", pinned=name == pinned) for name in ("a", "b")]
    rig.dispatcher.set_catalog(models)
    states = {"a": "resident", "b": "resident"}
    workers = [rig.worker(f"w{n}", states=dict(states)) for n in range(3)]
    for number in range(3):
        rig.ask(f"b{number}", model="b")
    assert not await run_on(rig, workers, 10), "the other model of the pack is at work"
    for worker in workers:
        for request_id, attempt in list(worker.running):
            worker.finish(request_id, attempt=attempt)
    told = await run_on(rig, workers, 60)
    assert [order.split()[1] for order in told] == [pinned or "a"] * 2


async def test_two_pins_of_one_pack_keep_all_its_copies() -> None:
    rig = Rig()
    rig.dispatcher.set_catalog([hosted(name, pack="p", pinned=True) for name in ("a", "b")])
    states = {"a": "resident", "b": "resident"}
    workers = [rig.worker(f"w{n}", states=dict(states)) for n in range(3)]
    assert not await run_on(rig, workers, 20)


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
    rig.join(worker)
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
