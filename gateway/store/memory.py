"""Counts of limits in this process: the store of a server that runs one gateway.

Nothing awaits, so each call is atomic in the event loop. A key whose minute has passed and that
runs nothing is forgotten; what is held is bounded by the keys used in the last minute.
"""

from collections import OrderedDict

from gateway.policy import rate_limit
from gateway.policy.rate_limit import Figures, KeyState, Refusal, Reservation
from gateway.types import Limits


class MemoryStore:
    """See store/base.py. Keys are in the order in which they are next looked at."""

    def __init__(self) -> None:
        self._states: OrderedDict[str, KeyState] = OrderedDict()

    async def reserve(
        self, key_id: str, limits: Limits, tokens: int, now_s: float
    ) -> Reservation | Refusal:
        """See LimitStore."""
        self._forget_idle(now_s)
        state = self._states.setdefault(key_id, KeyState())
        self._states.move_to_end(key_id)
        return rate_limit.reserve(state, limits, tokens, now_s)

    async def settle(self, key_id: str, reservation: Reservation, tokens: int) -> None:
        """See LimitStore."""
        rate_limit.settle(self._states[key_id], reservation, tokens)

    async def release(self, key_id: str, reservation: Reservation) -> None:
        """See LimitStore."""
        rate_limit.release(self._states[key_id], reservation)

    async def figures(
        self, key_id: str, limits: Limits, now_s: float
    ) -> tuple[Figures | None, Figures | None]:
        """See LimitStore."""
        state = self._states.get(key_id, KeyState())
        requests, tokens = limits.requests_per_minute, limits.tokens_per_minute
        return (
            state.requests.figures(requests, now_s) if requests else None,
            state.tokens.figures(tokens, now_s) if tokens else None,
        )

    @property
    def num_keys(self) -> int:
        """Keys with counts."""
        return len(self._states)

    @property
    def num_open(self) -> int:
        """Reservations that nobody has closed yet."""
        return sum(state.num_open for state in self._states.values())

    def check_integrity(self) -> None:
        """Raises AssertionError where totals and slots disagree or a place is owed."""
        for key_id, state in self._states.items():
            for window in (state.requests, state.tokens):
                total = sum(amount for _, amount in window.slots)
                if window.total != total or any(amount < 0 for _, amount in window.slots):
                    raise AssertionError(f"{key_id}: window {window.total} != {total} or below 0")
            if state.num_open < 0:
                raise AssertionError(f"{key_id}: {state.num_open} open reservations")

    def _forget_idle(self, now_s: float) -> None:
        """Amortised: every call looks at two keys, so that all come round."""
        for _ in range(min(2, len(self._states))):
            key_id = next(iter(self._states))
            if self._states[key_id].is_idle(now_s):
                del self._states[key_id]
            else:
                self._states.move_to_end(key_id)
