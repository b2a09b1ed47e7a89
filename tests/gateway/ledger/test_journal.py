"""The journal: durable once told, whatever the disk or the process does in between."""

import random
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.ledger.journal import Journal
from gateway.ledger.journal_segments import (
    END_BYTES,
    MARK,
    MAX_RECORD_BYTES,
    SEGMENT_HEAD,
    Damage,
    DiskFiles,
    Files,
    JournalLimits,
    JournalRefused,
    Position,
    Record,
    RecordCodec,
    UnknownRecord,
    Void,
)
from registry.money.ledger import Checkpoint, OpenRecord, Posting
from tests.gateway.journal_disk import MemoryDisk, PowerCut

SEGMENT = 4096
FOLDER = Path("/journal")
LIMITS = JournalLimits(SEGMENT, 100 * SEGMENT, 0, 0.0)
OPEN = OpenRecord("a", "ten", "key", "m", "r1", 7, 990.0, "gateway-0", 12)
POSTING = Posting(
    "a", "ten", "key", "m", "r1", "chat", "finished", 7, 0, 3, 70, 0.5, 0, 0.1, 0.6, 1
)
RECORDS: list[Record] = [OPEN, Checkpoint("a", 64), POSTING, Void("b")]


def frames(records: Sequence[Record]) -> bytes:
    codec = RecordCodec()
    return b"".join(codec.frame(record) for record in records)


def read(data: bytes) -> tuple[list[Record], list[Damage]]:
    found = [each for each, _ in RecordCodec().read(data)]
    return (
        [each for each in found if not isinstance(each, Damage)],
        [each for each in found if isinstance(each, Damage)],
    )


# The format.


def test_what_is_framed_is_read() -> None:
    segment = SEGMENT_HEAD + frames(RECORDS) + bytes(100)
    assert read(segment) == (RECORDS, [])
    assert read(SEGMENT_HEAD) == ([], [])
    assert read(b"") == ([], [])


def test_cut_at_every_byte_what_is_whole_is_read() -> None:
    """The tail of a write that a kill interrupted; with the allocated zeros behind it, too."""
    data = SEGMENT_HEAD + frames(RECORDS)
    ends = [len(SEGMENT_HEAD) + len(frames(RECORDS[:num])) for num in range(len(RECORDS) + 1)]
    for cut in range(len(SEGMENT_HEAD), len(data)):
        for tail in (b"", bytes(50)):
            there = data[:cut] + tail  # a zero that was cut off is there again
            whole = max(num for num, end in enumerate(ends) if there[:end] == data[:end])
            found, damage = read(there)
            assert found == RECORDS[:whole]
            assert all(each.torn for each in damage)


def test_any_flipped_byte_costs_one_record_at_most() -> None:
    data = SEGMENT_HEAD + frames(RECORDS)
    for at in range(len(SEGMENT_HEAD), len(data)):
        broken = bytearray(data)
        broken[at] ^= 0x5A
        found, damage = read(bytes(broken) + bytes(20))
        assert [each for each in RECORDS if each in found] == found
        assert len(found) == len(RECORDS) - 1
        (only,) = damage
        assert only.torn == (RECORDS[-1] not in found)


def test_a_hole_of_zeros_is_damage_and_not_the_end() -> None:
    parts = [frames([record]) for record in RECORDS]
    found, (hole,) = read(SEGMENT_HEAD + parts[0] + bytes(len(parts[1])) + parts[2] + parts[3])
    assert found == [RECORDS[0], *RECORDS[2:]]
    assert (hole.num_bytes, hole.torn) == (len(parts[1]), False)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300), st.binary(max_size=40))
def test_rubbish_is_never_a_record(rubbish: bytes, more: bytes) -> None:
    data = SEGMENT_HEAD + rubbish + frames([OPEN]) + MARK + more
    found, _ = read(data)
    assert found == [OPEN]


def test_a_record_of_an_earlier_release_has_defaults_for_what_is_new() -> None:
    known = ("request_id", "tenant_id", "key_id", "model", "revision", "prompt_tokens", "opened_at")
    body = b"\0" + msgspec.msgpack.encode({name: getattr(OPEN, name) for name in known})
    frame = struct.pack("<4sII", MARK, len(body), zlib.crc32(body)) + body
    assert read(frame) == ([OpenRecord("a", "ten", "key", "m", "r1", 7, 990.0)], [])


