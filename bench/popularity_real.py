"""`python -m bench.popularity_real DATA`: popularity on the real server, beside LRU and a split.

    python -m bench.popularity_real DATA --prepare --work-dir DIR
    python -m bench.popularity_real DATA --work-dir DIR --output FILE --seed 1     (then 2, 3, ...)

Models of one true shape with random weights (168 MB each), on a device budget for fewer of them and
the KV of what runs. A recorded trace with the popularity of its models, stretched in time, asks for
them over HTTP, streaming, each request at its time; tenants are drawn by the seed. The same
arrivals go, one after the other, to

    ours     the product as it is
    lru      the longest unused leaves; whatever is asked for is loaded at once
    static   the most popular models (the trace is known) have the device but for one place each to
             themselves (pinned), the others take turns on that place, the longest unused leaves

The last two are the product's server with these policies in ours' place (policy_server.py).
Everything else is alike. Before the trace each model is asked once and not counted.

A run with `--output` adds its rounds to what the file holds, so that repeats may be run one by one;
the summary is the median over all rounds. A load on a CPU is a copy from the page cache, about as
long as ten tokens: the rate and the budget are such that loads are a part of the work all the same,
and `load_share` says how large a part. Latencies count from the time a request was due.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import machine, processes, servers, shapes, stats
from bench.client import ChatRequest, RequestResult, Target
from bench.prompts import PromptMaker
from bench.sim.packs import SimPacks
from bench.sim.spec import parse_workload
from bench.sim.types import Arrival, SimModel
from bench.sim.workloads import open_workload
from bench.sim_real import Played, pin_server, pin_this, play
from bench.swap_log import Swap, read_swaps
from gateway.cli.operator_client import ask

TRACE = "arena27_multimodel:rate=1.6,requests=110,scale=0.1,max_prompt=96,max_tokens=exact"
ARMS: dict[str, tuple[str, ...]] = {
    "ours": ("gateway",),
    "lru": ("bench.policy_server", "--evict", "lru", "--place", "eager"),
    "static": ("bench.policy_server", "--evict", "lru", "--place", "eager"),
}
MIB = 1 << 20
PAGE_BYTES = MIB
WARM_UP_GAP_S = 1.0
WARM_UP_TOKENS = 8
MIN_MODEL_BYTES = 100 * 10**6
FIGURES = (
    *("loads", "reload_s", "load_share", "ttft_p50_s", "ttft_p99_s", "ttft_mean_s"),
    *("goodput", "good_share", "tok_s", "refused", "wall_s", "worker_cpu_s", "core_share"),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What every arm is given. `popular`: models by how often the trace asks for them."""

    arrivals: list[Arrival]
    models: tuple[SimModel, ...]
    settings: dict[str, object]
    num_tenants: int
    popular: list[int]


def make_plan(args: argparse.Namespace) -> Plan:
    """Raises ValueError, OSError."""
    models = tuple(SimModel(f"m{n}", args.shape, args.dtype) for n in range(args.models))
    spec = parse_workload(args.trace, args.data)
    arrivals = list(open_workload(spec, args.tenants, len(models), args.seed))
    size = SimPacks([models[0]]).pack(0).index.total_bytes
    if size < MIN_MODEL_BYTES:
        raise ValueError(f"{args.shape} in {args.dtype} has {size} bytes: take a larger shape")
    budget = args.slots * (size + 8 * PAGE_BYTES) + args.kv_mib * MIB
    asked = Counter(arrival.model for arrival in arrivals)
    settings: dict[str, object] = {
        "device_budget_bytes": budget // PAGE_BYTES * PAGE_BYTES,
        "page_bytes": PAGE_BYTES,
        "host_tier_bytes": 0,
        "device_reserve_bytes": 0,
        "num_threads": 1,
        "max_num_seqs": 16,
        "max_batch_tokens": 256,
        "queue_timeout_s": args.queue_timeout,
    }
    settings |= dict(item.split("=", 1) for item in args.setting)
    ranked = sorted(range(len(models)), key=lambda model: (-asked[model], model))
    return Plan(arrivals, models, settings, args.tenants, ranked)


