"""Who is connected to a worker, and what it counts of them (the worker's side of stage 5).

A peer is a connection that said Hello: a gateway process, or a dispatcher process, which submits
nothing itself and is told of all requests alike (`observes`). What messages mean is
`worker_loop.py`'s.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from engine.protocol import RequestService, WorkerStatus
from engine.worker.worker_status import RequestKey


@dataclass(slots=True, eq=False)
class Peer:
    """A gateway's connection. `requests` are those it submitted that have not ended.

    `taken`: of one that observes, the Submits of anybody since its last status.
    """

    identity: bytes
    gateway_id: str
    observes: bool = False
    num_received: int = 0
    connected: bool = True
    requests: set[RequestKey] = field(default_factory=set)
    taken: list[RequestKey] = field(default_factory=list)

    def status(
        self,
        status: WorkerStatus,
        owners: "Mapping[RequestKey, Peer]",
    ) -> WorkerStatus:
        """What this peer is told of a status meant for all."""
        service: Sequence[RequestService] = status.service
        if not self.observes:
            service = [s for s in service if owners.get((s.request_id, s.attempt)) is self]
        taken, self.taken = self.taken, []
        return msgspec.structs.replace(
            status, num_received=self.num_received, service=list(service), taken=taken
        )


@dataclass(slots=True)
class WorkerCounters:
    """What went wrong or hit a bound; in WorkerStatus.counters, each prefixed `worker_`."""

    submits_refused: int = 0
    submits_duplicate: int = 0
    messages_without_hello: int = 0
    controls_refused: int = 0
    deltas_unknown: int = 0
    peers_lost: int = 0
    peers_refused: int = 0
