"""The judge of reconcile.py: a run as it should be, and each fault that it is to find."""

from dataclasses import replace

import pytest

from registry.money.ledger import Posting
from tests.e2e.reconcile_judge import (
    Promise,
    Seen,
    affordable,
    compare_sums,
    judge,
    most_in_a_minute,
    slope_mib_min,
)
from tests.e2e.violence_judge import COMPLETION_NANOS, PROMPT_NANOS


def posting(name: str, outcome: str = "finished", completion_tokens: int = 5) -> Posting:
    cost = 0 if outcome == "failed" else 4 * PROMPT_NANOS + completion_tokens * COMPLETION_NANOS
    return Posting(
        request_id=name,
        tenant_id="t",
        key_id="k",
        model="m",
        revision="r",
        kind="chat",
        outcome=outcome,
        prompt_tokens=4,
        cached_tokens=0,
        completion_tokens=completion_tokens,
        cost_nanos=cost,
        service_s=0.1,
        queue_s=0.0,
        ttft_s=0.0,
        duration_s=0.1,
        posted_at=1.0,
    )


SEEN = [
    Seen(
        "t",
        end="done",
        status=200,
        request_id="done",
        has_usage=True,
        prompt_tokens=4,
        completion_tokens=5,
    ),
    Seen("t", end="left", status=200, request_id="left", chunks=3),
    Seen("t", end="error", status=200, request_id="error", chunks=2),
    Seen("t", end="refused", status=429, code="insufficient_quota"),
    Seen("t", end="left"),
    Seen("t", end="left"),
]
POSTINGS = [
    posting("done"),
    posting("left", "disconnected"),
    posting("error", "failed"),
    posting("given up", "disconnected"),
]
SPENT = sum(one.cost_nanos for one in POSTINGS)
USED = 3 * (4 + 5)
PROMISES = {"t": Promise(SPENT, USED)}


def test_a_run_as_it_should_be() -> None:
    assert judge(SEEN, POSTINGS, PROMISES) == []


@pytest.mark.parametrize(
    ("number", "change"),
    [
        (0, {"completion_tokens": 6, "cost_nanos": 4 * PROMPT_NANOS + 6 * COMPLETION_NANOS}),
        (0, {"cost_nanos": 1}),
        (0, {"tenant_id": "other"}),
        (0, {"outcome": "failed", "cost_nanos": 0}),
        (1, {"completion_tokens": 2, "cost_nanos": 4 * PROMPT_NANOS + 2 * COMPLETION_NANOS}),
        (1, {"outcome": "failed", "cost_nanos": 0}),
        (2, {"outcome": "finished", "cost_nanos": 4 * PROMPT_NANOS + 5 * COMPLETION_NANOS}),
        (3, {"outcome": "cache_hit"}),
    ],
)
def test_a_posting_that_is_not_what_its_client_saw(number: int, change: dict[str, object]) -> None:
    wrong = [*POSTINGS]
    wrong[number] = replace(wrong[number], **change)  # type: ignore[arg-type]
    assert judge(SEEN, wrong, {})


def test_a_posting_too_few_or_too_many() -> None:
    assert judge(SEEN, POSTINGS[1:], {})
    assert judge(SEEN, [*POSTINGS, POSTINGS[0]], {})
    assert judge(SEEN, [*POSTINGS, posting("a"), posting("b")], {}), "two clients know no id"
    assert judge(SEEN, [*POSTINGS, posting("a")], {}) == []
    assert judge([*SEEN, Seen("t", end="refused", status=429, request_id="done")], POSTINGS, {})
    assert judge([*SEEN, Seen("t", end="broken")], POSTINGS, {})


def test_promises_are_kept_to_the_unit() -> None:
    assert judge(SEEN, POSTINGS, {"t": Promise(SPENT - 1)})
    assert judge(SEEN, POSTINGS, {"t": Promise(0, USED - 1)})


def test_what_is_left_of_a_budget_in_tokens() -> None:
    assert affordable(4 * PROMPT_NANOS + 2 * COMPLETION_NANOS, 4) == 2
    assert affordable(4 * PROMPT_NANOS + 2 * COMPLETION_NANOS - 1, 4) == 1
    assert affordable(0, 4) < 1


def test_the_slope_is_of_the_second_half() -> None:
    flat = [(float(at), 100.0) for at in range(100)]
    assert slope_mib_min(flat) == 0.0
    warming = [(float(at), min(at, 50) * 1.0) for at in range(100)]
    assert slope_mib_min(warming) == pytest.approx(0.0, abs=0.5)
    assert slope_mib_min([(float(at), at / 60) for at in range(100)]) == pytest.approx(1.0)
    assert slope_mib_min([(0.0, 1.0)]) == 0.0


def test_a_minutes_requests_are_those_of_any_minute() -> None:
    at = [0.0, 30.0, 57.0, 59.0, 87.9]
    some = [replace(posting(f"p{n}"), arrived_at=when) for n, when in enumerate(at)]
    assert most_in_a_minute(some, "t") == 4
    assert most_in_a_minute(some, "u") == 0
    assert judge([], some[:1], {"t": Promise(minute_requests=1)}) == [
        "t: 1 postings of 0 unknown requests"
    ]
    assert "t: 4 of 3 requests in a minute" in judge([], some, {"t": Promise(minute_requests=3)})


def test_sums_are_compared_tenant_by_tenant() -> None:
    spent = {"a": 5, "b": 6}
    assert compare_sums(spent, {"x": {"a": 5, "b": 6}, "y": {"a": 5, "b": 6, "c": 0}}) == []
    assert compare_sums(spent, {"x": {"a": 5}}) == ["b: x says 0 of 6"]
    assert compare_sums(spent, {"x": {"a": 6, "b": 5}}) == ["a: x says 6 of 5", "b: x says 5 of 6"]
