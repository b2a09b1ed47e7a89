"""`python -m bench.cpu_busy`: what a busy gateway takes from generation on the same cores.

Lives here: a real server with a model of a true shape, streams that generate without end, and in
every second window so many answers from the cache a second beside them. Does not: the load itself
(`gateway_load.py`, a process of its own), the server (`cpu_http.py`).

Windows take turns: alone, busy, alone, busy, alone; a busy one is compared with the mean of those
around it. Streams are so long that none ends: four prompts at once take seconds of the window they
fall into. From the processes' own clocks comes what gateway and clients took of the cores in each,
and so how many tokens were left to be had: `alone x (cores - taken busy) / (cores - taken alone)`.
What is missing beyond that is waiting: for a core, for a thread that was put aside, for a lock. The
goal is 15 % at 200 hits a second.

    .venv/bin/python -m bench.cpu_busy FOLDER [--rate 200] [--streams 4] [--windows 9] [--output F]
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypedDict

import aiohttp
import msgspec

from bench import cpu_http, machine, process_memory, processes, servers, stats
from bench.gateway_load import Found, Plan
from bench.in_process import MODEL

GOAL_BEYOND = 0.15
TICKS = os.sysconf("SC_CLK_TCK")
PROMPT_WORDS = 40
SETTLE_S = 2.0


class Window(TypedDict):
    """One window. CPU in cores; `rest`: gateway and clients."""

    busy: bool
    tokens_s: float
    worker_cores: float
    gateway_cores: float
    client_cores: float
    hit_p50_ms: float
    hit_p99_ms: float
    refused: int


class Streams:
    """Callers that stream without end; counts what comes."""

    def __init__(self, url: str, key: str, num_callers: int, max_tokens: int) -> None:
        self.num_tokens = 0
        self._url, self._key, self._max_tokens = url, key, max_tokens
        self._num_callers = num_callers
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin, and wait until each has said something."""
        self._tasks = [asyncio.create_task(self._call(n)) for n in range(self._num_callers)]
        while self.num_tokens < 2 * self._num_callers:
            await asyncio.sleep(0.1)
            self.check()

    def check(self) -> None:
        """Raises what ended one of them."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def stop(self) -> None:
        """End all."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _call(self, number: int) -> None:
        async with aiohttp.ClientSession() as session:
            for turn in range(1 << 30):
                said = " ".join(f"{number} {turn} {word}" for word in range(PROMPT_WORDS))
                body = chat(said, self._max_tokens) | {"stream": True}
                headers = {"authorization": f"Bearer {self._key}"}
                url = f"{self._url}/v1/chat/completions"
                async with session.post(url, json=body, headers=headers) as answer:
                    answer.raise_for_status()
                    async for data in answer.content.iter_any():
                        self.num_tokens += data.count(b"data: ")


def chat(content: str, max_tokens: int) -> dict[str, Any]:
    """A greedy request."""
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "temperature": 0,
    }


def cpu_seconds(leader: int) -> tuple[float, float]:
    """Of the workers below this process, and of it and the others below it."""
    parents, spent = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(encoding="utf-8").rpartition(")")[2].split()
            command = stat.with_name("cmdline").read_bytes()
        except OSError:
            continue
        pid = int(stat.parent.name)
        parents[pid] = int(fields[1])
        spent[pid] = (b"engine.worker" in command, (int(fields[11]) + int(fields[12])) / TICKS)
    found = [0.0, 0.0]
    for pid, (is_worker, seconds) in spent.items():
        if process_memory.is_below(pid, leader, parents):
            found[0 if is_worker else 1] += seconds
    return found[0], found[1]


