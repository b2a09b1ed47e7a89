"""The ledger on a real SQLite file: durability, order, replays, outages, recovery after a kill."""

import asyncio
import sqlite3
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Engine, event

from engine.protocol import Finish, FinishReason, Usage
from gateway.errors import UNAVAILABLE, ApiError
from gateway.ledger.journal_segments import DiskFiles, Files, RecordCodec
from gateway.ledger.ledger import Ledger
from gateway.ledger.ledger_recovery import RECOVERED_KIND, owner_of
from gateway.pricing.policy.pricing import FREE, Prices, Rates
from gateway.settings.settings import Settings
from registry.locks import LockBusy
from registry.money.ledger import OpenRecord, Posting, open_left
from registry.session import make_engine, reading
from tests.registry.postings_kit import postings as stored_postings

ROOT = Path(__file__).resolve().parents[3]
PRICES = Prices(prompt_nanos=10, cached_nanos=1, completion_nanos=100)


def find_rates(tenant_id: str, model: str, at: float) -> Rates:
    return Rates(at, PRICES, PRICES) if model == "m" else FREE


def ledger_on(
    engine: Engine,
    acked: list[str] | None = None,
    recovered: list[Posting] | None = None,
    gateway_id: str = "gateway-0",
    files: Files | None = None,
    **settings: object,
) -> Ledger:
    """A ledger that reports what it may acknowledge into `acked`, and what it `recovered`."""
    heard: list[str] = [] if acked is None else acked
    told: list[Posting] = [] if recovered is None else recovered

    def on_durable(request_ids: Sequence[str]) -> None:
        heard.extend(request_ids)

    defaults: dict[str, object] = {
        "ledger_recovery_wait_s": 0.0,
        "ledger_write_interval_s": 0.001,
        "data_dir": str(folder_of(engine)),
        "journal_segment_bytes": 65536,
        "journal_min_free_bytes": 0,
    }
    chosen = Settings(**{**defaults, **settings})  # type: ignore[arg-type]
    return Ledger(
        engine, chosen, find_rates, on_durable, lambda: 1000.0, told.append, gateway_id, files
    )


@asynccontextmanager
async def started(ledger: Ledger) -> AsyncIterator[Ledger]:
    await ledger.start()
    await ledger.recover()
    try:
        yield ledger
    finally:
        await ledger.stop(timeout_s=30.0)


async def killed(ledger: Ledger) -> None:
    """What a kill does: its threads end, its lock is gone, its journal stays."""

    def end() -> None:
        ledger._journal.stop(5.0)
        ledger._writer._give_up.set()
        ledger._writer._thread.join()
        ledger._held.close()

    await asyncio.to_thread(end)


def folder_of(engine: Engine) -> Path:
    assert engine.url.database is not None
    return Path(engine.url.database).parent


def opened(request_id: str, model: str = "m") -> OpenRecord:
    return OpenRecord(request_id, "ten", "key", model, "r1", 7, opened_at=990.0)


def posting(request_id: str, completion_tokens: int = 3) -> Posting:
    return Posting(
        request_id=request_id,
        tenant_id="ten",
        key_id="key",
        model="m",
        revision="r1",
        kind="chat",
        outcome="finished",
        prompt_tokens=7,
        cached_tokens=0,
        completion_tokens=completion_tokens,
        cost_nanos=70,
        service_s=0.5,
        queue_s=0.0,
        ttft_s=0.1,
        duration_s=0.6,
        posted_at=1000.0,
    )


def postings_in(engine: Engine) -> dict[str, Posting]:
    with reading(engine) as session:
        rows = stored_postings(session)
    assert len({row.request_id for row in rows}) == len(rows)
    return {row.request_id: row for row in rows}


def open_in(engine: Engine) -> list[str]:
    with reading(engine) as session:
        return [record.request_id for record in open_left(session)]


def finish(reason: FinishReason, generated: int = 5, cached: int = 2) -> Finish:
    return Finish(reason, Usage(7, cached, generated, 0.25))


