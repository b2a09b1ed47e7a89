"""`python -m bench.gateway`: what the gateway itself costs and adds, beside LiteLLM's proxy.

The real `polyhost serve` (auth, limits, ledger) with a worker behind the real protocol whose tokens
cost nothing (`gateway_worker.py`), short prompts, a client in a process of its own
(`gateway_load.py`). CPU is that of the gateway's processes, worker and client left out, from
/proc/PID/stat before and after; so it has the ledger's thread and the kernel's share of sockets.

    whole      chats that are not streamed, closed loop
    dialects   the same through Anthropic's Messages and OpenAI's Responses, in turns with chats
    stream     chats of 64 chunks, a token every 20 ms, closed loop
    refused    a tenant whose limit is used up: 429, closed loop
    pace       200 chats a second, open loop: added latency is what is beyond the same client's
               against a bare server that answers with bytes made beforehand
    idle       connections that have asked once and wait

Goals stand in docs/benchmarks.md. With `--litellm-python` LiteLLM (a mock OpenAI server behind it,
no database, no logs) gets the same in the same run. Exit status 1 where a goal is missed.
"""

import argparse
import contextlib
import json
import socket
import subprocess
import sys
import time
import timeit
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bench import command, gateway_peer, machine, servers, stats
from bench.gateway_load import Found, Plan
from bench.processes import ServerFailed, below, cpu_s, rss_mib

MODEL = Path(__file__).resolve().parent.parent / "gateway" / "demo_models" / "sherlock"
INSTANT, PACED = "instant", "paced"
NUM_CHUNKS, ANSWER_TOKENS, NUM_TENANTS = 64, 16, 4
DIALECTS = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
MAX_DIALECT_RATIO = 1.15
"""CPU per request of a dialect over that of a chat."""
GOALS = {
    "whole_cpu_ms": 0.5,
    "stream_cpu_ms": 1.5,
    "refused_cpu_ms": 0.3,
    "added_p50_ms": 1.0,
    "added_p99_ms": 5.0,
    "idle_mib": 1024.0,
}
ROUNDS = ("whole", "dialects", "stream", "refused", "pace", "idle")
DIALECT_TURNS = 8
MIN_RATIO = 25.0
"""LiteLLM's CPU per request over ours."""
LIMITS = (
    *("--rpm", "10000000", "--tpm", "1000000000", "--concurrency", "100000"),
    *("--budget-month", "1000000"),
)


@dataclass(frozen=True, slots=True)
class Place:
    """A server under load. `pids`: those whose CPU counts."""

    port: int
    pids: tuple[int, ...]
    keys: tuple[str, ...]
    model: str
    stream_model: str


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gateway", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=6000, help="of `whole` and `refused`")
    parser.add_argument("--streams", type=int, default=1500)
    parser.add_argument("--stream-connections", type=int, default=64)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=15.0, help="of the open loop")
    parser.add_argument("--idle", type=int, default=10_000, help="connections; 0: leave it out")
    parser.add_argument("--peer-requests", type=int, default=400)
    parser.add_argument("--litellm-python", type=Path, metavar="PATH")
    parser.add_argument("--only", nargs="*", choices=ROUNDS)
    command.add_options(parser)
    return parser.parse_args(argv)


def loop_us() -> float:
    """A loop of plain Python, the quickest of some: how much of a core there is just now."""
    best = min(timeit.repeat("sum(range(1000))", number=200, repeat=15))
    return best / 200 * 1e6


def gateway_pids(pid: int) -> tuple[int, ...]:
    """The server and what it started, but for workers."""
    return pid, *below(pid, without=("worker", "resource_tracker"))


