"""The CPU as a device: the arena is plain host memory and a step has ended when it returns.

`fence_lag` holds `last_done` back by so many steps and `poison` overwrites what the pool frees, so
that tests see any use of memory after its release without a GPU.
"""

import numpy as np
import torch


class CpuBackend:
    """Implements `backend.base.Backend` on host memory."""

    def __init__(self, arena_bytes: int, fence_lag: int = 0) -> None:
        # 4 KiB slack: torch aligns to 64 bytes only, pages want 4096.
        raw = torch.empty(arena_bytes + 4096, dtype=torch.uint8)
        shift = -raw.data_ptr() % 4096
        self._arena = raw[shift : shift + arena_bytes]
        self._bytes = self._arena.numpy()
        self._fence_lag = fence_lag
        self._last_launched = 0

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
