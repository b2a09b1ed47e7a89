"""Finishes that no gateway has acknowledged yet: the worker's half of "usage is posted once".

    add    a request ended; kept from here on, whether or not the Finish could be sent
    ack    the gateway has recorded it durably; forgotten
    unacked(gateway)  what a gateway that says Hello is told again, oldest first

Keyed by (request_id, attempt), so telling it twice is harmless. Held in memory: it outlives a
gateway, not the worker. Bounded: beyond `capacity` the oldest falls out and `num_dropped` counts
it (the gateway then bills its own last checkpoint). Does not know sockets.
"""

from collections import OrderedDict
from collections.abc import Iterable

from engine.protocol import Finish, TokenDelta


class UsageOutbox:
    """Not thread-safe; lives on the worker's step thread."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError("the outbox must hold at least one finish")
        self.capacity = capacity
        self.num_dropped = 0
        self._entries: OrderedDict[tuple[str, int], tuple[str, Finish]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: tuple[str, int]) -> bool:
        return key in self._entries

    def add(self, gateway_id: str, key: tuple[str, int], finish: Finish) -> None:
        """Keep `finish` for `gateway_id`. A key that is here already keeps its first finish."""
        if key in self._entries:
            return
        if len(self._entries) >= self.capacity:
            self._entries.popitem(last=False)
            self.num_dropped += 1
        self._entries[key] = (gateway_id, finish)

    def ack(self, gateway_id: str, keys: Iterable[tuple[str, int]]) -> int:
        """Forget those of `keys` that are kept for `gateway_id`. Returns how many those were."""
        num_acked = 0
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None and entry[0] == gateway_id:
                del self._entries[key]
                num_acked += 1
        return num_acked

    def unacked(self, gateway_id: str) -> list[TokenDelta]:
        """What `gateway_id` has not acknowledged, as deltas without tokens, oldest first."""
        return [
            TokenDelta(request_id, attempt, [], finish)
            for (request_id, attempt), (owner, finish) in self._entries.items()
            if owner == gateway_id
        ]
