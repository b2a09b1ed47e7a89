"""The warm tier: bounded, least recently used, there after its worker, one for all workers."""

import mmap
import os
import random
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
    return names(folder)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "w-lock")


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
    assert tier.is_filling("cc")
    assert tier.used_bytes == PACK  # another worker is writing it


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
    assert len(names(tmp_path)) == 2
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


def two(folder: Path, capacity: int) -> tuple[HostTier, HostTier]:
    """Tiers of two workers: this process, and the one that started it."""
    return HostTier(folder, "w", capacity), HostTier(folder, "w", capacity, pid=os.getppid())


def test_a_pack_that_one_worker_has_filled_is_warm_for_all(tmp_path: Path) -> None:
    one, other = two(tmp_path, 3 * PACK)
    fill = one.begin_fill("aa", PACK)
    assert fill is not None
    assert other.begin_fill("aa", PACK) is None  # it is on its way
    assert other.is_filling("aa")
    assert (other.used_bytes, other.has("aa")) == (PACK, False)
    os.pwrite(fill.descriptor, b"a" * PACK, 0)
    one.commit(fill)
    before = other.num_changes
    other.look()
    assert other.has("aa")
    assert other.num_changes > before
    other.release(get(other, "aa"))
    assert put(other, "bb")
    one.look()
    assert one.used_bytes == other.used_bytes == 2 * PACK
    one.check_integrity()


def test_all_workers_keep_within_one_bound(tmp_path: Path) -> None:
    one, other = two(tmp_path, 2 * PACK)
    assert put(one, "aa")
    fill = other.begin_fill("bb", PACK)
    assert fill is not None
    assert one.begin_fill("cc", 2 * PACK) is None  # that would push out what is being filled
    other.abandon(fill)
    files(other, tmp_path)
    assert put(one, "cc", PACK)
    assert put(other, "dd")  # drops the oldest, which another filled
    one.look()
    assert [r for r in ("aa", "bb", "cc", "dd") if one.has(r)] == ["cc", "dd"]
    assert one.used_bytes == 2 * PACK


def test_who_reads_what_another_drops_reads_on(tmp_path: Path) -> None:
    one, other = two(tmp_path, PACK)
    put(one, "aa")
    other.look()
    slab = get(other, "aa")
    one.keep_only([])
    other.look()
    assert not other.has("aa")
    assert bytes(slab.view) == b"a" * PACK
    other.release(slab)
    other.close(keep=True)
    assert slab.map is None


def test_packs_are_worth_what_they_are_to_all_workers(tmp_path: Path) -> None:
    one, other = two(tmp_path, 2 * PACK)
    put(one, "aa")
    put(one, "bb")
    other.look()
    other.worth = lambda revision: 5.0 if revision == "aa" else 0.0
    one.worth = lambda revision: 1.0 if revision == "cc" else 0.0
    other.report_worth(0.0)
    assert put(one, "cc")
    assert [r for r in ("aa", "bb", "cc") if one.has(r)] == ["aa", "cc"]
    other.worth = lambda revision: 9.0 if revision == "cc" else 0.0
    other.report_worth(0.5)  # too early to say it again
    one.worth = lambda revision: 5.5 if revision == "dd" else 0.0
    other.look()
    slab = get(other, "aa")
    other.report_worth(1.0)
    assert not put(one, "dd")  # one is being read, the other worth more
    other.release(slab)
    other.report_worth(2.0)
    assert put(one, "dd")
    assert [r for r in ("aa", "cc", "dd") if one.has(r)] == ["cc", "dd"]
    other.close(keep=True)
    assert not list(tmp_path.glob(f"w-worth-{os.getppid()}"))


def test_nobody_waits_for_another_s_decision(tmp_path: Path) -> None:
    one, other = two(tmp_path, PACK)
    with one._folder.deciding() as is_mine:
        assert is_mine
        assert other.begin_fill("aa", PACK) is None
    assert put(other, "aa")


