"""The running server at one moment, as pages see it."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.protocol import WorkerStatus
from gateway.services import DispatcherSnapshot, LedgerSnapshot


@dataclass(frozen=True, slots=True)
class LiveState:
    """The workers and the queue are of the whole server (fleet_watch.py), the ledger and the limits
    as this process has them."""

    workers: Sequence[WorkerStatus]
    dispatcher: DispatcherSnapshot
    ledger: LedgerSnapshot
    ready: bool
    limits_degraded: bool

    def states_of(self, model: str) -> dict[str, str]:
        """Where a model is, by worker; cold where a worker says nothing of it."""
        return {
            worker.worker_id: next(
                (row.state for row in worker.models if row.model_id == model), "cold"
            )
            for worker in self.workers
        }