async def hits(plan: Plan) -> Found:
    """The load process, to its end."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.gateway_load"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    said, _ = await process.communicate(msgspec.json.encode(plan))
    return msgspec.json.decode(said, type=Found)


async def window(streams: Streams, leader: int, plan: Plan | None, seconds: float) -> Window:
    """`plan`: the hits beside; None: alone."""
    beside = asyncio.create_task(hits(plan)) if plan else None
    await asyncio.sleep(SETTLE_S)
    tokens, started = streams.num_tokens, time.perf_counter()
    worker, gateway = cpu_seconds(leader)
    own = time.process_time()
    await asyncio.sleep(seconds)
    spent = time.perf_counter() - started
    tokens, own = streams.num_tokens - tokens, time.process_time() - own
    worker_now, gateway_now = cpu_seconds(leader)
    found = await beside if beside else Found([], [], {})
    streams.check()
    share = found.client_cpu_s / found.wall_s if found.wall_s else 0.0
    return {
        "busy": beside is not None,
        "tokens_s": tokens / spent,
        "worker_cores": (worker_now - worker) / spent,
        "gateway_cores": (gateway_now - gateway) / spent,
        "client_cores": own / spent + share,
        "hit_p50_ms": stats.percentile(found.done_s or [0.0], 0.5) * 1e3,
        "hit_p99_ms": stats.percentile(found.done_s or [0.0], 0.99) * 1e3,
        "refused": sum(count for status, count in found.statuses.items() if status != "200"),
    }


def beyond(before: Window, busy: Window, after: Window, cores: int) -> dict[str, float]:
    """What was lost: in all, by CPU time that others took, and beyond that."""
    alone = (before["tokens_s"] + after["tokens_s"]) / 2

    def free(window: Window) -> float:
        return cores - window["gateway_cores"] - window["client_cores"]

    expected = alone * free(busy) / ((free(before) + free(after)) / 2)
    return {
        "lost": 1 - busy["tokens_s"] / alone,
        "taken": 1 - expected / alone,
        "beyond": 1 - busy["tokens_s"] / expected,
    }


async def measure(url: str, keys: tuple[str, str], leader: int, args: Any) -> list[Window]:
    """All windows. `keys`: without the cache, and with it."""
    host, _, port = url.removeprefix("http://").partition(":")
    body = json.dumps(chat("what is asked again and again", 8))
    requests = int(args.rate * (args.seconds + SETTLE_S + 1))
    plan = Plan(host, int(port), [body], [keys[1]], requests, rate=args.rate)
    await hits(Plan(host, int(port), [body], [keys[1]], 2, connections=1))
    streams = Streams(url, keys[0], args.streams, args.stream_tokens)
    await streams.start()
    found = [
        await window(streams, leader, plan if number % 2 else None, args.seconds)
        for number in range(args.windows)
    ]
    await streams.stop()
    return found


def report(found: Sequence[Window], cores: int) -> dict[str, Any]:
    """Losses of the busy windows, and the table's lines."""
    losses = [
        beyond(found[n - 1], found[n], found[n + 1], cores) for n in range(1, len(found) - 1, 2)
    ]
    return {
        "windows": found,
        "loss": {key: stats.repeated([loss[key] for loss in losses]) for key in losses[0]},
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write. 1 where the goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.cpu_busy", description=__doc__)
    parser.add_argument("folder", type=Path, help="the model; its data folder is made beside it")
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--stream-tokens", type=int, default=8000)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--windows", type=int, default=9)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    processes.exit_on_sigterm()
    cores = len(os.sched_getaffinity(0))
    with ExitStack() as closing:
        target, leader = cpu_http.ours(args.folder.resolve(), args.threads, closing)
        house = servers.Polyhost(cpu_http.data_dir(args.folder.resolve()))
        name = f"busy-{time.time_ns()}"
        said = house.run(
            *("keys", "create", "--tenant", servers.TENANT, "--name", name, "--cache", "exact")
        )
        keys = (target.api_key, said.strip())
        found = report(asyncio.run(measure(target.base_url, keys, leader, args)), cores)
    print(json.dumps(found["windows"], indent=1))
    print(json.dumps({key: value["median"] for key, value in found["loss"].items()}))
    if args.output:
        document = {
            "benchmark": "cpu-busy",
            "settings": {key: getattr(args, key) for key in ("rate", "streams", "seconds")},
            "machine": machine.facts(),
            **found,
        }
        args.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 1 if found["loss"]["beyond"]["median"] > GOAL_BEYOND else 0


if __name__ == "__main__":
    raise SystemExit(main())
