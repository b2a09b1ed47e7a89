"""`python -m bench.pipeline`: preparing step n+1 while step n runs, against one after the other.

Lives here: the command line, the rounds, the table. Does not: the engine (`in_process.py`). Two
engines over one pack differ in nothing but `steps_ahead` (and with 1 the steps run in a thread of
their own, as the worker does it); they take turns with the very same requests at each batch size.

The gain can be no more than the share of a step that the host takes outside the model; that share
is measured beside it, on the engine without.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from bench import machine, processes, stats
from bench.in_process import (
    Ask,
    Host,
    ModelClock,
    Pack,
    hosting,
    kv_bytes,
    make_pack,
    random_prompts,
)


def measure(
    hosts: Sequence[Host], pack: Pack, width: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Interleaved rounds of one batch size."""
    generator = torch.Generator().manual_seed(args.seed)
    num_asks = width * args.per_slot
    rates: tuple[list[float], list[float]] = ([], [])
    step_ms: tuple[list[float], list[float]] = ([], [])
    shares: list[float] = []
    clock = ModelClock()
    for repeat in range(args.repeats + 1):
        sizes = [args.prompt_tokens] * num_asks
        prompts = random_prompts(sizes, pack.index.vocab_size, generator)
        asks = [Ask(prompt, args.output_tokens) for prompt in prompts]
        for ahead in (0, 1) if repeat % 2 else (1, 0):
            done = hosts[ahead].run(asks, width)
            if repeat:  # the first touches everything
                rates[ahead].append(done.num_tokens / done.wall_s)
                step_ms[ahead].append(done.wall_s / done.num_steps * 1e3)
        with clock:
            done = hosts[0].run(asks[: 2 * width], width, clock)
        shares.append(1 - done.model_cpu_s / done.cpu_s)
        print(f"{pack.name} batch {width}: repeat {repeat} done", file=sys.stderr)
    gains = [one / zero for zero, one in zip(*rates, strict=True)]
    return {
        "model": pack.name,
        "batch": width,
        "tok_s_one_after_the_other": stats.repeated(rates[0]),
        "tok_s_ahead": stats.repeated(rates[1]),
        "step_ms_one_after_the_other": stats.repeated(step_ms[0]),
        "step_ms_ahead": stats.repeated(step_ms[1]),
        "gain": stats.repeated(gains),
        "host_share": stats.repeated(shares),
    }


def table(result: Mapping[str, Any]) -> str:
    """A line for each model and batch size."""
    lines = [
        f"{result['threads']} thread(s) an operator, medians of {result['repeats']} repeats",
        f"{'model':<28}{'B':>4}{'tok/s 0':>10}{'tok/s 1':>10}{'gain':>7}{'(min-max)':>13}"
        f"{'ms/step 0':>11}{'host share':>12}",
    ]
    for row in result["rows"]:
        gain = row["gain"]
        bounds = f"({gain['min']:.2f}-{gain['max']:.2f})"
        lines.append(
            f"{row['model']:<28}{row['batch']:>4}"
            f"{row['tok_s_one_after_the_other']['median']:>10.1f}"
            f"{row['tok_s_ahead']['median']:>10.1f}{gain['median']:>7.2f}{bounds:>13}"
            f"{row['step_ms_one_after_the_other']['median']:>11.2f}"
            f"{row['host_share']['median']:>12.1%}"
        )
    return "\n".join(lines)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.pipeline", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    models = ["shakespeare", "HuggingFaceTB/SmolLM2-135M"]
    parser.add_argument("--models", nargs="+", default=models, help="demo models or shapes")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--per-slot", type=int, default=2, help="requests for each slot")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--output-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of one operator")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work-dir", type=Path, help="models and packs; else a temporary one")
    parser.add_argument("--output", type=Path, help="else bench/results/pipeline-<time>.json")
    return parser.parse_args(argv)


def run(args: argparse.Namespace, work_dir: Path) -> list[dict[str, Any]]:
    """All models and batch sizes."""
    rows: list[dict[str, Any]] = []
    widest = max(args.batch)
    for model in args.models:
        pack = make_pack(model, work_dir, args.seed)
        common = {"max_num_seqs": widest, "max_waiting": widest * args.per_slot}
        settings = [common | {"steps_ahead": ahead} for ahead in (0, 1)]
        tokens = args.prompt_tokens + args.output_tokens
        with hosting(pack, settings, kv_bytes(pack, widest, tokens)) as hosts:
            rows += [measure(hosts, pack, width, args) for width in args.batch]
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the table, write the result."""
    args = parse(argv)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    output = args.output or Path("bench/results") / f"pipeline-{stamp}.json"
    facts = machine.facts()
    torch.set_num_threads(args.threads)
    with ExitStack() as stack:
        work_dir = args.work_dir
        if work_dir is None:
            work_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        try:
            rows = run(args, work_dir)
        except (processes.ServerFailed, TimeoutError) as error:
            print(f"bench.pipeline: {error}", file=sys.stderr)
            return 1
    result: dict[str, Any] = {"benchmark": "pipeline", "machine": facts, "rows": rows}
    result |= {"threads": args.threads, "repeats": args.repeats}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))
    print(f"written to {output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
