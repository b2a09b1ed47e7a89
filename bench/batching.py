"""`python -m bench.batching DATA`: continuous over static batching on real answer lengths.

Lives here: the command line, the ideal, the interleaved rounds, the table. Does not: the engine
(`in_process.py`), the lengths (`lengths.py`).

The same requests, in the same order, on the same engine and kernels, at most B at a time:

    continuous   as one ends the next takes its place: what the engine does
    static       B are taken in together and all of them run until the longest answer of the B is
                 there, as `generate` on a padded batch does; what the shorter rows put out after
                 their own end is thrown away
    ragged       as static, but rows that have ended leave; nobody takes their place. Kinder to
                 static batching than most implementations, shown beside it

The ideal. A slot gives one token a step. Static batching takes the sum over its batches of the
longest answer; no schedule at all can take fewer than sum(answers) / B steps, or fewer than the
longest answer. The quotient is the ideal step ratio: what perfect packing would gain. Prefill has
no step of its own in it: a prompt that fits the budget gives its first token in the step it runs
in. Two shares of the ideal are reported: of steps (what is lost where slots stay empty) and of time
(what is lost by steps that cost more, too). A finite list of requests ends with a tail of slots
that nobody refills; what first come, first served can reach with it at best is stated beside.

Lengths are scaled down, all by one factor, so that a small model can give them in minutes; the
ideal is of the scaled lengths, and hardly depends on the factor.
"""

import argparse
import heapq
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from bench import lengths, machine, processes, stats
from bench.in_process import Ask, Host, Run, hosting, kv_bytes, make_pack, random_prompts
from bench.lengths import Length

Mode = Literal["continuous", "static", "ragged"]
MODES: tuple[Mode, ...] = ("continuous", "static", "ragged")
GOAL = 0.85


@dataclass(frozen=True, slots=True)
class Ideal:
    """Steps by arithmetic alone."""

    static_steps: int
    packed_steps: int
    in_order_steps: int

    @property
    def ratio(self) -> float:
        """What perfect packing would gain over static batches."""
        return self.static_steps / self.packed_steps

    @property
    def in_order_share(self) -> float:
        """What slots that are refilled at once, first come, first served, reach of it."""
        return self.packed_steps / self.in_order_steps


def ideal(answers: Sequence[int], width: int) -> Ideal:
    """Of these answers in this order in batches of `width`."""
    static = sum(max(batch) for batch in batches(answers, width))
    ends = [0] * width  # when each slot is free again
    for answer in answers:
        heapq.heapreplace(ends, ends[0] + answer)
    return Ideal(static, max(-(-sum(answers) // width), max(answers)), max(ends))


def batches(items: Sequence[Any], width: int) -> list[Sequence[Any]]:
    """The items cut into batches, the last one perhaps short."""
    return [items[i : i + width] for i in range(0, len(items), width)]


def run_mode(host: Host, mode: Mode, asks: Sequence[Ask], width: int) -> Run:
    """All requests in this way; tokens are those that were asked for."""
    if mode == "continuous":
        return host.run(asks, width)
    total = Run()
    for batch in batches(asks, width):
        longest = max(ask.max_tokens for ask in batch)
        padded = [Ask(ask.prompt_ids, longest) for ask in batch]
        done = host.run(batch if mode == "ragged" else padded, width)
        total.wall_s += done.wall_s
        total.cpu_s += done.cpu_s
        total.num_steps += done.num_steps
    total.num_tokens = sum(ask.max_tokens for ask in asks)
    return total


def measure(
    host: Host, asks: Sequence[Ask], width: int, modes: Sequence[Mode], repeats: int
) -> dict[Mode, list[Run]]:
    """All modes in turn within each repeat, each time in another order."""
    orders = list(itertools.permutations(modes))
    runs: dict[Mode, list[Run]] = {mode: [] for mode in modes}
    host.run(asks[: 2 * width], width)  # touches every batch size before the clock runs
    for repeat in range(repeats):
        for mode in orders[repeat * 2 % len(orders)]:
            runs[mode].append(run_mode(host, mode, asks, width))
            last = runs[mode][-1]
            print(f"{mode} {last.num_steps} steps {last.wall_s:.2f} s", file=sys.stderr)
    return runs


def summary(runs: Mapping[Mode, Sequence[Run]], best: Ideal) -> dict[str, Any]:
    """Ratios of each repeat's rounds, their medians, and the shares of the ideal."""
    ours = runs["continuous"]
    found: dict[str, Any] = {
        "ideal_ratio": best.ratio,
        "static_steps_by_arithmetic": best.static_steps,
        "packed_steps": best.packed_steps,
        "in_order_share": best.in_order_share,
        "continuous_steps": stats.repeated([run.num_steps for run in ours]),
        "continuous_s": stats.repeated([run.wall_s for run in ours]),
        "continuous_tok_s": stats.repeated([run.num_tokens / run.wall_s for run in ours]),
    }
    for mode, theirs in runs.items():
        if mode == "continuous":
            continue
        pairs = list(zip(theirs, ours, strict=True))
        steps = [their.num_steps / our.num_steps for their, our in pairs]
        times = [their.wall_s / our.wall_s for their, our in pairs]
        found[mode] = {
            "steps": stats.repeated([their.num_steps for their in theirs]),
            "seconds": stats.repeated([their.wall_s for their in theirs]),
            "step_ratio": stats.repeated(steps),
            "time_ratio": stats.repeated(times),
            "step_share": stats.repeated([ratio / best.ratio for ratio in steps]),
            "time_share": stats.repeated([ratio / best.ratio for ratio in times]),
        }
    return found


def requests(
    rows: Sequence[Length], count: int, context: int, vocab_size: int, args: argparse.Namespace
) -> tuple[list[Ask], float]:
    """The first `count` of the stream, scaled to the context; and the scale."""
    scale = args.scale or lengths.scale_to(rows, context, args.max_prompt_tokens)
    drawn = [
        length.scaled(scale, args.max_prompt_tokens).cut(context)
        for length in itertools.islice(lengths.stream(rows, args.seed), count)
    ]
    generator = torch.Generator().manual_seed(args.seed)
    prompts = random_prompts([length.prompt_tokens for length in drawn], vocab_size, generator)
    pairs = zip(prompts, drawn, strict=True)
    return [Ask(prompt, length.output_tokens) for prompt, length in pairs], scale


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.batching", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("data", type=Path, help="folder with prompts, traces and tokenizers")
    parser.add_argument("--model", default="shakespeare", help="a demo model or a shape's name")
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 16])
    names = ("arena_hard", "azure2023_conv")
    parser.add_argument("--lengths", nargs="+", choices=lengths.NAMES, default=names)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES[:2])
    parser.add_argument("--per-slot", type=int, default=20, help="requests for each slot")
    parser.add_argument("--max-prompt-tokens", type=int, default=32)
    parser.add_argument("--scale", type=float, default=0.12, help="of lengths; 0: to the context")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work-dir", type=Path, help="models and packs; else a temporary one")
    parser.add_argument("--output", type=Path, help="else bench/results/batching-<time>.json")
    args = parser.parse_args(argv)
    if "continuous" not in args.modes:
        parser.error("every ratio is over continuous batching: name it in --modes")
    return args


