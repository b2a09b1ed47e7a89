"""A server and its clients as one child of `bench.cpu`: `cpu_child.py`'s protocol, over HTTP.

Lives here: Polyhost's own server, or `transformers serve` with continuous batching from another
environment (`servers.py` starts both), and one streaming chat for each prompt, all at once. Does
not: what is run and how often (`cpu.py`).

A prompt of n ids stands for a text of about n tokens, the same for every server; the chat template
adds some. `seconds` is from the first request out to the last answer in; `num_tokens` is what the
servers say they generated. `peak_bytes`: of all processes of the server.

    python -m bench.cpu_http polyhost FOLDER --threads 2
    python -m bench.cpu_http transformers FOLDER --batch 16 --python .venv-peers/bin/python
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from bench import load, processes, servers
from bench.client import ChatRequest, Target
from bench.in_process import MODEL
from bench.prompts import PromptMaker

KEY_FILE = "bench-key"
# As llama.cpp's batch in `cpu_llama.py`.
MAX_BATCH_TOKENS = 2048
BLOCK_TOKENS = 32
TEMPLATE_TOKENS = 64


def data_dir(folder: Path) -> Path:
    """Where our server keeps what it made of a model's folder."""
    return folder.parent / f"{folder.name}-data"


def ours(folder: Path, threads: int, closing: ExitStack) -> tuple[Target, int]:
    """Our server over a data folder beside the model, made once; and its process."""
    data = data_dir(folder)
    fresh = not (data / KEY_FILE).exists()
    data.mkdir(exist_ok=True)
    house = servers.Polyhost(data, {"num_threads": threads} if threads else {})
    if fresh:
        house.add_model(MODEL, folder)
        (data / KEY_FILE).write_text(house.new_key(), encoding="utf-8")
    server = house.serve((data / KEY_FILE).read_text(encoding="utf-8"))
    closing.enter_context(server.process)
    return server.target(servers.OURS, MODEL), server.process.pid


def theirs(folder: Path, args: argparse.Namespace, closing: ExitStack) -> tuple[Target, int]:
    """`transformers serve`, and its process.

    It is told how much KV to keep: by itself it takes what memory there is, and is killed for it.
    """
    blocks = -(-args.batch * (args.positions + TEMPLATE_TOKENS) // BLOCK_TOKENS)
    room = [
        *("--cb-block-size", str(BLOCK_TOKENS), "--cb-num-blocks", str(blocks)),
        *("--cb-max-batch-tokens", str(MAX_BATCH_TOKENS)),
    ]
    server = servers.start_transformers(args.python, folder, folder.parent, room, args.threads)
    closing.enter_context(server.process)
    return server.target(servers.PEER, str(folder)), server.process.pid


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


def peak_bytes(leader: int) -> int:
    """The most that it and all processes below it have had in memory, added up.

    Not those of its session: our workers lead sessions of their own. What processes share counts
    for each.
    """
    parents, peaks = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = stat.read_text(encoding="utf-8").rpartition(")")[2].split()[1]
            status = stat.with_name("status").read_text(encoding="utf-8")
        except OSError:
            continue
        pid = int(stat.parent.name)
        parents[pid] = int(parent)
        lines = [line for line in status.splitlines() if line.startswith("VmHWM")]
        peaks[pid] = sum(int(line.split()[1]) * 1024 for line in lines)
    return sum(peak for pid, peak in peaks.items() if is_below(pid, leader, parents))


def is_below(pid: int, leader: int, parents: Mapping[int, int]) -> bool:
    """Whether a process is the leader or was started by it, or by one that was."""
    while pid not in (leader, 0):
        pid = parents.get(pid, 0)
    return pid == leader


def serve(target: Target, leader: int, texts: PromptMaker) -> None:
    """Answer until the input ends."""
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        prompts, tokens = asked["prompts"], asked["max_tokens"]
        started = time.perf_counter()
        num_tokens = ask(target, prompts, texts, tokens)
        answer = {
            "seconds": time.perf_counter() - started,
            "num_tokens": num_tokens,
            "peak_bytes": peak_bytes(leader),
        }
        print(json.dumps(answer), flush=True)


def main() -> None:
    """One server until its input ends."""
    parser = argparse.ArgumentParser(prog="python -m bench.cpu_http")
    parser.add_argument("engine", choices=[servers.OURS, servers.PEER])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--positions", type=int, default=2048)
    parser.add_argument("--python", type=Path, help="of the environment with transformers[serving]")
    args = parser.parse_args()
    processes.exit_on_sigterm()
    folder = args.folder.resolve()
    with ExitStack() as closing:
        if args.engine == servers.OURS:
            target, leader = ours(folder, args.threads, closing)
        else:
            target, leader = theirs(folder, args, closing)
        serve(target, leader, PromptMaker(folder))


if __name__ == "__main__":
    main()