def test_a_record_of_a_later_release_stops_everything() -> None:
    class Later(Void, frozen=True):
        pass

    codec = RecordCodec()
    codec._numbers[Later] = 9
    with pytest.raises(UnknownRecord, match="newer release"):
        read(codec.frame(Later("a")))


def test_a_record_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="a record of"):
        RecordCodec().frame(Void("x" * MAX_RECORD_BYTES))


def test_the_longest_end_there_can_be_fits_into_its_room() -> None:
    names = {"request_id": 64, "tenant_id": 64, "key_id": 64, "model": 128, "revision": 128}
    texts = {name: "x" * size for name, size in names.items()} | {"kind": "k" * 32}
    numbers = dict.fromkeys(
        ("prompt_tokens", "cached_tokens", "completion_tokens", "cost_nanos", "input_nanos"),
        2**62,
    ) | dict.fromkeys(
        ("cached_nanos", "output_nanos", "service_nanos", "load_nanos", "list_nanos"), 2**62
    )
    times = dict.fromkeys(
        ("service_s", "queue_s", "ttft_s", "duration_s", "posted_at", "arrived_at"), 1.1
    ) | dict.fromkeys(("prefill_s", "decode_s", "load_s"), 1.1)
    longest = Posting(**texts, **numbers, **times, outcome="disconnected")  # type: ignore[arg-type]
    assert len(RecordCodec().frame(longest)) <= END_BYTES


# The journal.


class Heard:
    """What a journal has told, by tag."""

    def __init__(self) -> None:
        self.durable: list[Any] = []
        self.failed: dict[Any, BaseException] = {}
        self.changed = threading.Condition()

    def __call__(self, tags: Sequence[Any], error: BaseException | None) -> None:
        with self.changed:
            if error is None:
                self.durable.extend(tags)
            else:
                self.failed.update(dict.fromkeys(tags, error))
            self.changed.notify_all()

    def wait(self, condition: Callable[[], bool]) -> None:
        for _ in range(6000):
            with self.changed:
                if condition():
                    return
                self.changed.wait(0.005)
        raise AssertionError((self.durable, self.failed))


@contextmanager
def running(
    files: Files, heard: Heard, limits: JournalLimits = LIMITS, folder: Path = FOLDER
) -> Iterator[tuple[Journal, Position]]:
    journal = Journal(folder, limits, heard, files)
    begin = journal.start()
    try:
        yield journal, begin
    finally:
        journal.stop(30.0)


@pytest.fixture(autouse=True)
def _no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """FOLDER is in memory."""
    real = Path.mkdir
    monkeypatch.setattr(
        Path, "mkdir", lambda self, *a, **k: None if self == FOLDER else real(self, *a, **k)
    )
    monkeypatch.setattr("gateway.ledger.journal.RETRY_S", 0.01)


def all_of(journal: Journal, at: Position) -> list[Record]:
    found: list[Record] = []
    while True:
        records, after = journal.segments.read(at, 500)
        found += records
        if after == at:
            return found
        at = after


def left_on(disk: Files, heard: Heard | None = None) -> list[Record]:
    """What the next process finds of the ones before."""
    with running(disk, heard or Heard()) as (journal, begin):
        found: list[Record] = []
        at = begin
        while journal.segments.is_old(at):
            records, at = journal.segments.read(at, 500)
            found += records
        return found


def void(number: int) -> Void:
    return Void(f"r{number}")