def test_what_a_dead_worker_said_and_left_does_not_count(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    dead = HostTier(tmp_path, "w", 2 * PACK, pid=gone.pid)
    assert put(dead, "aa")
    dead.worth = lambda revision: 100.0
    dead.report_worth(0.0)
    assert dead.begin_fill("bb", PACK) is not None
    one = HostTier(tmp_path, "w", 2 * PACK)
    assert names(tmp_path) == ["w-aa.pack"]
    one.worth = lambda revision: 1.0
    assert put(one, "cc", 2 * PACK)
    assert files(one, tmp_path) == ["w-cc.pack"]


def test_a_pack_that_several_want_comes_in_for_what_it_is_worth_to_all(tmp_path: Path) -> None:
    one, other = two(tmp_path, PACK)
    put(one, "aa")
    for tier in (one, other):
        tier.look()
        tier.worth = lambda revision: {"aa": 0.5, "bb": 0.9}[revision]
    one.worth = lambda revision: {"aa": 1.0, "bb": 0.9}[revision]
    assert not put(one, "bb")
    one.report_worth(0.0)
    assert put(other, "bb")  # 1.8 against 1.5: neither alone would have it


def test_what_a_worker_was_writing_when_it_died_goes_at_the_next_look(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    dying = HostTier(tmp_path, "w", 2 * PACK, pid=child.pid)
    assert dying.begin_fill("aa", PACK) is not None
    one = HostTier(tmp_path, "w", 2 * PACK)
    assert one.used_bytes == PACK
    child.kill()
    child.wait()
    child.stdin.close()  # type: ignore[union-attr]
    time.sleep(0.25)
    one.look()
    assert (one.used_bytes, names(tmp_path)) == (0, [])


def test_a_file_that_is_renamed_while_the_folder_is_read_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two(tmp_path, 2 * PACK)
    fill = one.begin_fill("aa", PACK)
    assert fill is not None
    lstat = Path.lstat

    def commits(path: Path) -> os.stat_result:
        if ".tmp-" in path.name and fill.path.exists():
            one.commit(fill)
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", commits)
    assert other.begin_fill("bb", 2 * PACK) is None or not other.has("aa")
    assert other.used_bytes <= 2 * PACK


def test_a_pack_that_cannot_be_mapped_now_is_still_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = HostTier(tmp_path, "w", PACK)
    put(tier, "aa")
    tier.close(keep=True)
    tier = HostTier(tmp_path, "w", PACK)

    def no_descriptors(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(mmap, "mmap", no_descriptors)
        assert tier.acquire("aa", PACK) is None
    tier.release(get(tier, "aa"))


def test_two_workers_at_random_keep_one_book(tmp_path: Path) -> None:
    """Neither the bound nor a byte of a pack is ever wrong, whoever fills, reads and drops."""
    for seed in range(30):
        folder = tmp_path / str(seed)
        folder.mkdir()
        rng = random.Random(seed)
        tiers = two(folder, 5 * PACK)
        worths = {r: rng.random() for r in ("aa", "bb", "cc", "dd", "ee")}
        read: list[tuple[HostTier, Slab]] = []
        for step in range(120):
            tier = rng.choice(tiers)
            revision = rng.choice(list(worths))
            action = rng.randrange(6)
            if action < 2:
                put(tier, revision, PACK * (1 + list(worths).index(revision) % 3))
            elif action == 2 and tier.has(revision):
                size = PACK * (1 + list(worths).index(revision) % 3)
                slab = tier.acquire(revision, size)
                if slab is not None:
                    assert bytes(slab.view) == revision[:1].encode() * size
                    read.append((tier, slab))
            elif action == 3 and read:
                done = read.pop(rng.randrange(len(read)))
                assert set(bytes(done[1].view)) == {ord(done[1].revision[0])}
                done[0].release(done[1])
            elif action == 4:
                worths[revision] = rng.random()
                tier.worth = lambda revision, of=dict(worths): of[revision]  # type: ignore[misc]
                tier.report_worth(float(2 * step))
            else:
                tier.look()
            on_disk = sum(p.stat().st_size for p in folder.glob("w-*.pack"))
            assert on_disk <= 5 * PACK
            tier.look()
            tier.check_integrity()
            assert tier.used_bytes == on_disk


def test_only_this_users_own_files_are_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert put(HostTier(tmp_path, "w", 3 * PACK), "aa")
    (tmp_path / "w-bb.pack").symlink_to(tmp_path / "w-aa.pack")
    assert [HostTier(tmp_path, "w", 3 * PACK).has(name) for name in ("aa", "bb")] == [True, False]
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert not HostTier(tmp_path, "w", 3 * PACK).has("aa")
