"""The engine as the worker calls it: the seam between the loop of a process and what it serves.

`engine.py` implements it for real, tests with a script. Every `now_s` is monotonic seconds; all
calls come from one thread.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from engine.protocol import (
    Layout,
    Lease,
    ModelSpec,
    ModelStatus,
    RequestService,
    Submit,
    SwapChoice,
    SwapRecord,
    TokenDelta,
)
from engine.residency.residency_state import PLAIN_WISH, Wish


class EngineStatusLike(Protocol):
    """Memory, residency and leases at one moment; each field as in protocol.WorkerStatus."""

    @property
    def free_requests(self) -> int:
        """Submits that would still be taken, over all models."""

    @property
    def free_kv_bytes(self) -> int:
        """Bytes that KV could still take, over all models."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""

    @property
    def num_pages(self) -> int:
        """Pages of the arena."""

    @property
    def pages(self) -> Mapping[str, int]:
        """Pages by owner, and "free"."""

    @property
    def models(self) -> Sequence[ModelStatus]:
        """One row for each model that is not cold."""

    @property
    def leases(self) -> Sequence[Lease]:
        """One offer for each resident model that takes requests."""

    @property
    def counters(self) -> Mapping[str, float]:
        """Rising counts, for metrics."""

    @property
    def service(self) -> Sequence[RequestService]:
        """What running requests have had so far."""

    @property
    def cold_bytes_per_s(self) -> float:
        """How fast models without a row would be loaded; 0: not known."""


class EngineLike(Protocol):
    """One engine, stepped by its owner."""

    def set_catalog(self, models: Sequence[ModelSpec], now_s: float) -> None:
        """The whole list of models that may be served; the others are unloaded."""

    def submit(self, request: Submit, now_s: float) -> None:
        """Take a request in. Raises RequestRefused, changing nothing."""

    def abort(self, request_id: str, attempt: int) -> None:
        """The next step's deltas end the request with reason `abort`."""

    def load(self, model_id: str, now_s: float, wish: Wish = PLAIN_WISH) -> None:
        """Make a model resident. Idempotent. Raises RequestRefused for an unknown one."""

    def unload(self, model_id: str, now_s: float) -> None:
        """Drain a model and give its pages back. Idempotent. Raises RequestRefused as `load`."""

    def step(self, now_s: float) -> list[TokenDelta]:
        """One scheduling step, and the progress of loads and evictions; [] when idle."""

    def has_work(self) -> bool:
        """A step would run rows now."""

    @property
    def in_transition(self) -> bool:
        """Some model loads or drains: the engine should be stepped though it has no work."""

    @property
    def residency_key(self) -> object:
        """Another value whenever a model has changed its state."""

    def status(self, now_s: float) -> EngineStatusLike:
        """Memory, residency and leases as they are."""

    def layout(self) -> Layout:
        """Who lies where in the arena, in the rough; not to be asked for in every step."""

    def take_swaps(self) -> tuple[list[SwapRecord], list[SwapChoice]]:
        """Swaps finished, and choices of who leaves made, since the last call."""

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every invariant holds."""
