"""Memory for answers that are being made: what one tenant's requests to encoders may hold.

Such an answer is whole before it leaves, its rows come piece by piece, and the pieces of many
requests take turns: without a bound all of them would fill up together. It is held until the client
has read its answer. Beyond it the answer is an early 429; one request always may.
"""

from collections.abc import Callable

from gateway.errors import QUEUE_FULL, ApiError

_RETRY_S = 1.0


class AnswerRoom:
    """Bytes by tenant."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: dict[str, int] = {}

    def hold(self, tenant_id: str, num_bytes: int) -> Callable[[], None]:
        """Hold so much until what comes back is called; calling it again does nothing.

        Raises ApiError QUEUE_FULL.
        """
        before = self._held.get(tenant_id, 0)
        if before and before + num_bytes > self._max_bytes:
            raise ApiError(
                QUEUE_FULL,
                f"your tenant's requests to encoders hold {before} bytes of answers, "
                f"with this one more than the {self._max_bytes} allowed: try again in a moment",
                retry_after_s=_RETRY_S,
            )
        self._held[tenant_id] = before + num_bytes
        is_held = True

        def release() -> None:
            nonlocal is_held
            if not is_held:
                return
            is_held = False
            self._held[tenant_id] -= num_bytes
            if not self._held[tenant_id]:
                del self._held[tenant_id]

        return release