class Rig:
    """The data folder with all models, made once and kept in the work folder."""

    def __init__(self, plan: Plan, work_dir: Path) -> None:
        self._plan = plan
        self.data_dir = work_dir / "data"
        self.data_dir.mkdir(exist_ok=True)
        self._polyhost = servers.Polyhost(self.data_dir, plan.settings)
        folders = [_folder(number, model, work_dir) for number, model in enumerate(plan.models)]
        self._makers = [PromptMaker(folder) for folder in folders]
        self._keys = self._prepare(work_dir / "keys.json", folders)
        self._logged = 0

    def run(self, arm: str, seed: str, slots: int) -> tuple[Played, list[Swap], dict[str, Any]]:
        """One arm: what came back, the loads while the trace ran, and the decisions' counts."""
        pinned = self._plan.popular[: slots - 1] if arm == "static" else []
        for number in pinned:
            self._polyhost.pin(self._plan.models[number].name, True)
        try:
            return self._serve(arm, seed)
        finally:
            for number in pinned:
                self._polyhost.pin(self._plan.models[number].name, False)

    def _serve(self, arm: str, seed: str) -> tuple[Played, list[Swap], dict[str, Any]]:
        server = self._polyhost.serve(self._keys[0], module=ARMS[arm])
        with server.process:
            pids = {"gateway": server.process.pid, "worker": pin_server(server.process.pid)}
            targets = {
                (tenant, number): Target(model.name, server.base_url, model.name, key)
                for tenant, key in enumerate(self._keys)
                for number, model in enumerate(self._plan.models)
            }
            warm = play(targets, self._warm_up(seed), pids)
            errors = sorted({result.error for result in warm.results if result.error})
            if errors:
                raise processes.ServerFailed(f"{arm}: the warm-up failed: {', '.join(errors)}")
            before_at = time.time()
            played = play(targets, self._asks(seed), pids)
            counts = ask(self.data_dir, ask="decisions", limit=1)["counts"]
        log = server.process.read_log()
        swaps, self._logged = read_swaps(log[self._logged :]), len(log)
        decided = {f"{row['kind']}: {row['reason']}": row["count"] for row in counts}
        return played, [swap for swap in swaps if swap.at >= before_at], decided

    def _prepare(self, keys_path: Path, folders: Sequence[Path]) -> list[str]:
        """A key of each tenant. Models that are registered already are left alone."""
        if keys_path.exists():
            keys: list[str] = json.loads(keys_path.read_text(encoding="utf-8"))
            if len(keys) >= self._plan.num_tenants:
                return keys[: self._plan.num_tenants]
            raise ValueError(f"{keys_path} has {len(keys)} tenants: take an empty --work-dir")
        for model, folder in zip(self._plan.models, folders, strict=True):
            print(f"registering {model.name}", file=sys.stderr)
            self._polyhost.add_model(model.name, folder, model.dtype)
        keys = [self._polyhost.new_key(f"tenant{n}") for n in range(self._plan.num_tenants)]
        keys_path.write_text(json.dumps(keys), encoding="utf-8")
        return keys

    def _warm_up(self, seed: str) -> list[tuple[float, tuple[int, int], ChatRequest]]:
        asks = []
        for number in range(len(self._plan.models)):
            text = self._makers[number].prompt(WARM_UP_TOKENS, f"{seed}/warm", number)
            request = ChatRequest(number, text, WARM_UP_TOKENS)
            asks.append((number * WARM_UP_GAP_S, (0, number), request))
        return asks

    def _asks(self, seed: str) -> list[tuple[float, tuple[int, int], ChatRequest]]:
        asks = []
        for index, arrival in enumerate(self._plan.arrivals):
            text = self._makers[arrival.model].prompt(arrival.prompt_tokens, seed, index)
            request = ChatRequest(index, text, arrival.max_tokens)
            asks.append((arrival.at_s, (arrival.tenant, arrival.model), request))
        return asks


def figures(
    played: Played, swaps: Sequence[Swap], slo_ttft_s: float, slo_tpot_s: float
) -> dict[str, Any]:
    """Of one arm's round. A request that was refused has no latency; it is never good."""
    done = [result for result in played.results if not result.error]
    errors = Counter(result.error for result in played.results if result.error)
    if not done:
        raise processes.ServerFailed(f"no request was answered: {dict(errors)}")
    ttft = [result.ttft_s for result in done if result.ttft_s is not None]
    good = [result for result in done if _is_good(result, slo_ttft_s, slo_tpot_s)]
    loads = [swap for swap in swaps if swap.kind == "load"]
    tokens = sum(result.completion_tokens for result in done)
    reload_s = sum(swap.seconds for swap in loads)
    return {
        "requests": len(played.results),
        "refused": len(played.results) - len(done),
        "errors": dict(errors),
        "loads": len(loads),
        "reload_s": reload_s,
        "load_p50_s": stats.percentile([s.seconds for s in loads], 0.5) if loads else None,
        "load_share": reload_s / played.wall_s,
        "evictions": sum(swap.kind == "evict" for swap in swaps),
        "tokens": tokens,
        "wall_s": played.wall_s,
        "tok_s": tokens / played.wall_s,
        "ttft_p50_s": stats.percentile(ttft, 0.5),
        "ttft_p99_s": stats.percentile(ttft, 0.99),
        "ttft_mean_s": sum(ttft) / len(ttft),
        "goodput": len(good) / played.wall_s,
        "good_share": len(good) / len(played.results),
        "worker_cpu_s": played.cpu_s["worker"],
        "core_share": played.core_share,
        "cpu_s": played.cpu_s,
        "core_busy_s": played.core_busy_s,
    }


