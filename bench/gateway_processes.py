"""`python -m bench.gateway_processes`: one server of several gateway processes, and what it keeps.

The real `polyhost serve --gateway-processes N` with a demo model on the CPU; every request comes on
a connection of its own, so that all processes get some.

    takeover     the active dispatcher is killed with -9 under a closed loop, ROUNDS times: how long
                 no request was granted (the longest pauses between two first tokens in the NEAR_S
                 after a kill, beside those at any other time), and that every request was
                 answered, once
    revoked      from the end of `keys revoke` to the last answer that was not 401
    limit        a limit by the minute that is set while the server runs: from the end of
                 `limits set` to its first 429, and how many were let through in all
    standing     memory of each process

Exit status 1 where a request was lost or doubled, a limit overrun, or a change took a second.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp

from bench import machine
from bench.servers import Polyhost, Server

MODEL = Path(__file__).resolve().parent.parent / "gateway" / "demo_models" / "sherlock"
NAME = "sherlock"
ROUNDS = 5
CLIENTS = 24
BETWEEN_S = 8.0
"""In which the one that was killed is there again, in waiting."""
NEAR_S = 4.0
FELT_S = 1.0
RPM = 40


class Client:
    """Asks on fresh connections. `first_s`: when each request's first token came."""

    def __init__(self, server: Server, key: str) -> None:
        self._url = f"{server.base_url}/v1/chat/completions"
        self._headers = {"authorization": f"Bearer {key}"}
        self.first_s: list[float] = []
        self.ids: list[str] = []
        self.statuses: Counter[int] = Counter()
        self.broken = 0

    async def ask(self, session: aiohttp.ClientSession, max_tokens: int = 8) -> int:
        """One stream, to its end."""
        body = {
            "model": NAME,
            "messages": [{"role": "user", "content": "Who came?"}],
            "max_tokens": max_tokens,
            "stream": True,
        }
        async with session.post(self._url, json=body, headers=self._headers) as answer:
            self.statuses[answer.status] += 1
            done = answer.status != 200
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        break
                    if not self.ids or self.ids[-1] != event["id"]:
                        self.first_s.append(time.monotonic())
                        self.ids.append(event["id"])
                done |= line.startswith(b"data: [DONE]")
            self.broken += not done
            return answer.status


