"""The judge of violent runs: it must be able to find every kind of wrong."""

from dataclasses import replace

import pytest

from registry.money.ledger import Posting
from tests.e2e.violence_judge import COMPLETION_NANOS, PROMPT_NANOS, Seen, judge

SEEN = Seen("key", "secret", 0, whole=False, request_id="a", tokens=30)
POSTING = Posting(
    *("a", "ten", "key", "m", "r1", "chat", "finished", 10, 0, 30),
    *(10 * PROMPT_NANOS + 30 * COMPLETION_NANOS, 0.5, 0.0, 0.1, 0.6, 1000.0),
)
FAILED = replace(POSTING, outcome="failed", cost_nanos=0)
CHECKPOINT = replace(
    POSTING,
    kind="recovered",
    outcome="disconnected",
    service_s=0.0,
    completion_tokens=16,
    cost_nanos=10 * PROMPT_NANOS + 16 * COMPLETION_NANOS,
)


def seen(end: str, **changed: object) -> Seen:
    return replace(SEEN, end=end, **changed)  # type: ignore[arg-type]


def told(completion_tokens: int) -> dict[str, object]:
    """The usage that a client got."""
    return {"has_usage": True, "prompt_tokens": 10, "completion_tokens": completion_tokens}


@pytest.mark.parametrize(
    ("one", "posting"),
    [
        (seen("done", **told(30)), POSTING),
        (seen("error"), FAILED),
        (seen("left"), replace(POSTING, outcome="disconnected")),
        (seen("broken"), CHECKPOINT),
        (seen("broken", tokens=5), replace(FAILED, kind="recovered", completion_tokens=0)),
        (seen("refused", tokens=0, whole=True, request_id=""), FAILED),
    ],
)
def test_what_the_table_of_outcomes_says_is_right(one: Seen, posting: Posting) -> None:
    assert judge([one], [posting], 16) == []


def test_no_tokens_need_no_posting() -> None:
    assert judge([seen("refused", tokens=0, request_id="")], [], 16) == []


@pytest.mark.parametrize(
    ("one", "postings", "problem"),
    [
        (seen("done"), [], "no posting"),
        (seen("done"), [POSTING, replace(POSTING, request_id="b")], "2 postings"),
        (seen("done"), [POSTING, replace(POSTING, key_id="x")], "nobody asked"),
        (seen("done"), [replace(POSTING, cost_nanos=1)], "should cost"),
        (seen("done"), [FAILED], "told otherwise"),
        (seen("done", **told(31)), [POSTING], "told otherwise"),
        (seen("done"), [replace(POSTING, request_id="b")], "another request"),
        (seen("error"), [POSTING], "our failure"),
        (seen("refused", tokens=0), [POSTING], "refused"),
        (seen("done"), [replace(POSTING, outcome="cache_hit")], "cannot be"),
        (seen("left", tokens=40), [replace(POSTING, outcome="disconnected")], "less than it got"),
        (seen("broken", tokens=37), [CHECKPOINT], "too far behind"),
        (seen("broken", tokens=5), [CHECKPOINT], "more than it got"),
    ],
)
def test_every_kind_of_wrong_is_found(one: Seen, postings: list[Posting], problem: str) -> None:
    assert problem in "".join(judge([one], postings, 16))
