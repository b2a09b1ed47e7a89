"""The thread between journal and database: it outlives what is raised in it, or it is missed."""

import asyncio
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Engine

from gateway.errors import UNAVAILABLE, ApiError
from gateway.ledger.journal import Journal
from gateway.ledger.journal_segments import JournalLimits, JournalStopped
from gateway.ledger.ledger_writer import LedgerWriter
from registry.money.ledger import Posting, open_many
from registry.session import make_engine, writing
from tests.gateway.ledger.test_ledger import (
    ledger_on,
    open_in,
    opened,
    posting,
    postings_in,
    started,
)
from tests.migrated import migrated


@pytest.fixture(name="engine")
def _engine(tmp_path: Path) -> Iterator[Engine]:
    url = f"sqlite:///{tmp_path / 'polyhost.db'}"
    migrated(url)
    engine = make_engine(url)
    yield engine
    engine.dispose()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the next try."""
    monkeypatch.setattr("gateway.ledger.ledger_writer.FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr("gateway.ledger.ledger_writer.LONGEST_PAUSE_S", 0.001)


def faulty(monkeypatch: pytest.MonkeyPatch, name: str, *faults: BaseException | None) -> list[str]:
    """The writer's method raises these, one a call, behind what it does (None: nothing)."""
    whole, left = getattr(LedgerWriter, name), list(faults)
    calls: list[str] = []

    def call(self: LedgerWriter, *arguments: object) -> object:
        done = whole(self, *arguments)
        calls.append(name)
        fault = left.pop(0) if left else None
        if fault is not None:
            raise fault
        return done

    monkeypatch.setattr(LedgerWriter, name, call)
    return calls


@pytest.mark.parametrize("name", ["_commit", "_release", "_roll"])
async def test_it_goes_on_after_what_nobody_thought_of(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    pauses: None,
    name: str,
) -> None:
    faulty(monkeypatch, name, RuntimeError("a bug"), None, MemoryError())
    async with started(ledger_on(engine, ledger_rollup_interval_s=0.001)) as ledger:
        for number in range(8):
            await ledger.open(opened(f"r{number}"))
            await ledger.post(posting(f"r{number}"))
            await ledger.written()
        assert not ledger.snapshot().refuses
        assert ledger.snapshot().num_write_errors == 2
        assert ledger.snapshot().num_pending == 0
    assert sorted(postings_in(engine)) == [f"r{number}" for number in range(8)]
    assert open_in(engine) == []
    assert caplog.text.count("LEDGER WRITER FAILED") == 2


async def test_a_batch_that_was_written_in_part_leaves_nothing_open(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, pauses: None
) -> None:
    """Of a split batch the open record was committed, and then it fails: the second time the
    record has an end beside it, and all the same it is closed."""
    ledger = ledger_on(engine, ledger_flush_interval_s=0.05, ledger_write_interval_s=0.1)
    commit, tries = LedgerWriter._commit, []

    def call(self: LedgerWriter, batch: object) -> None:
        tries.append(batch)
        if len(tries) == 1:
            raise ValueError("one of them is at fault")
        if len(tries) == 3:
            raise RuntimeError("a bug")
        commit(self, batch)  # type: ignore[arg-type]

    async with started(ledger):
        await asyncio.sleep(0)
        monkeypatch.setattr(LedgerWriter, "_commit", call)
        await asyncio.gather(
            ledger.open(opened("a")), ledger.post(posting("a")), return_exceptions=True
        )
        await ledger.written()
    assert len(tries) >= 4
    assert set(postings_in(engine)) == {"a"}
    assert open_in(engine) == []


async def test_what_can_be_put_aside_nowhere_waits(
    engine: Engine, tmp_path: Path, pauses: None, caplog: pytest.LogCaptureFixture
) -> None:
    aside = tmp_path / "journal/gateway-0/refused"
    async with started(ledger_on(engine)) as ledger:
        aside.mkdir(parents=True)
        await ledger._write(replace(posting("bad"), cost_nanos=-1), "bad")
        await ledger.post(posting("b"))
        for _ in range(3000):
            if "cannot set the record aside" in caplog.text:
                break
            await asyncio.sleep(0.01)
        assert postings_in(engine) == {}, "nothing overtakes it"
        aside.rmdir()
        await ledger.written()
        assert ledger.snapshot().num_put_aside == 1
    assert set(postings_in(engine)) == {"b"}


async def test_a_thread_that_ends_all_the_same_is_missed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing new is taken; what is open can still end; the next start has all of it."""
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    faulty(monkeypatch, "_commit", SystemExit())
    ledger = ledger_on(engine)
    await ledger.start()
    await ledger.open(opened("early"))
    await asyncio.to_thread(ledger._writer._thread.join)
    assert ledger.snapshot().refuses
    with pytest.raises(ApiError) as refused:
        await ledger.open(opened("late"))
    assert refused.value.kind is UNAVAILABLE
    with pytest.raises(JournalStopped):
        await ledger.written()
    await ledger.post(posting("early"))
    assert await ledger.stop(5.0) is False
    assert [record for record in caplog.records if record.levelno == logging.CRITICAL]
    monkeypatch.undo()
    async with started(ledger_on(engine)) as after:
        await after.written()
    assert set(postings_in(engine)) == {"early"}
    assert open_in(engine) == []


async def test_what_an_earlier_release_left_is_closed_by_one_of_several(engine: Engine) -> None:
    """It names no gateway. Limits hear of what is recovered: they are to hear of it once."""
    with writing(engine, "test") as session:
        open_many(session, [opened("old")])
    heard: list[Posting] = []
    other = ledger_on(engine, recovered=heard, gateway_id="gateway-1")
    async with started(other), started(ledger_on(engine, recovered=heard)) as first:
        await other.recovered()
        await first.recovered()
    assert [one.request_id for one in heard] == ["old"]
    assert set(postings_in(engine)) == {"old"}
    assert open_in(engine) == []


async def test_a_start_without_its_thread_fails(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)

    def end(self: LedgerWriter) -> bool:
        raise SystemExit

    monkeypatch.setattr(LedgerWriter, "_step", end)
    ledger = ledger_on(engine)
    with pytest.raises(JournalStopped):
        await ledger.start()
    await ledger.stop(5.0)


async def test_large_records_are_many_bytes_and_it_does_not_rest_before_the_last(
    engine: Engine, tmp_path: Path
) -> None:
    """A batch is cut by its bytes: fewer records than a batch may have are no reason to wait."""
    synced = threading.Semaphore(0)
    limits = JournalLimits(1 << 20, 1 << 30, 0, 0.0)
    journal = Journal(tmp_path / "journal", limits, lambda tags, _: synced.release(len(tags)))
    begin = await asyncio.to_thread(journal.start)
    for number in range(60):
        large = replace(posting(f"{number:064}"), model="m" * 128, revision="r" * 128)
        journal.append(large, number)
    for _ in range(60):
        assert await asyncio.to_thread(synced.acquire, timeout=30.0)
    writer = LedgerWriter(
        engine, journal, tmp_path / "aside", max_batch=10, interval_s=3600.0, rollup_interval_s=0.0
    )
    writer.start(begin)
    for _ in range(3000):
        if writer.is_at(journal.segments.durable):
            break
        await asyncio.sleep(0.01)
    assert len(postings_in(engine)) == 60
    assert await asyncio.to_thread(journal.stop, 30.0)
    assert await asyncio.to_thread(writer.stop, 30.0)
