"""Records of decisions: kept within bounds, merged, logged without a storm."""

import logging

import pytest

from engine.protocol import SwapCandidate, SwapChoice
from gateway.dispatch.decisions import (
    LOG_AGAIN_S,
    MAX_CANDIDATES,
    MAX_GOING_ON,
    MERGE_S,
    DecisionLog,
    DecisionRecord,
    line,
    of_choice,
)
from gateway.policy.reasons import Figures


def held(at_s: float, model: str = "a", until_s: float = 5.0) -> DecisionRecord:
    return DecisionRecord(at_s, "held", "gathering", model, figures=Figures(until_s=until_s))


def load(at_s: float, model: str = "a") -> DecisionRecord:
    return DecisionRecord(at_s, "load", "gathered", model, "w")


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
    assert log.counts() == {("held", "gathering"): 2, ("load", "gathered"): 1}


def test_reasons_that_take_turns_stay_one_record_each() -> None:
    log = DecisionLog()
    for look in range(10):
        log.add(held(look))
        log.add(DecisionRecord(look + 0.5, "held", "load budget", "a"))
    assert sorted((r.reason, r.count) for r in log.recent()) == [
        ("gathering", 10),
        ("load budget", 10),
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


def test_an_eviction_is_found_under_the_newcomer_and_under_who_left() -> None:
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


def test_a_choice_of_nobody_holds_the_newcomer() -> None:
    kept = [candidate(f"m{n}", "kept: margin") for n in range(MAX_CANDIDATES + 4)]
    record = of_choice("w", SwapChoice("new", "load", 12, 1.5, 9.0, kept), 3.0)
    assert (record.kind, record.reason) == ("held", "nobody gives way")
    assert record.about == ("new",)
    assert len(record.candidates) == MAX_CANDIDATES
    assert record.detail == "and 4 more"


def test_the_log_has_one_line_a_decision_and_no_storm(caplog: pytest.LogCaptureFixture) -> None:
    log = DecisionLog()
    with caplog.at_level(logging.INFO, "gateway.dispatch.decisions"):
        for look in range(300):  # 15 seconds of looks
            log.add(held(0.05 * look, "org/model 1"))
        log.add(DecisionRecord(20.0, "quarantine", "workers died", "b", detail="killed"))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1 + int(15 // LOG_AGAIN_S) + 1
    assert lines[0] == "decision kind=held reason=gathering model=org/model_1 until_s=5"
    assert "count=201" in lines[1]
    assert lines[2] == "decision kind=quarantine reason=workers_died model=b: killed"
    assert caplog.records[-1].levelno == logging.ERROR


def test_a_line_names_the_fate_of_every_candidate() -> None:
    choice = SwapChoice(
        "n", "kv", 1, 0.0, 0.0, [candidate("a", "evicted"), candidate("b", "kept: busy")]
    )
    assert line(of_choice("w", choice, 0.0)) == (
        "kind=eviction reason=kv model=n worker=w waited_s=0 pages_short=1 score=0 evicted=a kept=b"
    )
