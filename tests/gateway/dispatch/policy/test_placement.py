"""Placement: one claim a model, free room first, replicas, pins, failures, KV pressure.

What pushes models in demand out (gathering, the budget, outlooks) is in test_gathering.py.
"""

from dataclasses import replace

import pytest

from gateway.dispatch.policy.fleet_sight import AllWorkers
from gateway.dispatch.policy.fleet_view import Demand, ModelView, WorkerView
from gateway.dispatch.policy.placement import Placement
from gateway.dispatch.policy.relief import relieve, unplaceable

MB = 1 << 20


def model(state: str, mb: int = 10, load_s: float = 1.0, *, idle: bool = False) -> ModelView:
    """A model's view; `idle` for ten seconds if at all."""
    return ModelView(state, mb * MB, load_s, idle, -10.0 if idle else 0.0)


def worker(
    name: str, free_mb: int, *, kv_short: bool = False, arena_mb: int = 100, **models: ModelView
) -> WorkerView:
    return WorkerView(name, free_mb * MB, arena_mb * MB, models, kv_short)


def demand(name: str, waiting: int = 1, backlog_s: float = 0.1, mb: int = 10) -> Demand:
    return Demand(name, waiting, backlog_s, pinned=False, weight_bytes=mb * MB)


def decided(placement: Placement, now_s: float, demands: list[Demand], *workers: WorkerView) -> str:
    """Decisions as text."""
    found = placement.decide(now_s, demands, AllWorkers(workers))
    return " ".join(f"{d.model_id}@{d.worker_id}" for d in found)


def test_a_model_is_claimed_once_until_it_is_resident() -> None:
    placement = Placement(0.2)
    cold = worker("w", 50, a=model("cold"))
    assert decided(placement, 0.0, [demand("a")], cold) == "a@w"
    assert decided(placement, 0.1, [demand("a")], cold) == ""
    assert placement.num_claims("a") == 1
    assert decided(placement, 0.2, [demand("a")], worker("w", 40, a=model("resident"))) == ""
    assert placement.num_claims("a") == 0
    assert decided(placement, 0.3, [demand("a")], cold) == "a@w"


def test_a_claim_expires_and_dies_with_its_worker() -> None:
    placement = Placement(0.2)
    cold = worker("w", 50, a=model("cold", load_s=2.0))
    assert decided(placement, 0.0, [demand("a")], cold) == "a@w"
    assert decided(placement, 7.9, [demand("a")], cold) == ""
    assert decided(placement, 8.0, [demand("a")], cold) == "a@w"
    placement.lose_worker("w")
    assert decided(placement, 8.1, [demand("a")], cold) == "a@w"


def test_claims_of_one_round_share_the_free_pages() -> None:
    placement = Placement(0.2)
    views = worker("w", 25, a=model("cold"), b=model("cold"), c=model("cold"), r=model("resident"))
    found = placement.decide(0.0, [demand("a"), demand("b"), demand("c")], AllWorkers([views]))
    assert [(d.model_id, d.reason) for d in found] == [
        ("a", "free memory"),
        ("b", "free memory"),
        ("c", "next in line"),
    ]


def test_idle_models_make_room_before_busy_ones_are_asked() -> None:
    placement = Placement(0.2)
    idle = worker("w", 0, a=model("cold"), b=model("resident", idle=True), c=model("resident"))
    (decision,) = placement.decide(0.0, [demand("a")], AllWorkers([idle]))
    assert decision.reason == "idle models evicted"


def test_no_forced_load_while_another_moves() -> None:
    busy = worker("w", 0, a=model("cold"), b=model("draining"), c=model("resident"))
    assert decided(Placement(0.2), 0.0, [demand("a")], busy) == ""


def test_the_first_in_fair_order_gets_the_turn() -> None:
    busy = worker("w", 0, a=model("cold"), b=model("cold"), c=model("resident"))
    assert decided(Placement(0.2), 0.0, [demand("b"), demand("a")], busy) == "b@w"


def test_a_pin_that_nobody_waits_for_pushes_nobody_out() -> None:
    pinned = Demand("a", 0, 0.0, pinned=True)
    assert decided(Placement(0.2), 0.0, [pinned], worker("w", 50, a=model("cold"))) == "a@w"
    busy = worker("w", 0, a=model("cold"), c=model("resident"))
    assert decided(Placement(0.2), 0.0, [pinned], busy) == ""


def test_a_warm_copy_is_preferred_then_the_emptier_worker() -> None:
    cold = worker("big", 90, a=model("cold"))
    warm = worker("small", 20, a=model("warm"))
    assert decided(Placement(0.2), 0.0, [demand("a")], cold, warm) == "a@small"
    other = worker("other", 30, a=model("cold"))
    assert decided(Placement(0.2), 0.0, [demand("a")], other, cold) == "a@big"


