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
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias, get_args

import torch
from transformers import AutoModelForCausalLM

from bench.in_process import MODEL, Host, Pack, kv_bytes
from engine.packs import convert
from engine.protocol import SamplingParams, Submit

Prompts: TypeAlias = Sequence[list[int]]
Run: TypeAlias = Callable[[Prompts, int], list[list[int]]]
# A model's smallest KV is some extents, however few tokens are asked for.
LEAST_KV_BYTES = 16 << 20


def ours(
    folder: Path,
    batch: int,
    positions: int,
    dtype: convert.DtypeChoice,
    native: bool,
    closing: ExitStack,
) -> Run:
    """Our engine, its pack beside the folder."""
    candidate = convert.inspect(folder)
    pack_dir, index = convert.write_pack(candidate, folder.parent / "packs", dtype, _quiet)
    pack = Pack(folder.name, pack_dir, index)
    settings = {
        "max_num_seqs": batch,
        "prefix_cache": False,
        "native_kernels": native,
        "shm_prefix": f"polyhost-bench-{os.getpid()}",
    }
    host = Host(pack, settings, max(LEAST_KV_BYTES, kv_bytes(pack, batch, positions)))
    closing.callback(host.close)
    host.load(pack)

    def run(prompts: Prompts, max_tokens: int) -> list[list[int]]:
        said: dict[str, list[int]] = {}
        for prompt in prompts:
            host.number += 1
            name = f"r{host.number}"
            said[name] = []
            sampling = SamplingParams(temperature=0.0)
            host.engine.submit(
                Submit(name, 0, "bench", MODEL, prompt, max_tokens, sampling, []), time.monotonic()
            )
        waiting = set(said)
        while waiting:
            for delta in host.engine.step(time.monotonic()):
                said[delta.request_id] += delta.token_ids
                if delta.finish is not None:
                    waiting.discard(delta.request_id)
        return list(said.values())

    return run


def generate(folder: Path) -> Run:
    """transformers, eager, all prompts of one length."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

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
            "peak_bytes": peak_bytes(),
        }
        print(json.dumps(answer), flush=True)


def peak_bytes() -> int:
    """The most that this process has had in memory."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


def _quiet(phase: str, done: int, total: int) -> None:
    del phase, done, total


def main() -> None:
    """One engine until its input ends."""
    parser = argparse.ArgumentParser(prog="python -m bench.cpu_child")
    parser.add_argument("engine", choices=["ours", "generate"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--positions", type=int, default=2048)
    parser.add_argument("--dtype", choices=get_args(convert.DtypeChoice), default="auto")
    parser.add_argument("--torch", action="store_true", help="torch's operators, no C++ kernels")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with ExitStack() as closing:
        if args.engine == "generate":
            serve(generate(args.folder))
        else:
            serve(
                ours(args.folder, args.batch, args.positions, args.dtype, not args.torch, closing)
            )


if __name__ == "__main__":
    main()
