"""`python -m bench.gateway_hostile`: what others feel while clients that mean no good are at it.

The real `polyhost serve` with bench.gateway_worker. One tenant asks at an even pace,

    alone     first by itself
    sink      then while every attack of `hostile.py` and `--crowd` connections, all from one
              address, go to a server that refuses them at once: the machine's share
    beside    then while they go to this server, with a key of another tenant

The attackers have a process of their own, which runs when nobody else wants the processor (unless
`--attackers-compete`). Says the tenant's latencies, what became of each attack, what each cost the
gateway, and what was left over: connections, descriptors, reservations, memory. Exit status 1 where
p99 beside is more than 1.5 times alone, a request failed, or something was left.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from bench import gateway, machine
from bench.gateway import Place
from bench.gateway_load import Plan
from bench.hostile_load import Assault, Outcome
from gateway.settings import Settings

MAX_RATIO = 1.5
SETTINGS = (
    "receive_timeout_s=5",
    "keep_alive_timeout_s=5",
    "stream_write_timeout_s=5",
    f"connection_rate_per_address={Settings().connection_rate_per_address}",
)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gateway_hostile",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--crowd", type=int, default=10_000, help="connections of one address")
    parser.add_argument("--per-address", type=int, default=1024, help="how many are let in")
    parser.add_argument("--rate", type=float, default=50.0, help="of the tenant that is measured")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--scale", type=int, default=5, help="20 slow clients of a kind, so often")
    parser.add_argument(
        "--attackers-compete",
        action="store_true",
        help="for the processor too, as if they had no machine of their own",
    )
    parser.add_argument("--setting", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--work-dir", type=Path, help="keeps the data folder for the next run")
    parser.add_argument(
        "--output", type=Path, help="else bench/results/gateway-hostile-<time>.json"
    )
    return parser.parse_args(argv)


@contextlib.contextmanager
def sink() -> Iterator[int]:
    """A server that refuses everything and costs next to nothing; its port."""
    argv = [sys.executable, "-m", "bench.hostile_load", "--sink"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.terminate()


def beside(place: Place, wanted: Plan, assault: Assault) -> dict[str, Any]:
    """The tenant's figures while others are at it, and what became of those."""
    argv = [sys.executable, "-m", "bench.hostile_load"]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe) as attackers:
        assert attackers.stdin is not None
        assert attackers.stdout is not None
        attackers.stdin.write(msgspec.json.encode(assault))
        attackers.stdin.close()
        time.sleep(1.5)
        figures = gateway.measured(place, wanted)
        found = msgspec.json.decode(attackers.stdout.read(), type=Outcome)
    return {**figures, "attacks": found.attacks, "attackers_cpu_s": found.cpu_s}


def state(place: Place) -> dict[str, float]:
    """What the server holds."""
    with urllib.request.urlopen(f"http://127.0.0.1:{place.port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    figures = dict(line.rsplit(" ", 1) for line in lines if line and line[0] != "#")
    names = ("connections_open", "limit_reservations_open")
    return {
        **{name: float(figures[f"polyhost_{name}"]) for name in names},
        "descriptors": float(len(list(Path(f"/proc/{place.pids[0]}/fd").iterdir()))),
        "rss_mib": gateway.rss_mib(place.pids),
    }


def run(args: argparse.Namespace, work_dir: Path) -> dict[str, Any]:
    """The result file's content."""
    with ExitStack() as stack:
        bounds = (*SETTINGS, f"max_connections_per_address={args.per_address}")
        options = gateway.parse([f"--setting={item}" for item in (*bounds, *args.setting)])
        place, bad_key = gateway.start_ours(options, work_dir, stack)
        wanted = gateway.plan(place, round(args.rate * args.seconds), 8, False, args.rate)
        gateway.load(gateway.plan(place, 200, 8, stream=False))
        before = state(place)
        alone = gateway.measured(place, wanted)
        assault = Assault(
            place.port,
            bad_key,
            gateway.INSTANT,
            args.crowd,
            args.seconds,
            args.scale,
            not args.attackers_compete,
        )
        with sink() as port:
            at_sink = beside(place, wanted, msgspec.structs.replace(assault, port=port))
        at_us = beside(place, wanted, assault)
        time.sleep(6.0)
        after = state(place)
    p99_ms = alone["done_ms"]["p99"]
    num_attacks = sum(sum(found.values()) for found in at_us["attacks"].values())
    return {
        "benchmark": "gateway-hostile",
        "machine": machine.facts(),
        "settings": args.setting,
        "attackers_compete": args.attackers_compete,
        "alone": alone,
        "sink": at_sink,
        "beside": at_us,
        "p99_ratio": at_us["done_ms"]["p99"] / p99_ms,
        "p99_ratio_sink": at_sink["done_ms"]["p99"] / p99_ms,
        "attacks_per_s": num_attacks / at_us["wall_s"],
        "cpu_ms_per_attack": (at_us["cpu_ms"] - alone["cpu_ms"])
        * alone["requests"]
        / max(1, num_attacks),
        "before": before,
        "after": after,
    }


def failures(result: dict[str, Any]) -> list[str]:
    """What should not be; empty where all is well."""
    wrong = []
    if result["p99_ratio"] > MAX_RATIO:
        wrong.append(f"p99 {result['p99_ratio']:.2f} times as long")
    if set(result["beside"]["statuses"]) != {"200"}:
        wrong.append(f"others were not served: {result['beside']['statuses']}")
    before, after = result["before"], result["after"]
    if after["limit_reservations_open"] or after["descriptors"] > before["descriptors"] + 8:
        wrong.append(f"left over: {after}")
    for name, outcomes in result["beside"]["attacks"].items():
        odd = [o for o in outcomes if o != "closed" and not o.startswith("4") and o != "503"]
        if name not in ("crowd", "half-closed") and odd:
            wrong.append(f"{name}: {odd}")
    return wrong


def main(argv: Sequence[str] | None = None) -> int:
    """0 where others were served as before and nothing was left."""
    args = parse(argv)
    with ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(prefix="hostile-")
        work_dir = args.work_dir or Path(stack.enter_context(temporary))
        work_dir.mkdir(parents=True, exist_ok=True)
        result = run(args, work_dir)
    for name in ("alone", "sink", "beside"):
        row, done = result[name], result[name]["done_ms"]
        print(
            f"{name:<8} p50 {done['p50']:.2f}  p95 {done['p95']:.2f}  p99 {done['p99']:.2f} ms, "
            f"gateway {row['cpu_ms'] * row['requests'] / 1e3 / row['wall_s']:.2f} of a core, "
            f"attackers {row.get('attackers_cpu_s', 0.0):.1f} s"
        )
    each_ms, per_s = result["cpu_ms_per_attack"], result["attacks_per_s"]
    print(f"{per_s:.0f} attacks a second, {each_ms:.3f} ms of the gateway's CPU each")
    for name, outcomes in result["beside"]["attacks"].items():
        print(f"{name:<14}{outcomes}")
    wrong = failures(result)
    print("\n".join(wrong) or "nothing is left over")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    default = Path(__file__).parent / "results" / f"gateway-hostile-{stamp}.json"
    (args.output or default).write_text(json.dumps(result, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
