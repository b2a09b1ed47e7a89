"""The ledger on a real SQLite file: durability, order, replays, outages, recovery after a kill."""

import asyncio
import sqlite3
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Engine, event

from engine.protocol import Finish, FinishReason, Usage
from gateway.errors import UNAVAILABLE, ApiError
from gateway.ledger import RECOVERED_KIND, Ledger
from gateway.settings import Settings
from gateway.types import HostedModel
from registry.ledger import OpenRecord, Posting, iter_usage, open_left
from registry.session import make_engine, reading, upgrade
from tests.gateway.scripted_worker import hosted

ROOT = Path(__file__).resolve().parents[2]
PRICED = replace(
    hosted("m"), price_prompt_nanos=10, price_cached_nanos=1, price_completion_nanos=100
)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    url = f"sqlite:///{tmp_path / 'polyhost.db'}"
    upgrade(url)
    engine = make_engine(url)
    yield engine
    engine.dispose()


def find_model(name: str) -> HostedModel | None:
    return PRICED if name == "m" else None


def ledger_on(
    engine: Engine,
    acked: list[str] | None = None,
    recovered: list[Posting] | None = None,
    **settings: object,
) -> Ledger:
    """A ledger that reports what it may acknowledge into `acked`, and what it `recovered`."""
    heard: list[str] = [] if acked is None else acked
    told: list[Posting] = [] if recovered is None else recovered

    def on_durable(request_ids: Sequence[str]) -> None:
        heard.extend(request_ids)

    defaults: dict[str, object] = {"ledger_recovery_wait_s": 0.0}
    chosen = Settings(**{**defaults, **settings})  # type: ignore[arg-type]
    return Ledger(engine, chosen, find_model, on_durable, lambda: 1000.0, told.append)


@asynccontextmanager
async def started(ledger: Ledger) -> AsyncIterator[Ledger]:
    await ledger.start()
    try:
        yield ledger
    finally:
        await ledger.stop(timeout_s=30.0)


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
        rows = [row.posting for row in iter_usage(session, 0.0, 1e12)]
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


async def failed_writes(ledger: Ledger, count: int) -> None:
    """Returns once the database has refused so many writes."""
    for _ in range(3000):
        if ledger.snapshot().num_write_errors >= count:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the database took everything")


async def test_open_and_post_are_durable_on_return_and_then_acknowledged(engine: Engine) -> None:
    acked: list[str] = []
    async with started(ledger_on(engine, acked)) as ledger:
        await ledger.open(opened("a"))
        assert open_in(engine) == ["a"]
        assert acked == []
        await ledger.post(posting("a"))
        assert postings_in(engine) == {"a": posting("a")}
        assert open_in(engine) == []
        assert acked == ["a"]
        await ledger.check_integrity()


async def test_void_closes_without_a_posting(engine: Engine) -> None:
    acked: list[str] = []
    async with started(ledger_on(engine, acked)) as ledger:
        await ledger.open(opened("a"))
        await ledger.void("a")
    assert (postings_in(engine), open_in(engine), acked) == ({}, [], ["a"])


async def test_replays_change_nothing(engine: Engine) -> None:
    async with started(ledger_on(engine)) as ledger:
        await ledger.open(opened("a"))
        await ledger.open(opened("a"))
        await asyncio.gather(*(ledger.post(posting("a", tokens)) for tokens in (3, 4, 5)))
        await ledger.post(posting("a", 9))
        assert ledger.snapshot().num_posted == 1
    assert postings_in(engine)["a"].completion_tokens == 3


async def test_what_comes_together_is_committed_together(engine: Engine) -> None:
    commits = 0

    def count(_connection: object) -> None:
        nonlocal commits
        commits += 1

    async with started(ledger_on(engine, ledger_flush_interval_s=0.05)) as ledger:
        event.listen(engine, "commit", count)
        await asyncio.gather(*(ledger.open(opened(f"r{i}")) for i in range(50)))
        await asyncio.gather(*(ledger.post(posting(f"r{i}")) for i in range(50)))
    assert len(postings_in(engine)) == 50
    assert commits <= 6


async def test_a_posting_survives_the_cancellation_of_who_waited(engine: Engine) -> None:
    async with started(ledger_on(engine, ledger_flush_interval_s=0.05)) as ledger:
        await ledger.open(opened("a"))
        task = asyncio.create_task(ledger.post(posting("a")))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert set(postings_in(engine)) == {"a"}


async def test_an_outage_delays_and_loses_nothing(engine: Engine, tmp_path: Path) -> None:
    """Another process holds the write lock longer than SQLite waits."""
    blocker = blocker_of(engine, tmp_path)
    patient = ledger_on(engine, ledger_open_timeout_s=60.0)  # however busy the machine is
    async with started(patient) as ledger:
        blocker.execute("BEGIN IMMEDIATE")
        tasks = [asyncio.create_task(ledger.open(opened(f"r{i}"))) for i in range(3)]
        await failed_writes(ledger, 2)
        assert not any(task.done() for task in tasks)
        assert ledger.snapshot().num_pending == 3
        assert ledger.snapshot().lag_s > 0
        blocker.execute("ROLLBACK")
        await asyncio.gather(*tasks)
        assert ledger.snapshot().num_pending == 0
    blocker.close()
    assert sorted(open_in(engine)) == ["r0", "r1", "r2"]


