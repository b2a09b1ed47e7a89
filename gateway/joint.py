"""One request, several choices: their names towards workers, and their usage as the request's.

A request for one answer goes to a worker under its own id. The choices of a request for several are
Submits of their own, named `ID#0`, `ID#1`, ...; the ledger and the client know only `ID`.
"""

from collections.abc import Sequence

from engine.protocol import Usage

_MARK = "#"


def choice_id(request_id: str, index: int, num_choices: int) -> str:
    """What a worker knows this choice by."""
    return request_id if num_choices == 1 else f"{request_id}{_MARK}{index}"


def base_id(name: str) -> str:
    """The request that a worker's name for a choice belongs to."""
    return name.partition(_MARK)[0]


def joint_usage(usages: Sequence[Usage]) -> Usage:
    """What all choices used. The prompt counts once, and as cached only what every choice found
    cached: the later ones find it because of the first."""
    return Usage(
        prompt_tokens=max(usage.prompt_tokens for usage in usages),
        cached_tokens=min(usage.cached_tokens for usage in usages),
        generated_tokens=sum(usage.generated_tokens for usage in usages),
        service_s=sum(usage.service_s for usage in usages),
        device_s=sum(usage.device_s for usage in usages),
    )
