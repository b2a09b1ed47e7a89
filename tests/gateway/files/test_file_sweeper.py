"""What is left of files where a process dies at each step, and that the sweeper takes it."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Engine

from engine.objects.folder_store import FolderStore
from engine.objects.object_store import ObjectMissing
from gateway.files.file_store import FileStore
from gateway.settings.state_settings import DAY_S
from gateway.state import sweeper
from gateway.state.sweeper import ORPHAN_AGE_S, StateSweeper, Swept
from registry.errors import NotFound
from registry.session import make_engine, reading
from registry.state import file_quota, files, uploads
from registry.state.file_quota import FileBounds, FileReservation, FileUsage
from registry.state.files import FileRecord, FileViewer
from registry.state.uploads import UploadPartRecord, UploadRecord
from tests.migrated import migrated

NOW_AT = 1e9
NEW = FileRecord("file-1", "ten_1", "batch", "a", 0, "", "", NOW_AT, NOW_AT + 3600)
UPLOAD = UploadRecord("upload_1", "ten_1", "batch", "a", 4, "pending", 0, 0, NOW_AT, NOW_AT + 3600)


class World:
    """A sweeper with what it sweeps, at a time that the test sets."""

    def __init__(self, folder: Path) -> None:
        url = f"sqlite:///{folder / 'polyhost.db'}"
        migrated(url)
        self.now_at = NOW_AT
        self.engine: Engine = make_engine(url)
        self.objects = FolderStore(folder / "objects")
        self.store = FileStore(self.engine, self.objects, FileBounds(1000, 10))
        self.sweeper = self.swept_after(30)
        self.root = folder / "objects"

    def swept_after(self, days: int) -> StateSweeper:
        return StateSweeper(
            self.engine, self.objects, 30, 600.0, lambda: self.now_at, file_retention_days=days
        )

    def reserve(self, file_id: str = "file-1") -> None:
        self.store.reserve(FileReservation(file_id, "ten_1", 100, NOW_AT + 3660))

    def add(self, file_id: str = "file-1", **times: float) -> None:
        self.reserve(file_id)
        writer = self.store.writer("ten_1", files.KIND)
        writer.write(b"data")
        assert self.store.keep(writer, replace(NEW, id=file_id, **times)) is not None  # type: ignore[arg-type]
        self.age()

    def age(self) -> None:
        """All objects are as old as the clock says."""
        for path in self.paths:
            os.utime(path, (self.now_at, self.now_at))

    @property
    def paths(self) -> list[Path]:
        return [path for path in self.root.rglob("*") if path.is_file()]

    @property
    def usage(self) -> FileUsage:
        with reading(self.engine) as session:
            return file_quota.usage(session, "ten_1")

    def viewer(self) -> FileViewer:
        return FileViewer("ten_1", self.now_at, 0.0)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.engine.dispose()


def test_files_past_their_end_go_with_their_objects(world: World) -> None:
    world.add("file-1")
    world.add("file-2", expires_at=NOW_AT + 9999 * DAY_S)
    assert world.sweeper.look() == Swept()
    world.now_at += 3600
    assert world.sweeper.look() == Swept(num_expired=1)
    assert (world.usage, len(world.paths)) == (FileUsage(1, 4), 1)
    world.now_at += 31 * DAY_S
    assert world.sweeper.look() == Swept(num_expired=1), "older than the setting says"
    assert (world.usage, world.paths) == (FileUsage(), [])


def test_where_none_are_kept_all_go(world: World) -> None:
    world.add("file-1")
    assert world.swept_after(0).look() == Swept(num_expired=1)
    assert (world.usage, world.paths) == (FileUsage(), [])


def test_a_process_that_dies_while_a_file_comes_leaves_nothing_for_ever(world: World) -> None:
    world.reserve()
    writer = world.store.writer("ten_1", files.KIND)
    writer.write(b"half")
    world.age()
    world.sweeper.look()
    assert world.usage == FileUsage(1, 100), "it may still be at work"
    world.now_at += ORPHAN_AGE_S + 1
    world.sweeper.look()
    assert (world.usage, world.paths) == (FileUsage(), [])
    writer.abort()


def test_a_process_that_dies_between_object_and_row_leaves_nothing_for_ever(world: World) -> None:
    world.reserve()
    writer = world.store.writer("ten_1", files.KIND)
    writer.write(b"data")
    stored = writer.finish()
    world.age()
    world.sweeper.look()
    assert world.objects.get(stored.name) == b"data"
    world.now_at += ORPHAN_AGE_S + 1
    assert world.sweeper.look() == Swept(num_orphans=1)
    with pytest.raises(ObjectMissing):
        world.objects.get(stored.name)
    assert world.usage == FileUsage()


def test_a_file_that_was_kept_outlives_every_look(world: World) -> None:
    world.add("file-1", expires_at=NOW_AT + 20 * DAY_S)
    for _ in range(3):
        world.now_at += 6 * DAY_S
        assert world.sweeper.look() == Swept()
    record = world.store.get(world.viewer(), "file-1")
    assert b"".join(world.store.pieces(record)) == b"data"


def test_an_upload_that_nobody_completes_goes_with_its_parts(world: World) -> None:
    world.store.add_upload(UPLOAD)
    world.store.claim_part(world.viewer(), "upload_1", 500)
    writer = world.store.writer("ten_1", uploads.KIND)
    writer.write(b"data")
    part = UploadPartRecord("part_1", "upload_1", 0, "", NOW_AT)
    world.store.keep_part(writer, part, 500)
    world.store.claim_part(world.viewer(), "upload_1", 400)  # and dies while it comes
    world.age()
    world.sweeper.look()
    assert (world.usage, len(world.paths)) == (FileUsage(1, 404), 1)
    world.now_at += 3600
    assert world.sweeper.look() == Swept(num_expired=1)
    assert (world.usage, world.paths) == (FileUsage(), [])
    assert world.store.upload(world.viewer(), "upload_1")[0].state == "expired"
    world.now_at += uploads.KEEP_S
    world.sweeper.look()
    with pytest.raises(NotFound):
        world.store.upload(world.viewer(), "upload_1")


def test_one_look_takes_all_that_is_over(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeper, "BATCH", 2)
    monkeypatch.setattr(sweeper, "PAUSE_S", 0.0)
    for n in range(5):
        world.store.add_upload(replace(UPLOAD, id=f"upload_{n}"))  # without parts
        world.reserve(f"file-{n}")
    world.now_at += 3660
    assert world.sweeper.look() == Swept(), "there were no objects"
    assert world.usage == FileUsage()
