"""What is deleted when: expired responses, objects without a row, what dead processes left."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Engine

from engine.objects.folder_store import FolderStore
from engine.objects.object_store import StoreAway, new_name
from gateway.settings.state_settings import DAY_S
from gateway.state.background import LOST_S
from gateway.state.objects import DatabaseOwner
from gateway.state.response_store import ResponseStore
from gateway.state.sweeper import BATCH, ORPHAN_AGE_S, StateSweeper, Swept
from registry.accounts import tenants
from registry.session import appending, make_engine, reading, writing
from registry.state import idempotency, responses
from registry.state.idempotency import IdempotencyRecord
from registry.state.responses import ResponseRecord, Viewer
from tests.migrated import migrated

NOW_AT = 1e9
NEW = ResponseRecord("resp_1", "ten_1", None, "tiny", "completed", 0, "", "", 0, NOW_AT)
BODY = b'{"status":"completed","output":[]}'


class World:
    """A sweeper with what it sweeps, at a time that the test sets."""

    def __init__(self, folder: Path, days: int = 30) -> None:
        url = f"sqlite:///{folder / 'polyhost.db'}"
        migrated(url)
        self.now_at = NOW_AT
        self.engine: Engine = make_engine(url)
        self.root = folder / "objects"
        self.objects = FolderStore(self.root, DatabaseOwner(self.engine))
        self.store = ResponseStore(self.engine, self.objects, 10_000, 10_000, lambda: self.now_at)
        self.sweeper = StateSweeper(self.engine, self.objects, days, 600.0, lambda: self.now_at)

    def add(self, response_id: str, **fields: object) -> str:
        """Returns the object's name. It is as old as the response."""
        made = self.store.add(replace(NEW, id=response_id, **fields), [], BODY)  # type: ignore[arg-type]
        assert made is not None
        self.age(made.object_name, made.created_at)
        return made.object_name

    def age(self, name: str, at: float) -> None:
        tenant, kind, own = name.split("/")
        path = self.objects._root / tenant / kind / own[:2] / own
        os.utime(path, (at, at))

    @property
    def names(self) -> set[str]:
        return {found.name for found in self.objects.list()}

    def state(self, response_id: str) -> str:
        with reading(self.engine) as session:
            return responses.get(session, Viewer("ten_1", None, 0.0), response_id).state


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.engine.dispose()


def test_expired_responses_go_with_their_objects(world: World) -> None:
    world.add("resp_1", created_at=NOW_AT - 31 * DAY_S)
    kept = world.add("resp_2", created_at=NOW_AT - 29 * DAY_S)
    assert world.sweeper.look() == Swept(num_expired=1)
    assert world.names == {kept}
    assert world.sweeper.look() == Swept()
    world.now_at += 2 * DAY_S
    assert world.sweeper.look().num_expired == 1
    assert world.names == set()


def test_a_tenants_own_retention_is_the_shorter_one(world: World) -> None:
    kept = []
    for name, days, is_kept in (
        ("a", 3, False),
        ("b", 60, True),
        ("c", None, True),
        ("d", 0, False),
    ):
        with writing(world.engine, "test") as session:
            tenant = tenants.create_tenant(session, name, now_at=0.0)
            if days is not None:
                tenants.update_tenant(session, tenant.id, response_retention_days=days, now_at=0.0)
        at = NOW_AT - 10 * DAY_S
        made = world.add(f"resp_{name}", tenant_id=tenant.id, created_at=at)
        kept += [made] if is_kept else []
    assert world.sweeper.look().num_expired == 2
    assert world.names == set(kept)


def test_more_than_a_batch(world: World) -> None:
    for number in range(BATCH + 3):
        world.add(f"resp_{number}", created_at=NOW_AT - 31 * DAY_S)
    assert world.sweeper.look().num_expired == BATCH + 3
    assert world.names == set()


