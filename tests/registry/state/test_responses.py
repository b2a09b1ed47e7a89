"""Rows of stored responses, on both databases: whose they are, their chains, how each ends once."""

from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Engine, func, select

from registry.accounts import tenants
from registry.errors import NotFound
from registry.session import appending, reading, writing
from registry.state import conversations, responses
from registry.state.responses import MAX_DEPTH, ResponseRecord, Viewer

VIEWER = Viewer("ten_1", None, 0.0)


def record(response_id: str, **fields: Any) -> ResponseRecord:
    made = ResponseRecord(
        id=response_id,
        tenant_id="ten_1",
        parent_id=None,
        model="tiny",
        state="completed",
        depth=0,
        object_name=f"ten_1/responses/{response_id}",
        sha256="0" * 64,
        items_bytes=100,
        created_at=1000.0,
    )
    return replace(made, **fields)


def add(engine: Engine, *records: ResponseRecord, most: int = 100) -> list[bool]:
    with appending(engine, "test") as session:
        return [responses.add(session, each, most) for each in records]


def check_integrity(engine: Engine) -> None:
    """The counts are those of the rows."""
    with reading(engine) as session:
        table = responses.StoredResponse
        rows = session.execute(select(table.tenant_id, func.count()).group_by(table.tenant_id))
        counted = {row[0]: row[1] for row in rows}
        for tenant_id in ("ten_1", "ten_2"):
            expected = counted.get(tenant_id, 0)
            assert responses.num_responses(session, tenant_id) == expected


def test_a_response_is_seen_by_its_tenant_alone(engine: Engine) -> None:
    kept = record("resp_1")
    assert add(engine, kept) == [True]
    with reading(engine) as session:
        assert responses.get(session, VIEWER, "resp_1") == kept
        told = set()
        for viewer, response_id in (
            (VIEWER, "resp_2"),
            (Viewer("ten_2", None, 0.0), "resp_1"),
            (Viewer("ten_1", frozenset({"other"}), 0.0), "resp_1"),
            (Viewer("ten_1", frozenset(), 0.0), "resp_1"),
            (Viewer("ten_1", None, 1000.5), "resp_1"),
        ):
            for query in (responses.get, responses.chain):
                with pytest.raises(NotFound) as caught:
                    query(session, viewer, response_id)
                told.add(str(caught.value).replace(response_id, "ID"))
        assert told == {"response 'ID' does not exist"}
        bound = Viewer("ten_1", frozenset({"tiny"}), 1000.0)
        assert responses.get(session, bound, "resp_1") == kept


@pytest.mark.parametrize("name", ["", "a\x00b", "a\n", "\udc80", "ä", "x" * 65])
def test_what_is_no_id_is_missing(engine: Engine, name: str) -> None:
    with appending(engine, "test") as session:
        for query in (
            responses.get,
            responses.chain,
            responses.remove,
            responses.cancel,
            conversations.get,
            conversations.remove,
        ):
            with pytest.raises(NotFound):
                query(session, VIEWER, name)


def test_only_who_sees_it_removes_or_cancels_it(engine: Engine) -> None:
    add(engine, record("resp_1", state="queued", owner="gw", heartbeat_at=1.0))
    for viewer in (Viewer("ten_2", None, 0.0), Viewer("ten_1", frozenset({"other"}), 0.0)):
        for change in (responses.remove, responses.cancel):
            with pytest.raises(NotFound), appending(engine, "test") as session:
                change(session, viewer, "resp_1")
    with appending(engine, "test") as session:
        assert responses.get(session, VIEWER, "resp_1").state == "queued"
        assert responses.remove(session, VIEWER, "resp_1").object_name == "ten_1/responses/resp_1"
        with pytest.raises(NotFound):
            responses.remove(session, VIEWER, "resp_1")
    check_integrity(engine)


def test_chains(engine: Engine) -> None:
    links: list[ResponseRecord] = []
    for number in range(5):
        parent = links[-1].id if links else None
        links.append(record(f"resp_{number}", parent_id=parent, depth=number))
    links[1] = replace(links[1], model="other")
    foreign = record("resp_f", tenant_id="ten_2", parent_id="resp_4", depth=5)
    add(engine, *links, foreign)
    with reading(engine) as session:
        assert responses.chain(session, VIEWER, "resp_4") == links[::-1]
        bound = Viewer("ten_1", frozenset({"tiny"}), 0.0)
        assert [r.id for r in responses.chain(session, bound, "resp_4")] == [
            "resp_4",
            "resp_3",
            "resp_2",
        ]
        found = responses.chain(session, Viewer("ten_2", None, 0.0), "resp_f")
        assert [r.id for r in found] == ["resp_f"]
    with appending(engine, "test") as session:
        responses.remove(session, VIEWER, "resp_2")
    with reading(engine) as session:
        found = responses.chain(session, VIEWER, "resp_4")
        assert [r.id for r in found] == ["resp_4", "resp_3"]
        assert found[-1].parent_id == "resp_2"


def test_a_chain_that_bites_its_tail_ends(engine: Engine) -> None:
    add(engine, record("resp_a", parent_id="resp_b"), record("resp_b", parent_id="resp_a"))
    with reading(engine) as session:
        assert len(responses.chain(session, VIEWER, "resp_a")) == MAX_DEPTH + 1


def test_the_quota_is_a_tenants_own(engine: Engine) -> None:
    assert add(engine, *(record(f"resp_{n}") for n in range(3)), most=2) == [True, True, False]
    assert add(engine, record("resp_9", tenant_id="ten_2"), most=2) == [True]
    check_integrity(engine)
    with appending(engine, "test") as session:
        responses.remove(session, VIEWER, "resp_0")
    assert add(engine, record("resp_3"), record("resp_4"), most=2) == [True, False]
    check_integrity(engine)


