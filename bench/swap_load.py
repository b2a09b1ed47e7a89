"""Swapping a large model in and out through the server while small ones are in use.

Lives here: the second half of `bench/swap.py` (`--under-load`). Does not: the command line, the
in-process measurement.

The device budget holds the large model, or the demo models, but not all of them. One caller for
each demo model asks all the time. First alone (the baseline), then while another caller asks the
large model now and then: each of its requests must bring it in, pushing out whoever is in the way,
and the demo models then push it out again. Reported: what the large model's callers waited, what
its loads took beside reading as many bytes, what /metrics says of all swaps, and what the others'
tokens did meanwhile.

    warm    the host tier holds everything: the large model comes from there but for the first time
    cold    no host tier, and the pack's pages are dropped before each request: it comes from disk
"""

import asyncio
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bench import client, files, load, machine, processes, report, servers, stats
from bench.client import ChatRequest, RequestResult, Target
from bench.prompts import PromptMaker
from bench.report import RoundSummary
from engine.pack import BLOB_NAME

Tier = Literal["warm", "cold"]
BIG = "big"
DEMO_MODELS = Path(__file__).resolve().parent.parent / "gateway" / "demo_models"
DEMO_PROMPT_TOKENS = 24
DEMO_OUTPUT_TOKENS = 64
BIG_PROMPT_TOKENS = 32
BIG_OUTPUT_TOKENS = 8
PAUSE_S = 2.0
PAGE_BYTES = 1 << 20
# Room for the large model's first KV and part of the demo models, but not for all three.
ROOM_BYTES = 14 << 20
BIG_LOAD = re.compile(rf"swap model={BIG} kind=load tier=(\w+) bytes=\d+ seconds=([\d.]+)")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run: the large model, where from, how often, and how long the baseline is."""

    name: str
    folder: Path
    tier: Tier
    num_swaps: int
    baseline_s: float
    settings: Sequence[str] = ()


def device_budget(folder: Path) -> int:
    """Bytes that hold the model in `folder`, each layer rounded up to pages, and ROOM_BYTES."""
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    # Rounding costs half a page a segment on average; 64 segments are plenty below 2 GB.
    return -(-weights // PAGE_BYTES) * PAGE_BYTES + 16 * PAGE_BYTES + ROOM_BYTES


def run(plan: Plan, work_dir: Path) -> dict[str, Any]:
    """Start the server, measure, stop it. Raises ServerFailed where nothing was swapped."""
    settings = {
        "device_budget_bytes": str(device_budget(plan.folder)),
        "page_bytes": str(PAGE_BYTES),
        "host_tier_bytes": str(device_budget(plan.folder) if plan.tier == "warm" else 0),
        **dict(item.split("=", 1) for item in plan.settings),
    }
    with ExitStack() as stack:
        data_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="data-", dir=work_dir))
        polyhost = servers.Polyhost(Path(data_dir), settings)
        folders = sorted(path.parent for path in DEMO_MODELS.glob("*/config.json"))
        for folder in folders:
            polyhost.add_model(folder.name, folder)
        polyhost.add_model(BIG, plan.folder)
        server = polyhost.serve(polyhost.new_key())
        stack.enter_context(server.process)
        demos = [(server.target(f.name, f.name), _requests(f, f.name)) for f in folders]
        blob = max(Path(data_dir).glob(f"packs/*/{BLOB_NAME}"), key=lambda p: p.stat().st_size)
        print(f"{plan.tier}: baseline, the demo models alone", file=sys.stderr)
        before = asyncio.run(_baseline(demos, plan.baseline_s))
        start = server.metrics()
        print(f"{plan.tier}: with the large model coming and going", file=sys.stderr)
        during, asked = asyncio.run(_swapping(demos, server.target(BIG, BIG), plan, blob))
        end = server.metrics()
        server.process.stop()
        loads = big_loads(server.process.read_log())
        floor_s = _floor_seconds(plan.tier, blob)
    changed = {name: end[name] - start.get(name, 0.0) for name in end}
    return {
        "model": plan.name,
        "tier": plan.tier,
        "settings": settings,
        "demo_models": [folder.name for folder in folders],
        "big": _big_summary(asked),
        "big_loads": loads,
        "floor_s": floor_s,
        "big_load_share": _shares(loads, plan.tier, floor_s),
        "baseline": before,
        "during": during,
        "swaps": _swap_means(changed),
        "metrics": {name: value for name, value in end.items() if "_bucket" not in name},
    }


def big_loads(log: str) -> list[dict[str, Any]]:
    """Tier and seconds of each load of the large model, from the worker's log."""
    return [{"tier": match[1], "seconds": float(match[2])} for match in BIG_LOAD.finditer(log)]


def _shares(loads: Sequence[dict[str, Any]], tier: Tier, floor_s: float) -> stats.Repeated | None:
    """The plain read's time over each load's, of the loads from the tier under test."""
    wanted = "host" if tier == "warm" else "disk"
    return stats.repeated([floor_s / row["seconds"] for row in loads if row["tier"] == wanted])


def _floor_seconds(tier: Tier, blob: Path) -> float:
    """What reading as many bytes costs at least, on the machine as it is now."""
    if tier == "warm":
        return machine.memcpy_seconds(blob.stat().st_size)
    files.drop_pages(blob)
    return files.dd_seconds(blob)


