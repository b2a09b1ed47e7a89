"""`python -m bench.prefix DATA`: what the prefix cache saves, and what it costs without a hit.

Lives here: the command line, the prompts, both comparisons, the table. Does not: the engine
(`in_process.py`). Two engines over one pack differ in nothing but `prefix_cache`, and take turns.

    hits   the tasks of prompts/bbh: a few-shot text of its own for each, then questions on it.
           Time to the first token of each question, alone on the engine, after one question of the
           task has gone before: the text is then known to the engine with the cache. The engine
           without computes it again. Ratio of the sums, a pair a question
    misses prompts that never begin alike, through a KV memory so small that what is kept is soon
           evicted again: hashing, registering and evicting is all paid for and nothing is found.
           CPU time of the whole process for the same work, round by round in turn; the ratio of
           the sums less 1 is the cost, with the interval of a bootstrap over the pairs of rounds.
           The forward passes do the same on both sides and are most of the time and of its noise:
           beside it stands what the loop around them takes more, as a share of the whole time
           and of the loop's own (on a GPU the loop is all the CPU time there is)

Prompts are cut into tokens by the data's own tokenizer, its ids taken modulo the model's
vocabulary: weights that are random or tiny answer nonsense anyhow, and the lengths are real.
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
from tokenizers import Tokenizer

from bench import lengths, machine, processes, stats
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

HITS_GOAL = 0.3
COST_GOAL = 0.01
COSTS = {
    "whole": "CPU time",
    "loop_of_whole": "CPU time, same forward passes",
    "loop_of_loop": "CPU time outside the model alone",
}
QUESTION_ROOM = 0.5  # of the context, where a text must be cut: for the question and its answer


def read_tasks(data: Path, num_tasks: int, num_questions: int) -> list[tuple[str, list[str]]]:
    """The first tasks as (shared text, questions on it)."""
    prompts = data / "prompts"
    questions: dict[str, list[str]] = {}
    for row in lengths.read_rows(prompts / "bbh_questions.jsonl.gz"):
        questions.setdefault(str(row["task"]), []).append(f"\n\nQ: {row['input']}\nA:")
    tasks = [
        (str(row["prefix"]), questions[str(row["task"])][:num_questions])
        for row in lengths.read_rows(prompts / "bbh_prefixes.jsonl.gz")
    ]
    return tasks[:num_tasks]


def task_asks(
    tokenizer: Tokenizer, prefix: str, questions: Sequence[str], pack: Pack, max_tokens: int
) -> list[Ask]:
    """One request a question; text and question cut where the context is too short for them."""
    context, vocab_size = pack.index.max_context, pack.index.vocab_size

    def ids(text: str) -> list[int]:
        encoded = tokenizer.encode(text, add_special_tokens=False).ids
        return [token % vocab_size for token in encoded]

    room = context - max_tokens
    shared = ids(prefix)
    tails = [ids(question) for question in questions]
    if len(shared) + max(map(len, tails)) > room:
        tails = [tail[-int(room * QUESTION_ROOM) :] for tail in tails]
        shared = shared[: room - max(map(len, tails))]
    return [Ask(shared + tail, max_tokens) for tail in tails]


def measure_hits(
    with_cache: Host, without: Host, tasks: Sequence[Sequence[Ask]]
) -> list[dict[str, float]]:
    """A row a question but the first of each task, which only brings the text in."""
    rows: list[dict[str, float]] = []
    for number, (first, *others) in enumerate(tasks):
        for host in (with_cache, without):
            host.run([first], 1)
        for turn, ask in enumerate(others):
            hosts = {"with_s": with_cache, "without_s": without}
            row = {"task": float(number), "prompt_tokens": float(len(ask.prompt_ids))}
            for key in sorted(hosts, reverse=bool(turn % 2)):
                done = hosts[key].run([ask], 1)
                row[key] = done.ttft_s[0]
                if key == "with_s":
                    row["cached_tokens"] = float(done.cached_tokens)
            rows.append(row)
    return rows


def hits_summary(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Ratios of the time to first token, with and without."""
    with_s = [row["with_s"] for row in rows]
    without_s = [row["without_s"] for row in rows]
    return {
        "goal": HITS_GOAL,
        "ttft_with_s": stats.spread(with_s),
        "ttft_without_s": stats.spread(without_s),
        "ratio_of_sums": stats.bootstrap_ratio(with_s, without_s),
        "ratio_of_medians": stats.percentile(with_s, 0.5) / stats.percentile(without_s, 0.5),
        "hit_share": sum(row["cached_tokens"] for row in rows)
        / sum(row["prompt_tokens"] for row in rows),
        "prompt_tokens": stats.spread([row["prompt_tokens"] for row in rows]),
    }