def test_a_row_that_cannot_be_added_is_not_counted(engine: Engine) -> None:
    add(engine, record("resp_1"))
    with pytest.raises(Exception, match=r"(?i)unique"):
        add(engine, record("resp_1"))
    check_integrity(engine)


def active(response_id: str = "resp_1", owner: str = "gw-0", at: float = 10.0) -> ResponseRecord:
    return record(response_id, state="queued", owner=owner, heartbeat_at=at)


def test_a_background_response_ends_once(engine: Engine) -> None:
    add(engine, active())
    ended = record("resp_1", object_name="ten_1/responses/new", items_bytes=7)
    with appending(engine, "test") as session:
        assert not responses.begin(session, "resp_1", "gw-1")
        assert responses.begin(session, "resp_1", "gw-0")
        assert responses.get(session, VIEWER, "resp_1").state == "in_progress"
        assert not responses.finish(session, "gw-1", ended)
        assert responses.finish(session, "gw-0", ended)
        assert not responses.finish(session, "gw-0", replace(ended, state="failed"))
        assert responses.cancel(session, VIEWER, "resp_1").state == "completed"
        assert not responses.begin(session, "resp_1", "gw-0")
        assert responses.fail_lost(session, "x", "y", before_at=1e12) == 0
        found = responses.get(session, VIEWER, "resp_1")
    assert (found.object_name, found.items_bytes) == ("ten_1/responses/new", 7)
    assert found.heartbeat_at is None


def test_an_error_may_repeat_anything(engine: Engine) -> None:
    """PostgreSQL takes no NUL, and no half of a surrogate pair."""
    with appending(engine, "test") as session:
        made = replace(record("resp_1"), state="queued", owner="gw-0", heartbeat_at=1.0)
        assert responses.add(session, made, 10)
        ended = replace(made, state="failed", error_code="x", error_message="a\0b\ud800c日")
        assert responses.finish(session, "gw-0", ended)
        assert responses.get(session, VIEWER, "resp_1").error_message == "a?b?c日"


def test_one_that_is_cancelled_is_not_its_owners_any_more(engine: Engine) -> None:
    add(engine, active("resp_1"), active("resp_2"), active("resp_3", owner="gw-1"))
    with appending(engine, "test") as session:
        known = ["resp_1", "resp_2", "resp_3"]
        assert responses.beat(session, "gw-0", known, now_at=20.0) == {"resp_1", "resp_2"}
        assert responses.cancel(session, VIEWER, "resp_1").state == "cancelled"
        assert responses.cancel(session, VIEWER, "resp_1").state == "cancelled"
        assert responses.beat(session, "gw-0", known, now_at=21.0) == {"resp_2"}
        assert not responses.finish(session, "gw-0", record("resp_1"))
        assert not responses.begin(session, "resp_1", "gw-0")


def test_lost_ones_fail(engine: Engine) -> None:
    add(engine, active("resp_1", at=10.0), active("resp_2", owner="gw-1", at=10.0))
    with appending(engine, "test") as session:
        responses.beat(session, "gw-1", ["resp_2"], now_at=50.0)
        assert not responses.has_lost(session, 10.0)
        assert responses.has_lost(session, 40.0)
        assert responses.fail_lost(session, "server_error", "it died", before_at=40.0) == 1
        assert not responses.has_lost(session, 40.0)
        found = responses.get(session, VIEWER, "resp_1")
        assert (found.state, found.error_code, found.error_message) == (
            "failed",
            "server_error",
            "it died",
        )
        assert responses.get(session, VIEWER, "resp_2").state == "queued"
        lost = responses.fail_lost(session, "server_error", "x", owner="gw-1", before_at=1e12)
        assert lost == 1
        assert responses.fail_lost(session, "server_error", "x", before_at=1e12) == 0


def test_old_ones_are_removed_tenant_by_tenant(engine: Engine) -> None:
    with writing(engine, "test") as session:
        own = tenants.create_tenant(session, "own", now_at=0.0)
        tenants.update_tenant(session, own.id, response_retention_days=3, now_at=0.0)
    rows = [record(f"resp_{n}", created_at=100.0 + n) for n in range(4)]
    add(engine, *rows, record("resp_5", tenant_id=own.id), record("resp_6", tenant_id="ten_2"))
    with appending(engine, "test") as session:
        assert responses.tenants_of(session) == {own.id: 3, "ten_1": None, "ten_2": None}
        first = responses.remove_before(session, "ten_1", 103.0, limit=2)
        assert sorted(first) == ["ten_1/responses/resp_0", "ten_1/responses/resp_1"]
        assert len(responses.remove_before(session, "ten_1", 103.0, limit=2)) == 1
        assert not responses.remove_before(session, "ten_1", 103.0, limit=2)
        names = {row.object_name for row in rows}
        assert responses.without_row(session, names) == names - {rows[3].object_name}
    check_integrity(engine)


def test_a_tenants_retention(engine: Engine) -> None:
    with writing(engine, "test") as session:
        own = tenants.create_tenant(session, "own", now_at=0.0)
        assert own.response_retention_days is None
        for days, kept in ((0, 0), (30, 30), (tenants.SERVERS_RETENTION, None)):
            changed = tenants.update_tenant(
                session, own.id, response_retention_days=days, now_at=0.0
            )
            assert changed.response_retention_days == kept
        for days in (-2, tenants.MAX_RETENTION_DAYS + 1):
            with pytest.raises(Exception, match="response retention must be"):
                tenants.update_tenant(session, own.id, response_retention_days=days, now_at=0.0)
