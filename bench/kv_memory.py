"""`python -m bench.kv_memory DATA`: how much memory KV holds beside what it needs at least.

Lives here: the command line, the cases, the tables, the result file. Does not: the requests
(`kv_traffic.py`), the minimum (`kv_minimum.py`), the lengths (`lengths.py`).

No model runs: the production page pool and caches serve 1, 8 and 40 models of true shapes, with the
lengths of real requests. Every round is sampled: the bytes of all extents that hold a live block,
over the packed minimum, the bytes that the live tokens need at least (windows honoured). A case's
mean is weighted by time: all bytes held over all bytes needed. Weights take their runs first, so
that the pool that is left is as large and lies as it would.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

import torch

from bench import lengths, machine, shapes, stats
from bench.kv_minimum import Model, group_bytes_per_token, model_of
from bench.kv_traffic import Load, Pace, Sample, Traffic, Unit
from bench.lengths import Length
from engine.config import EngineConfig, auto_page_bytes
from engine.memory.kv_cache import KvCache
from engine.memory.kv_memory import KvMemory
from engine.memory.kv_plan import plan_kv
from engine.memory.page_pool import Owner, PagePool

GOALS: Mapping[Load, float] = {"light": 1.5, "heavy": 1.1}
GIB = 1 << 30
FAMILY_TOKENS = 2048
FAMILY_SEQUENCES = 64
# What forty hosted models look like on one device: many small ones, some of one shape.
TINY = (
    "HuggingFaceTB/SmolLM2-135M",
    "openai-community/gpt2",
    "EleutherAI/pythia-160m",
    "facebook/opt-125m",
)
SMALL = (
    "Qwen/Qwen2.5-0.5B",
    "google/gemma-3-1b-it",
    "HuggingFaceTB/SmolLM2-360M",
    "Qwen/Qwen3-0.6B",
)
MEDIUM = (
    "Qwen/Qwen2.5-1.5B",
    "meta-llama/Llama-3.2-1B",
    "google/gemma-2-2b",
    "microsoft/Phi-3-mini-4k-instruct",
)


@dataclass(frozen=True, slots=True)
class Device:
    """An arena and the models that stay on it together, by how many they are."""

    name: str
    arena_bytes: int
    fleets: Mapping[int, Sequence[str]]
    page_bytes: int = 0  # 0: as EngineConfig chooses it

    @property
    def resolved_page_bytes(self) -> int:
        """The page's size."""
        return self.page_bytes or auto_page_bytes(self.arena_bytes)


