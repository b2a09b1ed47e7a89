"""`python -m bench.gateway_hostile`: what others feel while clients that mean no good are at it.

The real `polyhost serve` with bench.gateway_worker. One tenant asks at an even pace, first alone,
then while another tenant's clients run every attack of `hostile.py` and hold `--crowd` connections,
all from one address. Says the first tenant's latencies, what became of each attack, and what was
left over: connections, descriptors, reservations, memory. Exit status 1 where the first tenant's
p99 is more than 1.5 times its own, a request of it failed, or something was left.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench import gateway, hostile, machine
from bench.gateway import Place

MAX_RATIO = 1.5
SETTINGS = ("receive_timeout_s=5", "keep_alive_timeout_s=5", "stream_write_timeout_s=5")


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
    parser.add_argument("--work-dir", type=Path, help="keeps the data folder for the next run")
    parser.add_argument(
        "--output", type=Path, help="else bench/results/gateway-hostile-<time>.json"
    )
    return parser.parse_args(argv)


async def attack(site: hostile.Site, crowd: int, seconds: float) -> dict[str, dict[str, int]]:
    """Everything at once, again and again for so long."""
    found: dict[str, dict[str, int]] = {name: {} for name in hostile.ATTACKS}
    until_s = time.monotonic() + seconds

    async def repeat(name: str) -> None:
        while time.monotonic() < until_s:
            for outcome, count in (await hostile.ATTACKS[name](site)).items():
                found[name][outcome] = found[name].get(outcome, 0) + count

    held = asyncio.create_task(hostile.crowd(site, crowd, seconds))
    await asyncio.gather(*(repeat(name) for name in hostile.ATTACKS))
    return {**found, "crowd": dict(await held)}


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
        options = gateway.parse([f"--setting={item}" for item in bounds])
        place, bad_key = gateway.start_ours(options, work_dir, stack)
        wanted = gateway.plan(place, round(args.rate * args.seconds), 8, False, args.rate)
        gateway.load(gateway.plan(place, 200, 8, stream=False))
        before = state(place)
        alone = gateway.measured(place, wanted)
        site = hostile.Site(place.port, bad_key, gateway.INSTANT, scale=args.scale)
        found: dict[str, dict[str, int]] = {}
        attackers = threading.Thread(
            target=lambda: found.update(asyncio.run(attack(site, args.crowd, args.seconds)))
        )
        attackers.start()
        time.sleep(1.0)
        beside = gateway.measured(place, wanted)
        attackers.join()
        time.sleep(6.0)
        after = state(place)
    ratio = beside["done_ms"]["p99"] / alone["done_ms"]["p99"]
    return {
        "benchmark": "gateway-hostile",
        "machine": machine.facts(),
        "alone": alone,
        "beside": beside,
        "p99_ratio": ratio,
        "attacks": found,
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
    for name, outcomes in result["attacks"].items():
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
    for name in ("alone", "beside"):
        done = result[name]["done_ms"]
        print(f"{name:<8} p50 {done['p50']:.2f}  p99 {done['p99']:.2f} ms")
    for name, outcomes in result["attacks"].items():
        print(f"{name:<14}{outcomes}")
    wrong = failures(result)
    print("\n".join(wrong) or "nothing is left over")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    default = Path(__file__).parent / "results" / f"gateway-hostile-{stamp}.json"
    (args.output or default).write_text(json.dumps(result, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
