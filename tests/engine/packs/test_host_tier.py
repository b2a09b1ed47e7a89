"""The warm tier: bounded, least recently used, and still there after its worker."""

import mmap
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from engine.errors import IntegrityError
from engine.packs.host_tier import HostTier, Slab

PACK = 4096


def put(tier: HostTier, revision: str, size: int = PACK) -> bool:
    fill = tier.begin_fill(revision, size)
    if fill is None:
        return False
    os.pwrite(fill.descriptor, revision[:1].encode() * size, 0)
    fill.populate()
    tier.commit(fill)
    tier.check_integrity()
    return True


def files(tier: HostTier, folder: Path) -> list[str]:
    """What is left once everything dropped is deleted."""
    end = time.monotonic() + 20
    while tier.is_deleting:
        assert time.monotonic() < end
        time.sleep(0.001)
    return sorted(path.name for path in folder.iterdir())


def get(tier: HostTier, revision: str, size: int = PACK) -> Slab:
    slab = tier.acquire(revision, size)
    assert slab is not None
    assert bytes(slab.view) == revision[:1].encode() * size
    return slab


def test_least_recently_used_goes_first(tmp_path: Path) -> None:
    tier = HostTier(tmp_path, "w", 3 * PACK)
    for revision in ("aa", "bb", "cc"):
        assert put(tier, revision)
    tier.release(get(tier, "aa"))
    assert put(tier, "dd")
    assert [r for r in ("aa", "bb", "cc", "dd") if tier.has(r)] == ["aa", "cc", "dd"]
    assert files(tier, tmp_path) == ["w-aa.pack", "w-cc.pack", "w-dd.pack"]
    assert tier.used_bytes == 3 * PACK


def test_what_is_read_stays(tmp_path: Path) -> None:
    tier = HostTier(tmp_path, "w", 2 * PACK)
    put(tier, "aa")
    put(tier, "bb")
    one, two = get(tier, "aa"), get(tier, "bb")
    assert tier.begin_fill("cc", PACK) is None
    tier.keep_only([])
    assert tier.has("aa")
    tier.release(one)
    assert put(tier, "cc")
    assert not tier.has("aa")
    tier.release(two)
    tier.release(two)
    with pytest.raises(IntegrityError, match="too often"):
        tier.check_integrity()


def test_too_large_or_no_tier(tmp_path: Path) -> None:
    assert not put(HostTier(tmp_path, "w", PACK), "aa", 2 * PACK)
    assert not put(HostTier(tmp_path, "w", 0), "aa")
    assert not put(HostTier(tmp_path / "missing", "w", PACK), "aa")
    assert list(tmp_path.iterdir()) == []


def test_packs_outlive_the_worker_in_order_of_use(tmp_path: Path) -> None:
    first = HostTier(tmp_path, "w", 3 * PACK)
    for number, revision in enumerate(("aa", "bb", "cc")):
        put(first, revision)
        os.utime(tmp_path / f"w-{revision}.pack", (number, number))
    first.release(get(first, "aa"))
    first.close(keep=True)
    second = HostTier(tmp_path, "w", 2 * PACK)  # less room than before
    assert [r for r in ("aa", "bb", "cc") if second.has(r)] == ["aa", "cc"]
    second.release(get(second, "aa"))
    second.close(keep=False)
    assert list(tmp_path.iterdir()) == []


def test_half_written_packs_of_the_dead_are_removed(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    dead = tmp_path / f"w-aa.pack.tmp-{gone.pid}"
    dropped = tmp_path / f"w-aa.pack.old-{gone.pid}-3"
    ours = tmp_path / f"w-bb.pack.tmp-{os.getpid()}"  # an earlier process with our number
    alive = tmp_path / f"w-cc.pack.tmp-{os.getppid()}"
    other = tmp_path / "w2-dd.pack"
    for path in (dead, dropped, ours, alive, other):
        path.write_bytes(b"x" * PACK)
    tier = HostTier(tmp_path, "w", PACK)
    assert {path.name for path in tmp_path.iterdir()} == {alive.name, other.name}
    assert tier.used_bytes == 0


def test_a_file_of_the_wrong_size_is_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "w-aa.pack").write_bytes(b"a" * 100)
    tier = HostTier(tmp_path, "w", PACK)
    assert tier.has("aa")
    assert tier.acquire("aa", PACK) is None
    assert not tier.has("aa")
    assert files(tier, tmp_path) == []


