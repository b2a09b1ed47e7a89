"""Finishes that were handed out and whose posting is awaited: what AckUsage will have to name.

A worker keeps every Finish until it is acknowledged. Those that owe nothing (no token was ever
delivered) are acknowledged at once; the others when the ledger says that their posting is durable.
The ledger speaks of a request once, also where its choices were several requests to the workers.
"""

from collections import OrderedDict
from collections.abc import Iterable

from engine.protocol import AckUsage
from gateway.dispatch.fleet import Fleet
from gateway.dispatch.joint import base_id

MAX_UNACKED = 65_536
"""Requests; the oldest is forgotten beyond it; its worker keeps it, and its own bound."""


class UnackedFinishes:
    """Request id -> name at the worker -> (worker, epoch, attempt) of the finish that counts."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._entries: OrderedDict[str, dict[str, tuple[str, str, int]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def expect(self, request_id: str, attempt: int, worker_id: str, epoch: str) -> None:
        """The ledger will speak of this request."""
        names = self._entries.setdefault(base_id(request_id), {})
        names[request_id] = (worker_id, epoch, attempt)
        if len(self._entries) > MAX_UNACKED:
            self._entries.popitem(last=False)

    def expects(self, request_id: str, attempt: int) -> bool:
        """Whether this very finish waits for the ledger."""
        entry = self._entries.get(base_id(request_id), {}).get(request_id)
        return entry is not None and entry[2] == attempt

    def ack_now(self, request_id: str, attempt: int, worker_id: str) -> None:
        """Nothing is owed for it."""
        self._fleet.send(worker_id, AckUsage([(request_id, attempt)]))

    def ack(self, request_ids: Iterable[str]) -> None:
        """Their usage is durable. Unknown ids have been acknowledged or never ran."""
        by_worker: dict[str, list[tuple[str, int]]] = {}
        for request_id in request_ids:
            for name, (worker_id, epoch, attempt) in self._entries.pop(request_id, {}).items():
                if self._fleet.get(worker_id, epoch) is not None:
                    by_worker.setdefault(worker_id, []).append((name, attempt))
        for worker_id, keys in by_worker.items():
            self._fleet.send(worker_id, AckUsage(keys))
