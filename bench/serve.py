"""`python -m bench.serve`: Polyhost under HTTP load, beside `transformers serve` in the same run.

Lives here: the command line, the order of rounds, the result file. Does not: load (`load.py`),
servers (`servers.py`), arithmetic (`report.py`).

Every load (a closed loop at each `--concurrency`) is run `--repeats` times, and each repeat asks
one server and then the other for the very same prompts, so
that whatever else the machine does falls on both. Prompts differ between requests and repeats, so
no prefix cache helps; decoding is greedy. The result is the median of the repeats, with its spread.
"""

import argparse
import asyncio
import shlex
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench import command, load, machine, processes, report, servers, shapes, stats
from bench.client import ChatRequest, Target
from bench.prompts import PromptMaker
from bench.report import Comparison, RoundSummary

WARMUP_TOKENS = 8
MODEL_NAME = "bench"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.serve", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    model = parser.add_argument_group("the model")
    model.add_argument("--model-dir", type=Path, help="a Hugging Face folder; else one is made")
    model.add_argument("--shapes", type=Path, default=shapes.DEFAULT_SHAPES)
    model.add_argument("--shape", default="Qwen/Qwen2.5-0.5B")
    model.add_argument("--dtype", default="auto", help="what Polyhost registers the model in")
    what = parser.add_argument_group("the load")
    what.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 16])
    what.add_argument("--requests", type=int, help="per round; else 2 a caller, 8 at least")
    what.add_argument("--prompt-tokens", type=int, default=128, help="of the message's content")
    what.add_argument("--output-tokens", type=int, default=128)
    what.add_argument("--repeats", type=int, default=3)
    what.add_argument("--seed", type=int, default=0)
    who = parser.add_argument_group("the servers")
    who.add_argument("--peer", choices=[servers.PEER])
    who.add_argument("--peer-python", type=Path, default=Path(".venv-peers/bin/python"))
    who.add_argument("--peer-args", default="", help="more arguments for the peer, one string")
    who.add_argument("--skip-ours", action="store_true", help="measure the peer alone")
    who.add_argument("--threads", type=int, default=0, help="of each server; 0: its own choice")
    command.add_options(parser)
    args = parser.parse_args(argv)
    if args.skip_ours and not args.peer:
        parser.error("--skip-ours leaves no server: name a --peer")
    return args


def requests_of(
    args: argparse.Namespace, concurrency: int, prompts: PromptMaker, seed: str
) -> list[ChatRequest]:
    """What one round sends."""
    count = max(args.requests or max(8, 2 * concurrency), concurrency)
    return load.requests_for(prompts, seed, count, args.prompt_tokens, args.output_tokens)


def measure(
    args: argparse.Namespace, targets: Sequence[Target], prompts: PromptMaker
) -> dict[str, dict[str, list[RoundSummary]]]:
    """All rounds by load and server, servers taking turns within each repeat."""
    rounds: dict[str, dict[str, list[RoundSummary]]] = {}
    for concurrency in args.concurrency:
        name = f"c={concurrency}"
        by_server: dict[str, list[RoundSummary]] = {target.name: [] for target in targets}
        for repeat in range(args.repeats):
            # A seed of its own for each load and repeat: no prompt is ever sent twice to a server.
            asked = requests_of(args, concurrency, prompts, f"{args.seed}/{name}/{repeat}")
            for target in targets:
                done = asyncio.run(load.closed_loop(target, asked, concurrency))
                summary = report.summarise(done, {one.index: one.max_tokens for one in asked})
                by_server[target.name].append(summary)
                print(_progress(name, repeat, target.name, summary), file=sys.stderr)
        rounds[name] = by_server
    return rounds


def warm_up(args: argparse.Namespace, target: Target, prompts: PromptMaker) -> None:
    """Load the model and touch every batch size before the clock runs. Raises ServerFailed."""
    width = max(args.concurrency)
    asked = load.requests_for(prompts, "warm-up", width + 1, args.prompt_tokens, WARMUP_TOKENS)
    for some, concurrency in ((asked[:1], 1), (asked[1:], width)):
        done = asyncio.run(load.closed_loop(target, some, concurrency))
        errors = sorted({result.error for result in done.results if result.error})
        if errors:
            raise processes.ServerFailed(f"{target.name} failed its warm-up: {', '.join(errors)}")


