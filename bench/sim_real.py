"""The real server beside the simulator: started, pinned to cores, and played arrivals.

Lives here: cores, the run of one stream of arrivals over HTTP, what it leaves. Does not: what is
compared (sim/scenarios/real.py), one request's stream (client.py).

The first worker gets the first core that this process may use, the gateway and the client the
second, and so on for more workers; those beyond the last core share it. So on two cores a second
worker shares its core with gateway and client.
"""

import asyncio
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import client
from bench.client import ChatRequest, RequestResult, Target
from bench.processes import ServerFailed, cpu_s
from bench.servers import Server

_SWAP = re.compile(r"swap model=(\S+) kind=(load|evict) tier=(\w+) bytes=\d+ seconds=([\d.]+)")
_CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]


@dataclass(frozen=True, slots=True)
class Played:
    """What a run left. `cpu_s`: of gateway, worker and client, by name."""

    results: list[RequestResult]
    start_s: float
    cpu_s: dict[str, float]
    wall_s: float
    core_share: float
    """Of the time in which the workers wanted their cores, how much they had them."""


@dataclass(frozen=True, slots=True)
class LoggedSwap:
    """A line of the worker's log."""

    model: str
    kind: str
    tier: str
    seconds: float


def pin_this(place: int) -> None:
    """This process and all its threads to the `place`-th core."""
    _pin(os.getpid(), place)


def pin_server(server: Server) -> list[int]:
    """The server's gateway to the second core, its workers to the first ones; their pids.

    Raises ServerFailed where it has no worker.
    """
    workers = sorted(server.worker_pids())
    if not workers:
        raise ServerFailed("the server has no worker process")
    _pin(server.process.pid, 1)
    for place, worker in enumerate(workers):
        _pin(worker, place)
    return workers


def play(
    targets: Mapping[tuple[int, int], Target],
    asks: Sequence[tuple[float, tuple[int, int], ChatRequest]],
    gateway_pid: int,
    worker_pids: Sequence[int],
) -> Played:
    """Send each at its time, to the target of its tenant and model, whatever still runs."""
    pids = {"gateway": [gateway_pid], "worker": worker_pids, "client": [os.getpid()]}
    return asyncio.run(_play(targets, asks, pids))


def swaps(log: str) -> list[LoggedSwap]:
    """Loads and evictions that the log tells of, in their order."""
    return [
        LoggedSwap(match[1], match[2], match[3], float(match[4])) for match in _SWAP.finditer(log)
    ]


async def _play(
    targets: Mapping[tuple[int, int], Target],
    asks: Sequence[tuple[float, tuple[int, int], ChatRequest]],
    pids: Mapping[str, Sequence[int]],
) -> Played:
    async def one(due_s: float, target: Target, request: ChatRequest) -> RequestResult:
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        return await client.chat(session, target, request, due_s)

    before = {name: sum(cpu_s(some)) for name, some in pids.items()}
    ran_s, waited_s = _ran_and_waited(pids["worker"])
    async with client.new_session() as session:
        start_s = time.perf_counter() + 0.1
        results = await asyncio.gather(
            *(one(start_s + at_s, targets[whom], request) for at_s, whom, request in asks)
        )
    used = {name: sum(cpu_s(some)) - before[name] for name, some in pids.items()}
    wall_s = time.perf_counter() - start_s
    ran_now_s, waited_now_s = _ran_and_waited(pids["worker"])
    ran_s, waited_s = ran_now_s - ran_s, waited_now_s - waited_s
    return Played(list(results), start_s, used, wall_s, ran_s / max(1e-9, ran_s + waited_s))


def _pin(pid: int, place: int) -> None:
    core = _CORES[min(place, len(_CORES) - 1)]
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), {core})


def _ran_and_waited(pids: Sequence[int]) -> tuple[int, int]:
    """Of their main threads, which run the steps: on a core, and ready but without one."""
    rows = [Path(f"/proc/{pid}/schedstat").read_text().split() for pid in pids]
    return sum(int(row[0]) for row in rows), sum(int(row[1]) for row in rows)
