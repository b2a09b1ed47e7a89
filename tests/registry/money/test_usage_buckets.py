"""Buckets are the sums of their postings, whatever of these is in roll-ups."""

from collections import defaultdict
from dataclasses import replace
from random import Random

import pytest
from sqlalchemy import Engine

from registry.errors import InvalidValue
from registry.money import ledger, rollups, usage_buckets
from registry.money.ledger import Posting
from registry.money.usage_buckets import BucketQuery, BucketSum, bucket_sums
from registry.session import appending, reading

DAY_S = 86_400
POSTING = Posting(
    *("r", "ten_1", "key_1", "tiny", "rev1", "chat", "finished", 0, 0, 0, 0),
    *(0.25, 0.125, 0.5, 1.0, 0.0),
)


def postings(chance: Random, num: int) -> list[Posting]:
    return [
        replace(
            POSTING,
            request_id=f"r{n}",
            tenant_id=chance.choice(("ten_1", "ten_1", "ten_2")),
            key_id=chance.choice(("key_1", "key_2")),
            model=chance.choice(("tiny", "large")),
            kind=chance.choice(("chat", "completion", "embedding")),
            outcome=chance.choice(("finished", "disconnected", "cache_hit")),
            prompt_tokens=chance.randrange(100),
            cached_tokens=chance.randrange(10),
            completion_tokens=chance.randrange(100),
            cost_nanos=chance.randrange(10_000),
            output_nanos=chance.randrange(1000),
            posted_at=chance.randrange(3 * DAY_S) + chance.random(),
        )
        for n in range(num)
    ]


def by_hand(all_of_them: list[Posting], query: BucketQuery) -> list[BucketSum]:
    sums: dict[tuple[int, str, str], list[int]] = defaultdict(lambda: [0] * 9)
    for one in all_of_them:
        wanted = (
            one.tenant_id == query.tenant_id
            and query.from_at <= one.posted_at < query.to_at
            and (not query.key_ids or one.key_id in query.key_ids)
            and (not query.models or one.model in query.models)
            and (not query.kinds or one.kind in query.kinds)
        )
        if not wanted:
            continue
        bucket = int(one.posted_at // query.width_s) * query.width_s
        key = one.key_id if "key_id" in query.by else ""
        model = one.model if "model" in query.by else ""
        amounts = (
            *(1, one.prompt_tokens, one.cached_tokens, one.completion_tokens, one.cost_nanos),
            *(one.cached_nanos, one.output_nanos, one.service_nanos, one.load_nanos),
        )
        total = sums[bucket, key, model]
        for place, amount in enumerate(amounts):
            total[place] += amount
    return [BucketSum(*key, *sums[key]) for key in sorted(sums)]


@pytest.mark.parametrize("seed", range(4))
def test_buckets_are_sums_of_postings(engine: Engine, seed: int) -> None:
    chance = Random(seed)
    every: list[Posting] = []
    for part in range(3):
        some = [replace(p, request_id=f"{part}-{p.request_id}") for p in postings(chance, 150)]
        every += some
        with appending(engine, "test") as session:
            ledger.post_many(session, some)
        if part < 2:  # the last stays behind the roll-ups
            with appending(engine, "test") as session:
                rollups.roll(session, rollups.newest_seq(session))
        for width_s in (60, 3600, DAY_S):
            query = BucketQuery(
                "ten_1",
                DAY_S,
                3 * DAY_S,
                width_s,
                chance.choice(((), ("key_2",))),
                chance.choice(((), ("tiny",))),
                chance.choice(((), ("chat", "completion"))),
                chance.choice(((), ("key_id",), ("model",), ("key_id", "model"))),
            )
            with reading(engine) as session:
                assert bucket_sums(session, query) == by_hand(every, query)


def test_a_correction_costs_and_is_no_request(engine: Engine) -> None:
    right = replace(POSTING, request_id="a", cost_nanos=100, prompt_tokens=10)
    wrong = replace(POSTING, request_id="b", outcome="correction", corrects="a", cost_nanos=-40)
    failed = replace(POSTING, request_id="c", outcome="failed", prompt_tokens=7)
    with appending(engine, "test") as session:
        ledger.post_many(session, [right, wrong, failed])
    query = BucketQuery("ten_1", 0, DAY_S, DAY_S)
    for _ in range(2):
        with reading(engine) as session:
            (found,) = bucket_sums(session, query)
        assert (found.num_requests, found.prompt_tokens, found.cost_nanos) == (1, 10, 60)
        with appending(engine, "test") as session:
            rollups.roll(session, rollups.newest_seq(session))


def test_more_than_can_be_told_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_buckets, "MAX_ROWS", 3)
    with appending(engine, "test") as session:
        some = [replace(POSTING, request_id=f"{n}", model=f"m{n}") for n in range(4)]
        ledger.post_many(session, some)
    query = BucketQuery("ten_1", 0, DAY_S, DAY_S)
    with reading(engine) as session:
        assert len(bucket_sums(session, query)) == 1
        with pytest.raises(InvalidValue):
            bucket_sums(session, replace(query, by=("model",)))
