"""Objects and rows together: whatever step fails, no row names what is not there."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import Engine, event, select
from sqlalchemy.exc import OperationalError

from engine.objects.folder_store import FolderStore
from gateway.dialects.responses_items import Item
from gateway.state import response_store
from gateway.state.response_store import ChainBroken, ChainTooLong, ResponseStore
from gateway.state.state_threads import Damaged
from registry.errors import NotFound
from registry.session import make_engine, reading
from registry.state import responses
from registry.state.responses import MAX_DEPTH, ResponseRecord, StoredResponse, Viewer
from tests.migrated import migrated

VIEWER = Viewer("ten_1", None, 0.0)
NEW = ResponseRecord("resp_1", "ten_1", None, "tiny", "completed", 0, "", "", 0, 1000.0)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    url = f"sqlite:///{tmp_path / 'polyhost.db'}"
    migrated(url)
    engine = make_engine(url)
    yield engine
    engine.dispose()


@pytest.fixture
def objects(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "objects")


@pytest.fixture
def store(engine: Engine, objects: FolderStore) -> ResponseStore:
    return ResponseStore(engine, objects, 100, 10_000, lambda: 1000.0)


def message(text: str) -> dict[str, Any]:
    return {"id": f"msg_{text}", "type": "message", "role": "user", "content": text}


def response(text: str, **fields: Any) -> bytes:
    said = {"id": f"out_{text}", "type": "message", "role": "assistant", "content": text}
    return msgspec.json.encode({"id": "resp", "status": "completed", "output": [said], **fields})


def add(store: ResponseStore, number: int, **fields: Any) -> None:
    parent = f"resp_{number - 1}" if number > 1 else None
    record = replace(NEW, id=f"resp_{number}", parent_id=parent, depth=number - 1)
    made = store.add(replace(record, **fields), [message(f"in{number}")], response(f"out{number}"))
    assert made is not None


def contents(items: Any) -> list[Any]:
    return [item.content for item in items]


def check_integrity(engine: Engine, objects: FolderStore) -> tuple[int, int]:
    """Every row has its object. Returns how many of each there are."""
    with reading(engine) as session:
        rows = set(session.scalars(select(StoredResponse.object_name)))
        num = responses.num_responses(session, "ten_1")
    names = {found.name for found in objects.list()}
    assert rows <= names
    assert num == len(rows)
    return len(rows), len(names)


def test_a_response_comes_back(store: ResponseStore) -> None:
    add(store, 1)
    record, body = store.read(VIEWER, "resp_1")
    assert bytes(body.response) == response("out1")
    assert msgspec.json.decode(body.input) == [message("in1")]
    assert record.object_name.startswith("ten_1/responses/")
    assert "resp_1" not in record.object_name
    assert record.items_bytes > 0


def test_a_chain_is_the_items_of_all(store: ResponseStore) -> None:
    for number in range(1, 4):
        add(store, number)
    earlier = store.earlier(VIEWER, "resp_3")
    assert contents(earlier.items) == ["in1", "out1", "in2", "out2", "in3", "out3"]
    assert all(isinstance(item, Item) for item in earlier.items)
    assert earlier.depth == 3
    listed = [msgspec.json.decode(item)["content"] for item in store.input_items(VIEWER, "resp_3")]
    assert listed == ["in1", "out1", "in2", "out2", "in3"]


def test_a_chain_without_a_link_cannot_be_continued(store: ResponseStore) -> None:
    for number in range(1, 5):
        add(store, number)
    store.remove(VIEWER, "resp_2")
    with pytest.raises(ChainBroken, match="deleted"):
        store.earlier(VIEWER, "resp_4")
    with pytest.raises(NotFound):
        store.earlier(VIEWER, "resp_2")
    listed = [msgspec.json.decode(item)["content"] for item in store.input_items(VIEWER, "resp_4")]
    assert listed == ["in3", "out3", "in4"]
    assert store.earlier(VIEWER, "resp_1").depth == 1


@pytest.mark.parametrize("state", ["queued", "in_progress", "failed", "cancelled"])
def test_one_that_did_not_end_well_cannot_be_continued(store: ResponseStore, state: Any) -> None:
    add(store, 1, state=state)
    with pytest.raises(ChainBroken, match=state.replace("_", " ")):
        store.earlier(VIEWER, "resp_1")


def test_a_chain_has_bounds(store: ResponseStore) -> None:
    add(store, 1, depth=MAX_DEPTH - 2)
    assert store.earlier(VIEWER, "resp_1").depth == MAX_DEPTH - 1
    add(store, 2, parent_id=None, depth=MAX_DEPTH - 1)
    with pytest.raises(ChainTooLong, match="1000 responses"):
        store.earlier(VIEWER, "resp_2")
    record = replace(NEW, id="resp_3")
    assert store.add(record, [message("x" * 10_000)], response("y")) is not None
    with pytest.raises(ChainTooLong, match="bytes"):
        store.earlier(VIEWER, "resp_3")


def test_scores_are_kept_with_the_response_and_no_part_of_a_chain(store: ResponseStore) -> None:
    scores = [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}] * 500
    part = {"type": "output_text", "text": "a", "annotations": [], "logprobs": scores}
    said = {"id": "msg_1", "type": "message", "role": "assistant", "content": [part]}
    answer = msgspec.json.encode({"status": "completed", "output": [said]})
    store.conversations.create("conv_1", "ten_1", [], {})
    for number, conversation_id in (1, None), (2, "conv_1"):
        record = replace(NEW, id=f"resp_{number}", conversation_id=conversation_id)
        assert store.add(record, [message("in")], answer) is not None
        assert bytes(store.read(VIEWER, record.id)[1].response) == answer
    earlier = store.earlier(VIEWER, "resp_1")
    assert earlier.num_bytes < 1000 < len(answer)
    [_, kept] = store.conversations.items(VIEWER, "conv_1")
    assert msgspec.json.decode(kept) == {**said, "content": [{**part, "logprobs": []}]}


def test_what_answers_repeat_counts_too(store: ResponseStore) -> None:
    for number in range(1, 5):
        parent = f"resp_{number - 1}" if number > 1 else None
        record = replace(NEW, id=f"resp_{number}", parent_id=parent, depth=number - 1)
        said = response("y", instructions="x" * 11_000)
        assert store.add(record, [message("a")], said) is not None
    assert len(store.earlier(VIEWER, "resp_3").items) == 6
    assert len(store.input_items(VIEWER, "resp_3")) == 5
    for read in (store.earlier, store.input_items):
        with pytest.raises(ChainTooLong, match="40000 bytes with their instructions"):
            read(VIEWER, "resp_4")


def failing(engine: Engine, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """The database fails when it begins, when a row is written or when it commits."""

    def fail(*_: Any) -> None:
        raise OperationalError(at, None, Exception("the database is away"))

    if at == "commit":
        event.listen(engine, "commit", fail)
    else:
        name = "appending" if at == "begin" else "add"
        monkeypatch.setattr(response_store if at == "begin" else responses, name, fail)


@pytest.mark.parametrize("at", ["begin", "row", "commit"])
def test_an_object_without_a_row_is_no_response(
    engine: Engine,
    objects: FolderStore,
    store: ResponseStore,
    monkeypatch: pytest.MonkeyPatch,
    at: str,
) -> None:
    failing(engine, monkeypatch, at)
    with pytest.raises(OperationalError):
        store.add(NEW, [message("a")], response("b"))
    assert check_integrity(engine, objects) == (0, 1)
    with pytest.raises(NotFound):
        store.read(VIEWER, "resp_1")


def test_a_failure_between_row_and_object_leaves_an_object(
    engine: Engine, objects: FolderStore, store: ResponseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> bool:
        raise OSError(f"the disk is gone: {name}")

    add(store, 1)
    monkeypatch.setattr(objects, "delete", fail)
    store.remove(VIEWER, "resp_1")
    assert check_integrity(engine, objects) == (0, 1)
    with pytest.raises(NotFound):
        store.read(VIEWER, "resp_1")


def test_what_is_stored_is_stored_where_no_object_can_be_deleted(
    engine: Engine, objects: FolderStore, store: ResponseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> bool:
        raise OSError(f"the disk is gone: {name}")

    assert store.conversations.create("conv_1", "ten_1", [], {}) is not None
    queued = replace(NEW, state="queued", owner="gw", conversation_id="conv_1")
    record = store.add(queued, [message("a")], response("", output=[]))
    assert record is not None
    monkeypatch.setattr(objects, "delete", fail)
    assert store.finish(replace(record, state="completed"), response("b"))
    assert len(store.conversations.items(VIEWER, "conv_1")) == 2
    assert store.read(VIEWER, "resp_1")[0].state == "completed"


def test_a_row_that_cannot_be_deleted_keeps_its_object(
    engine: Engine, objects: FolderStore, store: ResponseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(store, 1)
    failing(engine, monkeypatch, "begin")
    with pytest.raises(OperationalError):
        store.remove(VIEWER, "resp_1")
    assert check_integrity(engine, objects) == (1, 1)


def test_an_object_that_cannot_be_put_leaves_no_row(
    engine: Engine, objects: FolderStore, store: ResponseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str, data: bytes) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(objects, "put", fail)
    with pytest.raises(OSError, match="full"):
        store.add(NEW, [], response("b"))
    assert check_integrity(engine, objects) == (0, 0)


def test_over_the_quota_nothing_stays(engine: Engine, objects: FolderStore) -> None:
    store = ResponseStore(engine, objects, 1, 10_000, lambda: 1000.0)
    add(store, 1)
    assert store.add(replace(NEW, id="resp_2"), [], response("b")) is None
    assert check_integrity(engine, objects) == (1, 1)


def test_a_background_response_gets_its_answer_in_place(
    engine: Engine, objects: FolderStore, store: ResponseStore
) -> None:
    queued = replace(NEW, state="queued", owner="gw", heartbeat_at=1.0)
    record = store.add(queued, [message("a")], response("", output=[]))
    assert record is not None
    assert store.finish(replace(record, state="completed"), response("b"))
    assert check_integrity(engine, objects) == (1, 1)
    _, body = store.read(VIEWER, "resp_1")
    assert bytes(body.response) == response("b")
    assert msgspec.json.decode(body.input) == [message("a")]
    assert contents(store.earlier(VIEWER, "resp_1").items) == ["a", "b"]
    assert not store.finish(replace(record, state="failed"), None)


def test_one_that_was_cancelled_or_deleted_gets_none(
    engine: Engine, objects: FolderStore, store: ResponseStore
) -> None:
    queued = replace(NEW, state="queued", owner="gw", heartbeat_at=1.0)
    record = store.add(queued, [message("a")], response("", output=[]))
    assert record is not None
    store.cancel(VIEWER, "resp_1")
    assert not store.finish(replace(record, state="completed"), response("b"))
    assert check_integrity(engine, objects) == (1, 1)
    assert store.read(VIEWER, "resp_1")[0].state == "cancelled"
    store.remove(VIEWER, "resp_1")
    with pytest.raises(NotFound):
        store.finish(replace(record, state="completed"), response("b"))
    assert check_integrity(engine, objects) == (0, 0)


def test_damage_is_noticed(store: ResponseStore, tmp_path: Path) -> None:
    add(store, 1)
    [path] = [path for path in (tmp_path / "objects").rglob("*") if path.is_file()]
    path.write_bytes(path.read_bytes().replace(b"out1", b"OUT1"))
    for look in (store.read, store.earlier, store.input_items):
        with pytest.raises(Damaged):
            look(VIEWER, "resp_1")


def test_an_object_that_is_in_another_folder_is_missing(
    store: ResponseStore, objects: FolderStore
) -> None:
    add(store, 1)
    [found] = objects.list()
    objects.delete(found.name)
    with pytest.raises(NotFound):
        store.read(VIEWER, "resp_1")


def test_what_is_withdrawn_leaves_nothing(
    engine: Engine, objects: FolderStore, store: ResponseStore
) -> None:
    add(store, 1)
    store.withdraw(NEW)
    store.withdraw(NEW)
    assert check_integrity(engine, objects) == (0, 0)
