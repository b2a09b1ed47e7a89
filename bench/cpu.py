"""`python -m bench.cpu`: our engine on a processor beside llama.cpp, transformers and vLLM.

Lives here: cases, interleaved repeats, the table, what the machine itself can do. Does not: the
engines, each of which is a process of its own (`cpu_child.py`, `cpu_http.py`, `cpu_llama.py`).

True-shape models with random weights, the same files for everybody (llama.cpp has them as GGUF).
A case is a model, a number of sequences at once, a prompt's length. Each engine runs it twice, with
one token each and with 1 + N: the first is prefill, the difference is N tokens of decode. Repeats
take turns engine by engine, so that a slow minute of the machine is everybody's. The table has
medians; min and max are in the JSON. Prompts are random ids and differ in every repeat; over HTTP
they are texts of as many tokens.

    --quantized      our int8 and int4 too, beside llama.cpp's q8_0 and q4_0
    --mixture        a mixture of experts instead, by each of transformers' ways with experts
    --hybrid         a model most of whose layers keep a state instead, with the prefix cache, too:
                     what it costs where nothing is found, and what it saves where 576 of 640 tokens
                     are shared
    --bbh DATA       with --hybrid: instead, the time to the first token on BIG-Bench Hard, whose
                     tasks' questions share three examples (`cpu_bbh.py`)
    --recurrent      only the kernels of recurrent mixers, beside the library's functions: a layer's
                     decode step of 1 and 16 rows, and a chunk of 512 tokens
    --short          batch 1 and 16 of the 0.5B and the 135M model, prompts of 128
    --output FILE    results as JSON, written after every figure; with --resume only what is missing
                     there is run
    --budget S       begin nothing that would not end within so many seconds: a long run in parts
"""

import argparse
import contextlib
import functools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import command, cpu_bbh, machine, recurrent_cases, servers, shapes, stats
from kernels.native_calls import library
from kernels.native_recurrent import NativeRecurrent

QWEN25, QWEN3, SMOL = "Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-0.6B", "HuggingFaceTB/SmolLM2-135M"
HYBRID = "Qwen3.5, 24 layers of 1024"
MIXTURE = "Qwen/Qwen3-30B-A3B, 4 layers of 64 experts"
# Ways of transformers to compute with experts; the best of them is what counts.
EXPERTS = ("eager", "grouped_mm", "batched_mm")
# Ours, and llama.cpp's of as many bits a weight.
QUANTIZED = (("int8", "q8_0"), ("int4", "q4_0"))
AS_WORKERS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}
BBH_TASKS, BBH_ROUNDS = 5, 5
COLUMNS = ("prefill", "decode", "end_to_end")


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table. `shared`: tokens that all prompts begin with."""

    model: str
    batch: int
    prompt: int
    shared: int = 0

    @property
    def name(self) -> str:
        """Its key in the results."""
        shared = f" s{self.shared}" if self.shared else ""
        return f"{self.model} x{self.batch} p{self.prompt}{shared}"


def cases(short: bool, mixture: bool = False, hybrid: bool = False) -> list[Case]:
    """All of them, a model's together."""
    if hybrid:
        return [Case(HYBRID, 1, 128), Case(HYBRID, 16, 128), Case(HYBRID, 1, 640, shared=576)]
    if mixture:
        return [Case(MIXTURE, batch, 128) for batch in (1, 16)]
    if short:
        return [Case(model, batch, 128) for model in (QWEN25, SMOL) for batch in (1, 16)]
    found = [Case(QWEN25, batch, prompt) for prompt in (128, 1024) for batch in (1, 4, 8, 16)]
    return found + [Case(model, batch, 128) for model in (SMOL, QWEN3) for batch in (1, 16)]


