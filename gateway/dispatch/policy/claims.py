"""Loads that have been decided and are not there yet: which worker is to load which model (pure).

A claim ends when the model is resident or failed there, when the worker is lost, or when it
expires.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

MIN_CLAIM_S = 5.0
CLAIM_LOADS = 4.0
"""A claim lives this many estimated loads, and MIN_CLAIM_S at least."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One load on its way. `ready_s`: when it is expected to end."""

    model_id: str
    worker_id: str
    expires_s: float
    weight_bytes: int
    ready_s: float
    load_s: float
    forced: bool


class Claims:
    """By model, and by worker."""

    def __init__(self) -> None:
        self._by_model: dict[str, dict[str, Claim]] = {}
        self._by_worker: dict[str, dict[str, Claim]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_model)

    def __iter__(self) -> Iterator[Claim]:
        return (
            claim for claims in list(self._by_model.values()) for claim in list(claims.values())
        )

    def of(self, model_id: str) -> Mapping[str, Claim]:
        """A model's, by worker."""
        return self._by_model.get(model_id, {})

    def on(self, worker_id: str) -> Mapping[str, Claim]:
        """A worker's, by model."""
        return self._by_worker.get(worker_id, {})

    def add(
        self,
        model_id: str,
        worker_id: str,
        weight_bytes: int,
        load_s: float,
        now_s: float,
        *,
        forced: bool,
    ) -> None:
        """A load has been decided. Loads of one worker share its way to the disk: one after the
        other, as seen from here. Raises ValueError where the worker is to load it already."""
        if model_id in self.on(worker_id):
            raise ValueError(f"{worker_id} has been told to load {model_id!r}")
        before = [claim.ready_s for claim in self.on(worker_id).values()]
        claim = Claim(
            model_id,
            worker_id,
            now_s + max(MIN_CLAIM_S, CLAIM_LOADS * load_s),
            weight_bytes,
            max([now_s, *before]) + load_s,
            load_s,
            forced,
        )
        self._by_model.setdefault(model_id, {})[worker_id] = claim
        self._by_worker.setdefault(worker_id, {})[model_id] = claim

    def drop(self, claim: Claim) -> None:
        """It has ended."""
        for table, one, other in (
            (self._by_model, claim.model_id, claim.worker_id),
            (self._by_worker, claim.worker_id, claim.model_id),
        ):
            del table[one][other]
            if not table[one]:
                del table[one]

    def drop_ended(self, now_s: float, state_of: Callable[[str, str], str | None]) -> list[Claim]:
        """End those that are done or too old; returns those that came to nothing. `state_of(worker,
        model)`: None: no such worker."""
        failed = []
        for claim in self:
            state = state_of(claim.worker_id, claim.model_id)
            if state in (None, "resident", "failed") or now_s >= claim.expires_s:
                self.drop(claim)
                if state not in (None, "resident", "failed", "loading"):
                    failed.append(claim)
        return failed

    def lose_worker(self, worker_id: str) -> None:
        """Its claims are void."""
        for claim in list(self.on(worker_id).values()):
            self.drop(claim)
