"""`python -m bench.soak --minutes 30`: does the real server stay the same for as long as it runs?

The gateway and its worker as `polyhost serve` starts them, the three demo models in a device
budget that holds two, callers of several tenants that stream, leave, give up and share prefixes
(`soak_clients.py`). Every `--breath-every` seconds the callers pause, so that the idle worker looks
through its books (`check_integrity`; a failure ends it, and is seen here as a restart) and memory
is read with nothing running.

Lives here: the run, its samples, the verdict. The verdict is no if a request ended in no way or in
two, if postings are not exactly those of the requests, if a greedy answer differed from itself, if
a worker was restarted, if requests were left over, or if memory grew by more than
`--max-growth-mib` between the middle and the last third of the run.
"""

import argparse
import asyncio
import contextlib
import json
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import machine, processes, servers
from bench.soak_clients import Callers, Mix, Seen, Tally

DEMO_MODELS = Path(__file__).resolve().parent.parent / "gateway" / "demo_models"
MIB = 1 << 20
BREATH_S = 1.5
"""How long the callers pause: longer than the ledger's and the status' intervals."""
SETTLE_S = 2.0
SERIES = re.compile(r"^polyhost_(\w+)(?:\{([^\n]*)\})? (\S+)$", re.MULTILINE)
KNOWN_UNPOSTED = ("refused",)


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at the server. Sizes in MiB; `resting`: nobody was asking."""

    at_s: float
    resting: bool
    gateway_mib: float
    worker_mib: float
    worker_anon_mib: float
    worker_pid: int
    swaps: float
    pages_free: float
    num_requests: int


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.soak", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--callers", type=int, default=10)
    parser.add_argument("--tenants", type=int, default=3)
    parser.add_argument("--device-budget", type=int, default=18 * MIB, help="bytes; two of three")
    parser.add_argument("--dtype", default="float32", help="greedy answers repeat exactly in fp32")
    parser.add_argument("--sample-every", type=float, default=5.0, help="seconds")
    parser.add_argument("--breath-every", type=float, default=30.0, help="seconds")
    parser.add_argument("--max-growth-mib", type=float, default=8.0)
    parser.add_argument("--setting", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work-dir", type=Path, help="data folder's place; else a temporary one")
    parser.add_argument("--output", type=Path, help="else bench/results/soak-<time>.json")
    return parser.parse_args(argv)


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
        series = metrics(self._server.base_url)
        gateway = memory_mib(self._server.process.pid)
        pids = worker_pids(self._server.process.pid)
        worker = memory_mib(pids[0]) if pids else {}
        sample = Sample(
            at_s=round(time.monotonic() - self._started_s, 3),
            resting=resting,
            gateway_mib=gateway.get("VmRSS", 0.0),
            worker_mib=worker.get("VmRSS", 0.0),
            worker_anon_mib=worker.get("RssAnon", 0.0),
            worker_pid=pids[0] if pids else 0,
            swaps=total(series, "swaps_total"),
            pages_free=sum(
                value
                for (name, labels), value in series.items()
                if name == "arena_pages" and 'kind="free"' in labels
            ),
            num_requests=len(self._callers.seen),
        )
        self.samples.append(sample)
        left = total(series, "num_requests_running") + total(series, "num_requests_waiting")
        if resting and left:
            self.problems.append(f"{left:.0f} requests left over at {sample.at_s:.0f} s")


async def breathe(callers: Callers, watch: Watch) -> None:
    """Everybody pauses; the idle worker checks its books; memory is read at rest."""
    await callers.hold()
    await asyncio.sleep(BREATH_S)
    await asyncio.to_thread(watch.look, True)
    callers.release()


async def soak(args: argparse.Namespace, callers: Callers, watch: Watch) -> None:
    """Callers and samples until the time is up."""
    running = asyncio.create_task(callers.run(args.callers))
    end_s = time.monotonic() + args.minutes * 60
    breath_s = time.monotonic() + args.breath_every
    while time.monotonic() < end_s and not running.done():
        await asyncio.sleep(min(args.sample_every, max(0.0, end_s - time.monotonic())))
        if time.monotonic() >= breath_s:
            await breathe(callers, watch)
            breath_s = time.monotonic() + args.breath_every
            print(_progress(watch.samples[-1]), file=sys.stderr)
        else:
            await asyncio.to_thread(watch.look, False)
    callers.stop()
    await running
    await asyncio.sleep(SETTLE_S)
    await asyncio.to_thread(watch.look, True)


def run(args: argparse.Namespace, work_dir: Path) -> dict[str, Any]:
    """The whole soak; returns the result file's content."""
    settings = {
        "device_budget_bytes": str(args.device_budget),
        **dict(item.split("=", 1) for item in args.setting),
    }
    with ExitStack() as stack:
        data_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="data-", dir=work_dir))
        polyhost = servers.Polyhost(Path(data_dir), settings)
        names = sorted(path.parent.name for path in DEMO_MODELS.glob("*/config.json"))
        for name in names:
            polyhost.add_model(name, DEMO_MODELS / name, args.dtype)
        keys = {f"tenant{i}": polyhost.new_key(f"tenant{i}") for i in range(args.tenants)}
        server = polyhost.serve(next(iter(keys.values())))
        stack.enter_context(server.process)
        callers = Callers(server.base_url, keys, Mix(names, args.seed))
        watch = Watch(server, callers)
        asyncio.run(soak(args, callers, watch))
        series = metrics(server.base_url)
        server.process.stop()
        postings = polyhost.usage()
        errors = errors_of(server.process.read_log())
    memory = {who: trend(watch.samples, who) for who in ("gateway_mib", "worker_mib")}
    restarts = total(series, "worker_restarts_total")
    problems = [
        *watch.problems,
        *settle(callers.seen, postings),
        *verdict(callers, memory, restarts, args.max_growth_mib),
    ]
    first, last = watch.samples[0], watch.samples[-1]
    return {
        "benchmark": "soak",
        "settings": {**settings, "dtype": args.dtype, "callers": args.callers, "seed": args.seed},
        "minutes": args.minutes,
        "machine": machine.facts(),
        "ok": not problems,
        "problems": problems[:50],
        "requests": asdict(Tally.of(callers.seen)),
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
        "counters": {f"{name}{{{labels}}}": v for (name, labels), v in _kept(series).items()},
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
            num_nameless += one.outcome not in KNOWN_UNPOSTED
            continue
        known.add(one.request_id)
        row = rows.get(one.request_id)
        # Events without text, such as the first, bind the ledger to nothing.
        if row is None and (one.outcome == "finished" or one.num_events):
            problems.append(f"{one.request_id} ({one.outcome}) has no posting")
        if row is None or one.outcome != "finished":
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
        f"{seen.ask.way} request to {seen.ask.model} {seen.outcome}: {seen.code}"
        for seen in callers.seen
        if seen.outcome in ("broken", "failed")
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


def memory_mib(pid: int) -> dict[str, float]:
    """VmRSS, RssAnon, RssFile and RssShmem of a process; {} once it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return {}
    found = re.findall(r"^(VmRSS|Rss\w+):\s+(\d+) kB$", text, re.MULTILINE)
    return {name: int(kib) / 1024 for name, kib in found}


def worker_pids(gateway_pid: int) -> list[int]:
    """Engine processes that the gateway started."""
    found = []
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{gateway_pid}/task/{gateway_pid}/children").read_text("utf-8")
        for pid in map(int, children.split()):
            with contextlib.suppress(OSError):
                if b"engine.worker.main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
    return found


def metrics(base_url: str) -> dict[tuple[str, str], float]:
    """Every series of /metrics by name (without the prefix) and labels."""
    with urllib.request.urlopen(f"{base_url}/metrics", timeout=30) as response:
        text = response.read().decode()
    return {(name, labels): float(value) for name, labels, value in SERIES.findall(text)}


def total(series: Mapping[tuple[str, str], float], name: str) -> float:
    """A metric over all its labels."""
    return sum(value for (found, _), value in series.items() if found == name)


def errors_of(log: str) -> list[str]:
    """The log's lines of level error or above, from the gateway or the worker."""
    return [
        line[:500] for line in log.splitlines() if re.search(r'"?level"?[=:] ?"?(err|crit)', line)
    ]


def _kept(series: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    return {key: value for key, value in series.items() if not key[0].endswith("_bucket")}


def _progress(sample: Sample) -> str:
    return (
        f"{sample.at_s / 60:6.1f} min  {sample.num_requests} requests, {sample.swaps:.0f} swaps, "
        f"gateway {sample.gateway_mib:.1f} MiB, worker {sample.worker_mib:.1f} MiB"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run, write the result, print the verdict. Returns 1 where the verdict is no."""
    args = parse(argv)
    processes.exit_on_sigterm()
    output = args.output or Path("bench/results") / f"soak-{time.strftime('%Y%m%d-%H%M%S')}.json"
    with ExitStack() as stack:
        work_dir = args.work_dir
        if work_dir is None:
            work_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        work_dir.mkdir(parents=True, exist_ok=True)
        result = run(args, work_dir)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(
        f"{result['num_requests']} requests {result['requests']['outcomes']}, "
        f"{result['swaps']:.0f} swaps, {result['breaths']} breaths, "
        f"{result['worker_restarts']:.0f} restarts, {result['cached_tokens']} cached tokens"
    )
    for who, row in result["memory"].items():
        print(f"{who}: {row['last_mib']:.1f}, {row['slope_mib_per_hour']:+.2f} MiB/h")
    print(*(result["problems"] or ["nothing wrong"]), sep="\n")
    print(f"written to {output}")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