def run(args: argparse.Namespace, work_dir: Path) -> dict[str, Any]:
    """The whole benchmark; returns the result file's content."""
    facts = machine.facts()
    torch.set_num_threads(args.threads)
    pack = make_pack(args.model, work_dir, args.seed)
    rows: list[dict[str, Any]] = []
    sets = {name: lengths.read(args.data, name) for name in args.lengths}
    for name, width in itertools.product(args.lengths, args.batch):
        count = args.per_slot * width
        context, vocab_size = pack.index.max_context, pack.index.vocab_size
        asks, scale = requests(sets[name], count, context, vocab_size, args)
        settings = {"max_num_seqs": width, "max_waiting": count, "prefix_cache": False}
        longest = max(len(ask.prompt_ids) + ask.max_tokens for ask in asks)
        with hosting(pack, [settings], kv_bytes(pack, width, longest)) as (host,):
            runs = measure(host, asks, width, args.modes, args.repeats)
        answers = [ask.max_tokens for ask in asks]
        rows.append(
            {
                "lengths": name,
                "batch": width,
                "num_requests": count,
                "scale": scale,
                "answer_tokens": stats.spread(answers),
                **summary(runs, ideal(answers, width)),
            }
        )
    return {
        "benchmark": "batching",
        "machine": facts,
        "model": args.model,
        "threads": args.threads,
        "repeats": args.repeats,
        "max_prompt_tokens": args.max_prompt_tokens,
        "goal": GOAL,
        "rows": rows,
    }


def table(result: Mapping[str, Any]) -> str:
    """A line for each way of batching that is not ours."""
    lines = [
        f"{result['model']}, {result['threads']} thread(s), medians of {result['repeats']} repeats "
        f"(min-max); goal: {result['goal']:.0%} of the ideal",
        f"{'lengths':<16}{'scale':>6}{'B':>4} {'over':<8}{'ideal':>7}{'(tail)':>8}{'steps':>7}"
        f"{'share':>7}{'time':>7}{'(min-max)':>13}{'share':>7}{'':>5}",
    ]
    for row in result["rows"]:
        for mode in MODES[1:]:
            if mode not in row:
                continue
            other = row[mode]
            time_ratio, share = other["time_ratio"], other["time_share"]["median"]
            reached = min(share, other["step_share"]["median"]) >= result["goal"]
            bounds = f"({time_ratio['min']:.2f}-{time_ratio['max']:.2f})"
            verdict = "" if mode == "ragged" else "ok" if reached else "LESS"
            lines.append(
                f"{row['lengths']:<16}{row['scale']:>6.3f}{row['batch']:>4} {mode:<8}"
                f"{row['ideal_ratio']:>7.2f}{row['in_order_share']:>8.0%}{other['step_ratio']['median']:>7.2f}"
                f"{other['step_share']['median']:>7.0%}{time_ratio['median']:>7.2f}{bounds:>13}"
                f"{share:>7.0%}{verdict:>5}"
            )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the table, write the result."""
    args = parse(argv)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    output = args.output or Path("bench/results") / f"batching-{stamp}.json"
    with ExitStack() as stack:
        work_dir = args.work_dir
        if work_dir is None:
            work_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        try:
            result = run(args, work_dir)
        except (processes.ServerFailed, TimeoutError) as error:
            print(f"bench.batching: {error}", file=sys.stderr)
            return 1
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))
    print(f"written to {output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
