"""Does the real server stay the same for as long as it runs?

The gateway and its worker as `polyhost serve` starts them, the three demo models in a device budget
that holds two, callers of several tenants that stream, leave, give up and share prefixes
(`soak_clients.py`). Every BREATH_EVERY_S the callers pause, so that the idle worker looks through
its books (`check_integrity`; a failure ends it, and is seen here as a restart) and memory is read
with nothing running.

What is wrong: a request ended in no way or in two, postings are not exactly those of the requests,
a greedy answer differed from itself, a worker was restarted, requests were left over, or memory
grew by more than `max_growth_mib` between the middle and the last third of the run.
"""

import asyncio
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import machine, servers
from bench.process_memory import memory_of
from tests.e2e.folders import DEMO_MODELS, NAMES
from tests.e2e.soak_clients import Callers, Mix, Seen

MIB = 1 << 20
DEVICE_BUDGET = 18 * MIB
"""Room for two of the three models."""
NUM_TENANTS = 3
SAMPLE_EVERY_S, BREATH_EVERY_S = 5.0, 30.0
BREATH_S = 1.5
"""How long the callers pause: longer than the ledger's and the status' intervals."""
SETTLE_S = 2.0
KNOWN_UNPOSTED = ("refused",)


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at the server. Sizes in MiB; `resting`: nobody was asking."""

    at_s: float
    resting: bool
    gateway_mib: float
    worker_mib: float
    swaps: float
    pages_free: float
    num_requests: int


class Watch:
    """Reads the server's processes and its /metrics into samples."""

    def __init__(self, server: servers.Server, callers: Callers) -> None:
        self._server = server
        self._callers = callers
        self._started_s = time.monotonic()
        self.samples: list[Sample] = []
        self.problems: list[str] = []

    def look(self, resting: bool) -> None:
        """One sample. At rest, requests that the server still knows are a problem."""
        series = self._server.metrics()
        memory = memory_of(self._server.process.pid)
        sample = Sample(
            at_s=round(time.monotonic() - self._started_s, 3),
            resting=resting,
            gateway_mib=memory.others / MIB,
            worker_mib=memory.workers / MIB,
            swaps=servers.total(series, "swaps_total"),
            pages_free=servers.total(series, "arena_pages", 'kind="free"'),
            num_requests=len(self._callers.seen),
        )
        self.samples.append(sample)
        left = servers.total(series, "num_requests_running") + servers.total(
            series, "num_requests_waiting"
        )
        if resting and left:
            self.problems.append(f"{left:.0f} requests left over at {sample.at_s:.0f} s")


async def breathe(callers: Callers, watch: Watch) -> None:
    """Everybody pauses; the idle worker checks its books; memory is read at rest."""
    await callers.hold()
    await asyncio.sleep(BREATH_S)
    await asyncio.to_thread(watch.look, True)
    callers.release()


async def soak(minutes: float, concurrency: int, callers: Callers, watch: Watch) -> None:
    """Callers and samples until the time is up."""
    running = asyncio.create_task(callers.run(concurrency))
    end_s = time.monotonic() + minutes * 60
    breath_s = time.monotonic() + BREATH_EVERY_S
    while time.monotonic() < end_s and not running.done():
        await asyncio.sleep(min(SAMPLE_EVERY_S, max(0.0, end_s - time.monotonic())))
        if time.monotonic() >= breath_s:
            await breathe(callers, watch)
            breath_s = time.monotonic() + BREATH_EVERY_S
            print(_progress(watch.samples[-1]), file=sys.stderr)
        else:
            await asyncio.to_thread(watch.look, False)
    callers.stop()
    await running
    await asyncio.sleep(SETTLE_S)
    await asyncio.to_thread(watch.look, True)


def run(
    work_dir: Path,
    minutes: float,
    *,
    concurrency: int = 10,
    max_growth_mib: float = 8.0,
    settings: Mapping[str, str] | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """The whole soak; what came of it, for a result file."""
    chosen = {"device_budget_bytes": str(DEVICE_BUDGET), **(settings or {})}
    with ExitStack() as stack:
        data_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="data-", dir=work_dir))
        polyhost = servers.Polyhost(Path(data_dir), chosen)
        for name in NAMES:  # greedy answers repeat exactly in float32
            polyhost.add_model(name, DEMO_MODELS / name, "float32")
        keys = {f"tenant{i}": polyhost.new_key(f"tenant{i}") for i in range(NUM_TENANTS)}
        server = polyhost.serve(next(iter(keys.values())))
        stack.enter_context(server.process)
        callers = Callers(server.url, keys, Mix(NAMES, seed))
        watch = Watch(server, callers)
        asyncio.run(soak(minutes, concurrency, callers, watch))
        series = server.metrics()
        server.process.stop()
        postings = polyhost.usage()
        errors = errors_of(server.process.read_log())
    memory = {who: trend(watch.samples, who) for who in ("gateway_mib", "worker_mib")}
    restarts = servers.total(series, "worker_restarts_total")
    problems = [
        *watch.problems,
        *settle(callers.seen, postings),
        *verdict(callers, memory, restarts, max_growth_mib),
    ]
    first, last = watch.samples[0], watch.samples[-1]
    return {
        "benchmark": "soak",
        "settings": {**chosen, "callers": concurrency, "seed": seed},
        "minutes": minutes,
        "machine": machine.facts(),
        "ok": not problems,
        "problems": problems[:50],
        "outcomes": dict(Counter(one.end for one in callers.seen)),
        "codes": dict(Counter(one.code for one in callers.seen if one.end != "left")),
        "num_requests": len(callers.seen),
        "num_postings": len(postings),
        "postings": dict(Counter(row["outcome"] for row in postings)),
        "greedy_answers_compared": callers.num_compared,
        "cached_tokens": sum(seen.cached_tokens for seen in callers.seen),
        "swaps": last.swaps - first.swaps,
        "breaths": sum(sample.resting for sample in watch.samples),
        "worker_restarts": restarts,
        "memory": memory,
        "errors_in_log": errors,
        "counters": {name: value for name, value in series.items() if "_bucket{" not in name},
        "samples": [asdict(sample) for sample in watch.samples],
    }


