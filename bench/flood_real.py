"""`python -m bench.flood_real`: a quiet tenant beside a flood, over HTTP, on the real server.

    python -m bench.flood_real --part resident
    python -m bench.flood_real --part cold

The quiet tenant asks one demo model at a steady, low rate, streaming. First alone, then beside
another tenant that keeps `--flood` requests open at once all the time.

    resident   the flood asks for the same model, which never leaves the device
    cold       the device holds one model less than there are: the flood sprays the other models,
               in turn, so that each of its requests may need a load

Everything is run on the product and on the product's server with first come, first served in place
of fair shares (policy_server.py), for the quiet tenant's wait there and for the throughput: both
servers are there all the time and each repeat has both, so that a machine that becomes slower does
so to both. The share of a core that each process had is told: where the gateway's and the client's
core is busy all the time, the wait is theirs.

Reported: the quiet tenant's time to first token alone and beside the flood (goals: resident, p99 at
most 1.5 of alone; cold, at most alone and one load), tokens a second of both tenants together
beside first come, first served (goal: 97 %), loads, refusals of the flood, and the service that
each tenant was charged. Latencies count from the time a request was due.
"""

import argparse
import asyncio
import itertools
import json
import os
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bench import client, machine, processes, servers, stats
from bench.client import ChatRequest, RequestResult, Target
from bench.prompts import PromptMaker
from bench.sim_real import pin_server, pin_this
from bench.swap_log import read_swaps

Part = Literal["resident", "cold"]
DEMO_MODELS = Path(__file__).resolve().parent.parent / "gateway" / "demo_models"
MODULES: dict[str, tuple[str, ...]] = {
    "ours": ("gateway",),
    "fcfs": ("bench.policy_server", "--share", "fcfs"),
}
BUDGETS: dict[str, int] = {"resident": 40 << 20, "cold": 18 << 20}
"""Of the device: all three demo models (6 MB each in float32) and their KV, or two of them."""
GOAL_RESIDENT = 1.5
GOAL_THROUGHPUT = 0.97
_SERVICE = re.compile(r'^polyhost_service_seconds_total\{tenant="([^"]*)"\} (\S+)$', re.MULTILINE)
FIGURES = (
    *("alone_p50_s", "alone_p99_s", "beside_p50_s", "beside_p99_s", "p50_ratio", "p99_ratio"),
    *("p99_added_s", "tok_s", "flood_tok_s", "loads", "load_p50_s", "load_max_s"),
    *("worker_core", "gateway_core", "client_core"),
)


@dataclass(frozen=True, slots=True)
class Phase:
    """What came back in one phase, and how long it was."""

    quiet: list[RequestResult]
    flood: list[RequestResult]
    wall_s: float


@dataclass(slots=True)
class Arm:
    """A server with its rounds so far: alone, beside, the service of each tenant meanwhile.

    cpu_s  by process, over the phases beside the flood, and `wall`
    """

    rig: "Rig"
    base_url: str
    pids: dict[str, int]
    rounds: list[tuple[Phase, Phase, list[float]]] = field(default_factory=list)
    cpu_s: dict[str, float] = field(default_factory=dict)

    def play(self) -> None:
        """One repeat."""
        alone = asyncio.run(self.rig.phase(self.base_url, flooding=False))
        before, used = _service(self.base_url), self._used()
        beside = asyncio.run(self.rig.phase(self.base_url, flooding=True))
        for name, seconds in self._used().items():
            self.cpu_s[name] = self.cpu_s.get(name, 0.0) + seconds - used[name]
        after = _service(self.base_url)
        service = sorted(after[key] - before.get(key, 0.0) for key in after)
        self.rounds.append((alone, beside, service))

    def _used(self) -> dict[str, float]:
        return {name: _cpu_s(pid) for name, pid in self.pids.items()} | {"wall": time.time()}