def test_objects_without_a_row_go_when_they_are_old(world: World) -> None:
    kept = world.add("resp_1", created_at=NOW_AT - 2 * ORPHAN_AGE_S)
    old, fresh, files = (new_name("ten_1", kind) for kind in ("responses", "responses", "packs"))
    for name, at in (
        (old, NOW_AT - ORPHAN_AGE_S - 1),
        (fresh, NOW_AT - ORPHAN_AGE_S + 1),
        (files, 0),
    ):
        world.objects.put(name, b"x")
        world.age(name, at)
    stray = world.objects._root / "ten_1" / "responses" / "aa" / "aa.bak"
    stray.parent.mkdir(exist_ok=True)
    stray.write_bytes(b"x")
    os.utime(stray, (0, 0))
    assert world.sweeper.look() == Swept(num_orphans=1)
    assert stray.exists()
    assert world.names == {kept, fresh, files}, "what is of another kind is somebody else's"


def test_conversations_go_when_they_were_not_changed_for_long(world: World) -> None:
    store = world.store.conversations
    assert store.create("conv_1", "ten_1", [], {}) is not None
    world.now_at += 20 * DAY_S
    assert store.create("conv_2", "ten_1", [], {}) is not None
    store.describe(Viewer("ten_1", None, 0.0), "conv_1", {"a": "b"})
    world.now_at += 20 * DAY_S
    assert world.sweeper.look() == Swept()
    orphan = new_name("ten_1", "conversations")
    world.objects.put(orphan, b"[]")
    world.age(orphan, NOW_AT)
    world.now_at += 11 * DAY_S
    assert world.sweeper.look() == Swept(num_expired=2, num_orphans=1)
    assert world.names == set()


def test_what_dead_processes_were_making_has_failed(world: World) -> None:
    world.add("resp_1", state="in_progress", owner="dead", heartbeat_at=NOW_AT - LOST_S - 1)
    world.add("resp_2", state="queued", owner="alive", heartbeat_at=NOW_AT - LOST_S + 1)
    assert world.sweeper.look() == Swept(num_lost=1)
    assert (world.state("resp_1"), world.state("resp_2")) == ("failed", "queued")


def test_nothing_is_deleted_while_the_folder_is_away(world: World) -> None:
    world.add("resp_1", created_at=NOW_AT - 31 * DAY_S)
    kept = world.add("resp_2")
    elsewhere = world.root.with_name("elsewhere")
    world.root.rename(elsewhere)
    for _ in range(2):
        with pytest.raises(StoreAway):
            world.sweeper.look()
        world.root.mkdir(exist_ok=True)
    assert world.state("resp_1") == "completed"
    world.root.rmdir()
    elsewhere.rename(world.root)
    assert world.sweeper.look() == Swept(num_expired=1)
    assert world.names == {kept}


def test_objects_of_another_database_are_no_orphans(world: World, tmp_path: Path) -> None:
    world.add("resp_1", created_at=NOW_AT - 2 * ORPHAN_AGE_S)
    (tmp_path / "other").mkdir()
    other = World(tmp_path / "other")
    other.sweeper = StateSweeper(
        other.engine,
        FolderStore(world.root, DatabaseOwner(other.engine)),
        30,
        600.0,
        lambda: NOW_AT,
    )
    with pytest.raises(StoreAway):
        other.sweeper.look()
    other.engine.dispose()
    assert len(world.names) == 1


def test_old_keys_go(world: World) -> None:
    key = IdempotencyRecord("ten_1", "k" * 64, "b" * 64, "resp_1", True, NOW_AT)
    with appending(world.engine, "test") as session:
        assert idempotency.claim(session, key, claim_s=1.0) is None
    world.sweeper.look()
    world.now_at += idempotency.KEEP_S + 1
    world.sweeper.look()
    with reading(world.engine) as session:
        assert session.get(idempotency.IdempotencyKey, f"ten_1/{'k' * 64}") is None