class Child:
    """One engine's process."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name = name
        # Ours as the server starts its workers: a thread of OpenMP's that spins takes a core from
        # the threads of the kernels. Others as they start by themselves.
        ours = AS_WORKERS if name.startswith("ours") else {}
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | ours,
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
    """By engine; peers only where an environment for them was named."""
    python = [sys.executable, "-m", "bench.cpu_child"]
    http = [sys.executable, "-m", "bench.cpu_http"]
    threads = ["--threads", str(args.threads)]
    room = ["--threads", str(args.threads), "--batch", str(batch), "--positions", str(positions)]
    found = {
        "ours": [*python, "ours", str(folder), *room],
        "ours, torch": [*python, "ours", str(folder), *room, "--torch"],
        "ours, HTTP": [*http, servers.OURS, str(folder), *room],
    }
    plain = [*python, "generate", str(folder), *threads]
    if args.hybrid:
        found["ours, prefix cache"] = [*found["ours"], "--prefix-cache"]
    if args.mixture:
        found |= {f"generate, {way}": [*plain, "--experts", way] for way in EXPERTS}
    else:
        found["generate"] = plain
    if args.peer_python:
        at = ["--python", args.peer_python]
        found["serve, HTTP"] = [*http, servers.PEER, str(folder), *room, *at]
    if args.vllm_python:
        at = ["--python", args.vllm_python]
        found["vllm, HTTP"] = [*http, servers.VLLM, str(folder), *room, *at]
    if args.llama_python:
        script = str(Path(__file__).with_name("cpu_llama.py"))
        found["llama.cpp"] = [args.llama_python, script, str(folder), *room]
    if args.quantized:
        for dtype, kind in QUANTIZED:
            found[f"ours, {dtype}"] = [*found["ours"], "--dtype", dtype]
            if args.llama_python:
                found[f"llama.cpp, {kind}"] = [*found["llama.cpp"], "--kind", kind]
    return {name: command for name, command in found.items() if name not in args.without}


def run_model(
    model: str,
    rows: Sequence[Case],
    args: argparse.Namespace,
    work: Path,
    done: dict[str, Any],
    deadline_s: float,
) -> Iterable[str]:
    """Measure what is missing of one model, until the deadline; yields as figures come."""
    folder = work / model.replace("/", "-")
    shapes.build_once(model, folder)
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
            found = done.setdefault(case.name, {})
            warm, longest = False, 0.0
            while (number := num_repeats(found, children)) < args.repeats:
                for child in children:
                    if count(found, child.name) > number:
                        continue
                    if not warm:
                        warm_up(case, children, vocab)
                        warm = True
                    if time.monotonic() + longest > deadline_s:
                        return
                    started = time.monotonic()
                    add(found, child.name, run_engine(case, number, child, args.tokens, vocab))
                    longest = max(longest, time.monotonic() - started)
                    yield case.name


def count(found: Mapping[str, Any], engine: str) -> int:
    """How many repeats of a case an engine has."""
    return len(found[engine]["decode"]["values"]) if engine in found else 0


def num_repeats(found: Mapping[str, Any], children: Sequence[Child]) -> int:
    """How many every engine has."""
    return min(count(found, child.name) for child in children)


def add(found: dict[str, Any], engine: str, figures: Mapping[str, float]) -> None:
    """One repeat more of one engine."""
    before = found.get(engine, {})
    found[engine] = {
        key: stats.repeated([*before.get(key, {"values": []})["values"], value])
        for key, value in figures.items()
    }


def prompts_of(case: Case, length: int, seed: str, vocab: int) -> list[list[int]]:
    """Random ids, no two alike but for what they share."""
    begins = random.Random(case.name)
    beginning = [begins.randrange(vocab) for _ in range(min(case.shared, length))]
    rng = random.Random(f"{case.name}/{seed}")
    return [
        beginning + [rng.randrange(vocab) for _ in range(length - len(beginning))]
        for _ in range(case.batch)
    ]


def warm_up(case: Case, children: Sequence[Child], vocab: int) -> None:
    """As many sequences, short ones: weights, threads and buffers are there then."""
    for child in children:
        child.run(prompts_of(case, min(case.prompt, 16), "warm", vocab), 4)


def run_engine(case: Case, number: int, child: Child, tokens: int, vocab: int) -> dict[str, float]:
    """One repeat of one engine: tokens a second of prefill and of decode, its peak in MiB.

    A server's parts of it are there too (`process_memory.py`).
    """
    prompts = prompts_of(case, case.prompt, str(number), vocab)
    first = child.run(prompts, 1)
    whole = child.run(prompts_of(case, case.prompt, f"{number}/whole", vocab), 1 + tokens)
    spent = max(1e-9, whole["seconds"] - first["seconds"])
    # A server may end an answer early; what came is what counts.
    came = whole.get("num_tokens", case.batch * (1 + tokens)) - case.batch
    return {
        "prefill": case.batch * case.prompt / first["seconds"],
        "decode": came / spent,
        "end_to_end": (came + case.batch) / whole["seconds"],
        "peak": whole["peak_bytes"] / 2**20,
        **{f"peak_{part}": size / 2**20 for part, size in whole.get("memory", {}).items()},
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


def recurrent(threads: int, repeats: int) -> str:
    """The kernels of recurrent mixers, float32, as a table. Raises RuntimeError without a build."""
    native = library()
    if native is None:
        raise RuntimeError("no C++ kernels were compiled, or none for this processor")
    torch.set_num_threads(threads)
    native.set_threads(threads)
    mixers = NativeRecurrent(native)
    runs = {name: getattr(mixers, name) for name in ("short_conv", "delta_rule", "ssd")}
    with torch.inference_mode():
        return recurrent_cases.on_processor(runs, repeats, torch.float32)


def bbh(args: argparse.Namespace, work: Path) -> None:
    """Real prompts of the hybrid: with the prefix cache and without."""
    folder = work / HYBRID.replace("/", "-")
    shapes.build_once(HYBRID, folder)
    questions = cpu_bbh.rounds(args.bbh, BBH_TASKS, BBH_ROUNDS)
    positions = max(len(question.ids) for one in questions for question in one) + 32
    made = commands(folder, args, BBH_TASKS, positions)
    with ExitStack() as closing:
        engines: dict[str, cpu_bbh.Ask] = {}
        for name in ("ours", "ours, prefix cache"):
            child = Child(name, made[name], work / "children.log")
            closing.callback(child.close)
            child.wait_ready()
            child.run([list(range(16))], 4)
            engines[name] = functools.partial(_first_token_s, child)
        found = cpu_bbh.measure(questions, engines)
    print(cpu_bbh.table(found["ttft_s"], "ours"))
    if args.output:
        document = {"machine": machine.facts(), "model": HYBRID, **found}
        args.output.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


def _first_token_s(child: Child, ids: Sequence[int]) -> float:
    seconds: float = child.run([list(ids)], 1)["seconds"]
    return seconds


def missing(case: Case, done: Mapping[str, Any], args: argparse.Namespace) -> bool:
    """Whether some engine still lacks repeats."""
    found = done.get(case.name, {})
    names = commands(Path(), args, case.batch, case.prompt)
    return bool(min(count(found, name) for name in names) < args.repeats)


def table(done: Mapping[str, Any]) -> str:
    """Medians, a row a case and engine."""
    head = "| case | engine | prefill tok/s | decode tok/s | both tok/s | peak MiB |"
    lines = [head, "|---|---|---|---|---|---|"]
    for name, engines in done.items():
        for engine, row in engines.items():
            cells = [f"{row[key]['median']:,.1f}" for key in COLUMNS]
            lines.append(f"| {name} | {engine} | {' | '.join(cells)} | {row['peak']['max']:,.0f} |")
    return "\n".join(lines)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.cpu", description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--mixture", action="store_true", help="a mixture of experts instead")
    parser.add_argument("--hybrid", action="store_true", help="a model with states instead")
    parser.add_argument("--bbh", type=Path, metavar="DATA", help="with --hybrid: real prompts")
    parser.add_argument("--recurrent", action="store_true", help="only kernels of mixers")
    parser.add_argument("--only", action="append", default=[], help="cases whose name has this")
    parser.add_argument("--quantized", action="store_true", help="int8 and int4 too")
    parser.add_argument("--without", action="append", default=[], help="an engine to leave out")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--llama-python", help="an environment with xllamacpp and gguf")
    parser.add_argument("--peer-python", help="an environment with transformers[serving]")
    parser.add_argument("--vllm-python", help="an environment with vllm's build for a CPU")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--work-dir", type=Path, help="where models are kept between runs")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args(argv)


def main() -> None:
    """Measure, print the table, write the JSON after every case."""
    args = parse()
    if args.recurrent:
        print(recurrent(args.threads, 10 * args.repeats))
        return
    if args.bbh:
        with command.working_in(args.work_dir) as work:
            bbh(args, work)
        return
    deadline_s = time.monotonic() + args.budget
    done: dict[str, Any] = {}
    if args.resume and args.output and args.output.exists():
        done = json.loads(args.output.read_text(encoding="utf-8"))["cases"]
    wanted = [
        case
        for case in cases(args.short, args.mixture, args.hybrid)
        if all(part in case.name for part in args.only)
    ]
    with command.working_in(args.work_dir) as work:
        facts = machine.facts()
        limits = ceilings(args.threads)
        for model in dict.fromkeys(case.model for case in wanted):
            rows = [case for case in wanted if case.model == model and missing(case, done, args)]
            if not rows or time.monotonic() > deadline_s:
                continue
            for name in run_model(model, rows, args, work, done, deadline_s):
                print(table({name: done[name]}), flush=True)
                if args.output:
                    document = {"machine": facts, "ceilings": limits, "cases": done}
                    args.output.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    print(json.dumps(limits))
    print(table(done))


if __name__ == "__main__":
    main()
