"""The drill on kept answers, a soak; its judge sees what must not be, and nothing else."""

import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from bench.client import End
from tests import redis8
from tests.e2e import cache_drill
from tests.e2e.cache_drill_clients import WORDINGS, Asked, Caller, Purge, Seen, judge
from tests.e2e.cache_drill_worker import answer
from tests.redis_kit import BINARY, RedisServer

ANN, BOB = Caller("ten_ann", "key_ann", "s1"), Caller("ten_bob", "key_bob", "s2")
TEXT = WORDINGS[0].format(kind="colour", stone=7)
ASKED = Asked(ANN, "colour", 7, 1, TEXT, "semantic", False)
MADE_S, PURGED_S, ASKED_S = 10.0, 20.0, 30.0


def said(text: str = TEXT, house: int = 1, tenant: str = ANN.tenant_id) -> str:
    """What the worker says to it."""
    prompt = f"<|system|>You keep house {house}.<|end|><|user|>{text}<|end|><|assistant|>"
    return answer(prompt, tenant, int(MADE_S * 1e9))


def seen(text: str, asked: Asked = ASKED, end: End = "done") -> Seen:
    """Asked after any purge."""
    return Seen(asked, began_s=ASKED_S, end=end, text=text)


def counts(one: Seen, *purges: Purge) -> dict[str, int]:
    """Of the faults that there are."""
    return {name: num for name, num in judge([one], purges).counts().items() if num}


def test_a_right_answer_is_right_in_any_wording() -> None:
    for wording in WORDINGS:
        assert not counts(seen(said(wording.format(kind="colour", stone=7))))


@pytest.mark.parametrize(
    ("one", "fault"),
    [
        (seen("{}", end="error"), "errors"),
        (seen(said(), end="broken"), "errors"),
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


@pytest.mark.e2e
@pytest.mark.soak
@pytest.mark.parametrize("kind", ["redis 6", "redis 8"])
def test_nothing_wrong_is_answered_while_redis_dies_and_purges_go_on(
    tmp_path: Path, kind: str
) -> None:
    program = [str(BINARY)]
    if kind == "redis 8":
        try:
            program = redis8.command()
        except redis8.Missing as missing:
            pytest.skip(str(missing))
    with tempfile.TemporaryDirectory(prefix="polyhost-redis-") as folder:
        redis = RedisServer(Path(folder), program)
        redis.start()
        try:
            world, wrong = cache_drill.run(tmp_path, redis, seconds=6.0)
        finally:
            redis.stop()
    assert not wrong, "\n".join(wrong[:20])
    answers = Counter(one.cache for one in world.seen)
    assert answers["hit"] > 100
    assert answers["miss"] > 100
    assert {purge.by for purge in world.purges} == {"this server", "another server"}
