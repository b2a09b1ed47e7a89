"""Objects in a folder: whole or not at all, hostile names, ranges, writers side by side."""

import hashlib
import os
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.objects.folder_store import OWNER_FILE, FolderStore
from engine.objects.object_store import (
    PIECE_BYTES,
    InvalidName,
    ObjectMissing,
    ObjectStore,
    StoreAway,
    new_name,
)

HOSTILE = (
    "",
    "/etc/passwd",
    "ten/kind",
    "ten/kind/",
    "ten/kind/a/b",
    "../kind/a",
    "ten/../a",
    "ten/kind/..",
    "ten/kind/.hidden",
    "ten/kind/a\x00b",
    "ten/kind/a\n",
    "ten/kind/ä",
    "ten//a",
    "ten/kind/" + "a" * 65,
    "C:\\ten/kind/a",
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "data" / "objects"


@pytest.fixture
def store(root: Path) -> ObjectStore:
    return FolderStore(root)


def files_of(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def test_an_object_comes_back(store: ObjectStore, root: Path) -> None:
    name = new_name("ten_1", "responses")
    data = os.urandom(100_000)
    stored = store.put(name, data)
    digest = hashlib.sha256(data).hexdigest()
    assert (stored.name, stored.size_bytes, stored.sha256) == (name, len(data), digest)
    assert store.get(name) == data
    assert store.digest(name) == digest
    assert store.stat(name).size_bytes == len(data)
    [path] = files_of(root)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for folder in (path.parent, path.parent.parent, root):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("start", "length", "expected"),
    [
        (0, None, b"0123456789"),
        (3, None, b"3456789"),
        (3, 4, b"3456"),
        (8, 100, b"89"),
        (10, 1, b""),
        (99, None, b""),
        (2, 0, b""),
    ],
)
def test_ranges(store: ObjectStore, start: int, length: int | None, expected: bytes) -> None:
    name = new_name("ten_1", "files")
    store.put(name, b"0123456789")
    assert store.get(name, start, length) == expected


def test_a_negative_range_is_refused(store: ObjectStore) -> None:
    name = new_name("ten_1", "files")
    store.put(name, b"0123456789")
    for start, length in ((-1, None), (0, -1)):
        with pytest.raises(ValueError, match="range"):
            store.get(name, start, length)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_touch_nothing(store: ObjectStore, root: Path, name: str) -> None:
    calls: tuple[Callable[[], object], ...] = (
        lambda: store.put(name, b"x"),
        lambda: store.get(name),
        lambda: store.stat(name),
        lambda: store.digest(name),
        lambda: store.delete(name),
    )
    for call in calls:
        with pytest.raises(InvalidName):
            call()
    assert not root.exists()


def test_hostile_prefixes_and_parts_are_refused(store: ObjectStore) -> None:
    for prefix in ("..", "../..", "ten_1/..", ".hidden", "a/b/c"):
        with pytest.raises(InvalidName):
            list(store.list(prefix))
    with pytest.raises(InvalidName):
        new_name("..", "responses")
    with pytest.raises(InvalidName):
        new_name("ten_1", "a/b")


def test_a_link_is_not_followed(store: ObjectStore, root: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    name = new_name("ten_1", "files")
    store.put(name, b"mine")
    [path] = files_of(root)
    path.unlink()
    path.symlink_to(secret)
    with pytest.raises(OSError, match="symbolic links"):
        store.get(name)
    assert list(store.list()) == []


def test_what_is_missing(store: ObjectStore) -> None:
    name = new_name("ten_1", "files")
    for call in (store.get, store.stat, store.digest):
        with pytest.raises(ObjectMissing):
            call(name)
    assert not store.delete(name)
    assert list(store.list()) == []
    store.put(name, b"")
    assert store.get(name) == b""
    assert store.delete(name)
    assert not store.delete(name)


def test_lists_by_prefix(store: ObjectStore) -> None:
    names = [new_name(t, k) for t in ("a", "ab") for k in ("files", "responses") for _ in "123"]
    for name in names:
        store.put(name, b"12")
    assert sorted(found.name for found in store.list()) == sorted(names)
    for prefix in ("a/", "a", "a/files/", "ab/responses"):
        wanted = [n for n in names if n.startswith(prefix.rstrip("/") + "/")]
        assert sorted(found.name for found in store.list(prefix)) == sorted(wanted)
    assert {found.size_bytes for found in store.list()} == {2}
    assert list(store.list("nobody/")) == []


def test_what_others_left_in_the_folder_is_no_object(store: ObjectStore, root: Path) -> None:
    name = new_name("ten_1", "kind")
    store.put(name, b"x")
    shard = root / "ten_1" / "kind" / name.rpartition("/")[2][:2]
    (shard / "copy of it.bak").write_bytes(b"x")
    (root / "lost+found" / "kind" / "aa").mkdir(parents=True)
    (root / "lost+found" / "kind" / "aa" / "aaaa").write_bytes(b"x")
    assert [found.name for found in store.list()] == [name]


@pytest.mark.parametrize("step", ["write", "fsync", "rename"])
def test_a_writer_that_fails_leaves_nothing(
    store: ObjectStore, root: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    name = new_name("ten_1", "responses")
    if step == "rename":
        monkeypatch.setattr(Path, "rename", fail)
    else:
        store.put(name, b"before")
        monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="full"):
        store.put(name, b"after")
    monkeypatch.undo()
    assert not [path for path in files_of(root) if path.name.startswith(".")]
    if step == "rename":
        with pytest.raises(ObjectMissing):
            store.get(name)
    else:
        assert store.get(name) == b"before"


def test_the_bytes_are_synced_before_the_name_and_the_name_after(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = new_name("ten_1", "responses")
    store.put(name, b"the folders are there")
    steps: list[str] = []
    rename, fsync = Path.rename, os.fsync

    def renamed(path: Path, to: Path) -> Path:
        steps.append("rename")
        return rename(path, to)

    def synced(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        steps.append("sync folder" if is_folder else "sync file")
        fsync(descriptor)

    monkeypatch.setattr(Path, "rename", renamed)
    monkeypatch.setattr(os, "fsync", synced)
    store.put(name, b"once more")
    assert steps == ["sync file", "rename", "sync folder"]


def test_what_a_dead_writer_left_is_no_object_and_is_deleted(
    store: ObjectStore, root: Path
) -> None:
    name = new_name("ten_1", "responses")
    store.put(name, b"mine")
    [path] = files_of(root)
    old, fresh = path.with_name(".old"), path.with_name(".fresh")
    old.write_bytes(b"half")
    os.utime(old, (1000.0, 1000.0))
    fresh.write_bytes(b"half")
    assert [found.name for found in store.list()] == [name]
    assert store.delete_unfinished(2000.0) == 1
    assert (old.exists(), fresh.exists(), path.exists()) == (False, True, True)


def test_writers_side_by_side(store: ObjectStore, root: Path) -> None:
    shared = new_name("ten_1", "responses")
    start = threading.Barrier(8)

    def write(number: int) -> list[str]:
        data = bytes([number]) * 50_000
        start.wait()
        names = []
        for _ in range(10):
            own = new_name(f"ten_{number % 3}", "responses")
            names.append(own)
            store.put(own, data)
            store.put(shared, data)
            found = store.get(shared)
            assert len(found) == 50_000
            assert len(set(found)) == 1
        return names

    with ThreadPoolExecutor(8) as threads:
        names = [name for made in threads.map(write, range(8)) for name in made]
    assert {found.name for found in store.list()} == {*names, shared}
    assert len(files_of(root)) == 81


class Database:
    """Whose objects they are."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.num_objects = 0

    def name(self) -> str:
        return self._name

    def has_objects(self) -> bool:
        return self.num_objects > 0


def test_a_folder_that_is_not_mounted_is_not_an_empty_one(root: Path, tmp_path: Path) -> None:
    owner = Database("db-1")
    store = FolderStore(root, owner)
    name = new_name("ten_1", "responses")
    with pytest.raises(ObjectMissing):
        store.get(name)
    assert not root.exists(), "nobody has put anything"
    store.put(name, b"mine")
    owner.num_objects = 1
    with pytest.raises(ObjectMissing):
        store.get(new_name("ten_1", "responses"))
    elsewhere = tmp_path / "elsewhere"
    root.rename(elsewhere)
    calls: tuple[Callable[[], object], ...] = (
        store.check,
        lambda: store.get(name),
        lambda: store.stat(name),
        lambda: store.digest(name),
        lambda: store.delete(name),
        lambda: store.put(name, b"x"),
        lambda: list(store.list()),
        lambda: store.delete_unfinished(0.0),
    )
    for is_there in (False, True):  # no folder; the empty one of a mount point
        if is_there:
            root.mkdir()
        for call in calls:
            with pytest.raises(StoreAway, match="mount the right one"):
                call()
        assert not is_there or not any(root.iterdir())
    root.rmdir()
    elsewhere.rename(root)
    assert store.get(name) == b"mine"


def test_a_folder_of_another_owner_is_left_alone(root: Path) -> None:
    name = new_name("ten_1", "responses")
    FolderStore(root, Database("db-1")).put(name, b"mine")
    other = FolderStore(root, Database("db-2"))
    for call in (other.check, lambda: list(other.list()), lambda: other.put(name, b"x")):
        with pytest.raises(StoreAway, match=r"another database.*write db-2 into"):
            call()
    (root / OWNER_FILE).write_text("db-2\n")
    assert other.get(name) == b"mine"


def test_what_an_earlier_release_stored_is_taken_over(root: Path) -> None:
    name = new_name("ten_1", "responses")
    FolderStore(root).put(name, b"mine")
    owner = Database("db-1")
    owner.num_objects = 1
    assert [found.name for found in FolderStore(root, owner).list()] == [name]
    assert (root / OWNER_FILE).read_text() == "db-1"
    assert stat.S_IMODE((root / OWNER_FILE).stat().st_mode) == 0o600


def test_owners_side_by_side(root: Path) -> None:
    stores = [FolderStore(root, Database("db-1")) for _ in range(8)]
    start = threading.Barrier(8)

    def put(store: FolderStore) -> None:
        start.wait()
        store.put(new_name("ten_1", "responses"), b"x")

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(put, stores))
    assert len(list(stores[0].list())) == 8
    assert sorted(path.name for path in root.iterdir()) == [OWNER_FILE, "ten_1"]


def test_an_object_comes_in_pieces_and_is_read_in_pieces(store: ObjectStore, root: Path) -> None:
    name = new_name("ten_1", "files")
    data = os.urandom(2 * PIECE_BYTES + 17)
    writer = store.writer(name)
    for at in range(0, len(data), 300_000):
        writer.write(data[at : at + 300_000])
    assert list(store.list()) == [], "nothing is seen before its end"
    stored = writer.finish()
    assert (stored.size_bytes, stored.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    pieces = list(store.pieces(name))
    assert [len(piece) for piece in pieces] == [PIECE_BYTES, PIECE_BYTES, 17]
    assert b"".join(pieces) == data
    assert b"".join(store.pieces(name, 5, PIECE_BYTES)) == data[5 : 5 + PIECE_BYTES]
    writer.abort()
    assert store.get(name) == data, "what was finished stays"
    with pytest.raises(ValueError, match="finished"):
        writer.write(b"more")


def test_an_object_that_is_deleted_is_read_to_its_end(store: ObjectStore) -> None:
    name = new_name("ten_1", "files")
    data = os.urandom(PIECE_BYTES + 1)
    store.put(name, data)
    pieces = store.pieces(name)
    first = next(pieces)
    assert store.delete(name)
    assert first + b"".join(pieces) == data
    with pytest.raises(ObjectMissing):
        next(store.pieces(name))


def test_an_aborted_writer_leaves_nothing(store: ObjectStore, root: Path) -> None:
    writer = store.writer(new_name("ten_1", "files"))
    writer.write(b"a")
    writer.abort()
    writer.abort()
    assert files_of(root) == []
    with pytest.raises(ValueError, match="aborted"):
        writer.finish()
