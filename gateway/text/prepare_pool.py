"""The prepare processes of one gateway process: started when needed, watched, replaced.

    ask -> [wait for a process that may take it] -> its job, alone -> the reply
                                                                   -> it ended: PrepareSpent

A process does one job at a time, so the job that ended it is known. Of several processes one is
kept for short jobs: neither a prompt of megabytes nor a tokenizer that is being read, nor a model
that has done wrong before (`is_long` says so of all of them), makes everybody wait. A job goes to a
process that has read its model's files; only where that is busy for COLD_WAIT_S, to another.

Tenants take turns (prepare_turns.py), and where too many jobs wait, the tenant that has most of
them loses its latest.

A process ends by its own limits of CPU time and memory. WALL_S is for what these do not see.
"""

import asyncio
import logging
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType

import msgspec

from gateway.errors import QUEUE_FULL, ApiError
from gateway.settings.config import prepare_environment
from gateway.settings.settings import Settings
from gateway.text.prepare_messages import (
    LENGTH_BYTES,
    MAX_FRAME_BYTES,
    Failed,
    Job,
    PrepareLimits,
    Reply,
    decode_reply,
    encode_job,
)
from gateway.text.prepare_turns import PrepareTurns

log = logging.getLogger(__name__)

LONG_BYTES = 1 << 15
COLD_WAIT_S = 0.02
WALL_S = 60.0
_RETRY_S = 1.0
_REAP_S = 2.0
_BUFFER_BYTES = 1 << 16
_ROOT = str(Path(__file__).resolve().parents[2])


class PrepareSpent(Exception):
    """A job took more than it may, or ended its process; the text says how."""


class _Process:
    """One of them, and whether it is at work."""

    def __init__(
        self, limits: PrepareLimits, max_codecs: int, environment: Mapping[str, str]
    ) -> None:
        self._environment = environment
        self._limits = limits
        self._max_codecs = max_codecs
        self._child: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._buffer = bytearray(_BUFFER_BYTES)
        self._is_closed = False
        self.is_busy = False
        self.folders: set[str] = set()
        """The packs that it was asked about."""

    @property
    def pid(self) -> int | None:
        """None before it is started."""
        return None if self._child is None else self._child.pid

    async def ask(self, folder: str, body: bytes) -> bytes:
        """One job. Raises PrepareSpent."""
        if self._child is not None and self._child.poll() is not None:
            self.end()  # nobody's job: the system may end an idle process
        if self._child is None:
            await asyncio.to_thread(self._start)
        assert self._child is not None
        assert self._socket is not None
        self.folders.add(folder)
        loop, limits = asyncio.get_running_loop(), self._limits
        longest_s = WALL_S + 2 * (limits.cpu_s_per_byte * len(body) + limits.cpu_s + limits.load_s)
        watch = loop.call_later(longest_s, self._child.kill)
        try:
            frame = len(body).to_bytes(LENGTH_BYTES, "big") + body
            await loop.sock_sendall(self._socket, frame)
            return await self._receive(self._socket)
        except (OSError, EOFError) as error:
            raise PrepareSpent(await asyncio.to_thread(self.end)) from error
        except asyncio.CancelledError:
            # Its reply would be taken for that of the next job, which may be another tenant's.
            if self._child is not None:
                self._child.kill()
            self.end()
            raise
        finally:
            watch.cancel()

    async def _receive(self, connection: socket.socket) -> bytes:
        """Raises EOFError, OSError."""
        loop, buffer, done = asyncio.get_running_loop(), self._buffer, 0
        while done < LENGTH_BYTES:
            done += await _received(loop, connection, memoryview(buffer)[done:])
        size = int.from_bytes(buffer[:LENGTH_BYTES], "big")
        if size > MAX_FRAME_BYTES:
            raise EOFError
        if done >= LENGTH_BYTES + size:
            return bytes(memoryview(buffer)[LENGTH_BYTES : LENGTH_BYTES + size])
        body = bytearray(size)
        body[: done - LENGTH_BYTES] = memoryview(buffer)[LENGTH_BYTES:done]
        done -= LENGTH_BYTES
        while done < size:
            done += await _received(loop, connection, memoryview(body)[done:])
        return bytes(body)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            self._child = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    # The same code as here, wherever it lies.
                    f"import runpy, sys; sys.path.insert(0, {_ROOT!r});"
                    "runpy.run_module('gateway.text.prepare_process', run_name='__main__', "
                    "alter_sys=True)",
                    str(theirs.fileno()),
                    msgspec.json.encode(self._limits).decode(),
                    str(self._max_codecs),
                ],
                env={**self._environment, "TOKENIZERS_PARALLELISM": "false"},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's Ctrl-C is for the server
            )
        self._socket = ours
        if self._is_closed:  # meanwhile: this is a thread
            self.end()

    def close(self) -> None:
        """End it now, and for good."""
        self._is_closed = True
        if self._child is not None:
            self._child.kill()
        self.end()

    def end(self) -> str:
        """End it, if it has not ended; how it did. The next job starts another."""
        child, self._child = self._child, None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self.folders.clear()
        if child is None:
            return "it was not started"
        try:
            child.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        if child.returncode == -signal.SIGPROF:
            return "more CPU time than a request may take"
        if child.returncode == -signal.SIGABRT:
            return "more memory than a request may take, or a fault of the tokenizer"
        return f"the process ended with status {child.returncode}"


async def _received(
    loop: asyncio.AbstractEventLoop, connection: socket.socket, into: memoryview
) -> int:
    count = await loop.sock_recv_into(connection, into)
    if not count:
        raise EOFError
    return count


