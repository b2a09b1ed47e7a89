"""One request, several choices: their names towards workers, and their usage as the request's.

A request for one answer goes to a worker under its own id. The choices of a request for several are
Submits of their own, named `ID#0`, `ID#1`, ...; the ledger and the client know only `ID`.
"""

from collections.abc import Sequence

from engine.protocol import Usage

MOST_S = 1e9
"""No request has taken longer than that: a figure above it is no time."""
_MARK = "#"


def choice_id(request_id: str, index: int, num_choices: int) -> str:
    """What a worker knows this choice by."""
    return request_id if num_choices == 1 else f"{request_id}{_MARK}{index}"


def base_id(name: str) -> str:
    """The request that a worker's name for a choice belongs to."""
    return name.partition(_MARK)[0]


def summed_usage(usages: Sequence[Usage]) -> Usage:
    """What all choices used. The prompt counts once, and as cached only what every choice found
    cached: the later ones find it because of the first.

    Every bill is made of what comes out here. A worker's figure that is no time (not finite, below
    0, above MOST_S) counts for nothing: a request must be settled and posted whatever was reported.
    """
    return Usage(
        prompt_tokens=max(usage.prompt_tokens for usage in usages),
        cached_tokens=min(usage.cached_tokens for usage in usages),
        generated_tokens=sum(usage.generated_tokens for usage in usages),
        service_s=sum(_time(usage.service_s) for usage in usages),
        device_s=sum(_time(usage.device_s) for usage in usages),
        prefill_s=sum(_time(usage.prefill_s) for usage in usages),
        load_s=sum(_time(usage.load_s) for usage in usages),
    )


def _time(seconds: float) -> float:
    return seconds if 0.0 <= seconds <= MOST_S else 0.0
