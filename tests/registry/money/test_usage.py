"""Sums for pages are the sums of the postings, to the unit, whatever of these is in roll-ups."""

from collections import defaultdict
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from sqlalchemy import Engine

from registry.money import exports, ledger, prices, rollups
from registry.money import usage as usage_sums
from registry.money.exports import Scope
from registry.money.ledger import CORRECTION, Posting
from registry.money.prices import PriceRecord
from registry.money.rollups import DAY_S, HOUR_S
from registry.money.usage import Amounts, UsageFilter, sum_of
from registry.session import appending, reading

FAR_SEQ = 2**53
POSTING = Posting(
    *("r", "ten_1", "key_1", "tiny", "rev1", "chat", "finished", 0, 0, 0, 0),
    *(0.25, 0.125, 0.5, 1.0, 0.0),
)


def postings(chance: Random, num: int) -> list[Posting]:
    rows = [
        replace(
            POSTING,
            request_id=f"r{n}",
            tenant_id=chance.choice(("ten_1", "ten_1", "ten_2")),
            key_id=chance.choice(("key_1", "key_2")),
            model=chance.choice(("tiny", "large")),
            outcome=chance.choice(("finished", "disconnected", "cache_hit", "failed", CORRECTION)),
            prompt_tokens=chance.randrange(100),
            cached_tokens=chance.randrange(10),
            completion_tokens=chance.randrange(100),
            cost_nanos=chance.randrange(10_000),
            posted_at=chance.randrange(4 * DAY_S) + chance.random(),
        )
        for n in range(num)
    ]
    free = [replace(row, cost_nanos=0) if row.outcome == "failed" else row for row in rows]
    return [replace(row, corrects="r0") if row.outcome == CORRECTION else row for row in free]