def blocker_of(engine: Engine, folder: Path) -> sqlite3.Connection:
    """A connection that can hold the write lock; the ledger's own no longer wait for it."""
    event.listen(engine, "connect", lambda raw, _: raw.execute("PRAGMA busy_timeout = 1"))
    engine.dispose()
    return sqlite3.connect(folder / "polyhost.db", isolation_level=None)


async def posted(ledger: Ledger, one: Posting) -> None:
    """As a caller does it."""
    await ledger.post(one)


async def failed_writes(ledger: Ledger, count: int) -> None:
    """Returns once the database has refused so many writes."""
    for _ in range(3000):
        if ledger.snapshot().num_write_errors >= count:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the database took everything")


async def test_what_is_posted_is_acknowledged_and_comes_to_the_database(engine: Engine) -> None:
    acked: list[str] = []
    async with started(ledger_on(engine, acked)) as ledger:
        await ledger.open(opened("a"))
        await ledger.written()
        with reading(engine) as session:
            assert open_left(session) == [
                replace(opened("a"), gateway_id=owner_of(folder_of(engine), "gateway-0"))
            ]
        assert acked == []
        await ledger.post(posting("a"))
        assert acked == []  # written, not durable: the worker is to keep it
        await ledger.written()
        assert acked == ["a"]
        assert postings_in(engine) == {"a": posting("a")}
        assert open_in(engine) == []
        await ledger.check_integrity()
        assert ledger.snapshot().num_pending == 0
        assert ledger.snapshot().num_open == 0


async def test_void_closes_without_a_posting(engine: Engine) -> None:
    acked: list[str] = []
    async with started(ledger_on(engine, acked)) as ledger:
        await ledger.open(opened("a"))
        await ledger.void("a")
        await ledger.void("never opened")
    assert (postings_in(engine), open_in(engine)) == ({}, [])
    assert sorted(acked) == ["a", "never opened"]


async def test_replays_change_nothing(engine: Engine) -> None:
    async with started(ledger_on(engine)) as ledger:
        await ledger.open(opened("a"))
        await ledger.open(opened("a"))
        await asyncio.gather(*(ledger.post(posting("a", tokens)) for tokens in (3, 4, 5)))
        await ledger.post(posting("a", 9))
        await ledger.written()
        assert ledger.snapshot().num_posted == 1
    assert postings_in(engine)["a"].completion_tokens == 3


class CountingFiles(DiskFiles):
    """Counts syncs; each waits for `free`."""

    def __init__(self) -> None:
        self.num_syncs = 0
        self.free = threading.Event()
        self.free.set()

    def sync(self, descriptor: int) -> None:
        self.num_syncs += 1
        self.free.wait()
        super().sync(descriptor)


async def test_what_comes_together_is_synced_together(engine: Engine) -> None:
    files = CountingFiles()
    async with started(ledger_on(engine, files=files, ledger_flush_interval_s=0.05)) as ledger:
        await asyncio.gather(*(ledger.open(opened(f"r{i}")) for i in range(50)))
        await asyncio.gather(*(ledger.post(posting(f"r{i}")) for i in range(50)))
    assert len(postings_in(engine)) == 50
    assert files.num_syncs <= 6


async def test_a_posting_survives_the_cancellation_of_who_waited(engine: Engine) -> None:
    async with started(ledger_on(engine, ledger_flush_interval_s=0.05)) as ledger:
        await ledger.open(opened("a"))
        task = asyncio.ensure_future(ledger.post(posting("a")))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert set(postings_in(engine)) == {"a"}


