"""Journals and database together: what another process sees of running gateways."""

from dataclasses import replace
from pathlib import Path

from sqlalchemy import Engine

from gateway.ledger.journal_view import still_open, unwritten
from gateway.ledger.owners import owner_of
from tests.gateway.ledger.test_ledger import (
    blocker_of,
    engine,
    killed,
    ledger_on,
    opened,
    posting,
    postings_in,
    started,
)

__all__ = ["engine"]


async def test_what_the_database_lacks_is_seen(engine: Engine, tmp_path: Path) -> None:
    assert (unwritten(engine, tmp_path), still_open(engine, tmp_path)) == ([], [])
    async with started(ledger_on(engine)) as ledger:
        costly = replace(opened("early"), reserved_nanos=99)
        await ledger.open(costly)
        await ledger.open(opened("early and ended"))
        await ledger.written()
        blocker = blocker_of(engine, tmp_path)
        blocker.execute("BEGIN IMMEDIATE")
        await ledger.post(posting("early and ended"))
        await ledger.open(opened("late"))
        await ledger.open(opened("void"))
        await ledger.void("void")
        assert postings_in(engine) == {}
        assert unwritten(engine, tmp_path) == [posting("early and ended")]
        found = {record.request_id: record for record in still_open(engine, tmp_path)}
        assert found == {
            "early": replace(costly, gateway_id=owner_of(tmp_path, "gateway-0")),
            "late": replace(opened("late"), gateway_id=owner_of(tmp_path, "gateway-0")),
        }
        blocker.execute("ROLLBACK")
        blocker.close()
        await ledger.written()
        assert unwritten(engine, tmp_path) == []
        assert {r.request_id for r in still_open(engine, tmp_path)} == {"early", "late"}


async def test_of_all_gateways_dead_ones_too(engine: Engine, tmp_path: Path) -> None:
    blocker = blocker_of(engine, tmp_path)
    for gateway_id in ("gateway-1", "gateway-2"):
        ledger = ledger_on(engine, gateway_id=gateway_id)
        await ledger.start()
        blocker.execute("BEGIN IMMEDIATE")
        await ledger.open(opened(f"open-{gateway_id}"))
        await ledger.open(opened(f"done-{gateway_id}"))
        await ledger.post(posting(f"done-{gateway_id}"))
        await killed(ledger)
        blocker.execute("ROLLBACK")
    blocker.close()
    told = {record.request_id: record.gateway_id for record in still_open(engine, tmp_path)}
    assert told == {f"open-{name}": owner_of(tmp_path, name) for name in ("gateway-1", "gateway-2")}
    assert {p.request_id for p in unwritten(engine, tmp_path)} == {
        "done-gateway-1",
        "done-gateway-2",
    }