def body(model: str, number: int, stream: bool) -> str:
    """A short chat. No two are the same, so nothing may be answered from a cache."""
    said: dict[str, Any] = {
        "messages": [{"role": "user", "content": f"What happened to hound number {number}?"}],
        "model": model,
        "max_tokens": NUM_CHUNKS if stream else ANSWER_TOKENS,
    }
    if stream:
        said |= {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(said, separators=(",", ":"))


def said_in(dialect: str, chat: str) -> str:
    """The same chat in a dialect."""
    said = json.loads(chat)
    if dialect == "responses":
        (message,) = said.pop("messages")
        most = said.pop("max_tokens")
        said |= {"input": message["content"], "max_output_tokens": most, "store": False}
    return json.dumps(said, separators=(",", ":"))


def dialects(place: Place, requests: int, connections: int) -> dict[str, Any]:
    """Chats in each dialect in turns, so that what else the machine does falls on all of them."""
    turn = plan(place, max(1, requests // DIALECT_TURNS), connections, stream=False)
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in DIALECTS}
    for _ in range(DIALECT_TURNS):
        for name, path in DIALECTS.items():
            bodies = [said_in(name, chat) for chat in turn.bodies]
            wanted = msgspec.structs.replace(turn, bodies=bodies, path=path)
            rows[name].append(measured(place, wanted))
    found: dict[str, Any] = {}
    for name, turns in rows.items():
        statuses = [status for row in turns for status in row["statuses"]]
        assert set(statuses) == {"200"}, statuses
        costs = [row["cpu_ms"] for row in turns]
        ratios = [own / chat["cpu_ms"] for own, chat in zip(costs, rows["chat"], strict=True)]
        found[name] = {"cpu_ms": stats.spread(costs), "ratio": stats.spread(ratios)}
    return found


def plan(place: Place, requests: int, connections: int, stream: bool, rate: float = 0.0) -> Plan:
    """What the client is told."""
    model = place.stream_model if stream else place.model
    bodies = [body(model, number, stream) for number in range(997)]
    keys = list(place.keys)
    return Plan("127.0.0.1", place.port, bodies, keys, requests, connections, rate)


def load(wanted: Plan) -> Found:
    """Run the client. Raises ServerFailed with what it said."""
    argv = [sys.executable, "-m", "bench.gateway_load"]
    done = subprocess.run(argv, input=msgspec.json.encode(wanted), capture_output=True)
    if done.returncode:
        raise ServerFailed(done.stderr.decode()[-2000:])
    return msgspec.json.decode(done.stdout, type=Found)


def measured(place: Place, wanted: Plan) -> dict[str, Any]:
    """The plan's figures, with the CPU of the server."""
    before_us = loop_us()
    before = cpu_s(place.pids)
    found = load(wanted)
    user_s, system_s = (now - then for now, then in zip(cpu_s(place.pids), before, strict=True))
    return {
        "requests": wanted.requests,
        "statuses": found.statuses,
        "cpu_ms": (user_s + system_s) / wanted.requests * 1e3,
        "user_ms": user_s / wanted.requests * 1e3,
        "system_ms": system_s / wanted.requests * 1e3,
        "python_loop_us": [before_us, loop_us()],
        "requests_per_s": wanted.requests / found.wall_s,
        "wall_s": found.wall_s,
        "client_cpu_s": found.client_cpu_s,
        "events_per_request": found.num_events / wanted.requests,
        "done_ms": _ms(found.done_s),
        "first_ms": _ms(found.first_s),
    }


def _ms(values_s: Sequence[float]) -> stats.Spread | None:
    return stats.spread([value * 1e3 for value in values_s])


def rounds(place: Place, args: argparse.Namespace, bare_port: int) -> dict[str, Any]:
    """All that is asked of one server but `refused` and `idle`."""
    found: dict[str, Any] = {}
    ours = place.port != bare_port and place.model == INSTANT
    requests = args.requests if ours else args.peer_requests
    wants = _wanted(args)
    load(plan(place, 200 if ours else 40, args.connections, stream=False))  # what is made once
    if "whole" in wants:
        found["whole"] = measured(place, plan(place, requests, args.connections, stream=False))
    if "dialects" in wants and ours:
        found["dialects"] = dialects(place, args.requests, args.connections)
    if "stream" in wants:
        streams = args.streams if ours else args.peer_requests
        wide = args.stream_connections if ours else args.connections
        load(plan(place, wide, wide, stream=True))
        found["stream"] = measured(place, plan(place, streams, wide, stream=True))
    if "pace" in wants and ours:
        found["pace"] = _pace(place, args, bare_port)
    return found


def _wanted(args: argparse.Namespace) -> Sequence[str]:
    return args.only or ROUNDS


def _pace(place: Place, args: argparse.Namespace, bare_port: int) -> dict[str, Any]:
    num = round(args.rate * args.seconds)
    bare = Place(bare_port, (), ("none",), "mock", "mock")
    floor = measured(bare, plan(bare, num, args.connections, stream=False, rate=args.rate))
    paced = measured(place, plan(place, num, args.connections, stream=False, rate=args.rate))
    added = {q: paced["done_ms"][q] - floor["done_ms"][q] for q in ("p50", "p95", "p99", "max")}
    return {**paced, "rate": args.rate, "floor_ms": floor["done_ms"], "added_ms": added}


@contextlib.contextmanager
def idle_connections(port: int, count: int) -> Iterator[None]:
    """So many that have asked once and stay."""
    ask = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"
    with ExitStack() as stack:
        held = []
        for _ in range(count):
            held.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), 30)))
            held[-1].sendall(ask)
        for connection in held:
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        yield


def idle(place: Place, count: int) -> dict[str, Any]:
    """Memory for connections, and whether others are served beside them."""
    before = rss_mib(place.pids)
    with idle_connections(place.port, count):
        held = rss_mib(place.pids)
        beside = measured(place, plan(place, 1000, 16, stream=False))
    time.sleep(1.0)
    return {
        "connections": count,
        "before_mib": before,
        "held_mib": held,
        "kib_each": (held - before) * 1024 / count,
        "after_mib": rss_mib(place.pids),
        "beside": beside,
    }


