"""Several servers at one database: when workers may forget, and the books of a server that is
lost."""

import asyncio
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, text

from gateway.ledger.ledger import REPORT_S
from gateway.ledger.ledger_recovery import owner_of
from gateway.settings.worker_settings import WorkerSpec
from tests.gateway.ledger.test_ledger import (
    blocker_of,
    killed,
    ledger_on,
    open_in,
    opened,
    posting,
    postings_in,
    started,
)

CLUSTERED: dict[str, Any] = {
    "dispatcher_address": "a:1",
    "database_url": "postgresql://shared",
    "workers": (WorkerSpec(name="far-0", endpoint="tcp://b:1", public_key="k" * 40),),
}


async def test_with_other_servers_a_worker_forgets_what_the_database_has(
    engine: Engine, tmp_path: Path
) -> None:
    """This machine may never come back with its journal."""
    acked: list[str] = []
    blocker = blocker_of(engine, tmp_path)
    ledger = ledger_on(engine, acked, **CLUSTERED)
    async with started(ledger):
        blocker.execute("BEGIN IMMEDIATE")
        await ledger.open(opened("a"))
        await ledger.post(posting("a"))
        await ledger.open(opened("b"))  # durable, and so is what came before
        await asyncio.sleep(3 * REPORT_S)
        assert acked == []
        blocker.execute("ROLLBACK")
        blocker.close()
        await ledger.written()
        for _ in range(300):
            if not acked:
                await asyncio.sleep(REPORT_S)
        assert acked == ["a"]
        assert set(postings_in(engine)) == {"a"}
        await ledger.void("b")
    assert acked == ["a", "b"]


async def test_a_lost_server_s_books_are_closed_once_even_if_it_comes_back(
    engine: Engine, tmp_path: Path
) -> None:
    """Its streams may go on, and its journal is there; of two postings the first one counts."""
    other = tmp_path / "other"
    lost, owner = ledger_on(engine), owner_of(tmp_path, "gateway-0")
    await lost.start()
    for name in ("stream", "open", "done"):
        await lost.open(opened(name))
    lost.checkpoint("stream", 64)
    await lost.post(posting("done"))
    await lost.written()
    async with started(ledger_on(engine, data_dir=str(other))) as ledger:
        await ledger.open(opened("mine"))
        await ledger.written()
        assert {one.request_id for one in await ledger.adopt(owner)} == {"stream", "open"}
        assert await ledger.adopt(owner) == []
        await ledger.recovered()
        await ledger.written()
        told = {name: (row.outcome, row.cost_nanos) for name, row in postings_in(engine).items()}
        assert told == {
            "done": ("finished", 70),
            "stream": ("disconnected", 7 * 1 + 64 * 100),
            "open": ("failed", 0),
        }
        assert open_in(engine) == ["mine"]
        await lost.post(posting("stream", 90))
        await lost.open(opened("late"))
        await lost.written()
        assert lost.snapshot().num_differing == 1
        await killed(lost)
        async with started(ledger_on(engine)) as again:
            await again.recovered()
            await again.check_integrity()
        after = {name: (row.outcome, row.cost_nanos) for name, row in postings_in(engine).items()}
        assert after == {**told, "late": ("failed", 0)}
        await ledger.post(posting("mine"))
    assert open_in(engine) == []


async def test_a_record_that_is_adopted_twice_is_closed_once(
    engine: Engine, tmp_path: Path
) -> None:
    """Another server had taken it in between."""
    lost, owner = ledger_on(engine), owner_of(tmp_path, "gateway-0")
    await lost.start()
    await lost.open(opened("r"))
    await lost.open(opened("s"))
    await lost.written()
    waits: dict[str, Any] = {"data_dir": str(tmp_path / "other"), "ledger_recovery_wait_s": 0.5}
    async with started(ledger_on(engine, **waits)) as ledger:
        assert {one.request_id for one in await ledger.adopt(owner)} == {"r", "s"}
        with engine.begin() as connection:
            back = text("UPDATE open_records SET gateway_id = :owner WHERE request_id = 'r'")
            connection.execute(back, {"owner": owner})
        await lost.open(opened("t"))
        await lost.written()
        assert [one.request_id for one in await ledger.adopt(owner)] == ["r", "t"]
        await ledger.recovered()
        await ledger.written()
        assert ledger.snapshot().num_recovered == 3
        assert set(postings_in(engine)) == {"r", "s", "t"}
    await killed(lost)