def measure_misses(
    with_cache: Host, without: Host, vocab_size: int, args: argparse.Namespace
) -> list[dict[str, float]]:
    """CPU seconds of the same round on both, in turn; the first pair warms up and fills the KV."""
    generator = torch.Generator().manual_seed(args.seed)
    rows: list[dict[str, float]] = []
    clock = ModelClock()
    for pair in range(args.pairs + args.warm_up_pairs):
        sizes = [args.miss_prompt_tokens] * args.requests
        prompts = random_prompts(sizes, vocab_size, generator)
        asks = [Ask(prompt, args.miss_output_tokens) for prompt in prompts]
        hosts = {"with_s": with_cache, "without_s": without}
        row: dict[str, float] = {}
        for key in sorted(hosts, reverse=bool(pair % 2)):
            with clock:
                done = hosts[key].run(asks, args.width, clock)
            row[key], row[f"loop_{key}"] = done.cpu_s, done.cpu_s - done.model_cpu_s
            row["steps"] = done.num_steps
            row["cached_tokens"] = row.get("cached_tokens", 0.0) + done.cached_tokens
        if pair >= args.warm_up_pairs:
            rows.append(row)
        print(f"pair {pair}: {row['with_s'] / row['without_s']:.4f}", file=sys.stderr)
    return rows


def misses_summary(rows: Sequence[Mapping[str, float]], counters: Mapping[str, float]) -> Any:
    """The cost: CPU seconds with the cache over those without, less 1."""

    def column(key: str) -> list[float]:
        return [row[key] for row in rows]

    whole, loop = column("without_s"), column("loop_without_s")
    # As if the forward passes had taken the very same time on both sides.
    same_model = [w - a + b for w, a, b in zip(whole, loop, column("loop_with_s"), strict=True)]
    steps = sum(column("steps"))
    return {
        "goal": COST_GOAL,
        "whole": _cost(column("with_s"), whole),
        "loop_of_whole": _cost(same_model, whole),
        "loop_of_loop": _cost(column("loop_with_s"), loop),
        "cpu_ms_per_step": sum(whole) / steps * 1e3,
        "loop_cpu_ms_per_step": sum(loop) / steps * 1e3,
        "hit_tokens": sum(column("cached_tokens")),
        "num_evicted_pages": counters.get("kv_evicted_pages", 0.0),
    }


