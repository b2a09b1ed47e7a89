"""Gateways that say that they live, and what becomes of one that does not any more."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

import pytest
from sqlalchemy.exc import OperationalError

from gateway.cluster import gateway_lease
from gateway.cluster.gateway_lease import Adoption, GatewayLease
from registry.money.ledger import OpenRecord
from registry.servers import gateway_leases
from registry.session import make_engine
from tests.gateway.ipc.test_ipc import until
from tests.gateway.ledger.test_ledger import opened

LOST_AFTER_S = 0.6


@asynccontextmanager
async def running(
    url: str,
    name: str,
    adopted: list[str],
    failures: int = 0,
    is_gone: Callable[[str], bool] = lambda gateway_id: True,
) -> AsyncIterator[None]:
    """A gateway that lives. Its first `failures` adoptions fail."""
    left = iter(range(failures))

    async def adopt(lost: str) -> None:
        if next(left, None) is not None:
            raise OperationalError("", {}, Exception("the database went away"))
        adopted.append(lost)

    lease = GatewayLease(url, name, LOST_AFTER_S, adopt, is_gone)
    task = asyncio.create_task(lease.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await lease.close()


async def test_the_books_of_a_lost_one_are_adopted_and_its_row_goes(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_lease, "RENEW_S", 0.05)
    adopted: list[str] = []
    engine = make_engine(postgres_url)
    gateway_leases.renew(engine, "lost/gateway-0")
    async with running(postgres_url, "a/gateway-0", adopted, failures=1):
        await asyncio.sleep(LOST_AFTER_S / 3)
        async with running(postgres_url, "b/gateway-0", adopted):
            await until(lambda: adopted)
            await asyncio.sleep(0.2)
        # The one that was stopped in order has no row any more, so nobody waits for it.
        await asyncio.sleep(2 * LOST_AFTER_S)
        assert set(adopted) == {"lost/gateway-0"}
        assert set(gateway_leases.renew(engine, "x")) == {"a/gateway-0"}
    engine.dispose()


async def test_one_that_only_has_lost_the_database_keeps_its_books(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gateway_lease, "RENEW_S", 0.05)
    adopted: list[str] = []
    gone: set[str] = set()
    engine = make_engine(postgres_url)
    gateway_leases.renew(engine, "cut/gateway-0")
    async with running(postgres_url, "a/gateway-0", adopted, is_gone=gone.__contains__):
        await until(lambda: "has lost the database" in caplog.text)
        await asyncio.sleep(LOST_AFTER_S)
        assert adopted == []
        gone.add("cut/gateway-0")
        await until(lambda: adopted)
    assert caplog.text.count("has lost the database") == 1
    engine.dispose()


async def test_a_gateway_renews_its_row_while_it_adopts(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_lease, "RENEW_S", 0.05)
    begun = asyncio.Event()

    async def adopt(lost: str) -> None:
        begun.set()
        await asyncio.Event().wait()

    engine = make_engine(postgres_url)
    gateway_leases.renew(engine, "lost/gateway-0")
    lease = GatewayLease(postgres_url, "a", LOST_AFTER_S, adopt, lambda gateway_id: True)
    task = asyncio.create_task(lease.run())
    await begun.wait()
    before = gateway_leases.renew(engine, "x")["a"]
    await until(lambda: gateway_leases.renew(engine, "x")["a"] > before)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await lease.close()
    engine.dispose()


async def test_what_nobody_foresaw_ends_the_lease_and_with_it_the_process(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_lease, "RENEW_S", 0.05)

    async def adopt(lost: str) -> None:
        raise KeyError(lost)

    engine = make_engine(postgres_url)
    gateway_leases.renew(engine, "lost/gateway-0")
    lease = GatewayLease(postgres_url, "a", LOST_AFTER_S, adopt, lambda gateway_id: True)
    with pytest.raises(KeyError):
        await lease.run()
    await lease.close()
    engine.dispose()


async def test_workers_are_asked_again_and_again_for_the_records_that_were_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateway_lease, "ASK_EVERY_S", 0.01)
    left = {"lost": [opened("a"), opened("b")]}
    carried: list[str] = []
    asked: list[tuple[str, list[str]]] = []

    async def take(gateway_id: str) -> list[OpenRecord]:
        return left.pop(gateway_id, [])

    async def carry(records: Iterable[OpenRecord]) -> None:
        assert not asked  # budgets hold what they may cost before anything else happens
        carried.extend(record.request_id for record in records)

    adopt = Adoption(take, carry, lambda *about: asked.append(about), 0.05)
    await asyncio.gather(adopt("lost"), adopt("lost"))  # of two adopters one has the records
    assert carried == ["a", "b"]
    assert asked == [("lost", ["a", "b"])] * 5