def run(args: argparse.Namespace, work_dir: Path) -> dict[str, Any]:
    """The whole benchmark; returns the result file's content."""
    folder = args.model_dir or work_dir / "model"
    if not args.model_dir:
        shapes.build_once(args.shape, folder, args.seed, args.shapes)
    facts = machine.facts()
    prompts = PromptMaker(folder)
    with ExitStack() as stack:
        targets, started = _start(args, folder.resolve(), work_dir, prompts, stack)
        for target in targets:
            warm_up(args, target, prompts)
        rounds = measure(args, targets, prompts)
    summary = {
        name: {server: report.compare(items) for server, items in by_server.items()}
        for name, by_server in rounds.items()
    }
    return {
        "benchmark": "serve",
        "model": args.model_dir.name if args.model_dir else args.shape,
        "settings": {
            key: getattr(args, key)
            for key in (
                "prompt_tokens",
                "output_tokens",
                "requests",
                "repeats",
                "dtype",
                "threads",
                "seed",
            )
        },
        "machine": facts,
        "servers": started,
        "summary": summary,
        "ratio_output_tok_s": _ratios(summary),
        "rounds": rounds,
    }


def _start(
    args: argparse.Namespace,
    folder: Path,
    work_dir: Path,
    prompts: PromptMaker,
    stack: ExitStack,
) -> tuple[list[Target], dict[str, Any]]:
    targets: list[Target] = []
    started: dict[str, Any] = {}
    if not args.skip_ours:
        settings = command.settings_of(args)
        if args.threads:
            settings["num_threads"] = str(args.threads)
        data_dir = tempfile.TemporaryDirectory(prefix="data-", dir=work_dir)
        ours = servers.Polyhost(Path(stack.enter_context(data_dir)), settings)
        ours.add_model(MODEL_NAME, folder, args.dtype)
        server = ours.serve(ours.new_key())
        stack.enter_context(server.process)
        targets.append(server.target(servers.OURS, MODEL_NAME, prompts))
        started[servers.OURS] = {"ready_s": server.ready_s, "settings": settings}
    if args.peer:
        versions = servers.peer_versions(args.peer_python)
        extra = shlex.split(args.peer_args)
        server = servers.start_transformers(args.peer_python, folder, work_dir, extra, args.threads)
        stack.enter_context(server.process)
        targets.append(server.target(servers.PEER, str(folder), prompts))
        started[servers.PEER] = {
            "ready_s": server.ready_s,
            "arguments": ["--continuous-batching", *extra],
            "packages": versions,
        }
    return targets, started


def _ratios(summary: dict[str, dict[str, Comparison]]) -> dict[str, float | None]:
    """Ours over the peer's output tokens a second, by load."""
    return {
        name: stats.ratio(row[servers.OURS]["output_tok_s"], row[servers.PEER]["output_tok_s"])
        for name, row in summary.items()
        if servers.OURS in row and servers.PEER in row
    }


def _progress(load_name: str, repeat: int, server: str, summary: RoundSummary) -> str:
    errors = f", errors {summary['errors']}" if summary["errors"] else ""
    return (
        f"{load_name} repeat {repeat + 1} {server}: {summary['output_tok_s']:.1f} tok/s, "
        f"{summary['num_completed']} of {summary['num_requests']} in {summary['wall_s']:.1f} s"
        f"{errors}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the table, write the result. Returns 1 where a round had errors."""
    args = parse(argv)
    with command.working_in(args.work_dir) as work_dir:
        try:
            result = run(args, work_dir)
        except processes.ServerFailed as error:
            print(f"bench.serve: {error}", file=sys.stderr)
            return 1
    print(report.table(result["summary"], servers.OURS))
    for name, factor in result["ratio_output_tok_s"].items():
        print(f"{name}: {servers.OURS} / {servers.PEER} = {factor or float('nan'):.2f}")
    command.keep(result, args.output, "serve")
    num_errors = sum(row["num_errors"] for by in result["summary"].values() for row in by.values())
    return 1 if num_errors else 0


if __name__ == "__main__":
    raise SystemExit(main())
