"""Takes a file out of a request's body and into an object, a megabyte at a time.

Comes in: a body (file_body.FileBody), and how large its file may be. Goes out: an `ObjectWriter`
that has all of the file, for the caller to finish once it has looked at the form's fields. Whatever
ends it early (a client that goes away, a file that is too large, a full disk), nothing stays.

Bodies are many times larger than other requests' and take minutes, so their number is bounded, of
one tenant a quarter of it. In threads the form is taken apart, and the bytes are hashed and
written: a form whose bytes nearly are boundaries costs a hundred times what another does.
"""

import asyncio
import contextlib
import errno
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from sqlalchemy.exc import SQLAlchemyError

from engine.objects.object_store import PIECE_BYTES, ObjectWriter
from gateway.api.bodies import invalid
from gateway.errors import QUEUE_FULL, TOO_LARGE, UNAVAILABLE, ApiError, ClientGone
from gateway.files.file_body import OVERHEAD_BYTES, FileBody, FileForm
from gateway.state.state_threads import RETRY_S, StateThreads

log = logging.getLogger(__name__)

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_T = TypeVar("_T")


class FileReceiver:
    """Of one gateway process. Used on the event loop."""

    def __init__(
        self, threads: StateThreads, max_running: int, count: Callable[[str], None]
    ) -> None:
        """`count`: what has become of a body."""
        self._count = count
        self._threads = threads
        self._max_running = max_running
        self._max_running_tenant = max(1, max_running // 4)
        self._running: Counter[str] = Counter()

    @contextlib.contextmanager
    def place(self, tenant_id: str) -> Iterator[None]:
        """One of the bodies that may come at a time. Raises ApiError where there is none left."""
        running = self._running
        if running.total() >= self._max_running or running[tenant_id] >= self._max_running_tenant:
            message = "too many files are being sent: try again in a moment"
            raise ApiError(QUEUE_FULL, message, retry_after_s=RETRY_S)
        running[tenant_id] += 1
        result = "failed"
        try:
            yield
            result = "stored"
        except ClientGone:
            result = "disconnected"
            raise
        except ApiError as error:
            result = "failed" if error.kind.status >= 500 else "refused"
            raise
        finally:
            self._count(result)
            running[tenant_id] -= 1
            if not running[tenant_id]:
                del running[tenant_id]

    async def receive(
        self,
        body: FileBody,
        form: FileForm,
        open_writer: Callable[[], ObjectWriter],
        most_bytes: Callable[[], int],
    ) -> ObjectWriter:
        """`most_bytes`: what the file may have, by what the form has said so far. Raises ApiError,
        ClientGone."""
        writer: ObjectWriter | None = None
        waiting: list[bytes] = []
        num_waiting = num_bytes = 0

        def take(data: bytes) -> None:
            nonlocal writer, num_bytes
            piece = form.feed(data)
            num_bytes += len(piece)
            if num_bytes > most_bytes():
                raise too_large(most_bytes())
            if piece:
                writer = writer or open_writer()
                writer.write(piece)

        try:
            while data := await body.receive():
                waiting.append(data)
                num_waiting += len(data)
                if num_waiting >= PIECE_BYTES:
                    whole, waiting, num_waiting = b"".join(waiting), [], 0
                    await self.write(partial(take, whole))
            await self.write(partial(take, b"".join(waiting)))
            form.check_end()
            if num_bytes > most_bytes():  # its purpose stood behind it
                raise too_large(most_bytes())
            if not num_bytes:
                raise invalid(form.file_field, "the file is empty: send one with bytes in it")
        except BaseException:
            if writer is not None:
                await self._threads.write(writer.abort)
            raise
        assert writer is not None
        return writer

    async def write(self, work: Callable[[], _T]) -> _T:
        """In a thread. Raises ApiError where database or objects fail; what else `work` raises."""
        try:
            return await self._threads.write(work)
        except (SQLAlchemyError, OSError) as error:
            log.error("a file could not be stored: %s", error)
            message = "the file could not be stored: try again in a moment"
            if isinstance(error, OSError) and error.errno in _NO_SPACE:
                message = "this server has no space left for files: tell its operator"
            raise ApiError(UNAVAILABLE, message, retry_after_s=RETRY_S) from error

    async def undo(self, work: Callable[[], object]) -> None:
        """In a thread, after a failure. What fails now is left to the sweeper."""
        try:
            await asyncio.shield(self._threads.write(work))
        except (SQLAlchemyError, OSError) as error:
            log.warning("a file that was not stored is left to the sweeper: %s", error)


def expected_bytes(body: FileBody, max_bytes: int) -> int:
    """What a body's file may come to have, before it is read. Raises ApiError where that is too
    much."""
    if body.length_bytes is None:
        return max_bytes
    if body.length_bytes > max_bytes + OVERHEAD_BYTES:
        raise too_large(max_bytes)
    return min(body.length_bytes, max_bytes)


def too_large(max_bytes: int) -> ApiError:
    """The answer to a file that is."""
    return ApiError(TOO_LARGE, f"the file is larger than {max_bytes} bytes: send a smaller one")