class Rig:
    """The data folder with the demo models and the two tenants, and its server."""

    def __init__(self, args: argparse.Namespace, data_dir: Path) -> None:
        self._args = args
        self.folders = sorted(path.parent for path in DEMO_MODELS.glob("*/config.json"))
        self.settings: dict[str, object] = {
            "device_budget_bytes": BUDGETS[args.part],
            "host_tier_bytes": 0,
            "num_threads": 1,
            "max_num_seqs": args.max_num_seqs,
        }
        self.settings |= dict(item.split("=", 1) for item in args.setting)
        self._polyhost = servers.Polyhost(data_dir, self.settings)
        for folder in self.folders:
            self._polyhost.add_model(folder.name, folder, "float32")
        self._keys = {name: self._polyhost.new_key(name) for name in ("quiet", "flood")}
        self._makers = [PromptMaker(folder) for folder in self.folders]
        self._numbers = itertools.count()
        self._begun_at = 0.0
        self._read_log: Callable[[], str] = str

    def serve(self, share: str, stack: ExitStack) -> Arm:
        """Start it, to end with `stack`, and ask each model once."""
        server = self._polyhost.serve(self._keys["quiet"], module=MODULES[share])
        stack.enter_context(server.process)
        self._read_log = server.process.read_log
        worker_pid = pin_server(server.process.pid)
        asyncio.run(self._warm_up(server.base_url))
        self._begun_at = time.time()
        pids = {"worker": worker_pid, "gateway": server.process.pid, "client": os.getpid()}
        return Arm(self, server.base_url, pids)

    def loads(self) -> list[float]:
        """Seconds of each load since the warm-up."""
        swaps = read_swaps(self._read_log())
        return [s.seconds for s in swaps if s.kind == "load" and s.at >= self._begun_at]

    async def _warm_up(self, base_url: str) -> None:
        async with client.new_session() as session:
            for number in range(len(self.folders)):
                target = self._target(base_url, "quiet", number)
                result = await client.chat(
                    session, target, self._request(number, 8), time.perf_counter()
                )
                if result.error:
                    raise processes.ServerFailed(f"the warm-up failed: {result.error}")

    async def phase(self, base_url: str, *, flooding: bool) -> Phase:
        """The quiet tenant's requests, beside the flood or alone."""
        args, stop = self._args, asyncio.Event()
        quiet, flood = self._target(base_url, "quiet", 0), []
        numbers = range(1, len(self.folders)) if args.part == "cold" else (0,)
        sprayed = itertools.cycle(numbers)
        start_s = time.perf_counter()

        async def ask(index: int) -> RequestResult:
            due_s = start_s + args.lead + index / args.rate
            request = self._request(0, args.output_tokens)
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            return await client.chat(session, quiet, request, due_s)

        async def caller() -> None:
            while not stop.is_set():
                number = next(sprayed)
                target = self._target(base_url, "flood", number)
                request = self._request(number, args.flood_tokens)
                flood.append(await client.chat(session, target, request, time.perf_counter()))
                if flood[-1].error:
                    await asyncio.sleep(0.1)

        async with client.new_session() as session:
            width = args.flood if flooding else 0
            callers = [asyncio.create_task(caller()) for _ in range(width)]
            asked = await asyncio.gather(*(ask(index) for index in range(args.requests)))
            wall_s = time.perf_counter() - start_s
            stop.set()
            await asyncio.gather(*callers)
        in_time = [result for result in flood if result.done_s <= start_s + wall_s]
        return Phase(list(asked), in_time, wall_s)

    def _target(self, base_url: str, tenant: str, number: int) -> Target:
        return Target(tenant, base_url, self.folders[number].name, self._keys[tenant])

    def _request(self, number: int, max_tokens: int) -> ChatRequest:
        index = next(self._numbers)
        text = self._makers[number].prompt(self._args.prompt_tokens, "flood", index)
        return ChatRequest(index, text, max_tokens)


def _figures(arm: Arm) -> dict[str, Any]:
    """All repeats together: quantiles over every request of the quiet tenant."""
    rounds, loads = arm.rounds, arm.rig.loads()
    alone = [r for phase, _, _ in rounds for r in phase.quiet]
    beside = [r for _, phase, _ in rounds for r in phase.quiet]
    flood = [r for _, phase, _ in rounds for r in phase.flood]
    failed = sorted({r.error for r in (*alone, *beside) if r.error})
    if failed:
        raise processes.ServerFailed(f"requests of the quiet tenant failed: {', '.join(failed)}")
    waits = {
        name: [r.ttft_s for r in results if r.ttft_s is not None]
        for name, results in (("alone", alone), ("beside", beside))
    }
    found = {
        f"{name}_{label}_s": stats.percentile(values, q)
        for name, values in waits.items()
        for label, q in (("p50", 0.5), ("p99", 0.99))
    }
    wall_s = sum(phase.wall_s for _, phase, _ in rounds)
    flood_tokens = sum(r.completion_tokens for r in flood)
    tokens = flood_tokens + sum(r.completion_tokens for r in beside)
    by_round = [statistics.median(r.ttft_s or 0.0 for r in phase.quiet) for _, phase, _ in rounds]
    return found | {
        "p50_ratio": found["beside_p50_s"] / found["alone_p50_s"],
        "p99_ratio": found["beside_p99_s"] / found["alone_p99_s"],
        "p99_added_s": found["beside_p99_s"] - found["alone_p99_s"],
        "tok_s": tokens / wall_s,
        "flood_tok_s": flood_tokens / wall_s,
        "loads": len(loads),
        "load_p50_s": statistics.median(loads) if loads else 0.0,
        "load_max_s": max(loads, default=0.0),
        "quiet_requests": len(beside),
        "flood_requests": len(flood),
        "flood_errors": dict(Counter(r.error for r in flood if r.error)),
        "service_s": [used for _, _, used in rounds],
        "beside_p50_by_round_s": by_round,
        "tok_s_by_round": [_tokens(phase) / phase.wall_s for _, phase, _ in rounds],
        **{f"{name}_core": arm.cpu_s[name] / arm.cpu_s["wall"] for name in arm.pids},
    }