def settle(seen: Sequence[Seen], postings: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is wrong between what clients saw and what was posted; [] where each has one."""
    problems: list[str] = []
    count = Counter(str(row["request_id"]) for row in postings)
    problems += [f"{name} was posted {n} times" for name, n in count.items() if n > 1]
    rows = {str(row["request_id"]): row for row in postings}
    known: set[str] = set()
    num_nameless = 0
    for one in seen:
        if not one.request_id:
            num_nameless += one.end not in KNOWN_UNPOSTED
            continue
        known.add(one.request_id)
        row = rows.get(one.request_id)
        # Events without text, such as the first, bind the ledger to nothing.
        if row is None and (one.end == "done" or one.chunks):
            problems.append(f"{one.request_id} ({one.end}) has no posting")
        if row is None or one.end != "done":
            continue
        told = (one.prompt_tokens, one.completion_tokens, one.cached_tokens)
        billed = (row["prompt_tokens"], row["completion_tokens"], row["cached_tokens"])
        if row["outcome"] not in ("finished", "cache_hit") or told != billed:
            problems.append(f"{one.request_id}: {row['outcome']} {billed}, the client saw {told}")
        if row["tenant_name"] != one.tenant:
            problems.append(f"{one.request_id} of {one.tenant} is billed to {row['tenant_name']}")
    strangers = sorted(rows.keys() - known)
    if len(strangers) > num_nameless:
        problems.append(f"{len(strangers)} postings of requests nobody made, as {strangers[0]}")
    return problems


def verdict(
    callers: Callers, memory: Mapping[str, Mapping[str, float]], restarts: float, max_mib: float
) -> list[str]:
    """What else speaks against the run."""
    problems = [
        f"{seen.ask.way} request to {seen.ask.model} {seen.end}: {seen.code}"
        for seen in callers.seen
        if seen.end in ("broken", "error")
    ]
    problems += [
        f"a greedy answer of {model} differs from an earlier one: {content[:40]!r}, {num} tokens"
        for model, content, num in callers.differing
    ]
    if restarts:
        problems.append(f"the worker was restarted {restarts:.0f} times")
    problems += [
        f"{who} grew by {trend['growth_mib']:.1f} MiB"
        for who, trend in memory.items()
        if trend["growth_mib"] > max_mib
    ]
    return problems


def trend(samples: Sequence[Sample], who: str) -> dict[str, float]:
    """Memory at rest: last third against middle third, and the slope over both by least squares."""
    points = [(sample.at_s, float(getattr(sample, who))) for sample in samples if sample.resting]
    third = len(points) // 3
    if not third:
        points = [(sample.at_s, float(getattr(sample, who))) for sample in samples]
        third = max(1, len(points) // 3)
    middle, last = points[third : 2 * third] or points, points[-third:]
    later = points[third:]
    slope = 0.0
    if len({at_s for at_s, _ in later}) > 1:
        slope = statistics.linear_regression(*zip(*later, strict=True)).slope
    middle_mib = statistics.median(value for _, value in middle)
    last_mib = statistics.median(value for _, value in last)
    return {
        "first_mib": points[0][1],
        "middle_mib": middle_mib,
        "last_mib": last_mib,
        "growth_mib": round(last_mib - middle_mib, 3),
        "slope_mib_per_hour": round(slope * 3600, 3),
    }


def errors_of(log: str) -> list[str]:
    """The log's lines of level error or above, from the gateway or the worker."""
    return [
        line[:500] for line in log.splitlines() if re.search(r'"?level"?[=:] ?"?(err|crit)', line)
    ]


def _progress(sample: Sample) -> str:
    return (
        f"{sample.at_s / 60:6.1f} min  {sample.num_requests} requests, {sample.swaps:.0f} swaps, "
        f"gateway {sample.gateway_mib:.1f} MiB, worker {sample.worker_mib:.1f} MiB"
    )
