"""Roll-ups, retention and corrections: derived sums that are always those of the postings."""

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, select, text
from sqlalchemy.exc import DatabaseError

from registry.accounts import api_keys, tenants
from registry.audit import latest
from registry.errors import InvalidValue, NotFound, RegistryError
from registry.money import corrections, ledger, rollups
from registry.money.corrections import Right
from registry.money.ledger import Posting
from registry.money.rollups import DAY_S, HOUR_S, RollupRow
from registry.session import appending, reading, writing
from tests.registry.postings_kit import postings

POSTING = Posting(
    *("req-1", "ten_x", "key_x", "tiny", "rev1", "chat", "finished", 12, 4, 30, 100),
    *(0.25, 0.125, 0.5, 1.0, 100.0),
    **{"prefill_s": 0.0000014, "load_s": 0.1, "input_nanos": 40, "output_nanos": 60},  # type: ignore[arg-type]
)
NOW = 100.0 * DAY_S


def post(engine: Engine, *postings: Posting) -> None:
    with appending(engine, "test") as session:
        ledger.post_many(session, postings)


def roll(engine: Engine, slice_rows: int = rollups.SLICE_ROWS) -> int:
    with appending(engine, "test") as session:
        upto = rollups.newest_seq(session)
    total = 0
    while True:
        with appending(engine, "test") as session:
            num = rollups.roll(session, upto, slice_rows)
        total += num
        if not num:
            return total


def check(engine: Engine) -> None:
    with reading(engine) as session:
        rollups.check_integrity(session)
        ledger.check_integrity(session)


def rows(engine: Engine, span_s: int) -> list[RollupRow]:
    with reading(engine) as session:
        query = select(RollupRow).where(RollupRow.span_s == span_s)
        return list(session.scalars(query.order_by(RollupRow.began_at, RollupRow.outcome)))


def usage(engine: Engine) -> list[Posting]:
    with reading(engine) as session:
        return postings(session)


def test_sums_by_hour_and_by_day(engine: Engine) -> None:
    with writing(engine, "test") as session:
        tenant = tenants.create_tenant(session, "acme", now_at=0.0)
        key, _ = api_keys.create_key(session, tenant.id, "ci", now_at=0.0)
    mine = replace(POSTING, tenant_id=tenant.id, key_id=key.id)
    post(
        engine,
        mine,
        replace(mine, request_id="req-2", posted_at=HOUR_S - 0.001),
        replace(mine, request_id="req-3", posted_at=float(HOUR_S)),
        replace(mine, request_id="req-4", posted_at=float(HOUR_S), outcome="cache_hit"),
    )
    assert roll(engine) == 4
    assert roll(engine) == 0
    told = [(row.began_at, row.outcome, row.num_postings) for row in rows(engine, HOUR_S)]
    assert told == [(0, "finished", 2), (HOUR_S, "cache_hit", 1), (HOUR_S, "finished", 1)]
    (hit, finished) = rows(engine, DAY_S)
    assert (hit.num_postings, finished.num_postings, finished.began_at) == (1, 3, 0)
    assert (finished.prompt_tokens, finished.cost_nanos, finished.input_nanos) == (36, 300, 120)
    assert (finished.service_us, finished.prefill_us, finished.load_us) == (750_000, 3, 300_000)
    assert (finished.tenant_name, finished.key_name) == ("acme", "ci")
    check(engine)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_kept_up_in_any_steps_they_are_the_same_as_made_anew(
    engine: Engine, data: st.DataObject
) -> None:
    """Late postings, slices, repeats: each posting counts once."""
    batches = data.draw(
        st.lists(
            st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3 * DAY_S)), max_size=8),
            max_size=5,
        )
    )
    slice_rows = data.draw(st.integers(1, 5))
    for batch in batches:
        made = [
            replace(
                POSTING,
                request_id=f"req-{number}",
                posted_at=float(at),
                key_id=f"key-{number % 2}",
                service_s=number / 7,
            )
            for number, at in batch
        ]
        post(engine, *made)
        roll(engine, slice_rows)
        check(engine)
    kept_up = [[getattr(row, name) for name in rollups.SUMS] for row in rows(engine, DAY_S)]
    with appending(engine, "test") as session:
        rollups.rebuild(session)
    anew = [[getattr(row, name) for name in rollups.SUMS] for row in rows(engine, DAY_S)]
    assert kept_up == anew
    check(engine)


def test_a_wrong_sum_is_found_and_made_right(engine: Engine) -> None:
    post(engine, POSTING)
    roll(engine)
    with appending(engine, "test") as session:
        session.execute(text("UPDATE usage_rollups SET cost_nanos = cost_nanos + 1"))
    with pytest.raises(RegistryError, match="usage rebuild"):
        check(engine)
    with appending(engine, "test") as session:
        assert rollups.rebuild(session) == 1
    check(engine)