def test_a_replica_comes_only_for_a_backlog_longer_than_the_load() -> None:
    views = worker("one", 0, a=model("resident")), worker("two", 50, a=model("cold", load_s=3.0))
    assert decided(Placement(0.2), 0.0, [demand("a", 9, backlog_s=3.0)], *views) == ""
    assert decided(Placement(0.2), 0.0, [demand("a", 9, backlog_s=3.1)], *views) == "a@two"


def test_failed_models_wait_for_the_operator() -> None:
    failed = worker("w", 50, a=model("failed"))
    placement = Placement(0.2)
    assert decided(placement, 0.0, [demand("a")], failed) == ""
    decision = placement.claim(0.0, demand("a"), AllWorkers([failed]))
    assert decision is not None
    assert decision.worker_id == "w"
    assert (
        placement.claim(0.0, demand("a"), AllWorkers([worker("w", 50, a=model("resident"))]))
        is None
    )


def test_what_no_arena_can_hold_is_never_claimed_and_says_why() -> None:
    views = [worker("w", 100, a=model("cold", mb=100)), worker("v", 50, arena_mb=50)]
    assert decided(Placement(0.2), 0.0, [demand("a", mb=100)], *views) == ""
    reason = unplaceable(100 * MB, 100 * MB)
    assert reason is not None
    assert str(100 * MB) in reason
    assert unplaceable(99 * MB, 100 * MB) is None
    assert unplaceable(100 * MB, 0) is None, "no worker has told its size"


def test_models_that_workers_say_nothing_of_are_cold_there() -> None:
    quick = WorkerView("quick", 50 * MB, 100 * MB, {}, cold_bytes_per_s=10 * MB)
    warm = worker("warm", 20, a=model("warm"))
    assert decided(Placement(0.2), 0.0, [demand("a")], quick, warm) == "a@warm"
    placement = Placement(0.2)
    assert decided(placement, 0.0, [demand("a", mb=30)], quick) == "a@quick"
    assert decided(placement, 11.9, [demand("a", mb=30)], quick) == "", "four loads of 3 s"
    assert decided(placement, 12.0, [demand("a", mb=30)], quick) == "a@quick"


def test_a_model_somebody_waits_for_is_not_idle() -> None:
    view = worker("w", 0, a=model("cold"), b=model("resident", idle=True), c=model("resident"))
    placement = Placement(0.2)
    (decision,) = placement.decide(0.0, [demand("a")], AllWorkers([view]), wanted={"b"})
    assert decision.reason == "next in line"
    short = worker("w", 0, kv_short=True, b=model("resident", idle=True))
    assert relieve([short], 0.0, wanted={"b"}) == []


def test_kv_pressure_makes_the_longest_idle_model_go() -> None:
    short = WorkerView(
        "w",
        0,
        100 * MB,
        {
            "young": ModelView("resident", MB, 1.0, True, 11.5),
            "old": ModelView("resident", MB, 1.0, True, 3.0),
            "older": ModelView("resident", MB, 1.0, True, 1.0),
            "busy": ModelView("resident", MB, 1.0, False, 0.0),
        },
        kv_short=True,
    )
    assert [d.model_id for d in relieve([short], 12.0)] == ["older"]
    assert relieve([worker("w", 0, a=model("resident", idle=True))], 0.0) == []
    moving = worker("w", 0, kv_short=True, a=model("resident", idle=True), b=model("loading"))
    assert relieve([moving], 0.0) == []


def test_kv_pressure_takes_the_least_wanted_and_no_load_takes_what_it_gave() -> None:
    models = {"a": model("resident", idle=True), "b": model("resident", idle=True)}
    short = WorkerView("w", 50 * MB, 100 * MB, models, kv_short=True)
    rates = {"a": 1.0, "b": 0.05}
    assert [d.model_id for d in relieve([short], 0.0, asks_s=lambda m: rates[m])] == ["b"]
    placement = Placement(0.2)
    decision = placement.decide(
        0.0, [demand("c")], AllWorkers([short]), asks_s=lambda m: rates.get(m, 0.0)
    )
    assert [d.reason for d in decision] == ["idle models evicted"]


SIZES = {"large": 60, "small": 30}


def held(mb: int, *, pinned: bool = False, floors: tuple[tuple[str, int], ...] = ()) -> ModelView:
    """Resident, in all its pages; busy."""
    size = mb * MB
    return ModelView("resident", size, 2.0, False, pinned=pinned, held_bytes=size, floors=floors)


