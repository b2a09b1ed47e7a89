"""Conversations as objects and rows: changed by several at a time, with no item lost."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from engine.objects.folder_store import FolderStore
from engine.objects.object_store import StoredObject
from gateway.state import conversation_store
from gateway.state.conversation_store import (
    ConversationFull,
    ConversationStore,
    Items,
    id_of,
)
from gateway.state.state_threads import Damaged
from registry.errors import NotFound
from registry.session import make_engine, reading
from registry.state import conversations, responses
from registry.state.responses import Viewer
from tests.migrated import migrated

VIEWER = Viewer("ten_1", None, 0.0)
ID = "conv_1"


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
def store(engine: Engine, objects: FolderStore) -> ConversationStore:
    store = ConversationStore(engine, objects, 10, 5000, lambda: 1000.0)
    assert store.create(ID, "ten_1", items("a"), {"k": "v"}) is not None
    return store


def items(*names: str) -> Items:
    return [
        msgspec.Raw(msgspec.json.encode({"id": name, "type": "message", "content": name}))
        for name in names
    ]


def ids(store: ConversationStore) -> list[str]:
    return [id_of(item) for item in store.items(VIEWER, ID)]


def num_objects(objects: FolderStore) -> int:
    return len(list(objects.list()))


def test_items_come_and_go(store: ConversationStore, objects: FolderStore) -> None:
    added = store.append(VIEWER, ID, items("b", "c"))
    assert added is not None
    assert [id_of(item) for item in added] == ["b", "c"]
    assert ids(store) == ["a", "b", "c"]
    store.remove_item(VIEWER, ID, "b")
    assert ids(store) == ["a", "c"]
    with pytest.raises(NotFound):
        store.remove_item(VIEWER, ID, "b")
    assert store.describe(VIEWER, ID, {"x": "y"}).details == {"x": "y"}
    assert store.get(VIEWER, ID).version == 3
    assert num_objects(objects) == 1, "the lists of before are gone"
    store.remove(VIEWER, ID)
    assert num_objects(objects) == 0
    with pytest.raises(NotFound):
        store.get(VIEWER, ID)


def test_an_id_that_is_taken_gets_another(store: ConversationStore) -> None:
    store.append(VIEWER, ID, items("a", "b", "b"))
    assert ids(store) == ["a", "a_2", "b", "b_2"]


def test_thousands_of_one_id_are_read_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    num_read = 0

    def counted(item: msgspec.Raw) -> str:
        nonlocal num_read
        num_read += 1
        return id_of(item)

    monkeypatch.setattr(conversation_store, "id_of", counted)
    made = conversation_store.with_own_ids(items("a"), items(*["a"] * 3000))
    assert len({id_of(item) for item in made}) == 3000
    assert num_read == 3001


def test_of_many_processes_none_loses_an_item(
    store: ConversationStore, engine: Engine, objects: FolderStore
) -> None:
    start = threading.Barrier(4)

    def write(number: int) -> None:
        process = ConversationStore(engine, objects, 10, 5000, lambda: 1000.0)
        start.wait()
        for turn in range(5):
            process.append(VIEWER, ID, items(f"{number}-{turn}"))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, range(4)))
    found = ids(store)
    assert sorted(found) == sorted(["a", *(f"{n}-{t}" for n in range(4) for t in range(5))])
    for number in range(4):
        own = [each for each in found if each.startswith(f"{number}-")]
        assert own == [f"{number}-{turn}" for turn in range(5)]
    assert num_objects(objects) == 1


def test_threads_of_one_process_take_turns(
    store: ConversationStore, objects: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, names, start = objects.put, list[str](), threading.Barrier(8)

    def counted(name: str, data: bytes) -> StoredObject:
        names.append(name)
        return put(name, data)

    def write(number: int) -> None:
        start.wait()
        store.append(VIEWER, ID, items(str(number)))

    monkeypatch.setattr(objects, "put", counted)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write, range(8)))
    assert (len(ids(store)), len(names)) == (9, 8), "no change was begun anew"


def test_a_change_that_is_not_wanted_changes_nothing(
    store: ConversationStore, objects: FolderStore
) -> None:
    assert store.append(VIEWER, ID, items("b"), also=lambda session: False) is None
    assert (ids(store), store.get(VIEWER, ID).version, num_objects(objects)) == (["a"], 0, 1)


def test_a_failure_in_the_transaction_changes_nothing(store: ConversationStore) -> None:
    def fail(session: object) -> bool:
        raise OperationalError("x", None, Exception("away"))

    with pytest.raises(OperationalError):
        store.append(VIEWER, ID, items("b"), also=fail)
    assert (ids(store), store.get(VIEWER, ID).version) == (["a"], 0)


def test_who_may_see_one(store: ConversationStore) -> None:
    store.append(VIEWER, ID, items("b"), "tiny")
    for viewer in (
        Viewer("ten_2", None, 0.0),
        Viewer("ten_1", frozenset({"other"}), 0.0),
        Viewer("ten_1", None, 1000.5),
    ):
        with pytest.raises(NotFound, match="'conv_1' does not exist"):
            store.items(viewer, ID)
        with pytest.raises(NotFound):
            store.append(viewer, ID, items("c"))
        with pytest.raises(NotFound):
            store.remove(viewer, ID)
    assert len(store.items(Viewer("ten_1", frozenset({"tiny"}), 1000.0), ID)) == 2


def test_bounds(store: ConversationStore, engine: Engine, objects: FolderStore) -> None:
    with pytest.raises(ConversationFull, match="maximum is 5000"):
        store.append(VIEWER, ID, items("x" * 5000))
    assert ids(store) == ["a"]
    for number in range(9):
        assert store.create(f"conv_n{number}", "ten_1", [], {}) is not None
    assert store.create("conv_last", "ten_1", [], {}) is None
    assert num_objects(objects) == 10
    store.remove(VIEWER, ID)
    with reading(engine) as session:
        assert responses.num_responses(session, "ten_1") == 9


def test_damage_is_noticed(store: ConversationStore, tmp_path: Path) -> None:
    [path] = [path for path in (tmp_path / "objects").rglob("*") if path.is_file()]
    path.write_bytes(b"[]")
    with pytest.raises(Damaged):
        store.items(VIEWER, ID)


def test_versions_move_one_by_one(store: ConversationStore, engine: Engine) -> None:
    with reading(engine) as session:
        before = conversations.get(session, VIEWER, ID)
    store.append(VIEWER, ID, items("b"))
    with reading(engine) as session:
        assert conversations.get(session, VIEWER, ID).version == before.version + 1
        assert not conversations.move(session, before), "an old version moves nothing"