async def test_a_database_that_is_away_holds_nobody_up(engine: Engine, tmp_path: Path) -> None:
    """Another process holds the write lock longer than SQLite waits."""
    blocker = blocker_of(engine, tmp_path)
    async with started(ledger_on(engine)) as ledger:
        blocker.execute("BEGIN IMMEDIATE")
        for i in range(3):
            await ledger.open(opened(f"r{i}"))
            await ledger.post(posting(f"r{i}"))
        await ledger.open(opened("still open"))
        await failed_writes(ledger, 2)
        assert ledger.snapshot().num_pending == 7
        assert ledger.snapshot().lag_s > 0
        blocker.execute("ROLLBACK")
        await ledger.written()
        assert ledger.snapshot().num_pending == 0
        assert ledger.snapshot().lag_s == 0
        assert open_in(engine) == ["still open"]
    blocker.close()
    assert sorted(postings_in(engine)) == ["r0", "r1", "r2"]


async def open_and_post(ledger: Ledger, taken: list[str]) -> None:
    """Until it is refused."""
    for i in range(10_000):
        await ledger.open(opened(f"r{i}"))
        await ledger.post(posting(f"r{i}"))
        taken.append(f"r{i}")


async def test_a_journal_that_is_behind_takes_nothing_new(engine: Engine, tmp_path: Path) -> None:
    """What is open goes on: its end still fits."""
    blocker = blocker_of(engine, tmp_path)
    ledger = ledger_on(engine, journal_max_bytes=65536, ledger_max_batch=20)
    async with started(ledger):
        await ledger.open(opened("early"))
        blocker.execute("BEGIN IMMEDIATE")
        taken: list[str] = []
        with pytest.raises(ApiError) as refused:
            await open_and_post(ledger, taken)
        assert refused.value.kind is UNAVAILABLE
        assert ledger.snapshot().refuses
        with pytest.raises(ApiError):  # of the cache: it was not opened, so it counts as new
            await ledger.post(posting("hit"))
        await ledger.void("refused")  # writes nothing: refusals never fill the room of ends
        await ledger.post(posting("early"))
        blocker.execute("ROLLBACK")
        await ledger.written()
        await ledger.open(opened("late"))
        await ledger.void("late")
    blocker.close()
    assert set(postings_in(engine)) == {*taken, "early"}
    assert len(taken) > 50
    assert open_in(engine) == []


async def test_a_slow_disk_means_no_new_requests(engine: Engine) -> None:
    files = CountingFiles()
    ledger = ledger_on(engine, files=files, ledger_max_pending=1, ledger_open_timeout_s=0.05)
    async with started(ledger):
        files.free.clear()
        slow = ledger.open(opened("slow"))
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as full:
            await ledger.open(opened("full"))
        with pytest.raises(ApiError) as late:
            await slow
        files.free.set()
    for caught in (full, late):
        assert caught.value.kind is UNAVAILABLE
        assert caught.value.retry_after_s is not None
    assert open_in(engine) == []  # the late one was voided behind it


@pytest.mark.parametrize(
    "wrong",
    [
        {"outcome": "failed"},  # costs something
        {"outcome": "lost"},
        {"outcome": "correction", "corrects": "b"},
        {"completion_tokens": -1},
        {"cost_nanos": 2**63},
        {"model": "\udc80"},
    ],
)
async def test_what_no_database_takes_is_refused_alone(
    engine: Engine, wrong: dict[str, int | str]
) -> None:
    bad = replace(posting("bad"), **wrong)  # type: ignore[arg-type]
    async with started(ledger_on(engine, ledger_flush_interval_s=0.05)) as ledger:
        results = await asyncio.gather(
            posted(ledger, posting("a")),
            posted(ledger, bad),
            posted(ledger, posting("b")),
            return_exceptions=True,
        )
    assert results[0] is None
    assert isinstance(results[1], Exception)
    assert results[2] is None
    assert set(postings_in(engine)) == {"a", "b"}


