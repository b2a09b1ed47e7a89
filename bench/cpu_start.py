"""`python -m bench.cpu_start FOLDER`: from the command to the first token, on a processor.

Lives here: what is started and when each thing had happened, for Polyhost, `transformers serve`,
llama.cpp and vLLM over one model's folder; where the imports' time goes; tables. Does not: starting
servers (`servers.py`, `cpu_http.py`), llama.cpp (`cpu_llama.py`), speed once it runs (`cpu.py`).

Seconds count from the moment the process is started; engines take turns in every repeat. Ours is
`polyhost serve` over a data folder in which the model is registered and not loaded: the first
request, sent as soon as the server says that it is ready, brings it in. Once with the pack's pages
in the page cache; once with them dropped and a host tier that gets a copy behind the load. Then the
model is unloaded by command and asked for again, from the page cache and from the host tier. The
others have the model when they say that they are ready. Times inside come from the server's log.

Modules are compiled once, before anything is timed, as an installation has them, whatever
PYTHONDONTWRITEBYTECODE says here.

    imports    seconds by package, of the worker's and the gateway's modules, as `python -X
               importtime` counts them (which makes them some tenths slower than they are)
    load       what the loader took for the bytes of the pack; GB/s of that
    built      from the load's end to the model being served: its modules made and pointed there

    --output FILE    results as JSON, written after every start; with --resume repeats are added
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench import client, cpu, cpu_http, files, machine, processes, servers, swap_log
from bench.client import ChatRequest, Target
from bench.in_process import MODEL
from bench.prompts import PromptMaker
from engine.packs.pack import BLOB_NAME

PROMPT_TOKENS = 16
BATCH, POSITIONS = 4, 1024
HOST_TIER_BYTES = 4 << 30
EVICT_TIMEOUT_S = 30.0
SETTLE_S = 3.0  # behind a load: the host tier's copy is made
IMPORTED = {"worker": "engine.worker.main", "gateway": "gateway.server.supervisor"}
COLUMNS = {
    "listening": "listens",
    "worker_told": "worker has its configuration",
    "worker_ready": "worker ready",
    "ready": "ready",
    "load": "load",
    "load_gb_s": "GB/s",
    "built": "built",
    "first_token": "first token",
    "next_token": "the next request's",
    "again": "first token after an unload",
    "again_load": "load then",
    "again_gb_s": "GB/s then",
}


def imports(text: str, least_s: float = 0.05) -> dict[str, float]:
    """Seconds by package from what `-X importtime` wrote; small ones together as `others`."""
    seconds: dict[str, float] = {}
    for line in text.splitlines():
        cells = line.removeprefix("import time:").split("|")
        if len(cells) != 3 or not cells[0].strip().isdigit():
            continue
        package = cells[2].strip().partition(".")[0]
        seconds[package] = seconds.get(package, 0.0) + int(cells[0]) / 1e6
    found = {name: value for name, value in seconds.items() if value >= least_s}
    found["others"] = sum(seconds.values()) - sum(found.values())
    found["all"] = sum(seconds.values())
    return found


def events(log: str, started_at: float) -> dict[str, float]:
    """What our server's log says of one start, as seconds since `started_at`, an epoch time."""
    found: dict[str, float] = {}
    for line in log.splitlines():
        try:
            entry = json.loads(line)
            at, message = float(entry["at"]) - started_at, str(entry["message"])
        except (ValueError, KeyError, TypeError):
            continue
        for name, beginning in (
            ("worker_told", "process started name=worker-0"),
            ("worker_ready", "ready endpoint="),
            ("asked", "decision kind=load"),
        ):
            if message.startswith(beginning):
                found.setdefault(name, at)
    return found


def loads(log: str, started_at: float, first_asked: float) -> dict[str, float]:
    """The first load of a log and the last: how long, how fast, how long until it was of use."""
    swaps = [swap for swap in swap_log.read_swaps(log) if swap.kind == "load"]
    if not swaps:
        return {}
    first, last = swaps[0], swaps[-1]
    found = {
        "load": first.seconds,
        "load_gb_s": first.num_bytes / first.seconds / 1e9,
        "built": first.at - started_at - first_asked - first.seconds,
    }
    if last is not first:
        found["again_load"] = last.seconds
        found["again_gb_s"] = last.num_bytes / last.seconds / 1e9
        found["again_from_host_tier"] = float(last.tier == "host")
    return found


