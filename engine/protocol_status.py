"""What a worker says of its models and memory; parts of the messages of `engine/protocol.py`.

The gateway takes them from there.
"""

from typing import Literal, TypeAlias

import msgspec

ResidencyState: TypeAlias = Literal["cold", "warm", "loading", "resident", "draining", "failed"]

Outcome: TypeAlias = Literal[
    "evicted",
    "drains",
    "kept: pinned",
    "kept: floor",
    "kept: first use",
    "kept: residence",
    "kept: margin",
    "kept: busy",
    "kept: claimed",
    "kept: not needed",
]
"""What became of a model when somebody had to go; see SwapCandidate."""

MAX_CANDIDATES = 64
"""Rows of one SwapChoice at most."""
MAX_CELLS = 512
"""Stretches of one Layout at most: a picture is not much wider. Some 3 kB."""


class RequestService(msgspec.Struct, frozen=True, array_like=True):
    """What an unfinished request has used so far; see protocol.Usage for the two sums."""

    request_id: str
    attempt: int
    service_s: float
    device_s: float


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """A standing offer for one resident model.

    num_requests and kv_tokens (prompt plus output) are what may still be submitted for it, each
    request rounded up to whole blocks of `block_tokens`. Offers of several models share one memory:
    all grants together must also stay within the `WorkerStatus.free_*` figures. Models of one pack
    have an offer each.
    """

    model_id: str
    num_requests: int
    kv_tokens: int
    kv_bytes_per_token: int
    block_tokens: int = 1


class ModelStatus(msgspec.Struct, frozen=True, array_like=True):
    """Residency of one hosted model. Durations in seconds; -1 where not yet known."""

    model_id: str
    state: ResidencyState
    weight_bytes: int
    kv_bytes_used: int
    num_running: int
    num_waiting: int
    load_s_estimate: float
    reason: str = ""


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """The arena from its first page to its last, in the rough: for a picture.

    `stretches` are (owner, pages), neighbours first to last; all pages together are the arena's.
    `owner` counts in `owners`, which are named as in `WorkerStatus.pages`, "free" among them; pages
    that a step in flight may still touch count as free. An arena of more than MAX_CELLS pages is
    looked at in that many places only.
    """

    owners: list[str]
    stretches: list[tuple[int, int]]


class SwapRecord(msgspec.Struct, frozen=True, array_like=True):
    """One finished load or eviction, for metrics and the operator's pages."""

    model_id: str
    kind: Literal["load", "evict"]
    tier: Literal["disk", "host", "none"]
    size_bytes: int
    duration_s: float
    reason: str = ""


class SwapCandidate(msgspec.Struct, frozen=True, array_like=True):
    """A model that held pages when somebody had to go, and what became of it.

    `score` is `demand` (device seconds a second) x `reload_s` x `weight` over `size_bytes`, or what
    else the worker's policy goes by; `num_pages` would come free. `outcome`:

    evicted               idle, left at once
    drains                leaves when what it runs has ended, or its time-out has come
    kept: pinned          never leaves
    kept: floor           its tenant would fall below its floor
    kept: first use       just loaded: its first request has not been served
    kept: residence       not resident for long enough
    kept: margin          worth more than the newcomer, or not clearly less
    kept: busy            runs something, and what is asked for is not worth that
    kept: claimed         KV of a request that has waited for long will need its room
    kept: not needed      others made the room, or not even all made it
    """

    model_id: str
    outcome: Outcome
    score: float
    demand: float
    reload_s: float
    weight: float
    size_bytes: int
    num_pages: int


class SwapChoice(msgspec.Struct, frozen=True, array_like=True):
    """One decision about who leaves the device. `newcomer`: the model that room is made for.

    `reason`: for its weights because somebody waits ("load") or may soon ("prefetch"), for its KV
    ("kv"), or nobody's: somebody asked for the unload ("operator"). `waited_s`: how long the
    newcomer has waited; `score` as the candidates'. `candidates`: at most MAX_CANDIDATES, those who
    leave first, then by score.
    """

    newcomer: str
    reason: Literal["load", "kv", "prefetch", "operator"]
    num_pages_short: int
    waited_s: float
    score: float
    candidates: list[SwapCandidate]
