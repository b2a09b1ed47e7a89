"""`python -m bench.cache_reading`: how long a look-up's question holds the event loop.

    python -m bench.cache_reading [--rounds 9] [--output FILE]

Nine texts of 2,000 characters of one kind each, made to be slow to read or to compare; the first is
asked, the others are kept and nearest. Told, in milliseconds, the median of the rounds: all of them
read and compared in one go (the policies alone); a look-up that has read none of them before, and
the longest that it let nobody else on the event loop; the same where the eight kept ones were read
before. Times of the clock: a machine with nothing else to do is needed.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bench import machine
from gateway.cache.readings import Readings
from gateway.cache.types import CachedAnswer, Entry, Neighbour, Scope
from gateway.policy.cache_choice import Candidate, choose
from gateway.policy.cache_confidence import Calibration, Confidence

NUM_CHARS = 2000
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PAIRS = tuple(one + other for one in LETTERS for other in LETTERS)
SENTENCE = "How can I pay for the trip to Rome with 3 friends in March and not in April by card"


def _filled(draw: random.Random, parts: tuple[str, ...], joint: str = " ") -> str:
    return joint.join(draw.choices(parts, k=NUM_CHARS))[:NUM_CHARS]


KINDS: dict[str, Callable[[random.Random], str]] = {
    "sentences": lambda draw: _filled(draw, tuple(SENTENCE.split())),
    "words of two letters": lambda draw: _filled(draw, PAIRS),
    "the same words in other orders": lambda draw: " ".join(draw.sample(PAIRS, len(PAIRS))),
    "numbers": lambda draw: _filled(draw, tuple(map(str, range(100)))),
    "names": lambda draw: "a " + _filled(draw, tuple(pair.upper() for pair in PAIRS)),
    "negating prefixes": lambda draw: _filled(draw, tuple(f"un{pair}able" for pair in PAIRS)),
    "quotations that open": lambda draw: _filled(draw, ("\u201e",) * 20 + ("a",), ""),
    "code that opens": lambda draw: _filled(draw, ("a(", "b[", "(", " - ", "x.y ", "_", "{"), ""),
}


def _near(texts: list[str], group: str) -> list[Neighbour]:
    scope, answer = Scope("ten_1", "model", b"scope"), CachedAnswer("yes", "stop", 1)
    vector = np.zeros(1, np.float32)
    return [
        Neighbour(
            Entry(
                entry_id=f"req_{number}",
                key_id="key_1",
                scope=scope,
                exact_key=b"key",
                question=text,
                vector=vector,
                answer=answer,
                cost_nanos=0,
                made_at=0.0,
                expires_at=0.0,
                epoch=b"",
                confidence=Confidence(group),
            ),
            0.9 - 0.01 * number,
        )
        for number, text in enumerate(texts)
    ]


def at_once(question: str, near: list[Neighbour]) -> float:
    """Milliseconds of the policies, nothing read before."""
    candidates = [
        Candidate(n.entry.entry_id, n.entry.question, n.similarity, n.entry.confidence)
        for n in near
    ]
    began_s = time.perf_counter()
    choose(question, candidates, Calibration(), 0.01, 0.5)
    return (time.perf_counter() - began_s) * 1e3


async def looked_up(readings: Readings, question: str, near: list[Neighbour]) -> list[float]:
    """Milliseconds from one turn of somebody else's on the event loop to the next, meanwhile."""
    turns = [time.perf_counter()]

    async def beside() -> None:
        while True:
            turns.append(time.perf_counter())
            await asyncio.sleep(0)

    other = asyncio.create_task(beside())
    await asyncio.sleep(0)
    del turns[:-1]
    asked, candidates = await readings.of(question, near, readings.num_forgotten)
    choose(question, candidates, Calibration(), 0.01, 0.5, reading=asked)
    turns.append(time.perf_counter())
    other.cancel()
    return [(after - before) * 1e3 for before, after in pairwise(turns)]


def measure(kind: str, rounds: int) -> dict[str, Any]:
    """One kind of text."""
    draw = random.Random(kind)
    rows: dict[str, list[float]] = {}
    for number in range(rounds):
        texts = [KINDS[kind](draw) for _ in range(9)]
        near = _near(texts[1:], "group" if number % 2 else "")
        rows.setdefault("at_once_ms", []).append(at_once(texts[0], near))
        readings = Readings(1 << 24)
        new = asyncio.run(looked_up(readings, texts[0], near))
        again = asyncio.run(looked_up(readings, texts[0], near))
        rows.setdefault("new_ms", []).append(sum(new))
        rows.setdefault("new_longest_ms", []).append(max(new))
        rows.setdefault("known_ms", []).append(sum(again))
        rows.setdefault("known_longest_ms", []).append(max(again))
    medians = {name: round(statistics.median(values), 2) for name, values in rows.items()}
    return {"kind": kind, **medians}


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.cache_reading")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, help="the report, as JSON")
    args = parser.parse_args()
    rows = []
    for kind in KINDS:
        rows.append(measure(kind, args.rounds))
        print(json.dumps(rows[-1]), flush=True)
    if args.output:
        told = {"benchmark": "cache-reading", "machine": machine.facts(), "kinds": rows}
        args.output.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
