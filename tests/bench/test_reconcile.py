"""The judge of `bench.reconcile`: a run as it should be, and each fault that it is to find."""

from dataclasses import replace

import pytest

from bench.reconcile_judge import (
    COMPLETION_NANOS,
    PROMPT_NANOS,
    Promise,
    Seen,
    affordable,
    judge,
    slope_mib_min,
)
from registry.ledger import Posting


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
    Seen("t", "done", 200, request_id="done", told=(4, 5)),
    Seen("t", "left", 200, request_id="left", chunks=3),
    Seen("t", "error", 200, request_id="error", chunks=2),
    Seen("t", "refused", 429, "insufficient_quota"),
    Seen("t", "left"),
    Seen("t", "left"),
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
    assert judge([*SEEN, Seen("t", "refused", 429, request_id="done")], POSTINGS, {})
    assert judge([*SEEN, Seen("t", "broken")], POSTINGS, {})


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
