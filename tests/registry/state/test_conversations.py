"""Rows of conversations, on both databases: whose they are, and versions that move one by one."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Engine, text

from registry.errors import NotFound
from registry.session import appending, reading
from registry.state import conversations, responses
from registry.state.conversations import ConversationRecord
from registry.state.responses import Viewer

VIEWER = Viewer("ten_1", None, 0.0)
NEW = ConversationRecord(
    id="conv_1",
    tenant_id="ten_1",
    version=0,
    models=[],
    details={"a": "b"},
    object_name="ten_1/conversations/0",
    sha256="0" * 64,
    items_bytes=2,
    created_at=1000.0,
    updated_at=1000.0,
)


def add(engine: Engine, *records: ConversationRecord, most: int = 10) -> list[bool]:
    with appending(engine, "test") as session:
        return [conversations.add(session, record, most) for record in records]


def moved(record: ConversationRecord, **fields: Any) -> ConversationRecord:
    name = f"ten_1/conversations/{record.version + 1}"
    return replace(record, version=record.version + 1, **{"object_name": name, **fields})


def test_a_conversation_comes_back_to_who_may_see_it(engine: Engine) -> None:
    kept = replace(NEW, models=["tiny", "large"])
    assert add(engine, kept) == [True]
    both = frozenset({"tiny", "large", "other"})
    with reading(engine) as session:
        assert conversations.get(session, VIEWER, "conv_1") == kept
        assert conversations.get(session, Viewer("ten_1", both, 1000.0), "conv_1") == kept
        for viewer in (
            Viewer("ten_2", None, 0.0),
            Viewer("ten_1", frozenset({"tiny"}), 0.0),
            Viewer("ten_1", None, 1000.5),
        ):
            with pytest.raises(NotFound, match="'conv_1' does not exist"):
                conversations.get(session, viewer, "conv_1")
    for viewer in (Viewer("ten_2", None, 0.0), Viewer("ten_1", frozenset({"tiny"}), 0.0)):
        with pytest.raises(NotFound), appending(engine, "test") as session:
            conversations.remove(session, viewer, "conv_1")


def test_of_two_changes_of_one_version_one_is_made(engine: Engine) -> None:
    add(engine, NEW)
    start = threading.Barrier(4)

    def change(number: int) -> bool:
        start.wait()
        with appending(engine, "test") as session:
            return conversations.move(session, moved(NEW, object_name=f"o{number}"))

    with ThreadPoolExecutor(4) as threads:
        done = list(threads.map(change, range(4)))
    assert done.count(True) == 1
    with reading(engine) as session:
        found = conversations.get(session, VIEWER, "conv_1")
    assert (found.version, found.object_name) == (1, f"o{done.index(True)}")
    with appending(engine, "test") as session:
        assert conversations.move(session, moved(found, details={}, models=["tiny"]))
        assert conversations.get(session, VIEWER, "conv_1").models == ["tiny"]
        conversations.remove(session, VIEWER, "conv_1")
        assert not conversations.move(session, moved(found)), "what is gone does not come back"


def test_conversations_count_as_responses(engine: Engine) -> None:
    others = (replace(NEW, id=f"conv_{n}", object_name=f"o{n}") for n in (2, 3))
    assert add(engine, NEW, *others, most=2) == [True, True, False]
    with appending(engine, "test") as session:
        assert responses.num_responses(session, "ten_1") == 2
        removed = conversations.remove(session, VIEWER, "conv_1")
        assert removed.object_name == NEW.object_name
        assert responses.num_responses(session, "ten_1") == 1


def test_old_ones_are_removed_by_their_last_change(engine: Engine) -> None:
    add(engine, NEW, replace(NEW, id="conv_2", object_name="o2", tenant_id="ten_2"))
    add(engine, replace(NEW, id="conv_3", object_name="o3", updated_at=2000.0))
    with appending(engine, "test") as session:
        names = {NEW.object_name, "o2", "o3", "o4"}
        assert conversations.without_row(session, names) == {"o4"}
        found = conversations.remove_before(session, "ten_1", 1500.0, limit=10)
        assert list(found) == [NEW.object_name]
        assert responses.num_responses(session, "ten_1") == 1
        assert conversations.without_row(session, names) == {"o4", NEW.object_name}


def test_one_that_is_changed_meanwhile_is_not_removed(engine: Engine) -> None:
    """The sweeper waits for the change's transaction, and finds the row as it is then."""
    add(engine, NEW)
    with ThreadPoolExecutor(1) as threads:
        with appending(engine, "test") as session:
            assert conversations.move(session, moved(NEW, updated_at=2000.0))
            session.flush()

            def sweep() -> list[str]:
                with appending(engine, "test") as sweeping:
                    found = conversations.remove_before(sweeping, "ten_1", 1500.0, limit=10)
                    return list(found)

            swept = threads.submit(sweep)
            waiting = text("SELECT count(*) FROM pg_locks WHERE NOT granted")
            while engine.dialect.name == "postgresql":
                with engine.connect() as watching:
                    if watching.scalar(waiting):
                        break
        assert swept.result(30) == []
    with reading(engine) as session:
        assert conversations.get(session, VIEWER, "conv_1").version == 1
        assert responses.num_responses(session, "ten_1") == 1


def test_metadata_may_hold_anything(engine: Engine) -> None:
    add(engine, replace(NEW, details={"a\0": "\0", "b": "\U0001f600"}))
    with reading(engine) as session:
        found = conversations.get(session, VIEWER, "conv_1").details
    assert found == {"a\0": "\0", "b": "\U0001f600"}
