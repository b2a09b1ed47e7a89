"""What comparisons taught is added up by all gateways, outlives them, is forgotten at a purge."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.cache import calibrations
from gateway.cache.calibrations import (
    CalibrationFiles,
    Calibrations,
    CalibrationStore,
    Owner,
    RedisCalibrations,
    decode,
    encode,
    forget_files,
)
from gateway.cache.policy.cache_confidence import MEMORY, NUM_BINS, Calibration, recorded
from gateway.cache.redis_answers import RedisAnswers
from gateway.cache.types import Epoch, Scope, StoreUnavailable
from tests.gateway.cache.answers_kit import Rig, key_of, rig_of, scope_of

KINDS = ("files", "matrix")
REVISION = "embedder-1"
SCOPE = scope_of()
RIGHT, WRONG = recorded(Calibration(), 1, 2.0, True), recorded(Calibration(), 2, 0.5, False, 20.0)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Gateway:
    """One process' calibrations."""

    def __init__(self, store: CalibrationStore, clock: Clock) -> None:
        self.clock, self.all = clock, Calibrations(store, clock)

    async def known(self, epoch: Epoch, scope: Scope = SCOPE) -> Calibration:
        """What is used once the exchange that is due has been made."""
        self.clock.now_s += calibrations.EXCHANGE_S
        self.all.of(scope, epoch, REVISION)
        await self.all.settle()
        return self.all.of(scope, epoch, REVISION)

    async def learn(self, epoch: Epoch, what: Calibration, scope: Scope = SCOPE) -> None:
        self.all.of(scope, epoch, REVISION)
        self.all.add(scope, epoch, REVISION, what)


class World:
    """Gateways that share a store."""

    def __init__(self, rig: Rig, folder: Path, is_files: bool) -> None:
        self.rig, self.folder, self.is_files = rig, folder, is_files

    def gateway(self, number: int = 0) -> Gateway:
        if self.is_files:
            return Gateway(CalibrationFiles(self.folder / "learnt"), Clock())
        store = self.rig.stores[number]
        assert isinstance(store, RedisAnswers)
        return Gateway(RedisCalibrations(store.link, 10.0), Clock())

    async def epoch(self, scope: Scope = SCOPE) -> Epoch:
        return (await self.rig.stores[0].exact(scope, key_of(scope, "why?"))).epoch


@pytest.fixture(params=KINDS)
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    is_files = request.param == "files"
    async with rig_of("memory" if is_files else request.param, tmp_path) as rig:
        yield World(rig, tmp_path, is_files)


def counts(calibration: Calibration) -> tuple[float, float, float]:
    return sum(calibration.right), sum(calibration.wrong), sum(calibration.seen)


async def test_gateways_add_up_and_do_not_overwrite_one_another(world: World) -> None:
    epoch, one, two = await world.epoch(), world.gateway(), world.gateway(1)
    await one.learn(epoch, RIGHT)
    await two.learn(epoch, RIGHT)
    await two.learn(epoch, WRONG)
    assert counts(one.all.of(SCOPE, epoch, REVISION)) == (1, 0, 1)
    await one.known(epoch)
    assert counts(await two.known(epoch)) == (2, 1, 22)
    assert counts(await one.known(epoch)) == (2, 1, 22)
    assert counts(await one.known(epoch)) == (2, 1, 22)  # told once


async def test_it_outlives_the_process(world: World) -> None:
    epoch, first = await world.epoch(), world.gateway()
    await first.known(epoch)
    await first.learn(epoch, WRONG)
    await first.all.close()
    assert await world.gateway().known(epoch) == WRONG


async def test_others_and_another_rule_begin_anew(world: World) -> None:
    epoch, gateway = await world.epoch(), world.gateway()
    await gateway.learn(epoch, RIGHT)
    assert await gateway.known(epoch) == RIGHT
    for other in (scope_of("another"), scope_of("tenant", "another"), scope_of("ten", "antmodel")):
        assert await gateway.known(await world.epoch(other), other) == Calibration()
    gateway.all.of(SCOPE, epoch, "embedder-2")
    await gateway.all.settle()
    assert gateway.all.of(SCOPE, epoch, "embedder-2") == Calibration()