def test_writers_and_rollers_at_once_count_each_posting_once(engine: Engine) -> None:
    """Numbers are drawn before commits: a mark must never pass one that is still to come."""
    done = threading.Event()
    errors: list[BaseException] = []

    def write(writer: int) -> None:
        for number in range(60):
            post(engine, replace(POSTING, request_id=f"{writer}-{number}"))

    def keep_up() -> None:
        try:
            while not done.is_set():
                roll(engine, 7)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    writers = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    rollers = [threading.Thread(target=keep_up) for _ in range(2)]
    for thread in (*writers, *rollers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    for thread in rollers:
        thread.join()
    roll(engine)
    assert errors == []
    assert [row.num_postings for row in rows(engine, DAY_S)] == [180]
    check(engine)


# Retention.


def days(*numbers: int) -> Sequence[Posting]:
    return [
        replace(POSTING, request_id=f"req-{number}", posted_at=number * float(DAY_S) + 5)
        for number in numbers
    ]


def test_old_postings_go_and_their_sums_stay(engine: Engine) -> None:
    post(engine, *days(1, 2, 3, 90))
    with pytest.raises(RegistryError, match="not in the roll-ups"), writing(engine, "t") as session:
        rollups.keep_postings_from(session, 3.0 * DAY_S + 77, now_at=NOW)
    roll(engine)
    before = [row.num_postings for row in rows(engine, DAY_S)]
    with writing(engine, "test") as session:
        rollups.keep_postings_from(session, 3.0 * DAY_S + 77, now_at=NOW)
    with appending(engine, "test") as session:
        assert [rollups.delete_postings(session, 1) for _ in range(3)] == [1, 1, 0]
    assert [posting.request_id for posting in usage(engine)] == ["req-3", "req-90"]
    assert [row.num_postings for row in rows(engine, DAY_S)] == before == [1, 1, 1, 1]
    check(engine)
    with appending(engine, "test") as session:
        assert rollups.rebuild(session) == 2
    assert [row.num_postings for row in rows(engine, DAY_S)] == before
    check(engine)
    with reading(engine) as session:
        assert latest(session, 1)[0].action == "ledger.keep"


def test_what_is_kept_is_kept(engine: Engine) -> None:
    post(engine, *days(1, 2, 90))
    roll(engine)
    for day, problem in ((66, "cannot be deleted"), (-1, "already been deleted")):
        if day < 0:
            with writing(engine, "test") as session:
                rollups.keep_postings_from(session, 2.0 * DAY_S, now_at=NOW)
        wanted = max(day, 1) * float(DAY_S)
        with pytest.raises(RegistryError, match=problem), writing(engine, "test") as session:
            rollups.keep_postings_from(session, wanted, now_at=NOW)
    with pytest.raises(DatabaseError, match="append-only"), writing(engine, "test") as session:
        session.execute(text("DELETE FROM postings WHERE request_id = 'req-2'"))
    late = replace(POSTING, request_id="late", posted_at=5.0)
    post(engine, late)  # it came after its day was given up: it goes once it is in the roll-ups
    with appending(engine, "test") as session:
        assert [rollups.delete_postings(session) for _ in range(2)] == [1, 0]
    roll(engine)
    with appending(engine, "test") as session:
        assert rollups.delete_postings(session) == 1
    assert [row.num_postings for row in rows(engine, DAY_S)] == [1, 1, 1, 1]
    check(engine)


# Corrections.


def test_a_correction_adds_what_is_missing(engine: Engine) -> None:
    post(engine, POSTING)
    with writing(engine, "test") as session:
        made = corrections.correct(
            session, "req-1", Right(cost_nanos=70, completion_tokens=20), now_at=500.0
        )
    assert (made.cost_nanos, made.completion_tokens, made.prompt_tokens) == (-30, -10, 0)
    assert (made.output_nanos, made.input_nanos, made.posted_at) == (-30, 0, 500.0)
    with writing(engine, "test") as session:
        again = corrections.correct(session, "req-1", Right(cost_nanos=0), now_at=600.0)
    assert (again.cost_nanos, again.output_nanos, again.input_nanos) == (-70, -30, -40)
    roll(engine)
    everything = usage(engine)
    assert sum(posting.cost_nanos for posting in everything) == 0
    assert sum(posting.completion_tokens for posting in everything) == 20
    assert {posting.corrects for posting in everything} == {"", "req-1"}
    assert [(row.outcome, row.num_postings) for row in rows(engine, DAY_S)] == [
        ("correction", 2),
        ("finished", 1),
    ]
    check(engine)
    with reading(engine) as session:
        entry = latest(session, 1)[0]
        assert (entry.action, entry.target) == ("ledger.correct", "req-1")
        assert rollups.spend_since(session, 0.0) == []
        (slot,) = ledger.usage_by_slot(session, 0.0, HOUR_S)
        assert slot.num_requests == 1


@pytest.mark.parametrize(
    "right",
    [Right(), Right(cost_nanos=100), Right(cost_nanos=-1), Right(cached_tokens=13)],
)
def test_a_correction_that_makes_no_sense_is_refused(engine: Engine, right: Right) -> None:
    post(engine, POSTING)
    with pytest.raises(InvalidValue), writing(engine, "test") as session:
        corrections.correct(session, "req-1", right, now_at=500.0)
    assert len(usage(engine)) == 1


def test_only_a_requests_posting_is_corrected(engine: Engine) -> None:
    post(engine, POSTING)
    with writing(engine, "test") as session:
        for slip in (Right(cost_nanos=2**60), Right(prompt_tokens=2**60)):
            with pytest.raises(InvalidValue, match="at most"):
                corrections.correct(session, "req-1", slip, now_at=500.0)
        made = corrections.correct(session, "req-1", Right(cost_nanos=1), now_at=500.0)
    for name in ("nobody", made.request_id):
        with pytest.raises(NotFound), writing(engine, "test") as session:
            corrections.correct(session, name, Right(cost_nanos=5), now_at=500.0)
