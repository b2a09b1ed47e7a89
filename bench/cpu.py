"""`python -m bench.cpu`: our engine on a processor beside llama.cpp and transformers, in one run.

Lives here: cases, interleaved repeats, the table, what the machine itself can do. Does not: the
engines, each of which is a process of its own (`cpu_child.py`, `cpu_llama.py`).

True-shape models with random weights, the same files for everybody (llama.cpp has them as GGUF).
A case is a model, a number of sequences at once, a prompt's length. Each engine runs it twice, with
one token each and with 1 + N: the first is prefill, the difference is N tokens of decode. Repeats
take turns engine by engine, so that a slow minute of the machine is everybody's. The table has
medians; min and max are in the JSON. Prompts are random ids and differ in every repeat.

    --short          batch 1 and 16 of the 0.5B and the 135M model, prompts of 128
    --output FILE    results as JSON; with --resume cases that are in it are not run again
"""

import argparse
import contextlib
import functools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import machine, shapes, stats

QWEN25, QWEN3, SMOL = "Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-0.6B", "HuggingFaceTB/SmolLM2-135M"
START_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table."""

    model: str
    batch: int
    prompt: int

    @property
    def name(self) -> str:
        """Its key in the results."""
        return f"{self.model} x{self.batch} p{self.prompt}"


def cases(short: bool) -> list[Case]:
    """All of them, a model's together."""
    if short:
        return [Case(model, batch, 128) for model in (QWEN25, SMOL) for batch in (1, 16)]
    found = [Case(QWEN25, batch, prompt) for prompt in (128, 1024) for batch in (1, 4, 8, 16)]
    return found + [Case(model, batch, 128) for model in (SMOL, QWEN3) for batch in (1, 16)]


class Child:
    """One engine's process."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name = name
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self._log = log

    def wait_ready(self) -> None:
        """Raises SystemExit where it does not come up."""
        self._answer()

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Mapping[str, Any]:
        """One answer of the child."""
        assert self._process.stdin is not None
        line = json.dumps({"prompts": prompts, "max_tokens": max_tokens})
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _answer(self) -> Mapping[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: Mapping[str, Any] = json.loads(line)
                return found
        raise SystemExit(f"{self.name} ended; its last words are in {self._log}")


def commands(
    folder: Path, args: argparse.Namespace, batch: int, positions: int
) -> dict[str, list[str]]:
    """By engine; llama.cpp only where an environment for it was named."""
    python = [sys.executable, "-m", "bench.cpu_child"]
    room = ["--threads", str(args.threads), "--batch", str(batch), "--positions", str(positions)]
    found = {
        "ours": [*python, "ours", str(folder), *room],
        "ours, torch": [*python, "ours", str(folder), *room, "--torch"],
        "generate": [*python, "generate", str(folder), "--threads", str(args.threads)],
    }
    if args.llama_python:
        script = str(Path(__file__).with_name("cpu_llama.py"))
        found["llama.cpp"] = [args.llama_python, script, str(folder), *room]
    return {name: command for name, command in found.items() if name not in args.without}


def run_model(
    model: str, rows: Sequence[Case], args: argparse.Namespace, work: Path, done: dict[str, Any]
) -> Iterable[str]:
    """Measure all cases of one model; yields after each."""
    folder = work / model.replace("/", "-")
    if not (folder / "tokenizer_config.json").exists():
        print(f"making {model} with random weights", file=sys.stderr)
        shapes.build(shapes.read_shapes(), model, folder, 0)
    vocab = shapes.read_shapes()[model]["vocab_size"]
    batch = max(case.batch for case in rows)
    positions = max(case.prompt for case in rows) + args.tokens + 32
    with ExitStack() as closing:
        children = []
        for name, command in commands(folder, args, batch, positions).items():
            child = Child(name, command, work / "children.log")
            closing.callback(child.close)
            child.wait_ready()
            children.append(child)
        for case in rows:
            done[case.name] = run_case(case, children, args, vocab)
            yield case.name


def run_case(
    case: Case, children: Sequence[Child], args: argparse.Namespace, vocab: int
) -> dict[str, Any]:
    """Every engine, `repeats` times in turns; the first round only warms up."""
    rng = random.Random(case.name)
    figures: dict[str, dict[str, list[float]]] = {
        child.name: {"prefill": [], "decode": [], "peak": []} for child in children
    }
    for repeat in range(args.repeats + 1):
        prompts = [[rng.randrange(vocab) for _ in range(case.prompt)] for _ in range(case.batch)]
        tokens = args.tokens if repeat else 4
        for child in children:
            first = child.run(prompts, 1)
            whole = child.run(prompts, 1 + tokens)
            if repeat == 0:
                continue
            mine = figures[child.name]
            mine["prefill"].append(case.batch * case.prompt / first["seconds"])
            spent = max(1e-9, whole["seconds"] - first["seconds"])
            mine["decode"].append(case.batch * tokens / spent)
            mine["peak"].append(whole["peak_bytes"] / 2**20)
    return {
        name: {key: stats.repeated(values) for key, values in mine.items()}
        for name, mine in figures.items()
    }


def ceilings(threads: int) -> dict[str, float]:
    """What this machine can do: reading in GB/s, products in GFLOP/s."""
    torch.set_num_threads(threads)
    big = torch.ones(1 << 28, dtype=torch.float32)
    found = {"read_gb_s": big.numel() * 4 / _fastest(big.sum) / 1e9}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.randn(1024, 1024).to(dtype) for _ in range(2))
        found[f"{str(dtype)[6:]}_gflop_s"] = (
            2 * 1024**3 / _fastest(functools.partial(torch.matmul, a, b)) / 1e9
        )
    return found


def _fastest(work: Any, repeats: int = 7) -> float:
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def table(done: Mapping[str, Any]) -> str:
    """Medians, a row a case and engine."""
    lines = ["| case | engine | prefill tok/s | decode tok/s | peak MiB |", "|---|---|---|---|---|"]
    for name, engines in done.items():
        for engine, row in engines.items():
            cells = [f"{row[key]['median']:,.1f}" for key in ("prefill", "decode")]
            lines.append(f"| {name} | {engine} | {' | '.join(cells)} | {row['peak']['max']:,.0f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print the table, write the JSON after every case."""
    parser = argparse.ArgumentParser(prog="python -m bench.cpu", description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--only", action="append", default=[], help="cases whose name has this")
    parser.add_argument("--without", action="append", default=[], help="an engine to leave out")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--llama-python", help="an environment with xllamacpp and gguf")
    parser.add_argument("--work-dir", type=Path, help="where models are kept between runs")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    done: dict[str, Any] = {}
    if args.resume and args.output and args.output.exists():
        done = json.loads(args.output.read_text(encoding="utf-8"))["cases"]
    wanted = [case for case in cases(args.short) if all(part in case.name for part in args.only)]
    with ExitStack() as closing:
        work = args.work_dir or Path(closing.enter_context(tempfile.TemporaryDirectory()))
        work.mkdir(parents=True, exist_ok=True)
        facts = machine.facts()
        limits = ceilings(args.threads)
        for model in dict.fromkeys(case.model for case in wanted):
            rows = [case for case in wanted if case.model == model and case.name not in done]
            if not rows:
                continue
            for name in run_model(model, rows, args, work, done):
                print(table({name: done[name]}), flush=True)
                if args.output:
                    document = {"machine": facts, "ceilings": limits, "cases": done}
                    args.output.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    print(json.dumps(limits))
    print(table(done))


if __name__ == "__main__":
    main()