@pytest.mark.parametrize(
    ("tenant", "model"), [("tenant", ""), ("", "model"), ("tenant", "model"), ("", "other")]
)
async def test_a_purge_forgets_it(world: World, tenant: str, model: str) -> None:
    before, one, two = await world.epoch(), world.gateway(), world.gateway(1)
    await one.learn(before, RIGHT)
    assert await one.known(before) == await two.known(before) == RIGHT
    await two.learn(before, WRONG)  # told to nobody yet
    store = world.rig.stores[0]
    await store.invalidate(tenant, model)
    await one.all.forget(tenant, model)
    if world.is_files:
        await two.all.forget(tenant, model)
    after = await world.epoch()
    is_meant = model != "other"
    if is_meant:
        assert two.all.of(SCOPE, after, REVISION) == Calibration()
        assert await two.known(after) == await one.known(after) == Calibration()
        two.all.add(SCOPE, before, REVISION, WRONG)  # of a request that had begun before
        assert await two.known(after) == await world.gateway().known(after) == Calibration()
    else:
        assert sum((await one.known(after)).right) == 1


async def test_in_redis_it_goes_when_it_is_no_longer_used(tmp_path: Path) -> None:
    async with rig_of("matrix", tmp_path) as rig:
        world = World(rig, tmp_path, is_files=False)
        epoch, gateway = await world.epoch(), world.gateway()
        await gateway.learn(epoch, RIGHT)
        await gateway.known(epoch)
        assert rig.server is not None
        with rig.server.client() as client:
            (name,) = [name for name in client.scan_iter() if b":c:" in name]
            assert 0 < client.pttl(name) <= 30 * 24 * 3_600_000
            assert client.strlen(name) < 4096
            client.pexpire(name, 1000)
            await gateway.known(epoch)
            assert client.pttl(name) > 1000
            client.set(name, b"junk")
        assert await gateway.known(epoch) == Calibration()


async def test_counts_are_bounded(world: World) -> None:
    epoch, gateway = await world.epoch(), world.gateway()
    most = recorded(Calibration(), 0, 0.0, True)
    most = Calibration(tuple(n * MEMORY for n in most.right), most.wrong, most.seen)
    await gateway.learn(epoch, most)
    assert counts(await gateway.known(epoch))[0] == MEMORY
    await gateway.learn(epoch, RIGHT)
    assert counts(await gateway.known(epoch))[0] == pytest.approx((MEMORY + 1) / 2)


async def test_many_gateways_at_once_lose_nothing(world: World) -> None:
    epoch = await world.epoch()
    gateways = [world.gateway(number % len(world.rig.stores)) for number in range(8)]
    for _ in range(5):
        for one in gateways:
            await one.learn(epoch, RIGHT)
        await asyncio.gather(*(one.known(epoch) for one in gateways))
    for one in gateways:  # the last look may have begun another exchange
        await one.all.settle()
    assert counts(await world.gateway().known(epoch)) == (40, 0, 40)


class Broken:
    def __init__(self) -> None:
        self.num_asked = 0

    async def exchange(self, owner: Owner, epoch: Epoch, learned: Calibration) -> None:
        self.num_asked += 1
        raise StoreUnavailable("away")

    async def forget(self, tenant_id: str, model_name: str) -> None:
        raise StoreUnavailable("away")


async def test_without_its_store_a_gateway_goes_on_by_itself() -> None:
    store = Broken()
    gateway = Gateway(store, Clock())
    await gateway.learn(b"e", RIGHT)
    assert await gateway.known(b"e") == RIGHT
    for _ in range(100):
        gateway.all.of(SCOPE, b"e", REVISION)
    await gateway.all.settle()
    assert store.num_asked <= 3
    with pytest.raises(StoreUnavailable):
        await gateway.all.forget("tenant", "")


async def test_files_are_bounded_and_what_is_broken_is_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrations, "MAX_FILES", 3)
    gateway = Gateway(CalibrationFiles(tmp_path), Clock())
    for number in range(5):
        await gateway.learn(b"e", RIGHT, scope_of(f"tenant-{number}"))
        await gateway.known(b"e", scope_of(f"tenant-{number}"))
    paths = list(tmp_path.glob("*.counts"))
    assert len(paths) == 3
    for path, junk in zip(paths, (b"", b"\x93\x01", b"\xff" * 99), strict=True):
        path.write_bytes(junk)
    other = Gateway(CalibrationFiles(tmp_path), Clock())
    assert await other.known(b"e", scope_of("tenant-4")) == Calibration()
    forget_files(tmp_path, "nobody", "")
    assert not list(tmp_path.glob("*.counts"))
    forget_files(tmp_path / "none", "", "m")


def test_what_is_no_calibration_is_nothing() -> None:
    assert decode(encode(WRONG)) == WRONG
    assert decode(encode(Calibration())) == Calibration()
    bad = [float("nan")] * (3 * NUM_BINS), [-1.0] * (3 * NUM_BINS), [1.0]
    for row in bad:
        counted = Calibration(tuple(row), tuple(row), tuple(row))
        assert decode(encode(counted)) == Calibration()
    assert decode(b"\xc1") == Calibration()
