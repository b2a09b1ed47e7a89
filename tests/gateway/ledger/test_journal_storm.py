"""The journal under threads that write while the disk fails, then a stop, a kill or a power cut:
what was told is so, and nothing is told twice."""

import contextlib
import errno
import random
import threading
import time
from collections.abc import Sequence

import pytest

from gateway.ledger.journal import Journal
from gateway.ledger.journal_segments import JournalLimits, Position, Record, Void
from registry.money.ledger import OpenRecord
from tests.gateway.journal_disk import MemoryDisk, PowerCut
from tests.gateway.ledger.test_journal import FOLDER, _no_folder, left_on

__all__ = ["_no_folder"]

WRITERS, EACH = 3, 100


class Unsteady(MemoryDisk):
    """Each call fails with `chance`, a write perhaps in its middle; writes go on beside a sync."""

    def __init__(self, random_: random.Random) -> None:
        super().__init__()
        self.random, self.chance = random_, 0.0

    def _call(self, name: str) -> None:
        super()._call(name)
        if self.chance and self.random.random() < self.chance:
            raise OSError(errno.EIO, name)

    def write(self, descriptor: int, data: bytes, offset: int) -> None:
        with self.lock:
            inode = self.descriptors[descriptor]
            error: BaseException | None = None
            try:
                self._call("write")
            except OSError as problem:
                error, data = problem, data[: self.random.randrange(len(data) + 1)]
            inode.data[offset : offset + len(data)] = data
            inode.writes.append((offset, data))
            if error is not None:
                raise error

    def sync(self, descriptor: int) -> None:
        with self.lock:
            inode = self.descriptors[descriptor]
            data, num_writes = bytes(inode.data), len(inode.writes)
        time.sleep(self.random.choice((0, 0, 0.0005, 0.002)))
        with self.lock:
            self._call("sync")
            inode.synced, inode.writes = data, inode.writes[num_writes:]


class Storm:
    """A journal with writers and a reader, and what each was told."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.disk = Unsteady(self.random)
        self.asked: dict[str, Record] = {}
        self.written: set[str] = set()
        self.told: dict[str, BaseException | None] = {}
        self.read: list[str] = []
        pauses_s = self.random.choice((0.0, 0.001)), self.random.choice((0.0, 0.003, 0.02))
        limits = JournalLimits(self.random.choice((4096, 8192)), 1 << 30, 0, *pauses_s)
        self.journal = Journal(FOLDER, limits, self._heard, self.disk)
        self.journal._thread = threading.Thread(target=self._sync)
        self._over = threading.Event()
        begin = self.journal.start()
        self.disk.chance = self.random.choice((0.0, 0.01, 0.05, 0.2))
        seeds = [self.random.random() for _ in range(WRITERS)]
        self._writers = [
            threading.Thread(target=self._write, args=(number, each))
            for number, each in enumerate(seeds)
        ]
        self._reader = threading.Thread(target=self._read, args=(begin,))
        for thread in (self._reader, *self._writers):
            thread.start()

    @property
    def durable(self) -> set[str]:
        return {name for name, error in self.told.items() if error is None}

    @property
    def refused(self) -> set[str]:
        return self.told.keys() - self.durable

    def stop(self) -> None:
        for thread in self._writers:
            thread.join()
        self.disk.chance = 0.01
        assert self.journal.stop(30.0)
        self._over.set()
        self._reader.join()

    def kill(self) -> None:
        while len(self.asked) < WRITERS * EACH // 2:
            pass
        with self.disk.lock:
            self.disk.is_dead = True
        for thread in self._writers:
            thread.join()
        with self.journal._changed:
            self.journal._stopping = True
            self.journal._changed.notify_all()
        self.journal._thread.join()
        self._over.set()
        self._reader.join()

    def _sync(self) -> None:
        with contextlib.suppress(PowerCut):
            self.journal._run()

    def _heard(self, tags: Sequence[str], error: BaseException | None) -> None:
        assert not self.told.keys() & set(tags), "told twice"
        self.told.update(dict.fromkeys(tags, error))

    def _write(self, number: int, seed: float) -> None:
        random_ = random.Random(seed)
        for count in range(EACH):
            name = f"{number}:{count:04}:" + "x" * random_.choice((0, 5, 900))
            opens = OpenRecord(name, "ten", "key", "m", "r1", 7, 990.0)
            self.asked[name] = Void(name) if random_.random() < 0.7 else opens
            try:
                if self.journal.append(self.asked[name], name, hurry=random_.random() < 0.4):
                    self.written.add(name)
            except PowerCut:
                return
            time.sleep(random_.choice((0, 0, 0, 0.001)))

    def _read(self, at: Position) -> None:
        while True:
            is_last = self._over.is_set()
            records, after = self.journal.segments.read(at, 700)
            self.read += [record.request_id for record in records]
            if after == at:
                if is_last:
                    return
                self._over.wait(0.0005)
            at = after


def in_order(names: Sequence[str]) -> bool:
    """What each writer wrote stands as it wrote it."""
    first = list(dict.fromkeys(names))
    return all(
        mine == sorted(mine)
        for number in range(WRITERS)
        for mine in [[name for name in first if name.startswith(f"{number}:")]]
    )


@pytest.mark.parametrize("seed", range(5))
def test_what_a_stop_leaves_is_all_that_was_not_refused(seed: int) -> None:
    storm = Storm(seed)
    storm.stop()
    assert storm.told.keys() == storm.asked.keys()
    assert all(isinstance(storm.asked[name], OpenRecord) for name in storm.refused)
    assert sorted(storm.read) == sorted(storm.durable)
    assert in_order(storm.read)


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_what_was_told_survives_a_kill_and_a_power_cut(seed: int, power: bool) -> None:
    storm = Storm(seed)
    storm.kill()
    disk = storm.disk.after_power_cut(storm.random) if power else MemoryDisk()
    if not power:
        disk.paths = storm.disk.paths
    found = [record.request_id for record in left_on(disk)]
    assert set(found) <= storm.asked.keys()
    assert storm.durable | set(storm.read) <= set(found)
    if not power:
        assert storm.written - storm.refused <= set(found)
        assert in_order([name for name in found if name not in storm.refused])
