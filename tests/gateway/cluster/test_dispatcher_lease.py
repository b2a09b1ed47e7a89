"""The dispatcher's lease on a real PostgreSQL: who has it, who follows, and what a database that
goes away changes."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from gateway.cluster.dispatcher_lease import DispatcherLease, RowLeads
from gateway.cluster.policy.election import TTL_S
from registry.errors import InvalidValue
from registry.schema import upgrade
from registry.servers import dispatcher_leases
from registry.session import make_engine
from tests.gateway.ipc.test_ipc import until
from tests.postgres import PostgresServer, own_server

FAR = 1 << 40
"""An epoch that the clock has not come to."""
LONG_S = 6 * TTL_S


@pytest.fixture
def database() -> Iterator[PostgresServer]:
    with own_server() as server:
        upgrade(server.url("postgres"))
        yield server


class SkewedClock:
    """A machine's monotonic clock. `jump`: it stood still meanwhile for whoever reads it."""

    def __init__(self, ahead_s: float) -> None:
        self.ahead_s = ahead_s

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


async def test_the_next_one_follows_a_kill_a_stop_and_one_that_gives_up(postgres_url: str) -> None:
    stop, clock = asyncio.Event(), SkewedClock(5e4)
    with (
        DispatcherLease(postgres_url, "a", "a:1") as first,
        DispatcherLease(postgres_url, "b", "b:1", clock) as second,
    ):
        assert await first.take(FAR, stop) == FAR
        assert first.may_grant()
        keeping = asyncio.create_task(first.keep())
        taking = asyncio.create_task(second.take(0, stop))
        await asyncio.sleep(1.5 * TTL_S)
        assert not taking.done()
        keeping.cancel()  # killed: nobody renews
        async with asyncio.timeout(LONG_S):
            assert await taking == FAR + 1
        assert not first.may_grant()
        assert second.may_grant()
        async with asyncio.timeout(LONG_S):
            await first.keep()  # woken: it asks, and it has ended
        assert not first.may_grant()
        keeping = asyncio.create_task(second.keep())
        await asyncio.sleep(1.5 * TTL_S)
        assert second.may_grant()
        clock.ahead_s += LONG_S  # as if it had been stopped, and only now goes on
        assert not second.may_grant()
        await until(second.may_grant)
        keeping.cancel()
        await second.give_up()
        began_s = time.monotonic()
        assert await first.take(0, stop) == FAR + 2
        assert time.monotonic() - began_s < TTL_S
        stop.set()
        assert await second.take(0, stop) is None


async def test_a_process_of_the_same_server_takes_it_at_once(postgres_url: str) -> None:
    stop = asyncio.Event()
    with (
        DispatcherLease(postgres_url, "a", "a:1") as first,
        DispatcherLease(postgres_url, "a", "a:1") as second,
    ):
        epoch = await first.take(FAR, stop)
        assert epoch == FAR
        began_s = time.monotonic()
        assert await second.take(0, stop) == epoch + 1
        assert time.monotonic() - began_s < TTL_S
        await first.keep()


async def test_a_database_that_is_away_leaves_the_holder_where_it_is(
    database: PostgresServer,
) -> None:
    stop, url = asyncio.Event(), database.url("postgres")
    with DispatcherLease(url, "a", "a:1") as first, DispatcherLease(url, "b", "b:1") as second:
        epoch = await first.take(FAR, stop)
        assert epoch == FAR
        keeping = asyncio.create_task(first.keep())
        taking = asyncio.create_task(second.take(0, stop))
        await asyncio.sleep(0.5)
        await asyncio.to_thread(database.kill)
        for _ in range(round(2 * TTL_S / 0.1)):
            await asyncio.sleep(0.1)
            assert first.may_grant()
        await asyncio.to_thread(database.start)
        await asyncio.sleep(2 * TTL_S)
        assert first.may_grant()
        assert not taking.done()
        keeping.cancel()
        async with asyncio.timeout(LONG_S):
            assert await taking == epoch + 1
        row = dispatcher_leases.read(second.engine)
        assert row is not None
        assert row[:3] == ("b", "b:1", epoch + 1)


async def test_leads_are_handed_over(postgres_url: str) -> None:
    stop = asyncio.Event()
    with (
        DispatcherLease(postgres_url, "a", "a:1") as first,
        DispatcherLease(postgres_url, "b", "b:1") as second,
    ):
        await first.take(0, stop)
        old = RowLeads(first.engine, first.epoch)
        old.write({"leads": {"ten_1": 2.5}})
        await first.give_up()
        await second.take(0, stop)
        new = RowLeads(second.engine, second.epoch)
        assert new.read() == {"leads": {"ten_1": 2.5}}
        new.write({"leads": {"ten_2": 1.0}})
        old.write({"leads": {"ten_1": 9.0}})
        assert new.read() == {"leads": {"ten_2": 1.0}}


def test_it_needs_postgresql(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue):
        DispatcherLease(f"sqlite:///{tmp_path / 'x.db'}", "a", "a:1")


async def test_an_epoch_that_fell_is_taken_higher_by_whoever_has_seen_it(
    postgres_url: str,
) -> None:
    """As after a database that was put back, and a holder whose clock was ahead."""
    stop, noted = asyncio.Event(), list[int]()
    engine = make_engine(postgres_url)
    with (
        DispatcherLease(postgres_url, "a", "a:1") as first,
        DispatcherLease(postgres_url, "b", "b:1", on_epoch=noted.append) as second,
    ):
        assert await first.take(FAR, stop) == FAR
        taking = asyncio.create_task(second.take(0, stop))
        await until(lambda: noted == [FAR])
        with engine.begin() as connection:
            connection.execute(text("DELETE FROM dispatcher_leases"))
        async with asyncio.timeout(LONG_S):
            assert await taking == FAR + 1
        second.refused(FAR + 50)  # gateways obeyed one that it never saw
        assert not second.may_grant()
        async with asyncio.timeout(LONG_S):
            await asyncio.gather(second.keep(), second.lost())
        await second.give_up()
        assert await second.take(0, stop) == FAR + 51
        assert noted == [FAR, FAR + 1, FAR + 50, FAR + 51]
    engine.dispose()


async def test_a_lease_that_is_not_kept_any_more_is_lost(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever went wrong: nobody would notice another holder."""
    with DispatcherLease(postgres_url, "a", "a:1") as lease:
        await lease.take(0, asyncio.Event())
        monkeypatch.setattr(dispatcher_leases, "renew", lambda *about: [][0])
        keeping = asyncio.create_task(lease.keep())
        async with asyncio.timeout(LONG_S):
            await lease.lost()
        assert not lease.may_grant()
        with pytest.raises(IndexError):
            await keeping
