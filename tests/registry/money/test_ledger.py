"""The ledger: once per request whoever posts, names as they were, sums that add up."""

import itertools
import multiprocessing
import threading
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, text
from sqlalchemy.exc import IntegrityError

from registry.accounts import api_keys, tenants
from registry.errors import RegistryError
from registry.money import exports, ledger
from registry.money.ledger import OpenRecord, Posting
from registry.session import make_engine, reading, writing
from tests.registry.postings_kit import named_postings, postings

OPEN = OpenRecord("req-1", "ten_x", "key_x", "tiny", "rev1", 12, 100.0)
POSTING = Posting(
    request_id="req-1",
    tenant_id="ten_x",
    key_id="key_x",
    model="tiny",
    revision="rev1",
    kind="chat",
    outcome="finished",
    prompt_tokens=12,
    cached_tokens=4,
    completion_tokens=8,
    cost_nanos=2_500,
    service_s=0.25,
    queue_s=0.01,
    ttft_s=0.02,
    duration_s=0.4,
    posted_at=101.0,
)
EXAMPLES = itertools.count()


def usage(engine: Engine, from_at: float = 0.0, to_at: float = 1e12) -> list[Posting]:
    with reading(engine) as session:
        return postings(session, from_at, to_at)


def test_open_then_post(engine: Engine) -> None:
    with writing(engine, "test") as session:
        ledger.open_many(session, [OPEN, replace(OPEN, request_id="req-2", opened_at=99.0)])
        ledger.open_many(session, [replace(OPEN, prompt_tokens=99)])
    with reading(engine) as session:
        assert ledger.open_left(session) == [
            replace(OPEN, request_id="req-2", opened_at=99.0),
            OPEN,
        ]
    with writing(engine, "test") as session:
        assert ledger.post_many(session, [POSTING]) == 1
        ledger.void_many(session, ["req-2", "req-none"])
        assert ledger.open_left(session) == []
        ledger.check_integrity(session)
    assert usage(engine) == [POSTING]


def test_posting_again_changes_nothing(engine: Engine) -> None:
    with writing(engine, "test") as session:
        ledger.post_many(session, [POSTING])
    second = replace(POSTING, request_id="req-2")
    with writing(engine, "test") as session:
        again = [replace(POSTING, cost_nanos=9), second]
        assert ledger.post_many(session, again) == 1
    assert usage(engine) == [POSTING, second]


def test_nothing_to_do_is_fine(engine: Engine) -> None:
    with writing(engine, "test") as session:
        ledger.open_many(session, [])
        assert ledger.post_many(session, []) == 0
        ledger.void_many(session, [])


def test_names_are_as_they_were(engine: Engine) -> None:
    with writing(engine, "test") as session:
        tenant = tenants.create_tenant(session, "acme", now_at=1.0)
        key, _ = api_keys.create_key(session, tenant.id, "ci", now_at=1.0)
        ledger.post_many(session, [replace(POSTING, tenant_id=tenant.id, key_id=key.id)])
        ledger.post_many(session, [replace(POSTING, request_id="req-2")])
        session.execute(text("DELETE FROM api_keys"))
        session.execute(text("DELETE FROM tenants"))
    with reading(engine) as session:
        rows = named_postings(session)
    assert [names for _, *names in rows] == [["acme", "ci"], ["", ""]]


def post_from_process(url: str, cost_nanos: int) -> None:
    engine = make_engine(url)
    for number in range(50):
        posting = replace(POSTING, request_id=f"req-{number}", cost_nanos=cost_nanos)
        with writing(engine, "test") as session:
            ledger.post_many(session, [posting])
    engine.dispose()


def test_two_processes_post_the_same_requests(url: str, engine: Engine) -> None:
    spawn = multiprocessing.get_context("spawn")
    posters = [spawn.Process(target=post_from_process, args=(url, cost)) for cost in (1, 2)]
    for poster in posters:
        poster.start()
    for poster in posters:
        poster.join()
    assert [poster.exitcode for poster in posters] == [0, 0]
    assert len(usage(engine)) == 50


def test_threads_post_the_same_request_and_one_wins(engine: Engine) -> None:
    winners: list[int] = []
    barrier = threading.Barrier(8)

    def post(number: int) -> None:
        barrier.wait()
        with writing(engine, "test") as session:
            if ledger.post_many(session, [replace(POSTING, cost_nanos=number)]):
                winners.append(number)

    threads = [threading.Thread(target=post, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [posting.cost_nanos for posting in usage(engine)] == winners
    assert len(winners) == 1


def test_a_rolled_back_post_was_never_there(engine: Engine) -> None:
    class Stop(Exception):
        pass

    def post_and_stop() -> None:
        with writing(engine, "test") as session:
            ledger.post_many(session, [POSTING])
            raise Stop

    with writing(engine, "test") as session:
        ledger.open_many(session, [OPEN])
    with pytest.raises(Stop):
        post_and_stop()
    assert usage(engine) == []
    with reading(engine) as session:
        assert ledger.open_left(session) == [OPEN]


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_consecutive_spans_hold_every_posting_once(engine: Engine, data: st.DataObject) -> None:
    times = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=30))
    base = next(EXAMPLES) * 10.0  # one database for all examples: each has its own time
    batch = [
        replace(POSTING, request_id=f"{base}-{number}", posted_at=base + at, cost_nanos=number)
        for number, at in enumerate(times)
    ]
    with writing(engine, "test") as session:
        posted = ledger.post_many(session, batch)
    cut = data.draw(st.integers(0, 6))
    found: list[Posting] = []
    with pytest.MonkeyPatch.context() as patch, reading(engine) as session:
        patch.setattr(exports, "BATCH_ROWS", 7)
        for span in ((base, base + cut), (base + cut, base + 6)):
            found += postings(session, *span)
    assert len(found) == posted
    assert sorted(p.request_id for p in found) == sorted(p.request_id for p in batch)
    assert found == sorted(found, key=lambda p: (p.posted_at, p.request_id))


def test_many_at_once(engine: Engine) -> None:
    batch = [
        replace(POSTING, request_id=f"req-{number:05}", posted_at=float(number))
        for number in range(2500)
    ]
    with writing(engine, "test") as session:
        ledger.open_many(session, [replace(OPEN, request_id=p.request_id) for p in batch])
        assert ledger.post_many(session, batch) == 2500
        assert ledger.open_left(session) == []
    assert usage(engine, 10.0, 2010.0) == batch[10:2010]


@pytest.mark.parametrize(
    "wrong",
    [
        {"outcome": "lost"},
        {"outcome": "failed"},  # costs something
        {"cost_nanos": -1},
        {"completion_tokens": -1},
    ],
)
def test_the_database_refuses_nonsense(engine: Engine, wrong: dict[str, str | int]) -> None:
    posting = replace(POSTING, **wrong)  # type: ignore[arg-type]
    with pytest.raises(IntegrityError), writing(engine, "test") as session:
        ledger.post_many(session, [posting])


def test_integrity_sees_an_open_record_with_a_posting(engine: Engine) -> None:
    with writing(engine, "test") as session:
        ledger.post_many(session, [POSTING])
        ledger.open_many(session, [OPEN])
        with pytest.raises(RegistryError, match="both open and posted"):
            ledger.check_integrity(session)