async def test_full_or_slow_means_no_new_requests(engine: Engine, tmp_path: Path) -> None:
    blocker = blocker_of(engine, tmp_path)
    ledger = ledger_on(engine, ledger_max_pending=1, ledger_open_timeout_s=0.05)
    async with started(ledger):
        blocker.execute("BEGIN IMMEDIATE")
        slow = asyncio.create_task(ledger.open(opened("slow")))
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as full:
            await ledger.open(opened("full"))
        with pytest.raises(ApiError) as late:
            await slow
        blocker.execute("ROLLBACK")
    blocker.close()
    for caught in (full, late):
        assert caught.value.kind is UNAVAILABLE
        assert caught.value.retry_after_s is not None
    assert open_in(engine) == []  # the late one was voided behind it


async def test_a_record_the_database_refuses_fails_alone(engine: Engine) -> None:
    bad = replace(posting("bad"), outcome="failed", cost_nanos=5)  # a failed posting costs nothing
    async with started(ledger_on(engine, ledger_flush_interval_s=0.05)) as ledger:
        results = await asyncio.gather(
            ledger.post(posting("a")),
            ledger.post(bad),
            ledger.post(posting("b")),
            return_exceptions=True,
        )
    assert results[0] is None
    assert isinstance(results[1], Exception)
    assert results[2] is None
    assert set(postings_in(engine)) == {"a", "b"}


async def test_stop_gives_up_on_a_database_that_never_answers(
    engine: Engine, tmp_path: Path
) -> None:
    blocker = blocker_of(engine, tmp_path)
    ledger = ledger_on(engine)
    await ledger.start()
    blocker.execute("BEGIN IMMEDIATE")
    task = asyncio.create_task(ledger.open(opened("a")))
    await failed_writes(ledger, 1)
    assert not await ledger.stop(timeout_s=0.01)
    with pytest.raises(ApiError):
        await task
    with pytest.raises(ApiError):
        await ledger.open(opened("after"))
    blocker.close()


# Recovery. A server that is killed is one that is never stopped: its ledger is just dropped.


async def killed_with_open(engine: Engine, *request_ids: str, model: str = "m") -> None:
    """An earlier server opened these and died."""
    ledger = ledger_on(engine)
    await ledger.start()
    for request_id in request_ids:
        await ledger.open(opened(request_id, model))
    # The thread has nothing queued; ending it is what a kill does, without the bookkeeping.
    ledger._writer.stop(timeout_s=5.0)


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
    ledger = ledger_on(engine, acked, recovered, ledger_recovery_wait_s=3600.0)
    async with started(ledger):
        assert ledger.claim("a", finish("stop"))
        assert not ledger.claim("a", finish("stop"))  # told again: closed already
        assert ledger.claim("b", finish("error"))
        assert ledger.claim("d", finish("timeout"))
        assert ledger.claim("e", finish("refused", generated=0))
        assert ledger.claim("f", finish("refused"))  # its own form cost too much to go on with
        assert not ledger.claim("unknown", finish("stop"))
    rows = postings_in(engine)
    assert (rows["a"].outcome, rows["a"].completion_tokens) == ("disconnected", 5)
    assert rows["a"].cost_nanos == 5 * 10 + 2 * 1 + 5 * 100
    assert (rows["b"].outcome, rows["b"].cost_nanos) == ("failed", 0)
    assert (rows["d"].outcome, rows["d"].cost_nanos) == ("failed", 0)
    assert (rows["e"].outcome, rows["e"].cost_nanos) == ("failed", 0)
    assert (rows["f"].outcome, rows["f"].cost_nanos) == ("disconnected", rows["a"].cost_nanos)
    assert sorted(acked) == ["a", "b", "d", "e", "f"]
    bills = {posting.request_id: posting.cost_nanos for posting in recovered}
    assert bills == {name: row.cost_nanos for name, row in rows.items()}  # for the limits
    assert open_in(engine) == ["c"]  # its wait was not over: the next start closes it


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


async def test_a_model_that_is_gone_costs_nothing(engine: Engine) -> None:
    await killed_with_open(engine, "a", model="gone")
    async with started(ledger_on(engine, ledger_recovery_wait_s=3600.0)) as ledger:
        assert ledger.claim("a", finish("stop"))
    assert postings_in(engine)["a"].cost_nanos == 0


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
from tests.gateway.test_ledger import ledger_on, opened, posting
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
    assert said["post"] <= set(postings_in(engine))
    assert said["open"] <= set(postings_in(engine)) | set(open_in(engine))
    async with started(ledger_on(engine)) as ledger:
        await ledger.recovered()
        await ledger.check_integrity()
    rows = postings_in(engine)
    assert said["open"] <= set(rows)
    assert {rows[request_id].outcome for request_id in said["post"]} == {"finished"}
    assert open_in(engine) == []
