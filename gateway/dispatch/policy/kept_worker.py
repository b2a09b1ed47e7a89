"""Which worker is kept for a head of the fair queue that fits nowhere yet (pure).

A head keeps one worker: the one where it is expected first. All others go on with what is behind
it. A worker lacks the time until enough of what runs there has ended, in mean lifetimes of a
request: with lifetimes that do not age, ln(1 / (1 - s)) until a share s of many has ended.

The choice stays, or the worker that was given up would be filled again and the head would run after
room for ever. Nothing is granted on the worker that is kept, so its lack only falls; another one is
taken only for less than CLEARLY of that. Each change so halves the lack at least, and it is nought
before long.
"""

import math
from collections.abc import Mapping

CLEARLY = 0.5
"""Another worker is taken only where it lacks less than this share of what the kept one lacks."""


def lacking_lifetimes(
    missing_requests: int, num_running: int, missing_bytes: int, used_bytes: int
) -> float:
    """Mean lifetimes of a request until it fits: 0 it fits, ln(n + 1) once all of n have ended.

    Falls whatever ends there, as long as nothing new is granted.
    """
    requests = max(0, missing_requests) / max(1, num_running)
    memory = max(0, missing_bytes) / max(1, used_bytes, missing_bytes)
    share = min(1.0, max(requests, memory))
    running = max(1, num_running)
    return -math.log1p(-share * running / (running + 1))


def expected_first(lacks: Mapping[str, float], before: str) -> str:
    """The worker to keep, of those with what each lacks; `before` is the one kept so far, perhaps
    none of them any more. Empty where there is none."""
    if not lacks:
        return ""
    best = min(lacks, key=lambda worker_id: (lacks[worker_id], worker_id))
    if before in lacks and lacks[best] >= CLEARLY * lacks[before]:
        return before
    return best
