"""The CPU as a device: the arena is plain host memory.

`execution` says who runs the steps: "inline", the caller, so that a step has ended when `launch`
returns; or "thread", one thread in the order of the calls, so that the caller prepares the next
step meanwhile (torch releases the GIL inside its operators).

The first touch of a page is slow (the system finds and clears it: about a second a GiB on a virtual
machine, more than a load takes), so `commit` touches the arena ahead of need, in a thread of the
lowest priority that makes way for loads and steps. The device budget is therefore really taken in
the end, as it is on a GPU: at once where nothing runs, 4 MiB a second beside work without a pause.

`fence_lag` holds `last_done` back by so many steps and `poison` overwrites what the pool frees, so
that tests see any use of memory after its release without a GPU.
"""

import ctypes
import logging
import math
import mmap
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import torch

T = TypeVar("T")
Execution = Literal["inline", "thread"]

logger = logging.getLogger(__name__)

MADV_POPULATE_WRITE = 23  # Linux 5.14; not in Python's mmap yet
COMMIT_PIECE_BYTES = 4 << 20
# While a piece is touched nobody in the process maps or unmaps memory, and between two its thread,
# which has the lowest priority, holds the interpreter's lock: a first load of 1 GB took 1 to 5 s
# instead of 0.2 (docs/log.md). So it makes way for loads and steps, and creeps on beside them:
# with a pause of 0.1 s it took 7 % of a core from every step.
COMMIT_QUIET_S = 0.25
COMMIT_PAUSE_S = 1.0
LOWEST_PRIORITY = 19


class CpuPending(Generic[T]):
    """Implements `backend.base.Pending`. One thread runs it, another may wait for it."""

    def __init__(self, step: int, work: Callable[[], T], is_copy: bool = False) -> None:
        self.step = step
        self.is_copy = is_copy
        self.device_s = 0.0
        self._work: Callable[[], T] | None = work
        self._ended = threading.Event()
        self._value: T | None = None
        self._error: Exception | None = None

    def run(self) -> None:
        """Do the work. What it raises is kept for whoever asks for the value."""
        work, self._work = self._work, None
        assert work is not None
        started = time.perf_counter()
        try:
            self._value = work()
        except Exception as error:  # noqa: BLE001 - `wait` raises it in the caller's thread
            self._error = error
        self.device_s = time.perf_counter() - started
        self._ended.set()

    def value(self) -> T:
        """Work runs in order, so for later work this never waits."""
        return self.wait()

    def wait(self) -> T:
        """Blocks until it has ended."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # T may itself be optional

    def done(self) -> bool:
        """Whether it has ended."""
        return self._ended.is_set()


class CpuBackend:
    """Implements `backend.base.Backend` on host memory."""

    def __init__(
        self, arena_bytes: int, fence_lag: int = 0, execution: Execution = "inline"
    ) -> None:
        # Private: of shared memory, which is mmap's default, systems rarely make huge pages.
        self._memory = mmap.mmap(-1, arena_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Fewer faults at first touch and fewer TLB misses ever after.
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(self._memory, dtype=np.uint8)
        self._arena = torch.from_numpy(self._bytes)
        self._fence_lag = fence_lag
        self._execution = execution
        self._last_launched = 0
        # What was handed over and has not been seen to end; the executor takes it from `_inbox`.
        self._under_way: deque[CpuPending[Any]] = deque()
        self._inbox: SimpleQueue[CpuPending[Any] | None] = SimpleQueue()
        self._executor: threading.Thread | None = None
        self._last_used_s = -math.inf

    def commit(self) -> threading.Thread | None:
        """Start touching the whole arena in the background; None where the system cannot.

        The thread changes no byte, so it may run beside loads and steps; it makes way for them.
        """
        if sys.platform != "linux":
            return None
        thread = threading.Thread(target=self._populate, name="arena-commit", daemon=True)
        thread.start()
        return thread

    def _populate(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        start, size = self._bytes.ctypes.data, self._bytes.size
        for offset in range(0, size, COMMIT_PIECE_BYTES):
            piece = min(COMMIT_PIECE_BYTES, size - offset)
            if madvise(start + offset, piece, MADV_POPULATE_WRITE):
                # Old kernels refuse; memory is then taken at first use, as everywhere else.
                reason = os.strerror(ctypes.get_errno())
                logger.info("cannot reserve the arena's memory in advance: %s", reason)
                return
            if time.monotonic() - self._last_used_s < COMMIT_QUIET_S:
                time.sleep(COMMIT_PAUSE_S)

    @property
    def name(self) -> str:
        """Device in words."""
        return f"cpu ({torch.get_num_threads()} threads)"

    @property
    def device(self) -> torch.device:
        """Where step tensors live."""
        return torch.device("cpu")

    @property
    def arena(self) -> torch.Tensor:
        """uint8 [arena_bytes]."""
        return self._arena

    def copy_in(self, offset: int, source: memoryview) -> None:
        """One memcpy; releases the GIL, so a loader thread does not stop the steps.

        Not torch's copy_, which would start a second team of threads beside the steps'.
        """
        self._last_used_s = time.monotonic()
        target = self._bytes[offset : offset + source.nbytes]
        np.copyto(target, np.frombuffer(source, dtype=np.uint8))

    def host_view(self, offset: int, num_bytes: int) -> memoryview:
        """The arena is host memory."""
        self._last_used_s = time.monotonic()
        return self._bytes[offset : offset + num_bytes].data

    def copy_within(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Over before the next step begins."""
        copies = CpuPending(self._last_launched + 1, lambda: self._move(moves), is_copy=True)
        self._hand_over(copies)
        if self._execution == "inline":
            copies.wait()

    def launch(self, step: int, work: Callable[[], T]) -> CpuPending[T]:
        """Inline: has ended on return."""
        self._last_launched = step
        pending = CpuPending(step, work)
        self._hand_over(pending)
        self._last_used_s = time.monotonic()
        return pending

    def launched(self, step: int) -> None:
        """An empty step ends with what was handed over before it."""
        self._last_launched = step

    def last_done(self) -> int:
        """The last step with nothing under way before or with it, less the lag tests ask for."""
        while self._under_way and self._under_way[0].done():
            ended = self._under_way.popleft()
            if ended.is_copy:
                ended.wait()  # nobody else asks whether it failed
        done = self._under_way[0].step - 1 if self._under_way else self._last_launched
        return max(0, done - self._fence_lag)

    def close(self) -> None:
        """Let the executor finish, then end it."""
        if self._executor is not None:
            self._inbox.put(None)
            self._executor.join()
            self._executor = None

    def _hand_over(self, pending: CpuPending[Any]) -> None:
        if self._execution == "inline":
            pending.run()
            return
        if self._executor is None:
            self._executor = threading.Thread(target=self._execute, name="steps", daemon=True)
            self._executor.start()
        self._under_way.append(pending)
        self._inbox.put(pending)

    def _execute(self) -> None:
        while (pending := self._inbox.get()) is not None:
            pending.run()
            del pending  # it holds the step's tensors

    def _move(self, moves: Sequence[tuple[int, int, int]]) -> None:
        for source, target, size in moves:
            self._bytes[target : target + size] = self._bytes[source : source + size]

    def poison(self, offset: int, num_bytes: int) -> None:
        """Overwrite freed bytes with 0xFF (NaN in every float type). Tests only call this."""
        self._arena[offset : offset + num_bytes].fill_(0xFF)
