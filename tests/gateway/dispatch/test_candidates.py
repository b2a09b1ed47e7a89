"""The workers as policies see them, kept up as statuses come."""

import pytest

from gateway.dispatch.policy.fleet_view import Demand
from gateway.dispatch.policy.relief import MIN_REPLICA_IDLE_S
from gateway.dispatch.tickets import IntegrityError
from tests.gateway.scripted_worker import Rig, hosted


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