def test_on_a_real_disk(tmp_path: Path) -> None:
    heard, folder = Heard(), tmp_path / "deep" / "journal"
    with running(DiskFiles(), heard, folder=folder) as (journal, begin):
        for number in range(500):
            journal.append(void(number), number)
        heard.wait(lambda: len(heard.durable) == 500)
        assert heard.durable == list(range(500))
        assert all_of(journal, begin) == [void(number) for number in range(500)]
        num_segments = len(list(folder.glob("*.journal")))
        assert num_segments > 3
        journal.segments.release(Position(3))
        assert min(folder.glob("*.journal")).name == "000000000003.journal"
        journal.segments.release(journal.segments.durable)
        assert len(list(folder.glob("*.journal"))) == 1
    with running(DiskFiles(), Heard(), folder=folder) as (journal, begin):
        last = all_of(journal, begin)
        assert last == [void(number) for number in range(500 - len(last), 500)]
        assert last
        end = journal.segments.durable
    journal.segments.discard()
    assert list(folder.iterdir()) == []
    assert end.segment > begin.segment


def test_nothing_is_read_before_it_is_durable() -> None:
    class Held(MemoryDisk):
        gate = threading.Event()

        def sync(self, descriptor: int) -> None:
            self.gate.wait()
            super().sync(descriptor)

    heard, disk = Heard(), Held()
    with running(disk, heard) as (journal, begin):
        journal.append(void(1), 1)
        while not any(inode.writes for inode in disk.paths.values()):
            pass
        assert all_of(journal, begin) == []
        assert heard.durable == []
        disk.gate.set()
        heard.wait(lambda: heard.durable == [1])
        assert all_of(journal, begin) == [void(1)]


@pytest.mark.parametrize("seed", range(6))
def test_power_cut_at_every_call(seed: int) -> None:
    """Whatever call was the last: what was told durable is there, in order, and nothing that was
    never asked for."""
    random_ = random.Random(seed)
    for cut_at in range(1, 45):
        disk, heard = MemoryDisk(), Heard()
        disk.cut_at = cut_at
        journal = Journal(FOLDER, LIMITS, heard, disk)
        asked = [void(number) for number in range(300)]
        died = threading.Event()
        journal._thread = threading.Thread(target=_until_power_cut, args=(journal, died))
        try:
            journal.start()
            for number, record in enumerate(asked):
                journal.append(record, number)
                if random_.random() < 0.1:
                    heard.changed.acquire()
                    heard.changed.wait(0.0005)
                    heard.changed.release()
            while not died.is_set() and len(heard.durable) < len(asked):
                pass
        except PowerCut:
            pass
        disk.is_dead = True
        with journal._changed:
            journal._stopping = True
            journal._changed.notify_all()
        if journal._thread.is_alive():
            journal._thread.join()
        found = left_on(disk.after_power_cut(random_))
        assert found[: len(heard.durable)] == asked[: len(heard.durable)]
        assert found == asked[: len(found)] or set(found) <= set(asked)


def _until_power_cut(journal: Journal, died: threading.Event) -> None:
    try:
        journal._run()
    except PowerCut:
        died.set()


PATIENT = JournalLimits(SEGMENT, 100 * SEGMENT, 0, 0.0, 30.0)
"""What nobody waits for is not synced by itself."""


def test_what_nobody_waits_for_survives_a_kill_at_once_and_a_power_cut_with_the_next() -> None:
    disk, heard = MemoryDisk(), Heard()
    hint = Checkpoint("a", 64)
    with running(disk, heard, PATIENT) as (journal, begin):
        assert journal.append(OPEN, "open")
        heard.wait(lambda: heard.durable == ["open"])
        journal.append_hint(hint)
        assert journal.append(POSTING, "end", hurry=False)
        killed, cut = MemoryDisk(), disk.after_power_cut(random.Random(1))
        killed.paths.update(disk.paths)
        assert left_on(killed) == [OPEN, hint, POSTING]
        assert left_on(cut)[0] == OPEN
        assert all_of(journal, begin) == [OPEN]
        assert heard.durable == ["open"]
        journal.append(Void("b"), "void")
        heard.wait(lambda: heard.durable == ["open", "end", "void"])
        assert all_of(journal, begin) == [OPEN, hint, POSTING, Void("b")]
        for number in range(300):  # over the end of a segment
            journal.append_hint(Checkpoint("a", number))
    assert left_on(disk)[-1] == Checkpoint("a", 299)
    assert journal.num_failed == 0