def test_a_file_removed_by_hand_is_missed_without_harm(tmp_path: Path) -> None:
    tier = HostTier(tmp_path, "w", PACK)
    put(tier, "aa")
    tier.close(keep=True)
    tier = HostTier(tmp_path, "w", PACK)
    (tmp_path / "w-aa.pack").unlink()
    assert tier.acquire("aa", PACK) is None


def test_an_abandoned_fill_leaves_nothing(tmp_path: Path) -> None:
    tier = HostTier(tmp_path, "w", PACK)
    fill = tier.begin_fill("aa", PACK)
    assert fill is not None
    assert tier.is_filling("aa")
    assert tier.begin_fill("aa", PACK) is None
    assert tier.begin_fill("bb", PACK) is None  # its room is taken
    tier.abandon(fill)
    assert files(tier, tmp_path) == []
    assert tier.used_bytes == 0
    assert put(tier, "aa")
    tier.close(keep=False)
    assert list(tmp_path.iterdir()) == []


def test_a_mapping_survives_the_eviction_of_its_file(tmp_path: Path) -> None:
    tier = HostTier(tmp_path, "w", PACK)
    put(tier, "aa")
    slab = get(tier, "aa")
    view = slab.view
    tier.release(slab)
    put(tier, "bb")  # drops aa
    assert bytes(view) == b"a" * PACK


def test_what_is_dropped_loses_its_name_at_once_and_is_deleted_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, unlink = threading.Event(), Path.unlink
    threads: set[int] = set()

    def slow(path: Path, missing_ok: bool = False) -> None:
        assert gate.wait(20)
        threads.add(threading.get_ident())
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", slow)
    tier = HostTier(tmp_path, "w", PACK)
    put(tier, "aa")
    tier.keep_only([])
    assert tier.is_deleting
    assert not tier.has("aa")
    assert tier.used_bytes == 0
    assert put(tier, "aa")  # the same pack again, while the old one is still there
    assert len(list(tmp_path.iterdir())) == 2
    gate.set()
    assert files(tier, tmp_path) == ["w-aa.pack"]
    tier.release(get(tier, "aa"))
    assert threading.get_ident() not in threads
    tier.close(keep=False)


def test_memory_is_unmapped_when_a_pack_is_dropped(tmp_path: Path) -> None:
    tier = HostTier(tmp_path, "w", PACK)
    put(tier, "aa")
    slab = get(tier, "aa")
    mapped = slab.map
    assert isinstance(mapped, mmap.mmap)
    tier.release(slab)
    tier.keep_only([])
    tier.close(keep=True)
    assert mapped.closed
    assert slab.map is None


def test_a_fill_whose_file_is_gone_can_be_abandoned(tmp_path: Path) -> None:
    tier = HostTier(tmp_path, "w", 3 * PACK)
    fill = tier.begin_fill("aa", PACK)
    assert fill is not None
    fill.path.unlink()
    with pytest.raises(OSError, match="aa"):
        tier.commit(fill)
    tier.abandon(fill)
    assert not tier.is_filling("aa")
    assert put(tier, "aa")


def test_only_this_users_own_files_are_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert put(HostTier(tmp_path, "w", 3 * PACK), "aa")
    (tmp_path / "w-bb.pack").symlink_to(tmp_path / "w-aa.pack")
    assert [HostTier(tmp_path, "w", 3 * PACK).has(name) for name in ("aa", "bb")] == [True, False]
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert not HostTier(tmp_path, "w", 3 * PACK).has("aa")