@dataclass(slots=True, eq=False)
class _Waiting:
    tenant_id: str
    folder: str
    is_long: bool
    since_s: float
    process: "asyncio.Future[_Process]"


class PreparePool:
    """Used from one event loop at a time. At most `max_pending` jobs wait or are worked on."""

    def __init__(
        self,
        num_processes: int,
        max_pending: int,
        limits: PrepareLimits | None = None,
        max_codecs: int = 32,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """The first of several processes is kept for short jobs."""
        about = limits or PrepareLimits(), max_codecs, environment
        self._processes = [_Process(*about) for _ in range(num_processes)]
        self._max_pending = max_pending
        self._waiting: list[_Waiting] = []
        self._turns = PrepareTurns()
        self._jobs: set[asyncio.Task[Reply]] = set()

    @classmethod
    def of(cls, settings: Settings, num_processes: int = 0) -> "PreparePool":
        """As a server has it. `num_processes`: instead of the settings'."""
        return cls(
            num_processes or settings.prepare_processes,
            settings.max_prepare_pending,
            PrepareLimits(cpu_s=settings.prepare_cpu_s, memory_bytes=settings.prepare_memory_bytes),
            settings.max_tokenizers,
            prepare_environment(),
        )

    @property
    def pids(self) -> list[int]:
        """Of the processes that run."""
        return [process.pid for process in self._processes if process.pid is not None]

    @property
    def is_idle(self) -> bool:
        """Nothing waits and nothing is worked on."""
        return not self._jobs

    async def ask(self, job: Job, is_long: bool = False, tenant_id: str = "") -> Reply:
        """Raises ApiError QUEUE_FULL, PrepareSpent, and ValueError for what cannot be sent.

        Whoever is cancelled does not wait for the reply; the job is done all the same.
        """
        self._make_room(tenant_id)
        try:
            body = encode_job(job)
        except RecursionError as error:
            raise ValueError("the request is nested too deeply") from error
        if len(body) > MAX_FRAME_BYTES:
            raise ValueError("the request is too large to be tokenized")
        loop = asyncio.get_running_loop()
        is_long = is_long or len(body) > LONG_BYTES
        waiting = _Waiting(tenant_id, job.folder, is_long, loop.time(), loop.create_future())
        self._waiting.append(waiting)
        self._assign()
        if not waiting.process.done():
            loop.call_later(COLD_WAIT_S, self._assign)
        task = asyncio.create_task(self._run(waiting, body))
        self._jobs.add(task)
        task.add_done_callback(self._done)
        return await asyncio.shield(task)

    def close(self) -> None:
        """End the processes and the jobs, whatever they are at."""
        self._waiting.clear()
        for task in self._jobs:
            task.cancel()
        for process in self._processes:
            process.close()

    def _done(self, task: "asyncio.Task[Reply]") -> None:
        self._jobs.discard(task)
        if not self._jobs:
            self._turns.clear()
        if not task.cancelled():
            task.exception()  # whoever asked may be gone

    def _make_room(self, tenant_id: str) -> None:
        """For one more job. Raises ApiError QUEUE_FULL: nobody has more of them that wait."""
        num_busy = sum(process.is_busy for process in self._processes)
        if num_busy + len(self._waiting) < self._max_pending:
            return
        waiting = Counter(waiting.tenant_id for waiting in self._waiting)
        most, count = max(waiting.items(), key=itemgetter(1), default=("", 0))
        full = ApiError(
            QUEUE_FULL,
            "the server is overloaded (too many requests are being tokenized): try again later",
            retry_after_s=_RETRY_S,
        )
        if count <= waiting[tenant_id] + 1:
            raise full
        latest = next(one for one in reversed(self._waiting) if one.tenant_id == most)
        self._waiting.remove(latest)
        latest.process.set_exception(full)

    async def _run(self, waiting: _Waiting, body: bytes) -> Reply:
        process = await waiting.process
        try:
            reply: Reply = decode_reply(await process.ask(waiting.folder, body))
            if isinstance(reply, Failed) and reply.kind == "limit":
                await asyncio.to_thread(process.end)  # it goes by itself
                raise PrepareSpent(reply.message)
            return reply
        finally:
            process.is_busy = False
            self._turns.end(waiting.tenant_id, waiting.process.get_loop().time())
            self._assign()

    def _assign(self) -> None:
        """Give free processes to those that wait, by turns and the oldest first."""
        if not self._waiting or all(process.is_busy for process in self._processes):
            return
        now_s, turns = self._waiting[0].process.get_loop().time(), self._turns
        self._waiting = [waiting for waiting in self._waiting if not waiting.process.done()]
        if len(self._waiting) > 1:
            charged_s = {
                one.tenant_id: turns.charged_s(one.tenant_id, now_s) for one in self._waiting
            }
            self._waiting.sort(key=lambda one: (charged_s[one.tenant_id], one.since_s))
        for waiting in list(self._waiting):
            process = self._choose(waiting.folder, waiting.is_long, now_s - waiting.since_s)
            if process is not None:
                process.is_busy = True
                turns.begin(waiting.tenant_id, now_s)
                self._waiting.remove(waiting)
                waiting.process.set_result(process)

    def _choose(self, folder: str, is_long: bool, waited_s: float) -> _Process | None:
        first = 1 if is_long and len(self._processes) > 1 else 0
        allowed = self._processes[first:]
        warm = [process for process in allowed if folder in process.folders]
        for process in warm:
            if not process.is_busy:
                return process
        if warm and waited_s < COLD_WAIT_S:
            return None
        free = [process for process in allowed if not process.is_busy]
        # One that runs already; of these the one with the fewest models.
        return min(free, key=lambda p: (p.pid is None, len(p.folders)), default=None)
