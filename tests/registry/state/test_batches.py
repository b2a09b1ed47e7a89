"""Rows of batches, on both databases: whose they are, who holds one, what a segment changes."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Engine, text

from registry.accounts import tenants
from registry.errors import NotFound
from registry.session import appending, reading, writing
from registry.state import batches
from registry.state.batches import BatchRecord, SegmentRecord
from registry.state.files import FileViewer

VIEWER = FileViewer("ten_1", 1000.0, 0.0)
NEW = BatchRecord(
    id="batch_1",
    tenant_id="ten_1",
    key_id="key_1",
    endpoint="/v1/embeddings",
    model="",
    input_file_id="file-1",
    state="validating",
    details={"a": "b"},
    created_at=1000.0,
    expires_at=2000.0,
)
SEGMENT = SegmentRecord("batch_1_000001o", "batch_1", False, "ten_1/segments/a", 10)


def add(engine: Engine, *records: BatchRecord, most: int = 10, most_ended: int = 10) -> list[bool]:
    with appending(engine, "test") as session:
        return [batches.add(session, each, most, most_ended) for each in records]


def claim(engine: Engine, token: str, now_at: float, **options: Any) -> str | None:
    asked = {"lost_at": now_at - 30, "without": [], **options}
    with appending(engine, "test") as session:
        found = batches.claim(session, token, now_at, **asked)
        return None if found is None else found.id


def test_a_batch_is_seen_by_its_tenant_alone(engine: Engine) -> None:
    assert add(engine, NEW) == [True]
    with reading(engine) as session:
        assert batches.get(session, VIEWER, "batch_1") == replace(NEW, error_lines=[])
        bound = replace(VIEWER, key_id="key_1", models=frozenset())
        assert batches.get(session, bound, "batch_1").key_id == "key_1"
        for viewer, batch_id in (
            (VIEWER, "batch_2"),
            (replace(VIEWER, tenant_id="ten_2"), "batch_1"),
            (replace(VIEWER, since_at=1000.5), "batch_1"),
            (replace(VIEWER, key_id="key_2", models=frozenset()), "batch_1"),
            (VIEWER, "a\x00b"),
        ):
            with pytest.raises(NotFound):
                batches.get(session, viewer, batch_id)
    with pytest.raises(NotFound), appending(engine, "test") as session:
        batches.cancel(session, replace(VIEWER, tenant_id="ten_2"), "batch_1", 1.0)


def test_lists_go_on_behind_a_batch(engine: Engine) -> None:
    add(engine, *(replace(NEW, id=f"batch_{n}", created_at=1000.0 + n // 2) for n in range(5)))
    with reading(engine) as session:
        found = batches.listed(session, VIEWER, limit=2, after="")
        assert [each.id for each in found] == ["batch_4", "batch_3"]
        found = batches.listed(session, VIEWER, limit=9, after="batch_3")
        assert [each.id for each in found] == ["batch_2", "batch_1", "batch_0"]
        with pytest.raises(NotFound):
            batches.listed(session, VIEWER, limit=2, after="batch_9")


def test_a_tenant_has_so_many_that_have_not_ended(engine: Engine) -> None:
    made = [replace(NEW, id=f"batch_{n}") for n in range(3)]
    other = replace(NEW, id="batch_9", tenant_id="ten_2")
    assert add(engine, made[0], made[1], made[2], other, most=2) == [True, True, False, True]
    with appending(engine, "test") as session:
        batches.claim(session, "t", 1000.0, lost_at=0.0, without=["batch_1", "batch_9"])
        assert batches.change(session, "batch_0", "t", batches.ACTIVE, state="failed")
    assert add(engine, made[2], most=2) == [True]


def test_the_oldest_that_have_ended_are_forgotten(engine: Engine) -> None:
    made = [replace(NEW, id=f"batch_{n}", created_at=1000.0 + n) for n in range(5)]
    ended = [replace(each, state="completed") for each in made[:3]]
    other = replace(ended[0], id="batch_9", tenant_id="ten_2")
    assert add(engine, other, *ended, made[3], made[4], most_ended=2) == [True] * 6
    with reading(engine) as session:
        found = batches.listed(session, VIEWER, limit=9, after="")
        assert [each.id for each in found] == ["batch_4", "batch_3", "batch_2", "batch_1"]
        batches.get(session, replace(VIEWER, tenant_id="ten_2"), "batch_9")


def test_two_at_once_are_not_more_than_the_maximum(engine: Engine) -> None:
    """The second waits for the first one's transaction, and counts it."""
    with ThreadPoolExecutor(1) as threads:
        with appending(engine, "test") as session:
            assert batches.add(session, NEW, 1, 9)
            session.flush()
            second = threads.submit(add, engine, replace(NEW, id="batch_2"), most=1)
            waiting = text("SELECT count(*) FROM pg_locks WHERE NOT granted")
            while engine.dialect.name == "postgresql" and not second.done():
                with engine.connect() as watching:
                    if watching.scalar(waiting):
                        break
        assert second.result(30) == [False]


