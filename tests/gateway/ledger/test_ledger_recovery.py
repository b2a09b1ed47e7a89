"""What earlier processes left: power cuts, and journals of gateways that never start again."""

from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Engine

from gateway.ledger.ledger_recovery import adopt, owner_of
from gateway.settings.settings import Settings
from registry import locks
from tests.gateway.ledger.test_ledger import (
    blocker_of,
    finish,
    folder_of,
    killed,
    killed_with_open,
    ledger_on,
    open_in,
    opened,
    posting,
    postings_in,
    started,
)

NAMES = ("gateway-0",)


def settings_of(engine: Engine, folder: Path) -> Settings:
    url = engine.url.render_as_string(hide_password=False)
    return Settings(data_dir=str(folder), database_url=url, journal_segment_bytes=65536)


async def left_by_gateway_2(engine: Engine, folder: Path) -> None:
    """It died with all of it in its journal: a posting, a stream, a request, and a void one."""
    blocker = blocker_of(engine, folder)
    ledger = ledger_on(engine, gateway_id="gateway-2")
    await ledger.start()
    blocker.execute("BEGIN IMMEDIATE")
    for name in ("done", "stream", "open", "void"):
        await ledger.open(opened(name))
    await ledger.post(posting("done"))
    await ledger.void("void")
    ledger.checkpoint("stream", 64)
    await ledger.open(opened("last"))  # takes the hint along
    await killed(ledger)
    blocker.execute("ROLLBACK")
    blocker.close()
    assert (postings_in(engine), open_in(engine)) == ({}, [])


async def test_a_gateway_that_is_no_more_is_closed_by_another(
    engine: Engine, tmp_path: Path
) -> None:
    await left_by_gateway_2(engine, tmp_path)
    adopt(settings_of(engine, tmp_path), NAMES, by="gateway-0")
    assert set(postings_in(engine)) == {"done"}
    assert not list((tmp_path / "journal/gateway-2").glob("*.journal"))
    adopt(settings_of(engine, tmp_path), NAMES, by="gateway-0")  # killed behind it: once more
    async with started(ledger_on(engine)) as ledger:
        await ledger.recovered()
        await ledger.check_integrity()
    told = {name: (row.outcome, row.cost_nanos) for name, row in postings_in(engine).items()}
    assert told == {
        "done": ("finished", 70),
        "stream": ("disconnected", 7 * 1 + 64 * 100),
        "open": ("failed", 0),
        "last": ("failed", 0),
    }
    assert open_in(engine) == []


async def test_what_it_left_in_the_database_alone_is_closed_too(
    engine: Engine, tmp_path: Path
) -> None:
    """It stopped in order before its recovery was over: no journal, but open records."""
    await killed_with_open(engine, "a", gateway_id="gateway-1")
    async with started(ledger_on(engine, gateway_id="gateway-1", ledger_recovery_wait_s=3600.0)):
        pass
    assert open_in(engine) == ["a"]
    adopt(settings_of(engine, tmp_path), NAMES, by="gateway-0")
    async with started(ledger_on(engine)) as ledger:
        await ledger.recovered()
    assert (set(postings_in(engine)), open_in(engine)) == ({"a"}, [])


async def test_a_gateway_that_starts_now_keeps_its_own(engine: Engine, tmp_path: Path) -> None:
    await killed_with_open(engine, "a", gateway_id="gateway-1")
    segments = sorted((tmp_path / "journal/gateway-1").glob("*.journal"))
    adopt(settings_of(engine, tmp_path), ("gateway-0", "gateway-1"), by="gateway-0")
    assert sorted((tmp_path / "journal/gateway-1").glob("*.journal")) == segments
    async with started(ledger_on(engine)) as ledger:
        await ledger.recovered()
    assert postings_in(engine) == {}