def first_token(target: Target, texts: PromptMaker, number: int) -> float:
    """Seconds of one streamed chat to its first text. Raises ServerFailed where it failed."""
    text = texts.prompt(PROMPT_TOKENS, f"start {time.time_ns()}", number)

    async def ask() -> client.RequestResult:
        async with client.new_session() as session:
            request = ChatRequest(number, text, 4)
            return await client.chat(session, target, request, time.perf_counter())

    result = asyncio.run(ask())
    if result.error or result.ttft_s is None:
        raise processes.ServerFailed(f"{target.name}: {result.error or 'no text'}")
    return result.ttft_s


def blob_of(folder: Path) -> Path:
    """The only pack of our data folder. Raises ServerFailed where there is another number."""
    found = list(cpu_http.data_dir(folder).glob(f"packs/**/{BLOB_NAME}"))
    if len(found) != 1:
        raise processes.ServerFailed(f"{len(found)} packs below {cpu_http.data_dir(folder)}")
    return found[0]


def ours(folder: Path, args: argparse.Namespace, is_cold: bool) -> dict[str, float]:
    """One start of our server."""
    settings: dict[str, object] = {"num_threads": args.threads} if args.threads else {}
    if is_cold:
        # One pack alone gets no copy there by itself.
        settings["host_tier_bytes"] = HOST_TIER_BYTES
    house, key = cpu_http.house_of(folder, settings)
    blob = blob_of(folder)
    if is_cold:
        stayed = files.drop_pages(blob)
    else:
        files.dd_seconds(blob)
        stayed = files.cached_share(blob)
    log_path = cpu_http.data_dir(folder) / "bench-server.log"
    log_path.unlink(missing_ok=True)
    started, started_at = time.monotonic(), time.time()
    server = house.serve(key, until="/health/live")
    with server.process as process:
        found = {"listening": time.monotonic() - started, "cached_share": stayed}
        target = server.target(servers.OURS, MODEL)
        process.wait_ready(f"{server.base_url}/health/ready", servers.START_TIMEOUT_S)
        found["ready"] = time.monotonic() - started
        texts = PromptMaker(folder)
        asked = time.monotonic() - started
        found["first_token"] = asked + first_token(target, texts, 0)
        found["next_token"] = first_token(target, texts, 1)
        time.sleep(SETTLE_S)
        house.run("models", "unload", MODEL)
        _wait_evicted(process)
        found["again"] = first_token(target, texts, 2)
        log = process.read_log()
    said = events(log, started_at)
    found |= loads(log, started_at, said.pop("asked", 0.0)) | said
    return found


def peer(name: str, folder: Path, args: argparse.Namespace, python: Path) -> dict[str, float]:
    """One start of another server, the model in it when it is ready."""
    room = cpu_http.Room(BATCH, POSITIONS)
    texts = PromptMaker(folder)
    started = time.monotonic()
    server = cpu_http.start_peer(name, folder, python, room, args.threads)
    with server.process:
        ready = time.monotonic() - started
        target = server.target(name, str(folder))
        asked = time.monotonic() - started
        answer = asked + first_token(target, texts, 0)
        return {
            "ready": ready,
            "first_token": answer,
            "next_token": first_token(target, texts, 1),
        }


