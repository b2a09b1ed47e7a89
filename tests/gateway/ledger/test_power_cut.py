"""What a power cut takes: what was written and not synced. Its open record tells of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from registry.session import make_engine, upgrade
from tests.gateway.ledger.test_ledger import (
    finish,
    folder_of,
    killed,
    ledger_on,
    open_in,
    opened,
    posting,
    postings_in,
    started,
)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    url = f"sqlite:///{tmp_path / 'polyhost.db'}"
    upgrade(url)
    engine = make_engine(url)
    yield engine
    engine.dispose()


async def test_a_power_cut_takes_a_posting_and_its_open_record_tells(engine: Engine) -> None:
    """Written and not synced: nobody pays too much, and no worker has forgotten."""
    acked: list[str] = []
    ledger = ledger_on(engine, acked, ledger_sync_interval_s=3600.0, ledger_write_interval_s=3600.0)
    await ledger.start()
    for name in ("a", "b", "c"):
        await ledger.open(opened(name))
    ledger.checkpoint("c", 64)
    await ledger.open(opened("d"))
    durable = ledger._journal.durable
    for name in ("a", "b", "c"):
        await ledger.post(posting(name, 70))
    assert acked == []
    ledger._writer._give_up.set()
    ledger._writer._stop.set()  # it sleeps for long
    await killed(ledger)
    path = folder_of(engine) / "journal/gateway-0/000000000001.journal"
    data = path.read_bytes()
    assert any(data[durable.offset :])
    path.write_bytes(data[: durable.offset] + bytes(len(data) - durable.offset))
    async with started(ledger_on(engine, ledger_recovery_wait_s=0.05)) as ledger:
        assert ledger.claim("a", finish("stop"))  # its worker has it still
        await ledger.recovered()
    told = {name: (r.outcome, r.completion_tokens) for name, r in postings_in(engine).items()}
    assert told == {
        "a": ("disconnected", 5),
        "b": ("failed", 0),
        "c": ("disconnected", 64),
        "d": ("failed", 0),
    }
    assert open_in(engine) == []