def test_what_nobody_waits_for_is_synced_within_its_interval() -> None:
    disk, heard = MemoryDisk(), Heard()
    with running(disk, heard, JournalLimits(SEGMENT, 100 * SEGMENT, 0, 0.0, 0.01)) as (journal, _):
        for number in range(3):
            journal.append(void(number), number, hurry=False)
            heard.wait(lambda: len(heard.durable) == number + 1)  # noqa: B023


def test_in_a_crowd_a_sync_is_for_many() -> None:
    class Counting(MemoryDisk):
        num_syncs = 0

        def sync(self, descriptor: int) -> None:
            self.num_syncs += 1
            super().sync(descriptor)

    heard, disk = Heard(), Counting()
    with running(disk, heard, JournalLimits(SEGMENT, 100 * SEGMENT, 0, 0.2, 0.0)) as (journal, _):
        for number in range(40):
            journal.append(void(number), number)
        heard.wait(lambda: len(heard.durable) == 40)
        assert disk.num_syncs <= 3


def test_what_was_written_and_not_synced_is_written_again_where_the_disk_fails() -> None:
    disk, heard = MemoryDisk(), Heard()
    with running(disk, heard, PATIENT) as (journal, begin):
        journal.append(POSTING, "end", hurry=False)
        journal.append_hint(Checkpoint("a", 64))
        disk.errors["sync"] = 1
        journal.append(Void("b"), "b")
        heard.wait(lambda: heard.durable == ["end", "b"])
        assert all_of(journal, begin) == [POSTING, Checkpoint("a", 64), Void("b")]
        assert heard.failed == {}


def test_a_write_that_fails_leaves_the_order_as_it_was() -> None:
    disk, heard = MemoryDisk(), Heard()
    with running(disk, heard, PATIENT) as (journal, begin):
        asked = [void(number) for number in range(120)]
        for number, record in enumerate(asked):
            if number % 30 == 10:
                disk.errors["write"] = 1
            is_written = journal.append(record, number, hurry=False)
            assert is_written or number > 9
        journal.append(Void("last"), "last")
        heard.wait(lambda: "last" in heard.durable)
        assert heard.durable == [*range(120), "last"]
        assert all_of(journal, begin) == [*asked, Void("last")]


@pytest.mark.parametrize("call", ["write", "sync", "rename", "allocate", "open"])
def test_a_disk_that_fails_refuses_what_opens_and_keeps_what_ends(call: str) -> None:
    disk, heard = MemoryDisk(), Heard()
    with running(disk, heard) as (journal, begin):
        journal.append(Void("before"), "before")
        heard.wait(lambda: "before" in heard.durable)
        disk.errors[call] = 3
        for number in range(200):
            journal.append(void(number), number)
        heard.wait(lambda: len(heard.durable) == 201)
        assert heard.failed == {}
        heard.wait(lambda: not journal.refusal(0))
        found = all_of(journal, begin)
        assert found == [Void("before"), *(void(number) for number in range(200))]
    # What was tried again may be there twice: it changes nothing in the database.
    assert list(dict.fromkeys(left_on(disk))) == found


def test_a_spare_one_that_is_renamed_by_half_is_made_anew() -> None:
    class Forgetful(MemoryDisk):
        """A rename that failed had come to pass."""

        def rename(self, path: Path, to: Path) -> None:
            self.paths[to] = self.paths.pop(path)
            self._call("rename")

    disk, heard = Forgetful(), Heard()
    with running(disk, heard) as (journal, begin):
        disk.errors["rename"] = 2
        for number in range(200):
            journal.append(void(number), number)
        heard.wait(lambda: len(heard.durable) == 200)
        assert all_of(journal, begin) == [void(number) for number in range(200)]


def test_what_failed_is_not_behind_for_ever() -> None:
    disk, heard = MemoryDisk(), Heard()
    with running(disk, heard) as (journal, begin):
        journal.append(Void("x" * MAX_RECORD_BYTES), "too long")
        journal.append(Void("a"), "a")
        heard.wait(lambda: heard.durable == ["a"])
        assert journal.age_s > 0
        journal.written(len(all_of(journal, begin)))
        assert journal.age_s == 0


