"""Records for operators: decisions kept within bounds and merged, and an hour of residency."""

import logging

import pytest

from engine.protocol import Layout, ModelStatus, SwapCandidate, SwapChoice, SwapRecord, WorkerStatus
from gateway.dispatch.decisions import (
    LOG_AGAIN_S,
    MAX_CANDIDATES,
    MAX_GOING_ON,
    MAX_MOVES,
    MAX_SWAPS,
    MERGE_S,
    SPAN_S,
    DecisionLog,
    DecisionRecord,
    ResidencyLog,
    line,
    of_choice,
)
from gateway.dispatch.operator_handler import decode
from gateway.dispatch.policy.reasons import DecisionFigures
from tests.gateway.dispatch.test_operator_handler import WALL_S, answer, waiting_rig


def held(at_s: float, model: str = "a", until_s: float = 5.0) -> DecisionRecord:
    return DecisionRecord(
        at_s, "held", "too few requests waiting", model, figures=DecisionFigures(until_s=until_s)
    )


def load(at_s: float, model: str = "a") -> DecisionRecord:
    return DecisionRecord(at_s, "load", "enough requests waiting", model, "w")


def candidate(model: str, outcome: str, score: float = 1.0) -> SwapCandidate:
    return SwapCandidate(model, outcome, score, 0.5, 2.0, 1.0, 100, 10)  # type: ignore[arg-type]


def test_what_is_said_at_every_look_is_one_record_until_the_load() -> None:
    log = DecisionLog()
    for look in range(40):
        log.add(held(0.05 * look, until_s=5.0 + look))
    (one,) = log.recent()
    assert (one.count, one.at_s, one.last_s) == (40, 0.0, 0.05 * 39)
    assert one.figures == {"until_s": 44.0}, "the latest figures hold"
    log.add(load(2.0))
    log.add(held(3.0))
    assert [(r.kind, r.count) for r in log.recent()] == [("held", 1), ("load", 1), ("held", 40)]
    assert log.counts() == {
        ("held", "too few requests waiting"): 2,
        ("load", "enough requests waiting"): 1,
    }


def test_reasons_that_take_turns_stay_one_record_each() -> None:
    log = DecisionLog()
    for look in range(10):
        log.add(held(look))
        log.add(DecisionRecord(look + 0.5, "held", "load budget used up", "a"))
    assert sorted((r.reason, r.count) for r in log.recent()) == [
        ("load budget used up", 10),
        ("too few requests waiting", 10),
    ]


def test_after_a_silence_it_is_a_new_record() -> None:
    log = DecisionLog()
    log.add(held(0.0))
    log.add(held(MERGE_S - 1.0))
    log.add(held(2 * MERGE_S))
    assert [r.count for r in log.recent()] == [1, 2]


def test_refusals_are_counted_each_and_kept_once_a_tenant() -> None:
    log = DecisionLog()
    for number in range(6):
        tenant = "t1" if number % 2 else "t2"
        log.add(DecisionRecord(number, "refusal", "queue full", "a", tenant=tenant))
    assert [(r.tenant, r.count) for r in log.recent()] == [("t1", 3), ("t2", 3)]
    assert log.counts()["refusal", "queue full"] == 6


def test_every_bound_holds() -> None:
    log = DecisionLog(per_model=3, overall=5, max_models=2)
    for number in range(4 * MAX_GOING_ON):
        tenant = f"t{number}"
        log.add(DecisionRecord(number, "refusal", "queue full", "a", tenant=tenant))
    for number in range(10):
        log.add(load(100.0 + number, "b"))
    assert [r.at_s for r in log.recent("b")] == [109.0, 108.0, 107.0]
    assert len(log.recent()) == 5
    assert len(log.recent("a")) == 3, "others' records do not push a model's own out"
    assert [r.at_s for r in log.recent(limit=2)] == [109.0, 108.0]
    log.add(load(200.0, "c"))
    assert log.recent("a") == [], "the model nobody decided about for longest is forgotten"
    assert len(log._going_on.get("a", {})) == 0
    assert len(log._by_model) == 2