DEVICES = (
    Device("cpu-1g", GIB, {1: TINY[:1]}),
    Device("cpu-4g", 4 * GIB, {1: SMALL[:1], 8: TINY * 2}),
    Device("cpu-16g", 16 * GIB, {40: TINY * 10}),
    Device(
        "gpu-40g",
        40 * GIB,
        {1: ["meta-llama/Llama-3.1-8B"], 8: SMALL + MEDIUM, 40: (TINY + SMALL) * 5},
    ),
    Device(
        "gpu-80g",
        80 * GIB,
        {
            1: ["google/gemma-2-9b"],
            8: [
                "meta-llama/Llama-3.1-8B",
                "Qwen/Qwen3-8B",
                "mistralai/Mistral-7B-v0.1",
                *SMALL[:2],
                *MEDIUM[2:],
                "Qwen/Qwen2.5-1.5B",
            ],
            40: (TINY + SMALL + MEDIUM[:2]) * 4,
        },
    ),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One run of the loop."""

    device: Device
    num_models: int
    lengths: str
    load: Load

    def __str__(self) -> str:
        return f"{self.device.name} {self.num_models} {self.lengths} {self.load}"


class Figures(TypedDict):
    """Ratios to the packed minimum. `with_cached` counts reusable prefixes as held too."""

    ratio_mean: float
    ratio: stats.Spread | None
    with_cached_mean: float
    kv_share: float
    num_running: float


class CaseResult(Figures):
    """One case of the table."""

    case: dict[str, Any]
    goal: float
    num_finished: int
    num_preempted: int
    num_stalls: int
    rounds: int
    seconds: float


def cases(args: argparse.Namespace) -> list[Case]:
    """What is asked for, in the order of the table."""
    return [
        Case(replace(device, page_bytes=args.page_bytes), num_models, name, load)
        for device in DEVICES
        if not args.devices or device.name in args.devices
        for num_models in sorted(device.fleets)
        if not args.models or num_models in args.models
        for name in args.lengths
        for load in args.loads
    ]


def run_case(
    case: Case,
    known: Mapping[str, Mapping[str, Any]],
    requests: Sequence[Length],
    pace: Pace,
    rounds: int,
    caching: bool = True,
) -> CaseResult:
    """The loop for `rounds` rounds, the first tenth of them not counted."""
    started = time.perf_counter()
    device = case.device
    pool = PagePool(device.arena_bytes // device.resolved_page_bytes, device.resolved_page_bytes)
    names = device.fleets[case.num_models]
    models = [model_of(name, known[name]) for name in names]
    take_weights(pool, models)
    caches, memory = production_caches(pool, models, caching, pace.chunk)
    units = [
        Unit(model, cache, lengths.stream(requests, seed))
        for seed, (model, cache) in enumerate(zip(models, caches, strict=True))
    ]
    traffic = Traffic(units, pool, memory, case.load, pace)
    samples = [traffic.round() for _ in range(rounds)][rounds // 10 :]
    traffic.check_integrity()
    kv_bytes = (pool.num_pages - weight_pages(pool)) * pool.page_bytes
    return {
        "case": {
            "device": device.name,
            "models": case.num_models,
            "lengths": case.lengths,
            "load": case.load,
            "page_bytes": pool.page_bytes,
            "kv_room_bytes": kv_bytes,
        },
        "goal": GOALS[case.load],
        **figures(samples, kv_bytes),
        "num_finished": traffic.num_finished,
        "num_preempted": traffic.num_preempted,
        "num_stalls": traffic.num_stalls,
        "rounds": rounds,
        "seconds": time.perf_counter() - started,
    }


def figures(samples: Sequence[Sample], kv_bytes: int) -> Figures:
    """Time-weighted means and percentiles over the rounds in which anything was live."""
    busy = [sample for sample in samples if sample.minimum]
    held = sum(sample.held for sample in busy)
    minimum = sum(sample.minimum for sample in busy)
    everything = held + sum(sample.cached for sample in busy)
    return {
        "ratio_mean": held / minimum,
        "ratio": stats.spread([sample.held / sample.minimum for sample in busy]),
        "with_cached_mean": everything / minimum,
        "kv_share": everything / len(busy) / kv_bytes,
        "num_running": sum(sample.num_running for sample in busy) / len(busy),
    }


def take_weights(pool: PagePool, models: Sequence[Model]) -> None:
    """A run for each layer and one for the rest, as packs are cut; low in the arena."""
    for number, model in enumerate(models):
        size = model.weight_bytes // (model.num_layers + 1)
        runs = [pool.pages_needed(size)] * (model.num_layers + 1)
        pool.alloc_runs(Owner(unit_id(number), "weights"), runs)


def production_caches(
    pool: PagePool, models: Sequence[Model], caching: bool, max_chunk: int
) -> tuple[list[KvCache], KvMemory]:
    """A cache for each model, and the memory that evicts over all, as the engine has them."""
    config = EngineConfig(arena_bytes=pool.num_pages * pool.page_bytes, shm_prefix="bench")
    memory = KvMemory(
        pool,
        copy=lambda moves: None,
        low_watermark_pages=int(config.kv_low_watermark * pool.num_pages),
        high_watermark_pages=int(config.kv_high_watermark * pool.num_pages),
    )
    caches = []
    for number, model in enumerate(models):
        plan = plan_kv(
            model.layers, model.dtype, config.block_tokens, pool.page_bytes, pool.num_pages
        )
        owner = Owner(unit_id(number), "kv")
        caches.append(KvCache(owner, plan, pool, torch.device("cpu"), caching, max_chunk))
        memory.register(unit_id(number), caches[-1], float(model.weight_bytes))
    return caches, memory


def weight_pages(pool: PagePool) -> int:
    """Pages that hold weights."""
    return sum(n for owner, n in pool.pages_by_owner().items() if owner.kind == "weights")


def unit_id(number: int) -> str:
    """One model's name among those of the device: a shape may be there many times."""
    return f"unit{number}"


def family_row(model: Model, device: Device) -> dict[str, Any]:
    """KV bytes a token, as the cache takes them in many long sequences, beside the minimum.

    So many tokens that the last extent of each group does not count; within the window, so that
    nothing is freed.
    """
    pool = PagePool(device.arena_bytes // device.resolved_page_bytes, device.resolved_page_bytes)
    (cache,), _ = production_caches(pool, [model], True, FAMILY_TOKENS)
    windows = [group.window for group in model.groups if group.window]
    tokens = min([*windows, model.max_context, FAMILY_TOKENS]) // 16 * 16
    minimum = model.minimum_bytes(tokens) // tokens
    count = max(1, min(FAMILY_SEQUENCES, int(device.arena_bytes * 0.7) // (minimum * tokens)))
    for _ in range(count):
        cache.reserve(cache.new_kv("bench"), tokens)
    held = sum(pool.pages_by_owner().values()) * pool.page_bytes
    return {
        "model": model.name,
        "family": model.family,
        "device": device.name,
        "groups": [
            {
                "layers": len(group.layers),
                "window": group.window,
                "bytes_per_token": group_bytes_per_token(group, model.dtype),
            }
            for group in model.groups
        ],
        "minimum_bytes_per_token": minimum,
        "held_bytes_per_token": held / (count * tokens),
        "ratio": held / (count * tokens * minimum),
    }


def table(results: Sequence[CaseResult], families: Sequence[Mapping[str, Any]]) -> str:
    """Cases, then families."""
    head = (
        f"{'device':<9}{'models':>7}  {'lengths':<16}{'load':<7}{'mean':>7}{'p50':>7}{'p99':>7}"
        f"{'goal':>7}{'':>5}{'+cached':>9}{'KV used':>9}{'running':>9}{'preempted':>11}{'s':>6}"
    )
    lines = [head, "-" * len(head)]
    for row in results:
        case, ratio = row["case"], row["ratio"]
        assert ratio is not None
        verdict = "ok" if row["ratio_mean"] <= row["goal"] else "OVER"
        lines.append(
            f"{case['device']:<9}{case['models']:>7}  {case['lengths']:<16}{case['load']:<7}"
            f"{row['ratio_mean']:>7.3f}{ratio['p50']:>7.3f}{ratio['p99']:>7.3f}"
            f"{row['goal']:>7.2f}{verdict:>5}{row['with_cached_mean']:>9.2f}"
            f"{row['kv_share']:>9.2f}{row['num_running']:>9.0f}{row['num_preempted']:>11}"
            f"{row['seconds']:>6.1f}"
        )
    lines += ["", f"{'model':<36}{'device':<9}{'minimum B/token':>16}{'held':>10}{'ratio':>8}"]
    lines += [
        f"{row['model']:<36}{row['device']:<9}{row['minimum_bytes_per_token']:>16}"
        f"{row['held_bytes_per_token']:>10.0f}{row['ratio']:>8.3f}"
        for row in families
    ]
    return "\n".join(lines)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.kv_memory", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    names = [device.name for device in DEVICES]
    parser.add_argument("data", type=Path, help="folder with prompts, traces and tokenizers")
    parser.add_argument("--shapes", type=Path, help="else model_shapes.json of the data folder")
    parser.add_argument("--devices", nargs="+", choices=names, help="else all")
    parser.add_argument("--models", nargs="+", type=int, choices=(1, 8, 40), help="else all")
    parser.add_argument("--lengths", nargs="+", choices=lengths.NAMES, default=lengths.NAMES)
    parser.add_argument("--loads", nargs="+", choices=tuple(GOALS), default=tuple(GOALS))
    parser.add_argument("--page-bytes", type=int, default=0, help="0: as the engine chooses")
    parser.add_argument("--light-rounds", type=int, default=600)
    parser.add_argument("--heavy-rounds", type=int, default=300)
    parser.add_argument("--stride", type=int, default=Pace().stride, help="tokens a round")
    parser.add_argument("--no-prefix-cache", action="store_true", help="blocks are not kept")
    parser.add_argument("--no-families", action="store_true", help="leave out bytes a token")
    parser.add_argument("--output", type=Path, help="else bench/results/kv-memory-<time>.json")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases, print the tables, write the result. 1 where a goal is missed."""
    args = parse(argv)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    output = args.output or Path("bench/results") / f"kv-memory-{stamp}.json"
    known = shapes.read_shapes(args.shapes or args.data / "model_shapes.json")
    sets = {name: lengths.read(args.data, name) for name in args.lengths}
    results: list[CaseResult] = []
    for case in cases(args):
        rounds = args.light_rounds if case.load == "light" else args.heavy_rounds
        pace = Pace(stride=args.stride)
        results.append(
            run_case(case, known, sets[case.lengths], pace, rounds, not args.no_prefix_cache)
        )
        print(f"{case}: {results[-1]['ratio_mean']:.3f}", file=sys.stderr)
    families = []
    if not args.no_families:
        for device in (DEVICES[1], DEVICES[-1]):
            families += [family_row(model_of(n, shape), device) for n, shape in known.items()]
    result = {
        "benchmark": "kv-memory",
        "machine": machine.facts(),
        "cases": results,
        "families": families,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(results, families))
    print(f"written to {output}")
    return 0 if all(row["ratio_mean"] <= row["goal"] for row in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