def test_an_open_record_that_a_failing_disk_did_not_take_is_refused() -> None:
    disk, heard = MemoryDisk(), Heard()
    with running(disk, heard) as (journal, _):
        disk.errors["sync"] = 1
        journal.append(OPEN, "open")
        heard.wait(lambda: bool(heard.failed))
        assert isinstance(heard.failed["open"], JournalRefused)
        assert journal.num_sync_errors == 1
        journal.append(Void("a"), "void")  # it may be on the disk all the same
        heard.wait(lambda: heard.durable == ["void"])


def test_a_full_disk_refuses_what_is_new_and_has_room_for_every_end() -> None:
    """Nothing but the journal's own segments is left: what was opened ends, durably."""
    disk, heard = MemoryDisk(room_bytes=2 * SEGMENT), Heard()
    most = SEGMENT // END_BYTES
    with running(disk, heard) as (journal, begin):
        num_open = 0
        while not journal.refusal(num_open):
            journal.append(OpenRecord(f"r{num_open}", "t", "k", "m", "v", 7, 1.0), f"o{num_open}")
            num_open += 1
        assert num_open == most
        heard.wait(lambda: len(heard.durable) == num_open)
        disk.room_bytes = 0  # somebody else took what there was
        journal.append(Void("x"), "x")
        heard.wait(lambda: "x" in heard.durable)
        for number in range(num_open):
            journal.append(_longest(f"r{number}"), f"e{number}")
        heard.wait(lambda: len(heard.durable) == 2 * num_open + 1)
        assert heard.failed == {}
        assert "full" in journal.refusal(0)
        records = all_of(journal, begin)
        assert len(records) == 2 * num_open + 1
        disk.room_bytes = 1 << 20
        heard.wait(lambda: not journal.refusal(0))


def _longest(request_id: str) -> Posting:
    texts = [request_id, "t" * 64, "k" * 64, "m" * 128, "v" * 128, "chat", "disconnected"]
    return Posting(*texts, *[2**62] * 4, *[0.5] * 5)  # type: ignore[arg-type]


def test_a_start_on_a_full_disk_reads_what_is_left_and_takes_nothing_new() -> None:
    disk, heard = MemoryDisk(), Heard()
    with running(disk, heard) as (journal, _):
        journal.append(OPEN, "open")
        heard.wait(lambda: heard.durable == ["open"])
    disk.delete(FOLDER / "spare")
    disk.room_bytes = SEGMENT + 10
    with running(disk, heard) as (journal, begin):
        assert journal.refusal(0)
        records, at = journal.segments.read(begin, 10_000)
        assert records == [OPEN]
        assert not journal.segments.is_old(at)
        journal.append(POSTING, "end")
        disk.room_bytes = 1 << 20
        heard.wait(lambda: "end" in heard.durable)
        assert all_of(journal, at) == [POSTING]


def test_little_free_space_or_a_long_backlog_refuse_what_is_new() -> None:
    disk = MemoryDisk(room_bytes=10 * SEGMENT)
    limits = JournalLimits(SEGMENT, 2 * SEGMENT, 7 * SEGMENT, 0.0)
    heard = Heard()
    with running(disk, heard, limits) as (journal, _):
        assert not journal.refusal(0)
        disk.room_bytes = 8 * SEGMENT
        heard.wait(lambda: "full" in journal.refusal(0))
        disk.room_bytes = 100 * SEGMENT
        heard.wait(lambda: not journal.refusal(0))
        for number in range(600):
            journal.append(void(number), number)
        heard.wait(lambda: len(heard.durable) == 600)
        assert "not in the database" in journal.refusal(0)
        journal.segments.release(journal.segments.durable)
        assert not journal.refusal(0)


def test_damage_in_the_middle_is_told_and_the_rest_read(caplog: pytest.LogCaptureFixture) -> None:
    disk, heard = MemoryDisk(), Heard()
    with running(disk, heard) as (journal, _):
        for number in range(10):
            journal.append(void(number), number)
        heard.wait(lambda: len(heard.durable) == 10)
    inode = disk.paths[FOLDER / "000000000001.journal"]
    at = inode.data.index(b"r4")
    inode.data[at] ^= 1
    found = left_on(disk)
    assert found == [void(number) for number in range(10) if number != 4]
    assert "JOURNAL DAMAGED" in caplog.text
