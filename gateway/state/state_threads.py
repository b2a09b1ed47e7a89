"""Where stored state and files are read and written: threads, since databases and disks block.

What callers wait for waits in a bounded number, of one tenant a quarter of it, and the next is told
so. What a request writes at its end is not refused, as the requests themselves are bounded, and has
threads of its own: long lists of one tenant hold up neither answers nor heartbeats of others.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from sqlalchemy.exc import SQLAlchemyError

from gateway.errors import QUEUE_FULL, SERVER_ERROR, UNAVAILABLE, ApiError

log = logging.getLogger(__name__)

RETRY_S = 1.0
_T = TypeVar("_T")


class Damaged(Exception):
    """The bytes of an object are not those that were stored."""


class StateThreads:
    """Of one gateway process. Used on the event loop."""

    def __init__(self, num_threads: int, max_waiting: int, what: str = "stored responses") -> None:
        """`num_threads`: of either sort. `what`: is read and written, for messages."""
        self._what = what
        self._readers = ThreadPoolExecutor(num_threads, thread_name_prefix="state-read")
        self._writers = ThreadPoolExecutor(num_threads, thread_name_prefix="state-write")
        self._max_waiting = max_waiting
        self._max_waiting_tenant = max(1, max_waiting // 4)
        self._waiting: Counter[str] = Counter()

    async def read(self, tenant_id: str, work: Callable[[], _T]) -> _T:
        """What a caller waits for. Raises ApiError where too many wait, or database or objects
        fail; what else `work` raises."""
        if (
            self._waiting.total() >= self._max_waiting
            or self._waiting[tenant_id] >= self._max_waiting_tenant
        ):
            message = f"too many requests for {self._what} are waiting: try again in a moment"
            raise ApiError(QUEUE_FULL, message, retry_after_s=RETRY_S)
        self._waiting[tenant_id] += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._readers, work)
        except Damaged as error:
            log.error("the object of %s is damaged", error)
            message = "what was stored is damaged: tell the operator of this server"
            raise ApiError(SERVER_ERROR, message) from error
        except (SQLAlchemyError, OSError) as error:
            log.warning("%s cannot be reached: %s", self._what, error)
            message = f"{self._what} cannot be reached at the moment: try again"
            raise ApiError(UNAVAILABLE, message, retry_after_s=RETRY_S) from error
        finally:
            self._waiting[tenant_id] -= 1
            if not self._waiting[tenant_id]:
                del self._waiting[tenant_id]

    async def go_on(self, work: Callable[[], _T]) -> _T:
        """The next step of what a caller has begun to read. Raises what `work` raises."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, work)

    async def write(self, work: Callable[[], _T]) -> _T:
        """Raises what `work` raises. It goes on where whoever waits is cancelled."""
        return await asyncio.get_running_loop().run_in_executor(self._writers, work)

    def close(self) -> None:
        """When no more requests come. Blocks until what runs has ended."""
        self._readers.shutdown(wait=True)
        self._writers.shutdown(wait=True)
