"""When requests of an open-loop run are sent and how long they are.

Lives here: Poisson arrivals and recorded traces (`t_s,in_tokens,out_tokens`, plain or gzip, such as
azure2023_conv.csv.gz) as lists of `Arrival`. Does not: prompts' text, HTTP, clocks.
"""

import csv
import gzip
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: seconds after the start, prompt tokens of content, output tokens."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


def at_once(num_requests: int, prompt_tokens: int, output_tokens: int) -> list[Arrival]:
    """What a closed loop takes its requests from: lengths only, all due at once."""
    return [Arrival(0.0, prompt_tokens, output_tokens)] * num_requests


def poisson(
    rate_rps: float, num_requests: int, prompt_tokens: int, output_tokens: int, seed: int
) -> list[Arrival]:
    """Exponential gaps with mean 1/rate; the first request comes after the first gap."""
    if rate_rps <= 0:
        raise ValueError("a rate is more than 0 requests a second")
    rng = random.Random(seed)
    now_s = 0.0
    arrivals = []
    for _ in range(num_requests):
        now_s += rng.expovariate(rate_rps)
        arrivals.append(Arrival(now_s, prompt_tokens, output_tokens))
    return arrivals


def trace(
    path: Path,
    num_requests: int,
    speed: float = 1.0,
    max_prompt_tokens: int = 0,
    max_output_tokens: int = 0,
) -> list[Arrival]:
    """The first `num_requests` rows of a trace, its time run `speed` times as fast.

    Lengths over a maximum (0: none) are cut to it. Raises ValueError on a file without the columns.
    """
    if speed <= 0:
        raise ValueError("a trace's speed is more than 0")
    arrivals: list[Arrival] = []
    for row in rows(path):
        if len(arrivals) == num_requests:
            break
        try:
            at_s, num_in, num_out = (
                float(row["t_s"]),
                int(row["in_tokens"]),
                int(row["out_tokens"]),
            )
        except KeyError as error:
            raise ValueError(f"{path} has no column {error}") from error
        arrivals.append(
            Arrival(at_s / speed, _cut(num_in, max_prompt_tokens), _cut(num_out, max_output_tokens))
        )
    return arrivals


def _cut(tokens: int, most: int) -> int:
    return max(1, min(tokens, most) if most else tokens)


def rows(path: Path) -> Iterator[dict[str, str]]:
    """The lines of a CSV file, plain or gzip, by column."""
    with _open(path) as lines:
        yield from csv.DictReader(lines)


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")