def _tokens(phase: Phase) -> int:
    return sum(r.completion_tokens for r in (*phase.quiet, *phase.flood))


def verdicts(
    part: Part, ours: dict[str, Any] | None, fcfs: dict[str, Any] | None
) -> dict[str, Any]:
    """Each goal with its figure, as far as it was measured."""
    found: dict[str, Any] = {}
    if ours is None:
        return found
    if part == "resident":
        ratio = ours["p99_ratio"]
        found["p99 beside over alone"] = {"is": ratio, "goal": GOAL_RESIDENT}
        found["p99 beside over alone"]["reached"] = ratio <= GOAL_RESIDENT
    else:
        added, load = ours["p99_added_s"], ours["load_max_s"]
        found["p99 added, beside the longest load"] = {"is": added, "goal": load}
        found["p99 added, beside the longest load"]["reached"] = added <= load
    if fcfs is not None:
        ratio = ours["tok_s"] / fcfs["tok_s"]
        found["tokens a second over fcfs"] = {"is": ratio, "goal": GOAL_THROUGHPUT}
        found["tokens a second over fcfs"]["reached"] = ratio >= GOAL_THROUGHPUT
    return found


def _service(base_url: str) -> dict[str, float]:
    """Device seconds charged so far, by tenant id."""
    with urllib.request.urlopen(f"{base_url}/metrics", timeout=10) as response:
        text = response.read().decode()
    return {match[1]: float(match[2]) for match in _SERVICE.finditer(text)}


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line a server."""
    lines = [f"{'':<6}" + "".join(f"{name:>14}" for name in FIGURES)]
    lines += [
        f"{row['share']:<6}" + "".join(f"{row[name]:>14.3f}" for name in FIGURES) for row in rows
    ]
    return "\n".join(lines)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.flood_real", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--part", choices=("resident", "cold"), default="resident")
    parser.add_argument("--shares", nargs="+", choices=list(MODULES), default=list(MODULES))
    parser.add_argument("--rate", type=float, default=4.0, help="of the quiet tenant, a second")
    parser.add_argument("--requests", type=int, default=40, help="of the quiet tenant, a phase")
    parser.add_argument("--repeats", type=int, default=3, help="of alone and beside, in turns")
    parser.add_argument("--flood", type=int, default=32, help="requests that the flood keeps open")
    parser.add_argument("--lead", type=float, default=2.0, help="seconds of flood before it counts")
    parser.add_argument("--prompt-tokens", type=int, default=24)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--flood-tokens", type=int, default=32)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--setting", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--work-dir", type=Path, help="packs and logs; else a temporary one")
    parser.add_argument("--output", type=Path, help="else bench/results/flood-real-<time>.json")
    return parser.parse_args(argv)


def run(args: argparse.Namespace, work_dir: Path) -> dict[str, Any]:
    """Each server; the result file's content."""
    facts = machine.facts()
    pin_this(1)
    with ExitStack() as stack:
        arms: dict[str, Arm] = {}
        for share in args.shares:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="data-", dir=work_dir))
            arms[share] = Rig(args, Path(folder)).serve(share, stack)
        for number in range(args.repeats):
            for share in args.shares[:: -1 if number % 2 else 1]:
                arms[share].play()
        rows = [_figures(arm) | {"share": share} for share, arm in arms.items()]
        settings = next(iter(arms.values())).rig.settings
    by_share = {row["share"]: row for row in rows}
    plan = {name: value for name, value in vars(args).items() if name not in ("output", "work_dir")}
    return {
        "benchmark": "flood_real",
        "machine": facts,
        "plan": plan,
        "settings": settings,
        "verdicts": verdicts(args.part, by_share.get("ours"), by_share.get("fcfs")),
        "rows": rows,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the table and the verdicts, write the result."""
    args = parse(argv)
    processes.exit_on_sigterm()
    stamp = time.strftime("%Y%m%d-%H%M%S")
    output = args.output or Path("bench/results") / f"flood-real-{args.part}-{stamp}.json"
    with ExitStack() as stack:
        work_dir = args.work_dir
        if work_dir is None:
            work_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        work_dir.mkdir(parents=True, exist_ok=True)
        try:
            result = run(args, work_dir.resolve())
        except (processes.ServerFailed, TimeoutError, OSError, ValueError) as error:
            print(f"bench.flood_real: {error}", file=sys.stderr)
            return 1
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result["rows"]))
    for name, row in result["verdicts"].items():
        state = "reached" if row["reached"] else "MISSED"
        print(f"{name}: {row['is']:.3f} (goal {row['goal']:.3f}): {state}")
    print(f"written to {output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
