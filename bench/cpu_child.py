"""One engine in a process of its own, told what to run over its standard input.

Lives here: the loop (a line of JSON in, a line out), memory's peak, and two engines: ours, stepped
in process, and transformers' `generate` on a batch. Does not: llama.cpp (`cpu_llama.py`), what is
run and how often (`cpu.py`).

    {"prompts": [[ids]], "max_tokens": n}   ->   {"seconds": s, "tokens": [[ids]], ...}

All prompts at once, greedy, exactly n tokens each; `seconds` is from the first request in to the
last token out. A line that begins with `{` on standard output is an answer, everything else noise.

    python -m bench.cpu_child ours FOLDER --threads 2 --batch 16 --positions 1160 [--torch]
    python -m bench.cpu_child generate FOLDER --threads 2
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias, get_args

import torch
from transformers import AutoModelForCausalLM

from bench import processes
from engine.backend.cpu import CpuBackend, Execution
from engine.config import EngineConfig, auto_page_bytes
from engine.engine import Engine
from engine.pack import PackIndex
from engine.protocol import ModelSpec, SamplingParams, Submit
from engine.registration import convert

Prompts: TypeAlias = Sequence[list[int]]
Run: TypeAlias = Callable[[Prompts, int], list[list[int]]]
MODEL = "bench"
LOAD_TIMEOUT_S = 600.0
KV_ROUNDING = 1.5  # what extents and watermarks may take beside the tokens
# A model's smallest KV is some extents, however few tokens are asked for.
LEAST_KV_BYTES = 16 << 20


class Host:
    """Our engine on this very process's CPU with one model resident, stepped by hand."""

    def __init__(self, folder: Path, dtype: convert.DtypeChoice, args: argparse.Namespace) -> None:
        candidate = convert.inspect(folder)
        packs = folder.parent / "packs"
        pack_dir, index = convert.write_pack(
            candidate, packs, dtype, lambda phase, done, total: None
        )
        kv_room = max(LEAST_KV_BYTES, kv_bytes(index, args.batch, args.positions))
        config = EngineConfig(
            arena_bytes=_arena_bytes(index, kv_room),
            max_num_seqs=args.batch,
            prefix_cache=args.prefix_cache,
            native_kernels=not args.torch,
            shm_prefix=f"polyhost-bench-{os.getpid()}",
        )
        execution: Execution = "thread" if config.steps_ahead else "inline"
        self._backend = CpuBackend(config.arena_bytes, execution=execution)
        self._backend.arena.zero_()  # touched once, as a running worker's arena is
        self._engine = Engine(config, self._backend)
        self._number = 0
        self._load(pack_dir)

    def run(self, prompts: Prompts, max_tokens: int) -> list[list[int]]:
        """All prompts at once; the tokens of each answer."""
        said: dict[str, list[int]] = {}
        for prompt in prompts:
            self._number += 1
            name = f"r{self._number}"
            said[name] = []
            sampling = SamplingParams(temperature=0.0)
            asked = Submit(name, 0, "bench", MODEL, prompt, max_tokens, sampling, [])
            self._engine.submit(asked, time.monotonic())
        waiting = set(said)
        while waiting:
            for delta in self._engine.step(time.monotonic()):
                said[delta.request_id] += delta.token_ids
                if delta.finish is not None:
                    waiting.discard(delta.request_id)
        return list(said.values())

    def close(self) -> None:
        """Check that nothing leaked, stop the threads."""
        self._engine.check_integrity()
        self._engine.close()
        self._backend.close()

    def _load(self, pack_dir: Path) -> None:
        deadline = time.monotonic() + LOAD_TIMEOUT_S
        self._engine.set_catalog([ModelSpec(MODEL, str(pack_dir))], time.monotonic())
        self._engine.load(MODEL, time.monotonic())
        while True:
            self._engine.step(time.monotonic())
            for row in self._engine.status(time.monotonic()).models:
                if row.state == "resident":
                    return
                if row.state == "failed" or time.monotonic() > deadline:
                    raise processes.ServerFailed(f"{pack_dir} was not loaded: {row.reason}")
            time.sleep(0.001)


def kv_bytes(index: PackIndex, num_seqs: int, num_tokens: int) -> int:
    """Room for so many sequences of so many tokens, and for rounding."""
    itemsize = getattr(torch, index.kv_dtype).itemsize
    groups = index.kv_groups
    per_token = sum(g.values_per_token for g in groups) * itemsize
    # A slot for each sequence, and three for what is kept of prompts.
    states = sum(
        len(g.states) * math.prod(g.shape) * getattr(torch, g.dtype).itemsize for g in index.states
    )
    return int((per_token * num_tokens + 4 * states) * num_seqs * KV_ROUNDING)


def _arena_bytes(index: PackIndex, kv_room: int) -> int:
    """Whole pages for the weights' runs, and room for KV beside them and little more."""
    page = auto_page_bytes(index.total_bytes + kv_room)
    runs = sum(-(-segment.num_bytes // page) for segment in index.segments)
    return (runs + -(-kv_room // page)) * page


def generate(folder: Path, experts: str | None = None) -> Run:
    """transformers, eager, all prompts of one length; `experts`: what mixtures compute with."""
    options = {} if experts is None else {"experts_implementation": experts}
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)
    model.eval()

    def run(prompts: Prompts, max_tokens: int) -> list[list[int]]:
        ids = torch.tensor(list(prompts))
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        said: list[list[int]] = out[:, ids.shape[1] :].tolist()
        return said

    return run


def serve(run: Run) -> None:
    """Answer until the input ends."""
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked: Mapping[str, Any] = json.loads(line)
        started = time.perf_counter()
        cpu = time.process_time()
        tokens = run(asked["prompts"], asked["max_tokens"])
        answer = {
            "seconds": time.perf_counter() - started,
            "cpu_seconds": time.process_time() - cpu,
            "tokens": tokens,
            "peak_bytes": processes.peak_bytes(os.getpid()),
        }
        print(json.dumps(answer), flush=True)


def main() -> None:
    """One engine until its input ends."""
    parser = argparse.ArgumentParser(prog="python -m bench.cpu_child")
    parser.add_argument("engine", choices=["ours", "generate"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--positions", type=int, default=2048)
    parser.add_argument("--dtype", choices=get_args(convert.DtypeChoice), default="auto")
    parser.add_argument("--experts", help="transformers' way with mixtures")
    parser.add_argument("--prefix-cache", action="store_true")
    parser.add_argument("--torch", action="store_true", help="torch's operators, no C++ kernels")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with ExitStack() as closing:
        if args.engine == "generate":
            serve(generate(args.folder, args.experts))
        else:
            host = Host(args.folder, args.dtype, args)
            closing.callback(host.close)
            serve(host.run)


if __name__ == "__main__":
    main()