def _cost(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    interval = stats.bootstrap_ratio(ours, theirs)
    return {
        "cost": interval["mean"] - 1,
        "low": interval["low"] - 1,
        "high": interval["high"] - 1,
        "confidence": interval["confidence"],
        "pairs": interval["n"],
    }


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.prefix", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("data", type=Path, help="folder with prompts and tokenizers")
    parser.add_argument("--parts", nargs="+", choices=("hits", "misses"), default=None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    hits = parser.add_argument_group("hits")
    hits.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M", help="or a demo model")
    hits.add_argument("--tasks", type=int, default=6)
    hits.add_argument("--questions", type=int, default=6, help="of a task; the first is not timed")
    misses = parser.add_argument_group("misses")
    misses.add_argument("--miss-model", default="shakespeare", help="a demo model or a shape")
    misses.add_argument("--pairs", type=int, default=30)
    misses.add_argument("--warm-up-pairs", type=int, default=3)
    misses.add_argument("--requests", type=int, default=16, help="in a round")
    misses.add_argument("--width", type=int, default=8, help="requests at a time")
    misses.add_argument("--miss-prompt-tokens", type=int, default=256)
    misses.add_argument("--miss-output-tokens", type=int, default=64)
    parser.add_argument("--work-dir", type=Path, help="models and packs; else a temporary one")
    parser.add_argument("--output", type=Path, help="else bench/results/prefix-<time>.json")
    args = parser.parse_args(argv)
    args.parts = args.parts or ["hits", "misses"]
    if args.questions < 2 or args.pairs < 2:
        parser.error("--questions and --pairs must be 2 at least")
    return args


def run_hits(args: argparse.Namespace, work_dir: Path) -> dict[str, Any]:
    """The first comparison."""
    pack = make_pack(args.model, work_dir, args.seed)
    tokenizer = lengths.read_tokenizer(args.data)
    tasks = [
        task_asks(tokenizer, prefix, questions, pack, max_tokens=1)
        for prefix, questions in read_tasks(args.data, args.tasks, args.questions)
    ]
    longest = max(len(ask.prompt_ids) for asks in tasks for ask in asks)
    # Every task's text and questions stay: eviction is the other comparison's matter.
    room = kv_bytes(pack, len(tasks) * args.questions, longest + 1)
    settings = [{"prefix_cache": True}, {"prefix_cache": False}]
    with hosting(pack, settings, room) as (with_cache, without):
        rows = measure_hits(with_cache, without, tasks)
    return {"model": args.model, **hits_summary(rows), "rows": rows}


def run_misses(args: argparse.Namespace, work_dir: Path) -> dict[str, Any]:
    """The second comparison."""
    pack = make_pack(args.miss_model, work_dir, args.seed)
    tokens = args.miss_prompt_tokens + args.miss_output_tokens
    common = {"max_num_seqs": args.width, "max_waiting": args.requests}
    settings = [common | {"prefix_cache": True}, common | {"prefix_cache": False}]
    with hosting(pack, settings, kv_bytes(pack, args.width, tokens)) as (with_cache, without):
        rows = measure_misses(with_cache, without, pack.index.vocab_size, args)
        counters = with_cache.counters()
    return {"model": args.miss_model, **misses_summary(rows, counters), "rows": rows}


def table(result: Mapping[str, Any]) -> str:
    """A line for each comparison."""
    lines = [f"{result['threads']} thread(s)"]
    if "hits" in result:
        hits = result["hits"]
        ratio, prompt = hits["ratio_of_sums"], hits["prompt_tokens"]["p50"]
        with_ms, without_ms = hits["ttft_with_s"]["p50"] * 1e3, hits["ttft_without_s"]["p50"] * 1e3
        lines += [
            f"hits    {hits['model']}, {ratio['n']} questions, prompts of {prompt:.0f} tokens, "
            f"{hits['hit_share']:.0%} found: TTFT {with_ms:.1f} ms with, {without_ms:.1f} without",
            f"        ratio of sums {ratio['mean']:.3f} ({ratio['low']:.3f} to "
            f"{ratio['high']:.3f}), goal {hits['goal']}",
        ]
    if "misses" in result:
        misses = result["misses"]
        lines.append(
            f"misses  {misses['model']}, {misses['whole']['pairs']} pairs, "
            f"{misses['cpu_ms_per_step']:.2f} ms CPU a step, {misses['loop_cpu_ms_per_step']:.2f} "
            f"of it outside the model, {misses['num_evicted_pages']:.0f} pages evicted"
        )
        for key, name in COSTS.items():
            cost = misses[key]
            bounds = f"({cost['low']:+.2%} to {cost['high']:+.2%})"
            lines.append(f"        {name:<36}{cost['cost']:+8.2%} {bounds}")
        lines.append(f"        goal {misses['goal']:+.0%}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the table, write the result."""
    args = parse(argv)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    output = args.output or Path("bench/results") / f"prefix-{stamp}.json"
    facts = machine.facts()
    torch.set_num_threads(args.threads)
    result: dict[str, Any] = {"benchmark": "prefix", "machine": facts, "threads": args.threads}
    with ExitStack() as stack:
        work_dir = args.work_dir
        if work_dir is None:
            work_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        try:
            for part in args.parts:
                result[part] = (run_hits if part == "hits" else run_misses)(args, work_dir)
        except (processes.ServerFailed, TimeoutError) as error:
            print(f"bench.prefix: {error}", file=sys.stderr)
            return 1
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))
    print(f"written to {output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
