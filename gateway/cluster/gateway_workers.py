"""A gateway's connections to workers, and what they said last (stage 5).

Only what a gateway needs of them: whether a process is still the one that was meant, which offer a
model, and where a hosted model is, for whoever asks. Capacity, loads and the rest of what statuses
say are the dispatcher's (dispatch/fleet.py).
"""

import math
from dataclasses import dataclass

from engine.protocol import ModelStatus, ToWorker, WorkerStatus
from gateway.dispatch.policy.fleet_view import NEAREST
from gateway.dispatch.policy.relief import unplaceable
from gateway.types import HostedModel
from gateway.workers.worker_client import WorkerClient, WorkerListener, is_sent


@dataclass(slots=True)
class ConnectedWorker:
    """One connection to one worker process."""

    worker_id: str
    epoch: str
    status: WorkerStatus | None = None
    heard_s: float = -math.inf

    def offers(self, model_id: str, now_s: float) -> bool:
        """Whether it takes requests for the model, as of a status that still counts."""
        status = self.status
        if status is None or now_s - self.heard_s > status.lease_ttl_s:
            return False
        return any(lease.model_id == model_id for lease in status.leases)

    def row(self, model_id: str) -> ModelStatus | None:
        """What the last status said of the model; nothing is said of cold ones."""
        rows = self.status.models if self.status is not None else []
        return next((row for row in rows if row.model_id == model_id), None)

    def load_s(self, model: HostedModel) -> float:
        """Until the model could be resident there, were it loaded now; inf: nobody can say."""
        row = self.row(model.name)
        if row is not None:
            return row.load_s_estimate if row.state != "failed" else math.inf
        if self.status is None or self.status.cold_bytes_per_s <= 0:
            return math.inf
        return model.weight_bytes / self.status.cold_bytes_per_s


class GatewayWorkers:
    """All workers of one gateway, by id."""

    def __init__(self) -> None:
        self._clients: dict[str, WorkerClient] = {}
        self._connected: dict[str, ConnectedWorker] = {}

    def __len__(self) -> int:
        return len(self._connected)

    def add(self, client: WorkerClient, listener: WorkerListener) -> None:
        """Begin to connect to one more worker."""
        self._clients[client.worker_id] = client
        client.start(listener)

    def close(self) -> None:
        """Close every connection."""
        for client in self._clients.values():
            client.close()
        self._connected.clear()

    def connect(self, worker_id: str, epoch: str) -> None:
        """A worker process answered."""
        self._connected[worker_id] = ConnectedWorker(worker_id, epoch)

    def lose(self, worker_id: str) -> None:
        """Its process is gone."""
        self._connected.pop(worker_id, None)

    def update(self, worker_id: str, status: WorkerStatus, now_s: float) -> None:
        """A heartbeat, perhaps of a process that is gone."""
        worker = self._connected.get(worker_id)
        if worker is not None and worker.epoch == status.epoch:
            worker.status, worker.heard_s = status, now_s

    def has(self, worker_id: str, epoch: str) -> bool:
        """Whether the worker is connected, and still this process."""
        worker = self._connected.get(worker_id)
        return worker is not None and worker.epoch == epoch

    def send(self, worker_id: str, message: ToWorker) -> bool:
        """Queue a message; False where the connection is gone (`on_lost` comes or has come)."""
        return is_sent(self._clients[worker_id], message)

    def send_all(self, message: ToWorker) -> None:
        """Queue a message for every worker that is connected."""
        for worker_id in list(self._connected):
            self.send(worker_id, message)

    @property
    def is_heard(self) -> bool:
        """A worker has sent a status."""
        return any(worker.status is not None for worker in self._connected.values())

    def offering(self, model_id: str, now_s: float) -> list[str]:
        """Workers with a lease of the model, full or not."""
        return [w.worker_id for w in self._connected.values() if w.offers(model_id, now_s)]

    def failure(self, model: HostedModel) -> str | None:
        """Why no connected worker can run the model; None if one may, or none is connected."""
        heard = [worker for worker in self._connected.values() if worker.status is not None]
        rows = [worker.row(model.name) for worker in heard]
        failed = [row for row in rows if row is not None and row.state == "failed"]
        if failed and len(failed) == len(heard):
            return failed[0].reason or "loading failed"
        statuses = [worker.status for worker in heard if worker.status is not None]
        largest = max((s.num_pages * s.page_bytes for s in statuses), default=0)
        return unplaceable(model.weight_bytes, largest)

    def residency(self, model_id: str) -> str:
        """Where a model's weights are, on the worker that has it nearest."""
        rows = (worker.row(model_id) for worker in self._connected.values())
        states = {row.state for row in rows if row is not None}
        return next((state for state in NEAREST if state in states), "cold")

    def load_s(self, model: HostedModel) -> float | None:
        """Until the model could answer; None: nobody can say."""
        if self.residency(model.name) == "resident":
            return 0.0
        least_s = min((w.load_s(model) for w in self._connected.values()), default=math.inf)
        return None if least_s == math.inf else least_s