def llama(folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """One start of llama.cpp without HTTP: Python, the GGUF, its own warm-up."""
    script = str(Path(__file__).with_name("cpu_llama.py"))
    room = ["--batch", str(BATCH), "--positions", str(POSITIONS)]
    threads = ["--threads", str(args.threads)] if args.threads else []
    command = [args.llama_python, script, str(folder), *room, *threads]
    started = time.monotonic()
    child = cpu.Child("llama.cpp", command, folder.parent / "children.log")
    try:
        child.wait_ready()
        ready = time.monotonic() - started
        child.run([list(range(100, 100 + PROMPT_TOKENS))], 1)
        answer = time.monotonic() - started
        again = time.monotonic()
        child.run([list(range(200, 200 + PROMPT_TOKENS))], 1)
        return {
            "ready": ready,
            "first_token": answer,
            "next_token": time.monotonic() - again,
        }
    finally:
        child.close()


def import_times(repeats: int) -> dict[str, dict[str, float]]:
    """Of each of our processes, the quickest of some runs."""
    found = {}
    for name, module in IMPORTED.items():
        argv = [sys.executable, "-X", "importtime", "-c", f"import {module}"]
        runs = [
            imports(subprocess.run(argv, capture_output=True, text=True, check=True).stderr)
            for _ in range(repeats)
        ]
        found[name] = min(runs, key=lambda run: run["all"])
    return found


def starts(folder: Path, args: argparse.Namespace) -> dict[str, Callable[[], dict[str, float]]]:
    """By engine; peers only where an environment for them was named."""
    found: dict[str, Callable[[], dict[str, float]]] = {
        "ours, pack cached": lambda: ours(folder, args, is_cold=False),
        "ours, pack on disk": lambda: ours(folder, args, is_cold=True),
    }
    if args.llama_python:
        found["llama.cpp"] = lambda: llama(folder, args)
    if args.peer_python:
        found["transformers serve"] = lambda: peer(servers.PEER, folder, args, args.peer_python)
    if args.vllm_python:
        found["vllm"] = lambda: peer(servers.VLLM, folder, args, args.vllm_python)
    return {name: start for name, start in found.items() if name not in args.without}


def table(done: Mapping[str, Mapping[str, Any]]) -> str:
    """Medians with their spread, a row a figure; columns are engines."""
    lines = [f"| seconds | {' | '.join(done)} |", "|---" * (len(done) + 1) + "|"]
    for key, words in COLUMNS.items():
        if any(key in row for row in done.values()):
            cells = [_cell(row.get(key)) for row in done.values()]
            lines.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join(lines)


def import_table(found: Mapping[str, Mapping[str, float]]) -> str:
    """Who is imported, by process, the slowest first."""
    lines = []
    for name, packages in found.items():
        ordered = sorted(packages.items(), key=lambda item: -item[1])
        lines.append(f"{name}: " + ", ".join(f"{what} {s:.2f}" for what, s in ordered))
    return "\n".join(lines)


def _cell(figure: Mapping[str, float] | None) -> str:
    if figure is None:
        return ""
    return f"{figure['median']:.2f} ({figure['min']:.2f} to {figure['max']:.2f})"


def _wait_evicted(process: processes.ServerProcess) -> None:
    deadline = time.monotonic() + EVICT_TIMEOUT_S
    while not any(swap.kind == "evict" for swap in swap_log.read_swaps(process.read_log())):
        if time.monotonic() > deadline:
            raise processes.ServerFailed(f"the model did not leave\n{process.log}")
        time.sleep(processes.POLL_S)


def main() -> None:
    """Start everything in turn, print tables, write the JSON after each start."""
    parser = argparse.ArgumentParser(prog="python -m bench.cpu_start", description=__doc__)
    parser.add_argument("folder", type=Path, help="the model; its data folder is made beside it")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--llama-python", help="an environment with xllamacpp and gguf")
    parser.add_argument("--peer-python", type=Path, help="one with transformers[serving]")
    parser.add_argument("--vllm-python", type=Path, help="one with vllm's build for a CPU")
    parser.add_argument("--without", action="append", default=[], help="an engine to leave out")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    processes.exit_on_sigterm()
    folder = args.folder.resolve()
    done: dict[str, Any] = {}
    if args.resume and args.output and args.output.exists():
        done = json.loads(args.output.read_text(encoding="utf-8"))["starts"]
    facts = machine.facts()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    imported = import_times(args.repeats)
    for _ in range(args.repeats):
        for name, start in starts(folder, args).items():
            cpu.add(done, name, start())
            print(f"{name}: {done[name]['first_token']['values'][-1]:.2f} s", flush=True)
            if args.output:
                document = {"benchmark": "cpu-start", "machine": facts, "imports": imported}
                document |= {"model": folder.name, "starts": done}
                args.output.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    print(import_table(imported))
    print(table(done))


if __name__ == "__main__":
    main()
