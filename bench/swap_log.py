"""Loads and evictions from a server's log, with their times.

Lives here: reading the worker's `swap` lines. Does not: what they add up to.
"""

import json
import re
from dataclasses import dataclass

_SWAP = re.compile(r"swap model=(\S+) kind=(load|evict) tier=(\w+) bytes=(\d+) seconds=([\d.]+)")


@dataclass(frozen=True, slots=True)
class Swap:
    """One line. `at`: epoch seconds of its end."""

    at: float
    model: str
    kind: str
    tier: str
    num_bytes: int
    seconds: float


def read_swaps(log: str) -> list[Swap]:
    """All of a log, in their order. Lines that are no JSON are somebody else's."""
    found = []
    for line in log.splitlines():
        match = _SWAP.search(line)
        if match is None:
            continue
        try:
            at = float(json.loads(line)["at"])
        except (ValueError, KeyError, TypeError):
            continue
        found.append(Swap(at, match[1], match[2], match[3], int(match[4]), float(match[5])))
    return found