def test_a_batch_is_held_by_one_at_a_time(engine: Engine) -> None:
    add(engine, NEW, replace(NEW, id="batch_2", created_at=1001.0))
    assert claim(engine, "one", 1000.0) == "batch_1", "the oldest"
    assert claim(engine, "one", 1000.0, without=["batch_1"]) == "batch_2"
    assert claim(engine, "two", 1029.0) is None
    with appending(engine, "test") as session:
        assert batches.beat(session, "batch_1", "one", 1029.0) == "validating"
        assert batches.beat(session, "batch_1", "two", 1029.0) is None
    assert claim(engine, "two", 1031.0) == "batch_2", "it was silent for too long"
    with appending(engine, "test") as session:
        assert batches.beat(session, "batch_2", "one", 1032.0) is None
        assert not batches.change(session, "batch_2", "one", batches.ACTIVE, num_lines=1)
        batches.release(session, "batch_2", "one")
        assert not batches.has_free(session, 1000.0, ["batch_1"]), "it was not his to give up"
        batches.release(session, "batch_2", "two")
        assert batches.has_free(session, 1000.0, ["batch_1"])


def test_the_tenant_with_the_fewest_held_is_next(engine: Engine) -> None:
    made = [replace(NEW, id=f"batch_{n}", created_at=1000.0 + n) for n in range(4)]
    add(engine, *made[:3], replace(made[3], tenant_id="ten_2"))
    assert claim(engine, "t", 1000.0) == "batch_0"
    assert claim(engine, "t", 1000.0, without_tenants=["ten_2"]) == "batch_1"
    assert claim(engine, "t", 1000.0) == "batch_3", "none of this tenant's is held yet"
    assert claim(engine, "t", 1000.0, without_tenants=["ten_1"]) is None
    assert claim(engine, "t", 1000.0) == "batch_2"


def test_what_a_dead_process_held_is_free_at_once(engine: Engine) -> None:
    add(engine, NEW, replace(NEW, id="batch_2", created_at=1001.0))
    assert claim(engine, "dead-1", 1000.0) == "batch_1"
    assert claim(engine, "alive-1", 1000.0) == "batch_2"
    with appending(engine, "test") as session:
        batches.release_all(session, "dead-")
    assert claim(engine, "dead-2", 1001.0) == "batch_1"
    assert claim(engine, "dead-2", 1001.0) is None


def test_states_change_from_those_that_are_named(engine: Engine) -> None:
    add(engine, NEW)
    claim(engine, "t", 1000.0)
    with appending(engine, "test") as session:
        assert batches.change(session, "batch_1", "t", ["validating"], state="in_progress")
        assert not batches.change(session, "batch_1", "t", ["validating"], state="failed")
        assert batches.cancel(session, VIEWER, "batch_1", 1001.0).state == "cancelling"
        assert batches.cancel(session, VIEWER, "batch_1", 1002.0).cancelling_at == 1001.0
        assert batches.beat(session, "batch_1", "t", 1000.0) == "cancelling"
        ended = {"state": "cancelled", "ended_at": 1003.0}
        assert batches.change(session, "batch_1", "t", batches.ACTIVE, **ended)
        assert batches.cancel(session, VIEWER, "batch_1", 1004.0).state == "cancelled"
    assert claim(engine, "t", 9999.0) is None, "it has ended"


def test_files_are_held_until_their_batch_has_ended(engine: Engine) -> None:
    add(engine, NEW)
    claim(engine, "t", 1000.0)
    for is_held in (True, False):
        with appending(engine, "test") as session:
            assert batches.is_input(session, "ten_1", "file-1") == is_held
            assert not batches.is_input(session, "ten_2", "file-1")
            assert batches.input_files(session) == ({"file-1"} if is_held else set())
            batches.change(session, "batch_1", "t", batches.ACTIVE, state="failed")


def test_zero_retention_forgets_what_has_ended(engine: Engine) -> None:
    with writing(engine, "test") as session:
        tenant_id = tenants.create_tenant(session, "acme", now_at=1.0).id
    mine = [replace(NEW, id=f"batch_{n}", tenant_id=tenant_id) for n in range(2)]
    other = replace(NEW, id="batch_9", state="failed")
    add(engine, replace(mine[0], state="completed"), mine[1], other)
    with appending(engine, "test") as session:
        assert batches.remove_before(session, 0.0) == 0
    with writing(engine, "test") as session:
        tenants.update_tenant(session, "acme", response_retention_days=0, now_at=2.0)
    with appending(engine, "test") as session:
        assert batches.remove_before(session, 0.0) == 1
        left = batches.listed(session, replace(VIEWER, tenant_id=tenant_id), limit=9, after="")
        assert [each.id for each in left] == ["batch_1"], "it has not ended"


def test_a_segment_and_its_bits_come_together(engine: Engine) -> None:
    add(engine, NEW)
    claim(engine, "t", 1000.0)
    with appending(engine, "test") as session:
        values = {"answered": b"\x05", "num_completed": 2}
        assert batches.change(session, "batch_1", "t", ["validating"], **values)
        batches.add_segments(session, [SEGMENT])
    with reading(engine) as session:
        found = batches.get(session, VIEWER, "batch_1")
        assert (found.answered, found.num_completed) == (b"\x05", 2)
        assert batches.segments(session, "batch_1") == [SEGMENT]
        names = [SEGMENT.object_name, "ten_1/segments/b"]
        assert batches.without_row(session, names) == {"ten_1/segments/b"}
    with appending(engine, "test") as session:
        assert batches.remove_segments(session, "batch_1") == [SEGMENT.object_name]
        assert batches.remove_before(session, 2000.0) == 0, "it has not ended"
        assert batches.change(session, "batch_1", "t", ["validating"], state="failed")
        assert batches.remove_before(session, 1000.0) == 0
        assert batches.remove_before(session, 1000.5) == 1