def session() -> aiohttp.ClientSession:
    """A connection a request."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))


def active_dispatcher(data_dir: Path) -> int:
    """Who holds the lock, as the kernel says. Raises ValueError where nobody does."""
    inode = (data_dir / "run" / "dispatcher.lock").stat().st_ino
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if fields[1] == "FLOCK" and fields[5].endswith(f":{inode}"):
            return int(fields[4])
    raise ValueError("no dispatcher is active")


async def takeover(server: Server, home: Polyhost, key: str, data_dir: Path) -> dict[str, Any]:
    """Kill the active one, again and again."""
    client = Client(server, key)
    killed_s: list[float] = []
    stop = asyncio.Event()

    async def loop(asking: aiohttp.ClientSession) -> None:
        while not stop.is_set():
            await client.ask(asking)

    async with session() as asking:
        loops = [asyncio.create_task(loop(asking)) for _ in range(CLIENTS)]
        for _ in range(ROUNDS):
            await asyncio.sleep(BETWEEN_S)
            os.kill(active_dispatcher(data_dir), signal.SIGKILL)
            killed_s.append(time.monotonic())
        await asyncio.sleep(BETWEEN_S)
        stop.set()
        await asyncio.gather(*loops)
    await asyncio.sleep(2.0)
    posted = Counter(row["request_id"] for row in await asyncio.to_thread(home.usage))
    told = Counter(set(client.ids))
    # What had been granted goes on: the pause comes after that, so it is looked for in a while.
    gaps: list[float] = []
    others: list[float] = []
    for before, after in pairwise(sorted(client.first_s)):
        near = any(before < at + NEAR_S and after > at for at in killed_s)
        (gaps if near else others).append(after - before)
    return {
        "num_requests": sum(client.statuses.values()),
        "statuses": dict(client.statuses),
        "num_broken": client.broken,
        "num_posted_twice": sum(count > 1 for count in posted.values()),
        "num_not_posted": len(told.keys() - posted.keys()),
        "longest_gaps_s": [round(gap, 3) for gap in sorted(gaps)[-ROUNDS:]],
        "longest_other_gaps_s": [round(gap, 3) for gap in sorted(others)[-ROUNDS:]],
        "ok": client.statuses.keys() == {200}
        and not client.broken
        and set(posted.values()) == {1}
        and told.keys() <= posted.keys(),
    }


async def revoked(server: Server, home: Polyhost, key: str) -> dict[str, Any]:
    """How long a revoked key is still taken by any process."""
    client = Client(server, key)
    last_s = 0.0
    async with session() as asking:

        async def loop() -> None:
            nonlocal last_s
            while time.monotonic() < ends_s:
                begun_s = time.monotonic()
                if await client.ask(asking, max_tokens=1) == 200:
                    last_s = max(last_s, begun_s)

        ends_s = time.monotonic() + 60.0
        loops = [asyncio.create_task(loop()) for _ in range(8)]
        await asyncio.sleep(1.0)
        await asyncio.to_thread(home.run, "keys", "revoke", key.split("-")[2])
        revoked_s = time.monotonic()
        ends_s = revoked_s + 3.0
        await asyncio.gather(*loops)
    felt_s = max(0.0, last_s - revoked_s)
    return {
        "felt_s": round(felt_s, 3),
        "statuses": dict(client.statuses),
        "ok": felt_s < FELT_S and client.statuses.keys() == {200, 401},
    }


async def limit(server: Server, home: Polyhost, key: str) -> dict[str, Any]:
    """A limit that is set holds for all processes together."""
    await asyncio.to_thread(home.run, "limits", "set", key.split("-")[2], "--rpm", str(RPM))
    await asyncio.sleep(FELT_S)
    client = Client(server, key)
    async with session() as asking:
        await asyncio.gather(*(client.ask(asking, max_tokens=1) for _ in range(3 * RPM)))
    granted = client.statuses[200]
    return {"rpm": RPM, "granted": granted, "ok": granted == RPM}


def standing(server: Server) -> dict[str, float]:
    """MiB of each process of the server."""
    pid = server.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found = {}
    for child in [str(pid), *children]:
        words = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
        name = next((w for w in words if w.startswith(("gateway-", "dispatcher-"))), "")
        name = name or ("worker" if "engine.worker.main" in words else "parent")
        status = Path(f"/proc/{child}/status").read_text()
        found[name] = int(status.split("VmRSS:")[1].split()[0]) / 1024
    return {name: round(mib, 1) for name, mib in sorted(found.items())}


async def measure(num_processes: int, redis_url: str, folder: Path) -> dict[str, Any]:
    """All parts, on one server."""
    data_dir = folder / "data"
    settings = {
        "gateway_processes": num_processes,
        "max_num_seqs": 8,
        "redis_url": redis_url,
        "redis_prefix": f"bench-{os.getpid()}",
    }
    home = Polyhost(data_dir, settings)
    data_dir.mkdir()
    home.run("db", "upgrade")
    home.add_model(NAME, MODEL)
    keys = [home.new_key(name) for name in ("takeover", "revoked", "limit")]
    server = home.serve(keys[0])
    try:
        return {
            "machine": machine.facts(),
            "gateway_processes": num_processes,
            "redis": bool(redis_url),
            "ready_s": round(server.ready_s, 1),
            "limit": await limit(server, home, keys[2]),
            "revoked": await revoked(server, home, keys[1]),
            "takeover": await takeover(server, home, keys[0], data_dir),
            "standing_mib": standing(server),
        }
    finally:
        server.process.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.gateway_processes")
    parser.add_argument("--processes", type=int, default=4, metavar="N")
    parser.add_argument("--redis", default="", metavar="URL", help="where limits are counted")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the report, as JSON")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(options.processes, options.redis, Path(folder)))
    text = json.dumps(found, indent=2)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n", encoding="utf-8")
    return 0 if all(found[part]["ok"] for part in ("limit", "revoked", "takeover")) else 1


if __name__ == "__main__":
    sys.exit(main())