async def test_what_only_the_database_refuses_is_put_aside(engine: Engine, tmp_path: Path) -> None:
    bad = replace(posting("bad"), cost_nanos=-1)
    async with started(ledger_on(engine)) as ledger:
        await ledger.post(posting("a"))
        await ledger._write(bad, "bad")
        await ledger.post(posting("b"))
        await ledger.written()
        assert ledger.snapshot().num_put_aside == 1
    assert set(postings_in(engine)) == {"a", "b"}
    aside = (tmp_path / "journal/gateway-0/refused").read_bytes()
    assert [record for record, _ in RecordCodec().read(aside)] == [bad]


async def test_without_a_free_connection_nothing_is_put_aside(engine: Engine) -> None:
    url = engine.url.render_as_string(hide_password=False)
    narrow = make_engine(url, pool_size=1, max_overflow=0, pool_timeout=0.02)
    async with started(ledger_on(narrow)) as ledger:
        with narrow.connect():
            await ledger.post(posting("a"))
            await failed_writes(ledger, 2)
        await ledger.written()
        assert ledger.snapshot().num_put_aside == 0
    narrow.dispose()
    assert set(postings_in(engine)) == {"a"}


async def test_a_stop_leaves_to_the_journal_what_the_database_does_not_take(
    engine: Engine, tmp_path: Path
) -> None:
    blocker = blocker_of(engine, tmp_path)
    ledger = ledger_on(engine)
    await ledger.start()
    blocker.execute("BEGIN IMMEDIATE")
    await ledger.open(opened("a"))
    await ledger.post(posting("a"))
    await ledger.open(opened("b"))
    assert not await ledger.stop(timeout_s=0.01)
    with pytest.raises(ApiError):
        await ledger.open(opened("after"))
    blocker.execute("ROLLBACK")
    blocker.close()
    assert postings_in(engine) == {}
    async with started(ledger_on(engine)) as ledger:
        assert postings_in(engine) == {"a": posting("a")}  # before start returns
        assert open_in(engine) == ["b"]
    assert not list((tmp_path / "journal/gateway-0").glob("*.journal"))