def start_ours(args: argparse.Namespace, work_dir: Path, stack: ExitStack) -> tuple[Place, str]:
    """The server, and the key of a tenant whose limit is used up."""
    settings = {
        "receive_timeout_s": "600",
        "keep_alive_timeout_s": "600",
        "max_connections_per_address": "0",
        "connection_rate_per_address": "0",
        **command.settings_of(args),
    }
    ours = servers.Polyhost(work_dir / "data", settings)
    keys = work_dir / "keys.json"
    if not keys.exists():
        made = []
        (work_dir / "data").mkdir(parents=True)
        for name in (INSTANT, PACED):
            ours.add_model(name, MODEL)
            ours.run("prices", "set", name, "--prompt", "1", "--completion", "2")
        for number in range(NUM_TENANTS):
            made.append(ours.new_key(f"tenant-{number}"))
            ours.run("limits", "set", "--tenant", f"tenant-{number}", *LIMITS)
        made.append(ours.new_key("poor"))
        ours.run("limits", "set", "--tenant", "poor", "--rpd", "1")
        keys.write_text(json.dumps(made))
    *rich, poor = json.loads(keys.read_text())
    server = ours.serve(rich[0], module=("bench.gateway_server",))
    stack.enter_context(server.process)
    pids = gateway_pids(server.process.pid)
    return Place(server.port, pids, tuple(rich), INSTANT, PACED), poor


def start_peer(python: Path, upstream: int, work_dir: Path, stack: ExitStack) -> Place:
    """LiteLLM."""
    process, port = gateway_peer.start_litellm(python, upstream, work_dir)
    stack.enter_context(process)
    return Place(port, gateway_pids(process.pid), (gateway_peer.KEY,), "mock", "mock")


def run(args: argparse.Namespace, work_dir: Path) -> dict[str, Any]:
    """The result file's content."""
    result: dict[str, Any] = {"benchmark": "gateway", "machine": machine.facts()}
    wants = _wanted(args)
    with ExitStack() as stack:
        bare, bare_port = gateway_peer.start_upstream(work_dir)
        stack.enter_context(bare)
        place, poor = start_ours(args, work_dir, stack)
        ours = rounds(place, args, bare_port)
        if "refused" in wants:
            refused = Place(place.port, place.pids, (poor,), INSTANT, PACED)
            load(plan(refused, 2, 1, stream=False))
            wanted = plan(refused, args.requests, args.connections, stream=False)
            ours["refused"] = measured(refused, wanted)
        if "idle" in wants and args.idle:
            ours["idle"] = idle(place, args.idle)
        result["polyhost"] = {**ours, "settings": args.setting, "pids": len(place.pids)}
        if args.litellm_python:
            peer = start_peer(args.litellm_python, bare_port, work_dir, stack)
            packages = servers.peer_versions(args.litellm_python, (gateway_peer.NAME,))
            result["litellm"] = {"packages": packages, **rounds(peer, args, bare_port)}
    result["goals"] = verdict(result)
    return result


def verdict(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each goal with its figure; those that were not measured are left out."""
    ours, peer = result["polyhost"], result.get("litellm", {})
    figures: dict[str, float] = {}
    for name in ("whole", "stream", "refused"):
        if name in ours:
            figures[f"{name}_cpu_ms"] = ours[name]["cpu_ms"]
    if "pace" in ours:
        added = ours["pace"]["added_ms"]
        figures |= {"added_p50_ms": added["p50"], "added_p99_ms": added["p99"]}
    if "idle" in ours:
        figures["idle_mib"] = ours["idle"]["held_mib"]
    goals: dict[str, dict[str, Any]] = {
        name: {"figure": figure, "goal": GOALS[name], "met": figure <= GOALS[name]}
        for name, figure in figures.items()
    }
    for name, row in ours.get("dialects", {}).items():
        if name != "chat":
            ratio, most = row["ratio"]["p50"], MAX_DIALECT_RATIO
            goals[f"{name}_ratio"] = {"figure": ratio, "goal": most, "met": ratio <= most}
    for name in ("whole", "stream"):
        if name in ours and name in peer:
            ratio = peer[name]["cpu_ms"] / ours[name]["cpu_ms"]
            met = ratio >= MIN_RATIO
            goals[f"litellm_{name}_ratio"] = {"figure": ratio, "goal": MIN_RATIO, "met": met}
    return goals


def table(result: dict[str, Any]) -> str:
    """For the terminal."""
    lines = []
    for server in ("polyhost", "litellm"):
        for name, row in result.get(server, {}).items():
            if isinstance(row, dict) and "cpu_ms" in row:
                done = row["done_ms"]
                lines.append(
                    f"{server:<9}{name:<9}{row['cpu_ms']:>8.3f} ms CPU "
                    f"({row['user_ms']:.3f} + {row['system_ms']:.3f}) "
                    f"{row['requests_per_s']:>8.0f}/s  p50 {done['p50']:.2f} "
                    f"p99 {done['p99']:.2f} ms  {row['statuses']}"
                )
    for name, goal in result["goals"].items():
        met = "met" if goal["met"] else "MISSED"
        lines.append(f"{name:<24}{goal['figure']:>9.3f}  goal {goal['goal']:g}  {met}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """0 where every goal that was measured is met."""
    args = parse(argv)
    with command.working_in(args.work_dir) as work_dir:
        result = run(args, work_dir)
    print(table(result))
    command.keep(result, args.output, "gateway")
    return 0 if all(goal["met"] for goal in result["goals"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
