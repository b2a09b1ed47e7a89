"""An hour of residency: every change once, bounded, and nothing of a worker that is gone."""

import pytest

from engine.protocol import Layout, ModelStatus, SwapRecord, WorkerStatus
from gateway.dispatch.fleet_told import decode
from gateway.dispatch.residency_log import MAX_MOVES, MAX_SWAPS, SPAN_S, ResidencyLog
from tests.gateway.dispatch.test_operator_socket import WALL_S, answer, waiting_rig


def status(
    worker: str = "w", layout: Layout | None = None, swaps: int = 0, **states: str
) -> WorkerStatus:
    rows = [
        ModelStatus(name, state, 1, 0, 0, 0, -1.0)  # type: ignore[arg-type]
        for name, state in states.items()
    ]
    told = [SwapRecord("m", "load", "disk", 1, 0.1)] * swaps
    return WorkerStatus("e", worker, 0, 1, 1, 1.0, 4096, 8, {}, rows, [], told, {}, layout=layout)


def test_every_change_is_kept_once_and_what_is_not_named_is_cold() -> None:
    log = ResidencyLog()
    log.note(status(m="loading"), True, 1.0)
    log.note(status(m="resident", n="warm"), True, 2.0)
    log.note(status(m="resident", n="warm"), True, 3.0)
    assert log.since("w") == {"m": 2.0, "n": 2.0}
    log.note(status(n="warm"), True, 4.0)
    assert [(m.at_s, m.model, m.before, m.state) for m in log.moves(4.0)] == [
        (1.0, "m", "loading", "loading"),
        (2.0, "m", "loading", "resident"),
        (2.0, "n", "cold", "warm"),
        (4.0, "m", "resident", "cold"),
    ]
    assert log.since("w") == {"n": 2.0}
    assert log.since_s(5.0) == 1.0, "the first status was then"
    assert log.since_s(2 * SPAN_S) == SPAN_S
    assert log.moves(2.0 + SPAN_S)[0].at_s == 2.0, "what is older than an hour is forgotten"


def test_what_has_not_moved_costs_no_look_and_the_layout_stays() -> None:
    log, layout = ResidencyLog(), Layout(["free"], [(0, 8)])
    log.note(status(layout=layout, m="resident"), True, 1.0)
    log.note(status(m="warm"), False, 2.0)
    assert (log.moves(2.0)[-1].state, log.layout("w")) == ("resident", layout)
    assert log.layout("another") is None


def test_a_worker_that_is_gone_has_nothing_until_it_comes_back() -> None:
    log = ResidencyLog()
    log.note(status(layout=Layout(["free"], [(0, 8)]), m="resident"), True, 1.0)
    log.lose("w", 5.0)
    log.lose("w", 6.0)
    log.lose("never seen", 6.0)
    assert (log.lost, log.since("w"), log.layout("w")) == ({"w": 5.0}, {}, None)
    assert [(m.model, m.state) for m in log.moves(6.0)][-1] == ("m", "cold")
    log.note(status(m="loading"), True, 7.0)
    assert (log.lost, log.since("w")) == ({}, {})
    log.note(status(m="resident"), True, 8.0)
    assert log.since("w") == {"m": 8.0}


def test_what_a_worker_has_when_it_is_first_heard_of_was_not_loaded_then() -> None:
    log = ResidencyLog()
    log.note(status(m="resident", n="warm"), True, 5.0)
    assert log.since("w") == {}, "nobody saw since when"
    assert [(m.model, m.before, m.state) for m in log.moves(5.0)] == [
        ("m", "resident", "resident"),
        ("n", "warm", "warm"),
    ]
    log.note(status(n="loading"), True, 6.0)
    assert log.since("w") == {"n": 6.0}


def test_it_is_bounded_and_says_from_when_on_it_knows_all() -> None:
    log = ResidencyLog()
    for n in range(MAX_MOVES):
        name = {f"m{n}": "resident"}
        log.note(status(swaps=1, **name), True, 1.0 + n * 0.001)  # type: ignore[arg-type]
    found = log.moves(10.0)
    assert len(found) == MAX_MOVES
    assert log.since_s(10.0) == pytest.approx(found[0].at_s, abs=0.002)
    assert log.since_s(10.0) > 1.0
    assert len(list(log.swaps())) == MAX_SWAPS
    assert next(log.swaps()).at_s > found[-3].at_s


async def test_the_desk_tells_all_of_it_in_a_form_that_pages_read() -> None:
    rig = waiting_rig()
    fleet = decode(answer(rig, ask="fleet")["fleet"])
    assert fleet.at == WALL_S + rig.clock.now_s
    (worker,) = fleet.workers
    assert worker.status.worker_id == "w"
    assert (worker.since, [m.model for m in fleet.moves]) == ({}, ["m", "n"])
    assert {(g.model, g.num_waiting, g.code) for g in fleet.waiting} == {
        ("m", 1, "worker full"),
        ("n", 1, "loading"),
    }
    assert fleet.dispatcher.waiting_by_model == {"m": 1, "n": 1}
    rig.clock.now_s += 1.0
    rig.dispatcher.on_lost("w", rig.dispatcher.worker_statuses()[0].epoch, "gone")
    after = decode(answer(rig, ask="fleet")["fleet"])
    assert (after.workers, after.lost) == ([], {"w": WALL_S + rig.clock.now_s})
    assert [(m.model, m.state) for m in after.moves][-1] == ("m", "cold")
