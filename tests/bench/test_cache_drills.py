"""The judge of the drill on kept answers sees what must not be, and nothing else."""

import json
from dataclasses import replace

import pytest

from bench.cache_drill_clients import WORDINGS, Asked, Caller, Purge, Seen, judge, read
from bench.cache_drill_worker import answer

ANN, BOB = Caller("ten_ann", "key_ann", "s1"), Caller("ten_bob", "key_bob", "s2")
TEXT = WORDINGS[0].format(kind="colour", stone=7)
ASKED = Asked(ANN, "colour", 7, 1, TEXT, "semantic", False)
MADE_S, PURGED_S, ASKED_S = 10.0, 20.0, 30.0


def said(text: str = TEXT, house: int = 1, tenant: str = ANN.tenant_id) -> str:
    """What the worker says to it."""
    prompt = f"<|system|>You keep house {house}.<|end|><|user|>{text}<|end|><|assistant|>"
    return answer(prompt, tenant, int(MADE_S * 1e9))


def seen(text: str, asked: Asked = ASKED, status: int = 200) -> Seen:
    """Asked after any purge."""
    return Seen(asked, ASKED_S, 0.1, status, "hit", "chatcmpl-1", text)


def counts(one: Seen, *purges: Purge) -> dict[str, int]:
    """Of the faults that there are."""
    return {name: num for name, num in judge([one], purges).counts().items() if num}


def test_a_right_answer_is_right_in_any_wording() -> None:
    for wording in WORDINGS:
        assert not counts(seen(said(wording.format(kind="colour", stone=7))))


@pytest.mark.parametrize(
    ("one", "fault"),
    [
        (seen("{}", status=500), "errors"),
        (seen("", status=0), "errors"),
        (seen("nobody asked"), "wrong"),
        (seen(said(TEXT.replace("7", "8"))), "wrong"),
        (seen(said(TEXT.replace("colour", "weight"))), "wrong"),
        (seen(said(house=0)), "wrong"),
        (seen(said(TEXT.lower()), replace(ASKED, mode="exact")), "wrong"),
        (seen(said(tenant=BOB.tenant_id)), "cross_tenant"),
    ],
)
def test_what_must_not_be_is_seen(one: Seen, fault: str) -> None:
    assert counts(one) == {fault: 1}


@pytest.mark.parametrize(
    ("named", "is_named"),
    [
        ({"model": "drill"}, True),
        ({"tenant_id": ANN.tenant_id}, True),
        ({"tenant_id": BOB.tenant_id}, False),
        ({"key_id": ANN.key_id}, True),
        ({"key_id": BOB.key_id}, False),
        ({"text": TEXT}, True),
        ({"text": TEXT.lower()}, False),
        ({"tenant_id": BOB.tenant_id, "text": TEXT}, False),
    ],
)
def test_an_answer_from_before_a_purge_of_it_is_seen(named: dict[str, str], is_named: bool) -> None:
    purge = Purge("x", PURGED_S, PURGED_S + 1, **named)
    assert counts(seen(said()), purge) == ({"invalidated": 1} if is_named else {})
    assert not counts(seen(said()), replace(purge, began_s=MADE_S - 1, ended_s=MADE_S + 1))
    assert not counts(seen(said()), replace(purge, ended_s=ASKED_S + 1))


def test_a_stream_is_read_to_its_end() -> None:
    deltas = [{"role": "assistant"}, {"content": "one "}, {"content": "two"}, {}]
    events = [{"choices": [{"delta": delta}]} for delta in deltas] + [{"choices": []}]
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    assert read("".join([*lines, "data: [DONE]\n\n"])) == "one two"
    with pytest.raises(ValueError, match="without an end"):
        read("".join(lines))