async def test_a_journal_that_somebody_has_or_nobody_can_read_stays(
    engine: Engine,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.ledger.ledger_recovery.LOCK_WAIT_S", 0.0)
    monkeypatch.setattr("gateway.ledger.ledger_recovery.WRITE_WAIT_S", 0.2)
    await left_by_gateway_2(engine, tmp_path)
    settings = settings_of(engine, tmp_path)
    folder = tmp_path / "journal/gateway-2"
    segments = {path.name: path.read_bytes() for path in folder.glob("*.journal")}
    with locks.hold(folder / "lock"):
        adopt(settings, NAMES, by="gateway-0")
    assert "gateway-2, it is kept" in caplog.text
    blocker = blocker_of(engine, tmp_path)
    blocker.execute("BEGIN IMMEDIATE")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("registry.session.SQLITE_BUSY_TIMEOUT_MS", 1)
        adopt(settings, NAMES, by="gateway-0")
    assert "the database did not accept all of it" in caplog.text
    blocker.execute("ROLLBACK")
    blocker.close()
    there = {path.name: path.read_bytes() for path in folder.glob("*.journal")}
    assert {name: there[name] for name in segments} == segments
    assert postings_in(engine) == {}
    adopt(settings, NAMES, by="gateway-0")
    assert set(postings_in(engine)) == {"done"}


async def test_servers_that_share_a_database_leave_one_another_alone(
    engine: Engine, tmp_path: Path
) -> None:
    """Both have a gateway-0, and the second one may once have had a gateway-1."""
    other = tmp_path / "other"
    async with (
        started(ledger_on(engine)) as first,
        started(ledger_on(engine, gateway_id="gateway-1")) as second,
    ):
        await first.open(opened("a"))
        await second.open(opened("b"))
        await first.written()
        await second.written()
        (other / "journal/gateway-1").mkdir(parents=True)
        adopt(settings_of(engine, other), NAMES, by="gateway-0")
        async with started(ledger_on(engine, data_dir=str(other))) as late:
            await late.recovered()
        assert open_in(engine) == ["a", "b"]
        await first.post(posting("a"))
        await second.post(posting("b"))
    assert postings_in(engine) == {"a": posting("a"), "b": posting("b")}


def test_an_owner_is_the_same_at_every_start(tmp_path: Path) -> None:
    first, second = tmp_path / "one", tmp_path / "two"
    assert owner_of(first, "gateway-0") == owner_of(first, "gateway-0")
    assert len({owner_of(p, g) for p in (first, second) for g in ("gateway-0", "gateway-1")}) == 4
    assert [path.name for path in (first / "journal").iterdir()] == ["server-id"]
    assert len(replace(opened("a"), gateway_id=owner_of(first, "gateway-31")).gateway_id) <= 64


async def test_a_finish_with_fewer_tokens_than_the_client_had_is_billed_by_those(
    engine: Engine,
) -> None:
    ledger = ledger_on(engine)
    await ledger.start()
    for name in ("fewer", "more"):
        await ledger.open(opened(name))
    ledger.checkpoint("fewer", 64)
    ledger.checkpoint("more", 2)
    await ledger.open(opened("last"))  # takes the hints along
    await killed(ledger)
    async with started(ledger_on(engine, ledger_recovery_wait_s=0.05)) as ledger:
        for name in ("fewer", "more"):
            assert ledger.claim(name, finish("stop"))
        await ledger.recovered()
    told = {name: r.completion_tokens for name, r in postings_in(engine).items()}
    assert told == {"fewer": 64, "more": 5, "last": 0}


async def test_a_power_cut_takes_a_posting_and_its_open_record_tells(engine: Engine) -> None:
    """Written and not synced: nobody pays too much, and no worker has forgotten."""
    acked: list[str] = []
    ledger = ledger_on(engine, acked, ledger_sync_interval_s=3600.0, ledger_write_interval_s=3600.0)
    await ledger.start()
    for name in ("a", "b", "c"):
        await ledger.open(opened(name))
    ledger.checkpoint("c", 64)
    await ledger.open(opened("d"))
    durable = ledger._journal.segments.durable
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


async def test_a_wait_that_was_not_over_is_left_to_the_next_start(engine: Engine) -> None:
    await killed_with_open(engine, "a", "b")
    async with started(ledger_on(engine, ledger_recovery_wait_s=3600.0)) as ledger:
        assert ledger.claim("a", finish("stop"))
    assert open_in(engine) == ["a", "b"]
    async with started(ledger_on(engine, ledger_recovery_wait_s=0.05)) as ledger:
        assert ledger.claim("a", finish("stop"))  # its worker has not been told to forget it
        await ledger.recovered()
    assert postings_in(engine)["a"].completion_tokens == 5


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
async def test_of_attempts_that_ended_the_last_one_is_billed(
    engine: Engine, order: tuple[int, int]
) -> None:
    """The first one's worker woke up and had made more by then than its client was sent."""
    await killed_with_open(engine, "a", "b")
    ends = {1: finish("abort", generated=50), 2: finish("stop", generated=30)}
    async with started(ledger_on(engine, ledger_recovery_wait_s=0.05)) as ledger:
        for attempt in order:
            assert ledger.claim("a", ends[attempt], attempt)
            assert ledger.claim("b#0", ends[attempt], attempt)
        assert ledger.claim("b#1", finish("stop", generated=7))
        await ledger.recovered()
    rows = postings_in(engine)
    assert (rows["a"].completion_tokens, rows["b"].completion_tokens) == (30, 37)


async def test_a_model_that_is_gone_costs_nothing(engine: Engine) -> None:
    await killed_with_open(engine, "a", model="gone")
    async with started(ledger_on(engine, ledger_recovery_wait_s=0.05)) as ledger:
        assert ledger.claim("a", finish("stop"))
        await ledger.recovered()
    assert postings_in(engine)["a"].cost_nanos == 0
