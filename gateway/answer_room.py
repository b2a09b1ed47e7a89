"""Memory for answers that are being made: what one tenant's requests to encoders may hold.

Such an answer is whole before it leaves, its rows come piece by piece, and the pieces of many
requests take turns: without a bound all of them would fill up together. Beyond it the answer is an
early 429; one request always may.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from gateway.errors import QUEUE_FULL, ApiError

_RETRY_S = 1.0


class AnswerRoom:
    """Bytes by tenant."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: dict[str, int] = {}

    @contextmanager
    def of(self, tenant_id: str, num_bytes: int) -> Iterator[None]:
        """Hold so much while the block runs. Raises ApiError QUEUE_FULL."""
        before = self._held.get(tenant_id, 0)
        if before and before + num_bytes > self._max_bytes:
            raise ApiError(
                QUEUE_FULL,
                f"your tenant's requests to encoders hold {before} bytes of answers being made, "
                f"with this one more than the {self._max_bytes} allowed: try again in a moment",
                retry_after_s=_RETRY_S,
            )
        self._held[tenant_id] = before + num_bytes
        try:
            yield
        finally:
            self._held[tenant_id] -= num_bytes
            if not self._held[tenant_id]:
                del self._held[tenant_id]