def by_hand(rows: list[Posting], wanted: UsageFilter, by: str) -> dict[str, Amounts]:
    sums: dict[str, Amounts] = defaultdict(Amounts)
    for row in rows:
        owners = ((row.tenant_id, wanted.tenant_ids), (row.key_id, wanted.key_ids),
                  (row.model, wanted.models))  # fmt: skip
        if not wanted.from_at <= row.posted_at < wanted.to_at:
            continue
        if any(names is not None and own not in names for own, names in owners):
            continue
        ref = {
            "": "",
            "tenant": row.tenant_id,
            "key": row.key_id,
            "model": row.model,
            "day": str(int(row.posted_at // DAY_S) * DAY_S),
            "hour": str(int(row.posted_at // HOUR_S) * HOUR_S),
        }[by]
        sums[ref] = sums[ref].plus(
            (
                int(row.outcome != CORRECTION),
                int(row.outcome == "failed"),
                row.prompt_tokens,
                row.cached_tokens,
                row.completion_tokens,
                row.cost_nanos,
                1,
            )
        )
    return dict(sums)


@pytest.mark.parametrize("by", usage_sums.OWNERS)
def test_a_pictures_series_are_those_of_the_postings(engine: Engine, by: str) -> None:
    """Of none, one, some and all owners, one that is not there among them; the rest together."""
    rows = postings(Random(by), 300)
    with appending(engine, "test") as session:
        ledger.insert_postings(session, rows)
    with appending(engine, "test") as session:
        rollups.roll(session, 250)
    unit_s = {"day": DAY_S, "hour": HOUR_S}
    with reading(engine) as session:
        for wanted in (UsageFilter(0, 4 * DAY_S), UsageFilter(DAY_S, 2 * DAY_S, ("ten_1",))):
            every = sorted(by_hand(rows, wanted, by))
            for refs in ([], every[:1], [*every[:2], "nobody"], every):
                for unit, width_s in unit_s.items():
                    expected: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
                    for row in rows:
                        of_tenant = wanted.tenant_ids is None or row.tenant_id in wanted.tenant_ids
                        if of_tenant and wanted.from_at <= row.posted_at < wanted.to_at:
                            owner = {"tenant": row.tenant_id, "key": row.key_id, "model": row.model}
                            ref = owner[by] if owner[by] in refs else ""
                            at = int(row.posted_at // width_s) * width_s
                            expected[ref][at] += row.cost_nanos
                    told = {
                        ref: {at: cost for at, cost in costs.items() if cost}
                        for ref, costs in expected.items()
                    }
                    found = usage_sums.cost_series(session, wanted, by, refs, unit)
                    assert found == {ref: costs for ref, costs in told.items() if costs}


@pytest.mark.parametrize("seed", range(4))
def test_sums_are_those_of_the_postings_and_of_exports(engine: Engine, seed: int) -> None:
    chance = Random(seed)
    rows = postings(chance, 300)
    with appending(engine, "test") as session:
        ledger.insert_postings(session, rows)
    with appending(engine, "test") as session:
        rollups.roll(session, chance.randrange(300))
    spans = ((0, 4 * DAY_S), (DAY_S, 2 * DAY_S), (5 * HOUR_S, 3 * DAY_S + HOUR_S), (0, HOUR_S))
    with reading(engine) as session:
        for from_at, to_at in spans:
            for filters in ({}, {"tenant_ids": ("ten_1",)}, {"models": ("tiny",)},
                            {"tenant_ids": ("ten_1",), "key_ids": ("key_2",)}):  # fmt: skip
                wanted = UsageFilter(from_at, to_at, **filters)
                for by in ("", *usage_sums.BY):
                    assert sum_of(session, wanted, by) == by_hand(rows, wanted, by), (wanted, by)
            wanted = UsageFilter(from_at, to_at, ("ten_1",))
            costs = usage_sums.cost_series(session, wanted, "model", ["tiny"], "day")
            for name, model in (("tiny", "tiny"), ("", "large")):
                of_model = by_hand(rows, replace(wanted, models=(model,)), "day")
                told_costs = {str(at): cost for at, cost in costs.get(name, {}).items()}
                costed = {at: sums.cost_nanos for at, sums in of_model.items() if sums.cost_nanos}
                assert told_costs == costed
            scope = Scope(from_at, to_at, "ten_1")
            ((requests, prompt, cached, made, cost),) = exports.totals(session, scope, FAR_SEQ)
            told = usage_sums.total(session, UsageFilter(from_at, to_at, ("ten_1",)))
            assert (told.num_requests, told.prompt_tokens, told.cached_tokens) == (
                requests, prompt, cached)  # fmt: skip
            assert (told.completion_tokens, told.cost_nanos) == (made, cost)


def test_a_price_sees_what_is_billed(engine: Engine) -> None:
    used = replace(POSTING, prompt_tokens=10, cached_tokens=4, completion_tokens=7)
    changes: tuple[dict[str, Any], ...] = (
        {"cost_nanos": 50, "list_nanos": 100},
        {"outcome": "cache_hit"},
        {"outcome": "failed"},
        {"outcome": CORRECTION, "cost_nanos": -3, "corrects": "0"},
        {"kind": "embedding"},
        {"model": "large"},
    )
    rows = [replace(used, request_id=str(n), **more) for n, more in enumerate(changes)]
    with appending(engine, "test") as session:
        ledger.insert_postings(session, rows)
    with appending(engine, "test") as session:
        rollups.roll(session, 100)
    with reading(engine) as session:
        found = prices.consumed(session, "tiny", 0, DAY_S)
    assert (found.num_requests, found.input_tokens, found.encoder_tokens) == (3, 6, 6)
    assert (found.read_tokens, found.output_tokens) == (4 + 17 + 4, 14)
    assert (found.cost_nanos, found.list_nanos) == (50, 100)
    price = PriceRecord("tiny", 0.0, 1, 10, 100, 1000, 2_000_000, 0)
    assert found.at_list(price) == 6 + 250 + 1400 + 6000 + 2 * found.service_us


@pytest.mark.parametrize("seed", range(3))
def test_long_spans_and_the_costliest_are_those_of_the_postings(engine: Engine, seed: int) -> None:
    """Over half a year: days, weeks and four weeks, whole and cut, and what lies beyond."""
    chance = Random(seed)
    began_at = chance.randrange(400) * DAY_S
    rows = [
        replace(
            row,
            model=f"model-{chance.randrange(9)}",
            posted_at=began_at + chance.randrange(180 * DAY_S) + chance.random(),
        )
        for row in postings(chance, 400)
    ]
    with appending(engine, "test") as session:
        ledger.insert_postings(session, rows)
    for upto in (150, 390):
        with appending(engine, "test") as session:
            rollups.roll(session, upto)
    for again in range(2):
        with reading(engine) as session:
            rollups.check_integrity(session)
            for _ in range(12):
                first, last = sorted(chance.sample(range(-40, 220), 2))
                wanted = UsageFilter(began_at + first * DAY_S, began_at + last * DAY_S)
                if chance.random() < 0.5:
                    wanted = replace(wanted, tenant_ids=("ten_1",))
                sums = by_hand(rows, wanted, "model")
                assert sum_of(session, wanted, "model") == sums
                ordered = sorted(
                    sums.items(), key=lambda one: (-one[1].cost_nanos, -one[1].num_requests, one[0])
                )
                found = usage_sums.top(session, wanted, "model", 4)
                assert (found.lines, found.num) == (ordered[:4], len(sums))
                assert found.total == by_hand(rows, wanted, "").get("", Amounts())
        if not again:
            with appending(engine, "test") as session:
                rollups.rebuild(session)