@pytest.mark.parametrize("kept", ["pin", "floor"])
def test_what_can_never_have_room_stands_in_nobodys_way(kept: str) -> None:
    placement = Placement(0.2, gather_wait_s=5.0)
    floors = (("acme", 1),) if kept == "floor" else ()
    stays = held(50, pinned=kept == "pin", floors=floors)
    view = worker("w", 5, stays=stays, busy=held(40))
    wanted = [replace(demand(name, mb=mb), oldest_s=0.0) for name, mb in SIZES.items()]
    loaded = [
        decision.model_id
        for tick in range(100)
        for decision in placement.decide(tick * 0.25, wanted, AllWorkers([view]))
    ]
    assert set(loaded) == {"small"}
    assert placement.outlooks["large"].reason == "not enough memory"
    own = replace(wanted[0], floors=floors)
    found = [
        decision.model_id for decision in Placement(0.2).decide(0.0, [own], AllWorkers([view]))
    ]
    assert found == (["large"] if floors else []), "one's own floor gives way"


def test_models_that_a_floor_keeps_at_rest_make_no_room() -> None:
    placement = Placement(0.2, gather_wait_s=5.0)
    mine = held(40, floors=(("acme", 1),))._replace(idle=True)
    view = worker("w", 5, mine=mine, busy=held(50))
    assert placement.decide(0.0, [demand("other", mb=30)], AllWorkers([view])) == []
    assert placement.outlooks["other"].reason == "too few requests waiting"
    spared = worker("w", 5, mine=mine, spare=mine, busy=held(10))
    (decision,) = placement.decide(0.0, [demand("other", mb=30)], AllWorkers([spared]))
    assert decision.reason == "idle models evicted", "one of the two is enough for the floor"


def test_claims_double_with_the_copies_that_have_the_bytes() -> None:
    """A crowd that needs a copy on every worker: 1, 1, 2, 4, 8 at a time."""
    placement = Placement(0.2)
    there: set[str] = set()
    rounds = []
    for turn in range(6):
        views = [
            worker(f"w{n:02}", 50, a=model("resident" if f"w{n:02}" in there else "cold"))
            for n in range(16)
        ]
        found = placement.decide(
            10.0 * turn, [demand("a", waiting=99, backlog_s=1000.0)], AllWorkers(views)
        )
        rounds.append(len(found))
        assert all(d.reason == ("replica" if there else "free memory") for d in found)
        there |= {decision.worker_id for decision in found}
    assert rounds == [1, 1, 2, 4, 8, 0]


def test_no_more_copies_than_the_backlog_needs() -> None:
    placement = Placement(0.2)
    views = [
        worker(f"w{n}", 50, a=model("resident" if n < 4 else "cold", load_s=1.0)) for n in range(9)
    ]
    found = placement.decide(0.0, [demand("a", backlog_s=5.5)], AllWorkers(views))
    assert len(found) == 2, "5.5 s of work over six copies is less than a load of 1 s"


def test_warm_copies_count_as_those_that_have_the_bytes() -> None:
    placement = Placement(0.2)
    views = [worker(f"w{n}", 50, a=model("warm" if n < 3 else "cold")) for n in range(9)]
    found = placement.decide(0.0, [demand("a", waiting=99, backlog_s=1000.0)], AllWorkers(views))
    assert sorted(decision.worker_id for decision in found) == ["w0", "w1", "w2"]


def crowd(num_bytes: int = 10 * MB) -> Demand:
    return Demand("a", 1000, 1000.0, False, num_bytes, oldest_s=0.0, waited_s=100.0)


def test_claims_of_one_look_go_to_workers_of_their_own() -> None:
    copies = [worker(f"r{n}", 0, a=model("resident")) for n in range(4)]
    unequal = [worker(f"c{n}", 90 - 20 * n) for n in range(5)]
    placement = Placement(0.2, 1.0)
    assert decided(placement, 1.0, [crowd()], *copies, *unequal) == "a@c0 a@c1 a@c2 a@c3"
    assert decided(placement, 1.1, [crowd()], *copies, *unequal) == ""


def test_a_warm_copy_is_claimed_once_and_a_cold_one_beside_it() -> None:
    warm, resident = worker("w", 90, a=model("warm")), worker("r", 90, a=model("resident"))
    placement = Placement(0.2, 1.0)
    found = decided(placement, 1.0, [crowd()], resident, warm, worker("c", 50), worker("d", 40))
    assert found == "a@w a@c"


def test_a_model_without_weights_is_claimed_as_often_as_there_are_workers() -> None:
    copies = [worker(f"r{n}", 50, a=model("resident", mb=0)) for n in range(2)]
    assert decided(Placement(0.2, 1.0), 1.0, [crowd(0)], *copies, worker("c", 50)) == "a@c"


def test_an_operator_asks_once_for_what_is_on_its_way() -> None:
    placement, cold = Placement(0.2), AllWorkers([worker("w", 50), worker("v", 50)])
    assert placement.claim(0.0, demand("a"), cold) is not None
    assert placement.claim(0.1, demand("a"), cold) is None
    assert placement.claim(9.0, demand("a"), cold) is not None  # the first came to nothing