def table(result: dict[str, Any]) -> str:
    """Waits for the large model, loads by tier, and the demo models before and during."""
    big = result["big"]
    lines = [
        f"{result['model']}, {result['tier']}: {big['num_completed']} of {big['num_requests']} "
        f"requests answered, errors {big['errors'] or 'none'}",
    ]
    if big["ttft_s"]:
        waits = big["ttft_s"]
        lines.append(
            f"first token after {waits['median']:.2f} s "
            f"({waits['min']:.2f}-{waits['max']:.2f}), swap and queue included"
        )
    share = result["big_load_share"]
    if share:
        floor = "memcpy" if result["tier"] == "warm" else "dd"
        lines.append(
            f"its loads: {floor} of as many bytes ({result['floor_s']:.3f} s) took "
            f"{share['median']:.2f} of the time ({share['min']:.2f}-{share['max']:.2f})"
        )
    lines += [
        f"{series}: {mean['count']:.0f} x {mean['mean_s']:.3f} s"
        for series, mean in result["swaps"].items()
    ]
    lines.append(
        f"{'demo models':<14}{'tok/s':>8}{'TTFT p50':>10}{'p99':>9}{'ITL p50':>10}{'p99':>9}"
    )
    lines += [_demo_row(phase, result[phase]) for phase in ("baseline", "during")]
    return "\n".join(lines)


def _demo_row(phase: str, summary: RoundSummary) -> str:
    ttft, itl = summary["ttft_s"], summary["itl_s"]
    if ttft is None or itl is None:
        return f"{phase:<14} nothing completed: {summary['errors']}"
    return (
        f"{phase:<14}{summary['output_tok_s']:>8.1f}{ttft['p50']:>9.2f}s{ttft['p99']:>8.2f}s"
        f"{itl['p50'] * 1e3:>8.1f}ms{itl['p99'] * 1e3:>7.1f}ms"
        f"{_longest_gap(summary):>12.2f}s   errors {summary['errors'] or 0}"
    )


def _longest_gap(summary: RoundSummary) -> float:
    gaps = summary["chunk_gap_s"]
    return gaps["max"] if gaps else 0.0


def _requests(folder: Path, seed: str) -> list[ChatRequest]:
    return load.requests_for(PromptMaker(folder), seed, 64, DEMO_PROMPT_TOKENS, DEMO_OUTPUT_TOKENS)


def _big_requests(plan: Plan) -> list[ChatRequest]:
    maker = PromptMaker(plan.folder)
    return load.requests_for(maker, "big", plan.num_swaps, BIG_PROMPT_TOKENS, BIG_OUTPUT_TOKENS)


async def _baseline(
    demos: Sequence[tuple[Target, list[ChatRequest]]], seconds: float
) -> RoundSummary:
    stop = asyncio.Event()
    callers = [asyncio.create_task(load.until(target, texts, stop)) for target, texts in demos]
    await asyncio.sleep(seconds)
    stop.set()
    return _together(await asyncio.gather(*callers))


async def _swapping(
    demos: Sequence[tuple[Target, list[ChatRequest]]], big: Target, plan: Plan, blob: Path
) -> tuple[RoundSummary, list[RequestResult]]:
    stop = asyncio.Event()
    callers = [asyncio.create_task(load.until(target, texts, stop)) for target, texts in demos]
    asked: list[RequestResult] = []
    async with client.new_session() as session:
        for request in _big_requests(plan):
            await asyncio.sleep(PAUSE_S)
            if plan.tier == "cold":
                await asyncio.to_thread(files.drop_pages, blob)
            asked.append(await client.chat(session, big, request, time.perf_counter()))
    await asyncio.sleep(PAUSE_S)
    stop.set()
    return _together(await asyncio.gather(*callers)), asked


def _together(runs: Sequence[load.LoadRun]) -> RoundSummary:
    """All callers as one round; how long an answer is is the demo models' own affair."""
    results = [result for run in runs for result in run.results]
    wall_s = max(run.wall_s for run in runs)
    cpu_s = max(run.client_cpu_s for run in runs)
    merged = load.LoadRun(results, wall_s, cpu_s)
    return report.summarise(merged, {result.index: 0 for result in results})


def _big_summary(asked: Sequence[RequestResult]) -> dict[str, Any]:
    good = [result for result in asked if not result.error]
    return {
        "num_requests": len(asked),
        "num_completed": len(good),
        "errors": sorted({result.error for result in asked if result.error}),
        "ttft_s": stats.repeated([result.ttft_s for result in good]),
        "itl_s": stats.repeated([result.itl_s for result in good]),
    }


def _swap_means(changed: dict[str, float]) -> dict[str, dict[str, float]]:
    """Mean duration of each kind of swap since the baseline. Raises ServerFailed without any."""
    means: dict[str, dict[str, float]] = {}
    for name, total_s in changed.items():
        count_name = name.replace("_seconds_sum", "_seconds_count")
        count = changed.get(count_name, 0.0)
        if count_name != name and count:
            means[name.replace("_sum", "")] = {"count": count, "mean_s": total_s / count}
    if not means:
        raise processes.ServerFailed("no model was swapped: is the device budget too large?")
    return means
