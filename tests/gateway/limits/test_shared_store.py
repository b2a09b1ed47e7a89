"""Gateways that share limits through Redis: what they do while it is gone, slow, empty or back."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from gateway.limits.policy.rate_limit import DAY_S, Draw, Reservation, Taken, UsedAmounts
from gateway.limits.redis_store import Answer, RedisLimits
from gateway.limits.shared_store import Backoff, SharedStore
from gateway.limits.store import Past
from gateway.redis.redis_script import Unreachable
from tests.redis_kit import RedisServer

PACE = Backoff(beat_s=0.05, lease_s=1.0, grace_s=0.4, lock_s=2.0, reconcile_s=0.3)
GIVE_UP_S = 20.0
PRICE = 7


@dataclass
class Bill:
    """The ledger, as far as these tests need it: when what was posted."""

    rows: list[tuple[float, int]] = field(default_factory=list)

    def spent(self, before_at: float = float("inf")) -> int:
        return sum(nanos for at, nanos in self.rows if at < before_at)


class Gateway:
    """A store with what a server runs beside it."""

    def __init__(
        self,
        server: RedisServer,
        name: str,
        bill: Bill,
        fail_open: bool,
        timeout_s: float = 1.0,
        pace: Backoff = PACE,
    ) -> None:
        redis = RedisLimits(server.url, name, timeout_s)
        self.store = SharedStore(redis, time.monotonic, fail_open, pace=pace)
        self._bill = bill
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self.store.start()
        self.resume()

    def resume(self) -> None:
        """After `kill`, as if it had only been silent."""
        self._tasks = [asyncio.create_task(self.store.run()), asyncio.create_task(self._poll())]

    async def kill(self) -> None:
        """As kill -9: nothing is told to anybody."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        await self.kill()
        await self.store.close()

    async def _poll(self) -> None:
        """The registry poll's part: the ledger's sums, when they are asked for."""
        while True:
            await asyncio.sleep(0.05)
            loss = await self.store.loss()
            if loss is not None:
                spent = self._bill.spent(loss.before_at)
                past = Past("cost", 0, period=5, spent=spent)
                await self.store.restore_loss(loss, [past], 0.0)


class Fleet:
    """Three gateways, one Redis, one ledger."""

    def __init__(
        self,
        server: RedisServer,
        fail_open: bool = False,
        timeout_s: float = 1.0,
        pace: Backoff = PACE,
    ) -> None:
        self.bill = Bill()
        self.gateways = [
            Gateway(server, f"g{n}", self.bill, fail_open, timeout_s, pace) for n in range(3)
        ]
        self.stores = [gateway.store for gateway in self.gateways]

    async def __aenter__(self) -> "Fleet":
        for gateway in self.gateways:
            await gateway.start()
        await self.settled()
        return self

    async def __aexit__(self, *_: object) -> None:
        for gateway in self.gateways:
            await gateway.close()

    async def settled(self) -> None:
        await until(lambda: not any(store.is_degraded for store in self.stores))

    async def told(self) -> None:
        """Redis knows all that has ended."""
        await until(lambda: not any(store.num_behind for store in self.stores))

    async def used(self, draw: Draw) -> int:
        (figures,) = await self.stores[0].figures([draw], time.monotonic())
        return draw.limit - figures.remaining

    async def until_used(self, draw: Draw, amount: int) -> None:
        async with asyncio.timeout(GIVE_UP_S):
            while await self.used(draw) != amount:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(GIVE_UP_S):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def cost_taken() -> Taken:
    return Taken("cost", "cost", 0, 5, 2 * PRICE)


def places(limit: int = 10**6) -> Draw:
    return Draw("places", "concurrency", 0, limit, 1)


def budget(limit: int = 10**12, cost: int = 2 * PRICE) -> Draw:
    return Draw("cost", "cost", 0, limit, cost, 5, 99.0)


def day(limit: int = 10**9) -> Draw:
    return Draw("day", "tokens", DAY_S, limit, 10)


