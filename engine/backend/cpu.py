"""The CPU as a device: the arena is plain host memory and a step has ended when it returns.

The first touch of a page is slow (the system finds and clears it: about a second a GiB on a virtual
machine, more than a load takes), so `commit` touches the arena ahead of need, in a thread of the
lowest priority. The device budget is therefore really taken, as it is on a GPU.

`fence_lag` holds `last_done` back by so many steps and `poison` overwrites what the pool frees, so
that tests see any use of memory after its release without a GPU.
"""

import ctypes
import logging
import mmap
import os
import sys
import threading

import numpy as np
import torch

logger = logging.getLogger(__name__)

MADV_POPULATE_WRITE = 23  # Linux 5.14; not in Python's mmap yet
COMMIT_PIECE_BYTES = 16 << 20
LOWEST_PRIORITY = 19


class CpuBackend:
    """Implements `backend.base.Backend` on host memory."""

    def __init__(self, arena_bytes: int, fence_lag: int = 0) -> None:
        self._memory = mmap.mmap(-1, arena_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Fewer faults at first touch and fewer TLB misses ever after.
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(self._memory, dtype=np.uint8)
        self._arena = torch.from_numpy(self._bytes)
        self._fence_lag = fence_lag
        self._last_launched = 0

    def commit(self) -> threading.Thread | None:
        """Start touching the whole arena in the background; None where the system cannot.

        The thread changes no byte, so it may run beside loads and steps.
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
                logger.info("arena is not committed ahead of use: %s", reason)
                return

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
        target = self._bytes[offset : offset + source.nbytes]
        np.copyto(target, np.frombuffer(source, dtype=np.uint8))

    def host_view(self, offset: int, num_bytes: int) -> memoryview:
        """The arena is host memory."""
        return self._bytes[offset : offset + num_bytes].data

    def launched(self, step: int) -> None:
        """The CPU runs a step synchronously."""
        self._last_launched = step

    def last_done(self) -> int:
        """The last launched step, less the lag that tests ask for."""
        return max(0, self._last_launched - self._fence_lag)

    def poison(self, offset: int, num_bytes: int) -> None:
        """Overwrite freed bytes with 0xFF (NaN in every float type). Tests only call this."""
        self._arena[offset : offset + num_bytes].fill_(0xFF)