def test_an_eviction_is_found_under_the_incoming_model_and_under_who_left() -> None:
    choice = SwapChoice(
        "new",
        "load",
        12,
        1.5,
        9.0,
        [
            candidate("gone", "evicted", 0.1),
            candidate("going", "drains", 0.2),
            candidate("pinned", "kept: pinned"),
        ],
    )
    log = DecisionLog()
    log.add(of_choice("w", choice, 3.0))
    for model in ("new", "gone", "going"):
        (record,) = log.recent(model)
        assert (record.kind, record.reason, record.worker) == ("eviction", "load", "w")
    assert log.recent("pinned") == []
    assert record.figures == {"waited_s": 1.5, "pages_short": 12, "score": 9.0}


def test_a_choice_of_nobody_holds_the_incoming_model() -> None:
    kept = [candidate(f"m{n}", "kept: margin") for n in range(MAX_CANDIDATES + 4)]
    record = of_choice("w", SwapChoice("new", "load", 12, 1.5, 9.0, kept), 3.0)
    assert (record.kind, record.reason) == ("held", "no model can be evicted")
    assert record.about == ("new",)
    assert len(record.candidates) == MAX_CANDIDATES
    assert record.detail == "and 4 more"


def test_the_log_has_one_line_a_decision_and_no_storm(caplog: pytest.LogCaptureFixture) -> None:
    log = DecisionLog()
    with caplog.at_level(logging.INFO, "gateway.dispatch.decisions"):
        for look in range(300):  # 15 seconds of looks
            log.add(held(0.05 * look, "org/model 1"))
        log.add(DecisionRecord(20.0, "quarantine", "workers crashed", "b", detail="killed"))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1 + int(15 // LOG_AGAIN_S) + 1
    assert (
        lines[0] == "decision kind=held reason=too_few_requests_waiting model=org/model_1 until_s=5"
    )
    assert "count=201" in lines[1]
    assert lines[2] == "decision kind=quarantine reason=workers_crashed model=b: killed"
    assert caplog.records[-1].levelno == logging.ERROR


def test_a_line_names_the_fate_of_every_candidate() -> None:
    choice = SwapChoice(
        "n", "kv", 1, 0.0, 0.0, [candidate("a", "evicted"), candidate("b", "kept: busy")]
    )
    assert line(of_choice("w", choice, 0.0)) == (
        "kind=eviction reason=kv model=n worker=w waited_s=0 pages_short=1 score=0 evicted=a kept=b"
    )


def status(
    worker: str = "w", layout: Layout | None = None, swaps: int = 0, **states: str
) -> WorkerStatus:
    rows = [
        ModelStatus(name, state, 1, 0, 0, 0, -1.0)  # type: ignore[arg-type]
        for name, state in states.items()
    ]
    told = [SwapRecord("m", "load", "disk", 1, 0.1)] * swaps
    return WorkerStatus("e", worker, 1, 1, 1.0, 4096, 8, {}, rows, [], told, {}, layout=layout)


def test_every_change_is_kept_once_and_what_is_not_named_is_cold() -> None:
    log = ResidencyLog()
    log.note(status(m="loading"), True, 1.0)
    log.note(status(m="resident", n="warm"), True, 2.0)
    log.note(status(m="resident", n="warm"), True, 3.0)
    assert log.since("w") == {"m": 2.0, "n": 2.0}
    log.note(status(n="warm"), True, 4.0)
    assert [(m.at, m.model, m.before, m.state) for m in log.moves(4.0)] == [
        (1.0, "m", "loading", "loading"),
        (2.0, "m", "loading", "resident"),
        (2.0, "n", "cold", "warm"),
        (4.0, "m", "resident", "cold"),
    ]
    assert log.since("w") == {"n": 2.0}
    assert log.since_s(5.0) == 1.0, "the first status was then"
    assert log.since_s(2 * SPAN_S) == SPAN_S
    assert log.moves(2.0 + SPAN_S)[0].at == 2.0, "what is older than an hour is forgotten"


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
    assert log.since_s(10.0) == pytest.approx(found[0].at, abs=0.002)
    assert log.since_s(10.0) > 1.0
    assert len(list(log.swaps())) == MAX_SWAPS
    assert next(log.swaps()).at > found[-3].at


async def test_the_handler_tells_all_of_it_in_a_form_that_pages_read() -> None:
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
    rig.dispatcher.on_lost("w", rig.dispatcher.worker_statuses()[0].epoch, "gone", "process")
    after = decode(answer(rig, ask="fleet")["fleet"])
    assert (after.workers, after.lost) == ([], {"w": WALL_S + rig.clock.now_s})
    assert [(m.model, m.state) for m in after.moves][-1] == ("m", "cold")