class Load:
    """Requests on all gateways, 12 at a time, until the block ends; what became of them."""

    def __init__(self, fleet: Fleet, draws: Sequence[Draw]) -> None:
        self._fleet = fleet
        self._draws = draws
        self._is_billed = any(draw.meter == "cost" for draw in draws)
        self._stopping = asyncio.Event()
        self._clients: list[asyncio.Task[None]] = []
        self.told = Counter[str]()

    async def __aenter__(self) -> "Load":
        self._clients = [asyncio.create_task(self._client(number)) for number in range(12)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping.set()
        await asyncio.gather(*self._clients)

    async def more(self, what: str, num: int) -> None:
        """Returns when so many more have been told that."""
        aim = self.told[what] + num
        await until(lambda: self.told[what] >= aim)

    async def _client(self, number: int) -> None:
        store, made = self._fleet.stores[number % len(self._fleet.stores)], 0
        while not self._stopping.is_set():
            made += 1
            name = f"{id(self)}-{number}-{made}"
            decision = await store.reserve(name, self._draws, time.monotonic())
            if decision.reservation is None:
                assert decision.refusal is not None
                self.told["unknown" if decision.refusal.is_unknown else "refused"] += 1
                await asyncio.sleep(0.02)
                continue
            await asyncio.sleep(0.01 * (number % 4))
            self.told["granted"] += 1
            if made % 5 == 0:
                await store.release(decision.reservation)
                continue
            posted_at = time.time()
            used = UsedAmounts(3, 4, PRICE, day=5, month=5, posted_at=posted_at)
            await store.settle(decision.reservation, used)
            if self._is_billed:
                self._fleet.bill.rows.append((posted_at, PRICE))


@pytest.mark.parametrize("ends", ["empty", "saved", "hangs", "hangs, budgets fail open"])
async def test_without_redis_no_request_fails_but_on_budgets(
    redis_server: RedisServer, ends: str
) -> None:
    hangs, fail_open = ends.startswith("hangs"), ends.endswith("open")
    async with Fleet(redis_server, fail_open, timeout_s=0.1 if hangs else 1.0) as fleet:
        async with (
            Load(fleet, [places(), day()]) as rates,
            Load(fleet, [budget()]) as budgets,
        ):
            for _ in range(2 if hangs else 3):
                await budgets.more("granted", 20)
                if hangs:
                    redis_server.pause()
                else:
                    redis_server.stop(save=ends == "saved")
                await until(lambda: all(store.is_degraded for store in fleet.stores))
                await rates.more("granted", 50)
                await budgets.more("granted" if fail_open else "unknown", 20)
                if hangs:
                    redis_server.resume()
                else:
                    redis_server.start()
                await fleet.settled()
        assert rates.told["refused"] == rates.told["unknown"] == budgets.told["refused"] == 0
        assert not (fail_open and budgets.told["unknown"])
        await fleet.told()
        # To the unit, over all losses: what is counted is what was posted.
        assert await fleet.used(budget()) == fleet.bill.spent()
        assert await fleet.used(places()) == 0


async def test_limits_degrade_to_a_share_of_each_and_recover(redis_server: RedisServer) -> None:
    async with Fleet(redis_server) as fleet:
        await until(lambda: fleet.stores[0].num_gateways == 3)
        redis_server.stop()

        async def granted(name: str, draw: Draw) -> list[Reservation]:
            found = []
            for number in range(200):
                store = fleet.stores[number % 3]
                decision = await store.reserve(f"{name} {number}", [draw], time.monotonic())
                assert decision.figures[0].limit == draw.limit
                if decision.reservation is not None:
                    found.append(decision.reservation)
                elif decision.refusal is not None:
                    assert decision.refusal.draw == draw
            return found

        held = await granted("places", places(30))
        assert len(held) == 30
        assert len(await granted("tokens", replace(day(), limit=90, cost=10))) == 9
        # A request that fits the whole limit is not refused for being larger than a share.
        assert len(await granted("large", Draw("large", "tokens", 60, 90, 80))) == 3
        redis_server.start()
        await until(lambda: not any(store.is_degraded for store in fleet.stores))
        assert await granted("more", places(30)) == []
        assert await fleet.used(places(30)) == 30
        for number, reservation in enumerate(held):
            await fleet.stores[number % 3].release(reservation)
        assert await fleet.used(places(30)) == 0


async def test_a_gateway_that_dies_leaves_its_places_at_once_and_its_money_until_it_is_known(
    redis_server: RedisServer,
) -> None:
    async with Fleet(redis_server) as fleet:
        for number in range(5):
            decision = await fleet.stores[2].reserve(f"r{number}", [places(), budget()], 0.0)
            assert decision.reservation is not None
        assert await fleet.used(places()) == 5
        await fleet.gateways[2].kill()
        await fleet.until_used(places(), 0)
        assert await fleet.used(budget()) == 5 * 2 * PRICE
        # Its next life finds two of them in the ledger, left open, and learns what one has cost.
        again = Gateway(redis_server, "g2", fleet.bill, False)
        fleet.gateways.append(again)
        await again.start()
        left = [Reservation(f"r{n}", (cost_taken(),)) for n in range(2)]
        await again.store.carry(left, 0.0)
        # What nobody knows of can cost nothing any more.
        await fleet.until_used(budget(), 2 * 2 * PRICE)
        await again.store.settle(left[0], UsedAmounts(1, 1, PRICE, 5, 5, time.time()))
        await again.store.release(left[1])
        assert await fleet.used(budget()) == PRICE


async def test_what_a_dead_gateway_owes_is_not_counted_for_ever(redis_server: RedisServer) -> None:
    short = replace(PACE, orphan_s=0.3)
    async with Fleet(redis_server, pace=short) as fleet:
        await fleet.stores[2].reserve("r", [budget()], 0.0)
        await fleet.gateways[2].kill()
        await fleet.until_used(budget(), 0)


async def test_a_reservation_whose_answer_nobody_waits_for_is_given_back(
    redis_server: RedisServer,
) -> None:
    async with Fleet(redis_server) as fleet:
        store = fleet.stores[0]
        for number in range(20):
            asking = asyncio.create_task(store.reserve(f"r{number}", [places()], 0.0))
            for _ in range(number % 4):
                await asyncio.sleep(0)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        await fleet.told()
        assert await fleet.used(places()) == 0
        assert store.num_open == 0


async def test_a_redis_without_our_script_is_given_it(redis_server: RedisServer) -> None:
    async with Fleet(redis_server) as fleet:
        with redis_server.client() as client:
            client.script_flush()
        decision = await fleet.stores[0].reserve("r", [places()], 0.0)
        assert decision.reservation is not None
        assert not fleet.stores[0].is_degraded


async def test_outages_are_two_lines_of_the_log(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with Fleet(redis_server) as fleet, Load(fleet, [places()]) as rates:
        caplog.set_level("INFO")
        caplog.clear()
        redis_server.stop()
        await rates.more("granted", 200)
        redis_server.start()
        await fleet.settled()
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("gateway")]
    assert len(lines) <= 3 * len(fleet.stores) + 1
    assert sum("out of reach" in line for line in lines) == len(fleet.stores)


async def test_a_hard_budget_is_not_overrun_by_a_unit_over_losses(
    redis_server: RedisServer,
) -> None:
    limit = 400 * PRICE
    async with Fleet(redis_server) as fleet:
        async with Load(fleet, [budget(limit)]) as budgets:
            for _ in range(2):
                await budgets.more("granted", 40)
                redis_server.stop(save=True)
                await budgets.more("unknown", 10)
                redis_server.start()
                await fleet.settled()
            await budgets.more("refused", 50)
        # By then some of the rest may be held by those that give it back.
        spent = fleet.bill.spent()
        assert limit - 12 * 2 * PRICE < spent <= limit
        await fleet.until_used(budget(limit), spent)


async def test_many_postings_at_once_are_no_outage(redis_server: RedisServer) -> None:
    """As recovery has them after a kill -9."""
    async with Fleet(redis_server) as fleet:
        past = Past(day().name, DAY_S, ((0.0, 5),))
        await asyncio.gather(*(fleet.stores[0].add([past], 0.0) for _ in range(60)))
        assert not fleet.stores[0].is_degraded
        assert await fleet.used(day()) == 300


async def test_what_is_added_and_not_answered_counts_once(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    maintain, num_lost = RedisLimits.maintain, 0

    async def deaf(self: RedisLimits, name: str, epoch: str, **args: Any) -> Answer:
        nonlocal num_lost
        answer = await maintain(self, name, epoch, **args)
        if name == "add" and num_lost < 3:
            num_lost += 1
            raise Unreachable("the answer is lost")
        return answer

    monkeypatch.setattr(RedisLimits, "maintain", deaf)
    async with Fleet(redis_server) as fleet:
        store = fleet.stores[0]
        for _ in range(3):
            await store.add([Past(day().name, DAY_S, ((0.0, 5),)), Past("cost", 0, (), 5, 7)], 0.0)
        await fleet.settled()
        await until(lambda: not store._unsynced.is_behind)
        assert num_lost == 3
        assert (await fleet.used(day()), await fleet.used(budget())) == (15, 21)


async def test_a_budget_that_is_new_while_redis_hangs_begins_with_what_was_spent(
    redis_server: RedisServer,
) -> None:
    async with Fleet(redis_server, timeout_s=0.05) as fleet:
        store = fleet.stores[0]
        redis_server.pause()
        await until(lambda: store.is_out_of_reach)
        await store.restore([Past("cost", 0, period=5, spent=95)], 0.0)
        redis_server.resume()
        await until(lambda: not store.is_out_of_reach)
        decision = await store.reserve("r", [budget(100, cost=10)], 0.0)
        assert decision.refusal is not None
        assert not decision.refusal.is_unknown
        assert await fleet.used(budget(100)) == 95


async def test_each_end_is_told_once(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Counter[str]()
    call = RedisLimits.call

    async def counting(
        self: RedisLimits, name: str, epoch: str, patience: float, **args: Any
    ) -> Answer:
        told.update(one["id"] for one in args.get("ended", ()))
        return await call(self, name, epoch, patience, **args)

    monkeypatch.setattr(RedisLimits, "call", counting)
    async with Fleet(redis_server, pace=replace(PACE, beat_s=5.0, lease_s=20.0)) as fleet:
        store = fleet.stores[0]
        decisions = [await store.reserve(f"r{n}", [places()], 0.0) for n in range(100)]
        await asyncio.gather(*(store.release(d.reservation) for d in decisions if d.reservation))
        assert told == {f"r{n}": 1 for n in range(100)}
        assert await fleet.used(places()) == 0


async def test_a_call_that_cannot_be_sent_leaves_nobody_waiting(redis_server: RedisServer) -> None:
    async with Fleet(redis_server) as fleet:
        with pytest.raises(OverflowError):
            await fleet.stores[0].reserve("r", [budget(cost=2**65)], 0.0)
        assert not fleet.stores[0].is_degraded


async def test_a_gateway_that_was_only_silent_is_not_buried_later(
    redis_server: RedisServer,
) -> None:
    short = replace(PACE, lease_s=0.3, orphan_s=0.6)
    async with Fleet(redis_server, pace=short) as fleet:
        silent = fleet.gateways[2]
        held = await silent.store.reserve("r", [places(), budget()], 0.0)
        await silent.kill()
        await fleet.until_used(places(), 0)  # given up
        silent.resume()
        await asyncio.sleep(short.orphan_s * 1.5)
        assert await fleet.used(budget()) == 2 * PRICE
        assert held.reservation is not None
        await silent.store.settle(held.reservation, UsedAmounts(1, 1, PRICE, 5, 5, time.time()))
        assert await fleet.used(budget()) == PRICE