def _is_good(result: RequestResult, slo_ttft_s: float, slo_tpot_s: float) -> bool:
    assert result.ttft_s is not None
    return result.ttft_s <= slo_ttft_s and (result.itl_s or 0.0) <= slo_tpot_s


def summarise(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By arm: each figure's median and spread; and ours over the others, of the medians."""
    arms = list(dict.fromkeys(row["arm"] for row in rounds))
    by_arm = {
        arm: {
            name: stats.repeated([float(row[name]) for row in rounds if row["arm"] == arm])
            for name in FIGURES
        }
        for arm in arms
    }
    ratios = {
        arm: {name: stats.ratio(by_arm["ours"][name], by_arm[arm][name]) for name in FIGURES}
        for arm in arms
        if arm != "ours" and "ours" in by_arm
    }
    return {"arms": by_arm, "ours_over": ratios}


def table(summary: dict[str, Any]) -> str:
    """A line an arm."""
    lines = [f"{'':<8}" + "".join(f"{name:>13}" for name in FIGURES)]
    for arm, row in summary["arms"].items():
        lines.append(f"{arm:<8}" + "".join(f"{row[name]['median']:>13.3f}" for name in FIGURES))
    for arm, row in summary["ours_over"].items():
        cells = ("-" if row[name] is None else f"{row[name]:.2f}" for name in FIGURES)
        lines.append(f"/{arm:<7}" + "".join(f"{cell:>13}" for cell in cells))
    return "\n".join(lines)


def _folder(number: int, model: SimModel, work_dir: Path) -> Path:
    """A seed for each: models of one shape are packs of their own."""
    folder = work_dir / f"model-{number}"
    if not (folder / "tokenizer_config.json").exists():
        print(f"making {model.shape} with random weights", file=sys.stderr)
        shapes.build(shapes.read_shapes(), model.shape, folder, number)
    return folder


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.popularity_real",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("data", type=Path, help="folder of the traces")
    parser.add_argument("--trace", default=TRACE, help="a workload of the simulator")
    parser.add_argument("--shape", default="karpathy/tinyllamas-42M")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--models", type=int, default=8)
    parser.add_argument("--slots", type=int, default=3, help="models the device has room for")
    parser.add_argument("--kv-mib", type=int, default=64, help="room for KV beside them")
    parser.add_argument("--tenants", type=int, default=4)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seed", type=int, default=1, help="of tenants, models' ranks and texts")
    parser.add_argument("--queue-timeout", type=float, default=30.0)
    parser.add_argument("--slo-ttft", type=float, default=2.0)
    parser.add_argument("--slo-tpot", type=float, default=0.1)
    parser.add_argument("--setting", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--work-dir", type=Path, help="models, packs, logs; else a temporary one")
    parser.add_argument("--prepare", action="store_true", help="make the models and stop")
    parser.add_argument("--output", type=Path, help="added to where it is there")
    return parser.parse_args(argv)


def run(args: argparse.Namespace, work_dir: Path, earlier: Sequence[dict[str, Any]]) -> Any:
    """All arms on one seed's arrivals; the result file's content."""
    plan = make_plan(args)
    facts = machine.facts()
    rig = Rig(plan, work_dir)
    if args.prepare:
        return None
    pin_this(1)
    rounds = list(earlier)
    for arm in args.arms:
        played, swaps, decided = rig.run(arm, f"{args.seed}", args.slots)
        row = {"arm": arm, "seed": args.seed}
        row |= figures(played, swaps, args.slo_ttft, args.slo_tpot) | {"decisions": decided}
        rounds.append(row)
        shown = ", ".join(f"{name} {row[name]:.3f}" for name in FIGURES)
        print(f"{arm} seed {args.seed}: {shown}, errors {row['errors']}", file=sys.stderr)
    names = ("trace", "shape", "dtype", "models", "slots", "kv_mib", "tenants")
    return {
        "benchmark": "popularity_real",
        "machine": facts,
        "plan": {name: getattr(args, name) for name in names},
        "slo": {"ttft_s": args.slo_ttft, "tpot_s": args.slo_tpot},
        "settings": plan.settings,
        "summary": summarise(rounds),
        "rounds": rounds,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the table, write the result."""
    args = parse(argv)
    processes.exit_on_sigterm()
    stamp = time.strftime("%Y%m%d-%H%M%S")
    output = args.output or Path("bench/results") / f"popularity-real-{stamp}.json"
    earlier = json.loads(output.read_text(encoding="utf-8"))["rounds"] if output.exists() else []
    with ExitStack() as stack:
        work_dir = args.work_dir
        if work_dir is None:
            work_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        work_dir.mkdir(parents=True, exist_ok=True)
        try:
            result = run(args, work_dir.resolve(), earlier)
        except (processes.ServerFailed, TimeoutError, OSError, ValueError) as error:
            print(f"bench.popularity_real: {error}", file=sys.stderr)
            return 1
    if result is None:
        return 0
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result["summary"]))
    print(f"written to {output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
