"""The warm tier: bounded, least recently used, and still there after its worker."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import IntegrityError
from engine.host_tier import HostTier, Slab

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
    assert len(list(tmp_path.iterdir())) == 3
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
    ours = tmp_path / f"w-bb.pack.tmp-{os.getpid()}"  # an earlier process with our number
    alive = tmp_path / f"w-cc.pack.tmp-{os.getppid()}"
    other = tmp_path / "w2-dd.pack"
    for path in (dead, ours, alive, other):
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
    assert list(tmp_path.iterdir()) == []


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
    assert list(tmp_path.iterdir()) == []
    assert tier.used_bytes == 0
    tier.begin_fill("aa", PACK)
    tier.close(keep=True)
    assert list(tmp_path.iterdir()) == []


def test_a_mapping_survives_the_eviction_of_its_file(tmp_path: Path) -> None:
    tier = HostTier(tmp_path, "w", PACK)
    put(tier, "aa")
    slab = get(tier, "aa")
    view = slab.view
    tier.release(slab)
    put(tier, "bb")  # drops aa
    assert bytes(view) == b"a" * PACK


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
