"""`python -m bench.redis_drills`: Redis stopped three times under a real server's load.

The real `polyhost serve --gateway-processes N` with limits in a Redis of its own. Two tenants ask
in closed loops, each on connections of its own: one with limits by the minute and day and places,
one with a hard budget as well. Redis is killed three times and started again DOWN_S later: twice
with what it last wrote, the third time empty. While it is away that time, a third tenant asks for
three times its limit by the minute. Told are the answers by tenant, what `polyhost_degraded` said
and when, the server's lines of the log, and the time until limits were shared again.

Exit status 1 where a request failed that has no budget, one of the budget's was answered other than
200 or 503, the third tenant got more than its limit, `polyhost_degraded` did not follow, or more
was logged than a few lines a process and death.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from bench import machine
from bench.gateway_processes import MODEL, NAME
from bench.limits_redis import Server as RedisServer
from bench.limits_redis import default_server
from bench.servers import Polyhost, Server

LANES = 4
BEFORE_S = 5.0
DOWN_S = 4.0
RECOVERED_S = 30.0
RPM = 40
MAX_LINES = 6
"""Of the log, a process and death."""
LIMITS = ("--rpm", "1000000", "--tpm", "100000000", "--tpd", "1000000000", "--concurrency", "1000")


class Tenant:
    """Asks, and keeps what it was told: (when, status)."""

    def __init__(self, server: Server, key: str) -> None:
        self._url = f"{server.base_url}/v1/chat/completions"
        self._headers = {"authorization": f"Bearer {key}"}
        self.told: list[tuple[float, int]] = []

    async def ask(self, session: aiohttp.ClientSession) -> None:
        """One short chat."""
        body = {"model": NAME, "max_tokens": 2, "messages": [{"role": "user", "content": "Who?"}]}
        began_s = time.monotonic()
        try:
            async with session.post(self._url, json=body, headers=self._headers) as answer:
                await answer.read()
                self.told.append((began_s, answer.status))
        except aiohttp.ClientError:
            self.told.append((began_s, 0))

    async def loop(self, stop: asyncio.Event) -> None:
        """Until told to stop; after a refusal a short pause."""
        async with aiohttp.ClientSession() as session:
            while not stop.is_set():
                await self.ask(session)
                if self.told[-1][1] != 200:
                    await asyncio.sleep(0.1)

    def statuses(self) -> dict[str, int]:
        """How many of each."""
        found = Counter(status for _, status in self.told)
        return {str(status): found[status] for status in sorted(found)}


async def degraded(server: Server, session: aiohttp.ClientSession) -> float:
    """What /metrics says of all processes."""
    async with session.get(f"{server.base_url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    (said,) = [line for line in lines if line.startswith('polyhost_degraded{part="limits"}')]
    return float(said.split()[1])


async def until_degraded_is(server: Server, wanted: float) -> float:
    """Seconds until it says so; RECOVERED_S where it does not."""
    began_s = time.monotonic()
    async with aiohttp.ClientSession() as session:
        while (took_s := time.monotonic() - began_s) < RECOVERED_S:
            if await degraded(server, session) == wanted:
                return round(took_s, 2)
            await asyncio.sleep(0.05)
    return RECOVERED_S


async def die(server: Server, redis: RedisServer, number: int, small: Tenant) -> dict[str, Any]:
    """One death; `number` 2: it comes back empty, and the third tenant asks meanwhile."""
    await asyncio.sleep(BEFORE_S)
    await asyncio.to_thread(redis.kill, number == 2)
    killed_s = time.monotonic()
    said_s = await until_degraded_is(server, 1.0)
    if number == 2:
        async with aiohttp.ClientSession() as session:
            await asyncio.gather(*(small.ask(session) for _ in range(3 * RPM)))
    await asyncio.sleep(max(0.0, DOWN_S - (time.monotonic() - killed_s)))
    redis.start()
    return {"degraded_after_s": said_s, "recovered_after_s": await until_degraded_is(server, 0.0)}


async def measure(num_processes: int, redis: RedisServer, folder: Path) -> dict[str, Any]:
    """All three, on one server."""
    data_dir = folder / "data"
    home = Polyhost(data_dir, {"gateway_processes": num_processes, "redis_url": redis.url})
    data_dir.mkdir()
    home.run("db", "upgrade")
    home.add_model(NAME, MODEL)
    home.run("prices", "set", NAME, "--prompt", "1", "--completion", "2")
    keys = [home.new_key(name) for name in ("rates", "budget", "small")]
    home.run("limits", "set", "--tenant", "rates", *LIMITS)
    home.run("limits", "set", "--tenant", "budget", *LIMITS, "--budget-month", "1000")
    home.run("limits", "set", "--tenant", "small", "--rpm", str(RPM))
    server = home.serve(keys[0])
    rates, budget, small = (Tenant(server, key) for key in keys)
    log = data_dir / "bench-server.log"
    try:
        await until_degraded_is(server, 0.0)
        lines_before = len(log.read_text().splitlines())
        stop = asyncio.Event()
        loops = [asyncio.create_task(tenant.loop(stop)) for tenant in (rates, budget) * LANES]
        deaths = [await die(server, redis, number, small) for number in range(3)]
        await asyncio.sleep(BEFORE_S)
        stop.set()
        await asyncio.gather(*loops)
        lines = log.read_text().splitlines()[lines_before:]
    finally:
        server.process.stop()
    ends_s = max(at for at, _ in budget.told)
    ok = {
        "rates": set(rates.statuses()) == {"200"},
        "budget": set(budget.statuses()) <= {"200", "503"},
        "budget_again": {status for at, status in budget.told if at > ends_s - 2.0} == {200},
        "small": 0 < small.statuses()["200"] <= RPM,
        "degraded": all(max(death.values()) < RECOVERED_S for death in deaths),
        "log": len(lines) <= 3 * MAX_LINES * (num_processes + 2),
    }
    return {
        "benchmark": "redis-drills",
        "machine": machine.facts(),
        "gateway_processes": num_processes,
        "down_s": DOWN_S,
        "deaths": deaths,
        "statuses": {
            "rates": rates.statuses(),
            "budget": budget.statuses(),
            "small": small.statuses(),
        },
        "num_log_lines": len(lines),
        "ok": ok,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.redis_drills")
    parser.add_argument("--processes", type=int, default=4, metavar="N")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the report, as JSON")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        redis = RedisServer(default_server(), folder)
        redis.start()
        try:
            found = asyncio.run(measure(options.processes, redis, Path(folder)))
        finally:
            redis.kill()
    for name in ("deaths", "statuses", "num_log_lines", "ok"):
        print(name, json.dumps(found[name]))
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if all(found["ok"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
