"""A server and its clients as one child of `bench.cpu`: `cpu_child.py`'s protocol, over HTTP.

Lives here: Polyhost's own server, `transformers serve` with continuous batching or vLLM's server,
these two from environments of their own (`servers.py` starts them), and one streaming chat for each
prompt, all at once. Does not: what is run and how often (`cpu.py`), memory (`process_memory.py`).

A prompt of n ids stands for a text of about n tokens, the same for every server; the chat template
adds some. `seconds` is from the first request out to the last answer in; `num_tokens` is what the
servers say they generated. `peak_bytes`: of all processes of the server, proportional; `memory` has
its parts at that moment. Every server is told how much KV to keep, for by themselves they take a
share of what memory there is; ours has an arena of the weights and that.

    python -m bench.cpu_http polyhost FOLDER --threads 2 --batch 16
    python -m bench.cpu_http transformers FOLDER --batch 16 --python .venv-peers/bin/python
    python -m bench.cpu_http vllm FOLDER --batch 16 --python .venv-vllm/bin/python
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench import load, processes, servers
from bench.client import ChatRequest, Target
from bench.cpu_child import KV_ROUNDING, MODEL
from bench.process_memory import Sampler, memory_of
from bench.prompts import PromptMaker

KEY_FILE = "bench-key"
# As llama.cpp's batch in `cpu_llama.py`.
MAX_BATCH_TOKENS = 2048
BLOCK_TOKENS = 32
VLLM_BLOCK_TOKENS = 128
TEMPLATE_TOKENS = 64
PAGES_SLACK_BYTES = 64 << 20  # of our arena: each layer's weights begin on a page


@dataclass(frozen=True, slots=True)
class Room:
    """How much KV a server is to keep: sequences, and positions of each with its template."""

    batch: int
    positions: int

    def kv_bytes(self, folder: Path) -> int:
        """bfloat16 K and V of all of it, by the model's configuration."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        row = config.get("num_key_value_heads", heads) * head_dim * 2 * 2
        return int(config["num_hidden_layers"] * row * self.batch * self.positions)

    def arena_bytes(self, folder: Path) -> int:
        """What our worker holds: the weights and the KV, rounded as `cpu_child.py` does."""
        weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        return weights + int(self.kv_bytes(folder) * KV_ROUNDING) + PAGES_SLACK_BYTES


def ours(folder: Path, threads: int, closing: ExitStack, room: Room) -> tuple[Target, int]:
    """Our server, and its process; its data folder, beside the model's, is made once."""
    data = folder.parent / f"{folder.name}-data"
    fresh = not (data / KEY_FILE).exists()
    data.mkdir(exist_ok=True)
    settings: dict[str, object] = {"device_budget_bytes": room.arena_bytes(folder)}
    polyhost = servers.Polyhost(data, settings | ({"num_threads": threads} if threads else {}))
    if fresh:
        polyhost.add_model(MODEL, folder)
        (data / KEY_FILE).write_text(polyhost.new_key(), encoding="utf-8")
    server = polyhost.serve((data / KEY_FILE).read_text(encoding="utf-8"))
    closing.enter_context(server.process)
    return server.target(servers.OURS, MODEL), server.process.pid


def start_peer(name: str, folder: Path, python: Path, room: Room, threads: int) -> servers.Server:
    """Another server, ready to answer."""
    if name == servers.VLLM:
        # One block more a sequence: it keeps one to itself.
        blocks = -(-room.positions // VLLM_BLOCK_TOKENS) + 1
        kv_bytes = Room(room.batch, blocks * VLLM_BLOCK_TOKENS).kv_bytes(folder)
        extra = [
            *("--max-model-len", str(room.positions), "--max-num-seqs", str(room.batch)),
            *("--max-num-batched-tokens", str(MAX_BATCH_TOKENS)),
            *("--kv-cache-memory-bytes", str(kv_bytes)),
        ]
        return servers.start_vllm(python, folder, folder.parent, extra, threads)
    blocks = -(-room.batch * room.positions // BLOCK_TOKENS)
    extra = [
        *("--cb-block-size", str(BLOCK_TOKENS), "--cb-num-blocks", str(blocks)),
        *("--cb-max-batch-tokens", str(MAX_BATCH_TOKENS)),
    ]
    return servers.start_transformers(python, folder, folder.parent, extra, threads)


def ask(target: Target, prompts: Sequence[Sequence[int]], texts: PromptMaker, tokens: int) -> int:
    """All at once. How many tokens came; raises ServerFailed where a request failed.

    Texts of their own for each number of tokens: a server with a prefix cache would find in the
    second run what the first has left.
    """
    requests = [
        ChatRequest(number, texts.prompt(len(ids), f"{tokens} {ids}", number), tokens)
        for number, ids in enumerate(prompts)
    ]
    done = asyncio.run(load.closed_loop(target, requests, len(requests)))
    errors = sorted({result.error for result in done.results if result.error})
    if errors:
        raise processes.ServerFailed(f"{target.name}: {', '.join(errors)}")
    return sum(result.completion_tokens for result in done.results)


def arena_bytes(series: Mapping[str, float]) -> dict[str, int]:
    """Of our metrics: what the arena has, and what of it weights and KV hold."""
    num_pages = servers.total(series, "arena_num_pages")
    held = num_pages - servers.total(series, "arena_pages", 'kind="free"')
    size = max(v for k, v in series.items() if k.startswith("arena_page_size_bytes"))
    return {"arena": int(num_pages * size), "arena_held": int(held * size)}


def serve(target: Target, texts: PromptMaker, memory: Sampler) -> None:
    """Answer until the input ends."""
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        prompts, tokens = asked["prompts"], asked["max_tokens"]
        started = time.perf_counter()
        num_tokens = ask(target, prompts, texts, tokens)
        seconds = time.perf_counter() - started
        parts = memory.peak()
        if target.name == servers.OURS:
            parts |= arena_bytes(servers.metrics(target.base_url))
        answer = {
            "seconds": seconds,
            "num_tokens": num_tokens,
            "peak_bytes": parts["total"],
            "memory": parts,
        }
        print(json.dumps(answer), flush=True)


def main() -> None:
    """One server until its input ends."""
    parser = argparse.ArgumentParser(prog="python -m bench.cpu_http")
    parser.add_argument("engine", choices=[servers.OURS, servers.PEER, servers.VLLM])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--positions", type=int, default=2048)
    parser.add_argument("--python", type=Path, help="of the environment that has the other server")
    args = parser.parse_args()
    processes.exit_on_sigterm()
    folder = args.folder.resolve()
    room = Room(args.batch, args.positions + TEMPLATE_TOKENS)
    with ExitStack() as closing:
        if args.engine == servers.OURS:
            target, leader = ours(folder, args.threads, closing, room)
        else:
            server = start_peer(args.engine, folder, args.python, room, args.threads)
            closing.enter_context(server.process)
            target, leader = server.target(args.engine, str(folder)), server.process.pid
        with Sampler(lambda: memory_of(leader)) as memory:
            serve(target, PromptMaker(folder), memory)


if __name__ == "__main__":
    main()