async def test_two_processes_never_share_a_journal(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.ledger.ledger.LOCK_WAIT_S", 0.0)
    async with started(ledger_on(engine)):
        with pytest.raises(LockBusy):
            await ledger_on(engine).start()
        async with started(ledger_on(engine, gateway_id="gateway-1")) as other:
            await other.open(opened("b"))
            await other.void("b")


# Recovery. A server that is killed is one that is never stopped: its ledger is just dropped.


async def killed_with_open(
    engine: Engine, *request_ids: str, model: str = "m", gateway_id: str = "gateway-0"
) -> None:
    """An earlier server opened these and died."""
    ledger = ledger_on(engine, gateway_id=gateway_id)
    await ledger.start()
    for request_id in request_ids:
        await ledger.open(opened(request_id, model))
    await killed(ledger)


async def test_only_the_same_gateway_closes_what_it_left(engine: Engine) -> None:
    await killed_with_open(engine, "a")
    await killed_with_open(engine, "b", gateway_id="gateway-1")
    async with started(ledger_on(engine, gateway_id="gateway-1")) as ledger:
        await ledger.recovered()
        await ledger.written()
        assert set(postings_in(engine)) == {"b"}
    async with started(ledger_on(engine)) as ledger:
        await ledger.recovered()
    assert set(postings_in(engine)) == {"a", "b"}


async def test_without_a_finish_the_last_checkpoint_is_billed(engine: Engine) -> None:
    """Gateway and worker both died. Nobody knows what of the prompt was cached: all of it."""
    ledger = ledger_on(engine)
    await ledger.start()
    for name in ("a", "b", "c", "e"):
        await ledger.open(opened(name))
    ledger.checkpoint("a", 64)
    ledger.checkpoint("b", 4)
    ledger.checkpoint("e", 64)
    await ledger.written()  # "a" and "b" were in the database before they went on
    ledger.checkpoint("a", 128)
    ledger.checkpoint("never opened", 64)
    await ledger.open(opened("d"))  # takes the hint along
    await killed(ledger)
    ledger = ledger_on(engine, ledger_recovery_wait_s=0.05)
    async with started(ledger):
        assert ledger.claim("b", finish("stop"))  # its worker still knows better
        assert ledger.claim("e", finish("stop"))  # of an earlier attempt: more was sent since
        await ledger.recovered()
    rows = postings_in(engine)
    told = {name: (r.outcome, r.completion_tokens, r.cost_nanos) for name, r in rows.items()}
    assert told == {
        "a": ("disconnected", 128, 7 * 1 + 128 * 100),
        "b": ("disconnected", 5, 5 * 10 + 2 * 1 + 5 * 100),
        "c": ("failed", 0, 0),
        "e": ("disconnected", 64, 5 * 10 + 2 * 1 + 64 * 100),
        "d": ("failed", 0, 0),
    }


async def test_what_a_killed_server_left_open_is_closed_for_nothing(engine: Engine) -> None:
    await killed_with_open(engine, "a", "b")
    async with started(ledger_on(engine)) as ledger:
        await ledger.recovered()
    rows = postings_in(engine)
    assert set(rows) == {"a", "b"}
    assert {(r.outcome, r.cost_nanos, r.prompt_tokens, r.kind) for r in rows.values()} == {
        ("failed", 0, 7, RECOVERED_KIND)
    }
    assert open_in(engine) == []


async def test_a_finish_that_a_worker_kept_is_billed(engine: Engine) -> None:
    await killed_with_open(engine, "a", "b", "c", "d", "e", "f")
    acked, recovered = list[str](), list[Posting]()
    ledger = ledger_on(engine, acked, recovered, ledger_recovery_wait_s=0.05)
    async with started(ledger):
        assert ledger.claim("a", finish("stop"))
        assert ledger.claim("a", finish("stop"))  # told again
        assert ledger.claim("b", finish("error"))
        assert ledger.claim("d", finish("timeout"))
        assert ledger.claim("e", finish("refused", generated=0))
        assert ledger.claim("f", finish("refused"))  # its own form cost too much to go on with
        assert not ledger.claim("unknown", finish("stop"))
        await ledger.recovered()
        assert not ledger.claim("a", finish("stop"))  # closed already
    rows = postings_in(engine)
    assert (rows["a"].outcome, rows["a"].completion_tokens) == ("disconnected", 5)
    assert rows["a"].cost_nanos == 5 * 10 + 2 * 1 + 5 * 100
    assert (rows["b"].outcome, rows["b"].cost_nanos) == ("failed", 0)
    assert (rows["d"].outcome, rows["d"].cost_nanos) == ("failed", 0)
    assert (rows["e"].outcome, rows["e"].cost_nanos) == ("failed", 0)
    assert (rows["f"].outcome, rows["f"].cost_nanos) == ("disconnected", rows["a"].cost_nanos)
    assert (rows["c"].outcome, rows["c"].cost_nanos) == ("failed", 0)
    assert sorted(acked) == ["a", "b", "c", "d", "e", "f"]
    bills = {posting.request_id: posting.cost_nanos for posting in recovered}
    assert bills == {name: row.cost_nanos for name, row in rows.items()}  # for the limits
    assert open_in(engine) == []


async def test_a_stream_whose_time_was_up_is_billed_by_what_its_worker_kept(
    engine: Engine,
) -> None:
    """As a gateway that lives bills it. Without a checkpoint nobody knows that it was a stream."""
    first = ledger_on(engine)
    await first.start()
    for name in ("sent", "choices", "kept"):
        await first.open(opened(name))
    for name in ("sent", "choices"):
        first.checkpoint(name, 3)
    await first.open(opened("last"))  # takes the hints along
    await first.written()
    await killed(first)
    async with started(ledger_on(engine, ledger_recovery_wait_s=0.05)) as ledger:
        assert ledger.claim("sent", finish("timeout"))
        assert ledger.claim("choices#0", finish("timeout"))
        assert ledger.claim("choices#1", finish("stop"))
        assert ledger.claim("kept", finish("timeout"))
        await ledger.recovered()
    rows = postings_in(engine)
    made = finish("timeout").usage.generated_tokens
    assert (rows["sent"].outcome, rows["sent"].completion_tokens) == ("disconnected", made)
    assert (rows["choices"].outcome, rows["choices"].completion_tokens) == (
        "disconnected",
        2 * made,
    )
    assert rows["choices"].cost_nanos > rows["sent"].cost_nanos > 0
    assert (rows["kept"].outcome, rows["kept"].cost_nanos) == ("failed", 0)


@pytest.mark.parametrize("failure", ["error", "timeout", "refused"])
async def test_the_kept_finishes_of_choices_are_billed_as_one(
    engine: Engine, failure: FinishReason
) -> None:
    await killed_with_open(engine, "a", "b", "c")
    acked: list[str] = []
    ledger = ledger_on(engine, acked, ledger_recovery_wait_s=0.05)
    async with started(ledger):
        for name in ("a#0", "a#2", "a#0", "b#0"):
            assert ledger.claim(name, finish("stop"))
        assert ledger.claim("b#1", finish(failure, generated=0))
        await ledger.recovered()
        assert not ledger.claim("a#1", finish("stop"))
    rows = postings_in(engine)
    one = finish("stop").usage
    assert (rows["a"].outcome, rows["a"].prompt_tokens) == ("disconnected", one.prompt_tokens)
    assert rows["a"].completion_tokens == 2 * one.generated_tokens
    assert (rows["b"].outcome, rows["b"].cost_nanos) == ("failed", 0)
    assert (rows["c"].outcome, sorted(acked)) == ("failed", ["a", "b", "c"])


async def test_an_encoders_kept_finish_costs_nothing(engine: Engine) -> None:
    await killed_with_open(engine, "a", "b")
    ledger = ledger_on(engine, ledger_recovery_wait_s=0.05)
    async with started(ledger):
        assert ledger.claim("a", finish("stop", generated=0))
        for piece in ("b#0", "b#1"):
            assert ledger.claim(piece, finish("stop", generated=0))
        await ledger.recovered()
    rows = postings_in(engine)
    assert {(row.outcome, row.cost_nanos) for row in rows.values()} == {("failed", 0)}
    assert set(rows) == {"a", "b"}


async def test_recovery_repeated_posts_once(engine: Engine) -> None:
    await killed_with_open(engine, "a")
    for _ in range(3):
        async with started(ledger_on(engine)) as ledger:
            await ledger.recovered()
            assert not ledger.claim("a", finish("stop"))
            await ledger.check_integrity()
    assert set(postings_in(engine)) == {"a"}


CHILD = """
import asyncio, sys
from tests.gateway.ledger.test_ledger import ledger_on, opened, posting
from registry.session import make_engine

async def main():
    ledger = ledger_on(make_engine(sys.argv[1]))
    await ledger.start()
    for i in range(10**6):
        await ledger.open(opened(f"r{i}"))
        print("open", f"r{i}", flush=True)
        if i % 3:
            await ledger.post(posting(f"r{i}"))
            print("post", f"r{i}", flush=True)

asyncio.run(main())
"""


async def test_kill_minus_nine_loses_nothing_that_was_durable(engine: Engine) -> None:
    url = engine.url.render_as_string(hide_password=False)
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHILD, url, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    said: dict[str, set[str]] = {"open": set(), "post": set()}
    async for line in child.stdout:
        word, request_id = line.decode().split()
        said[word].add(request_id)
        if len(said["post"]) == 20:
            child.kill()
    await child.wait()
    async with started(ledger_on(engine)) as ledger:
        await ledger.recovered()
        await ledger.check_integrity()
    rows = postings_in(engine)
    assert said["open"] <= set(rows)
    assert {rows[request_id].outcome for request_id in said["post"]} == {"finished"}
    assert open_in(engine) == []
