"""The seam between the engine and a device: one arena of bytes, copies into it, and fences.

Siblings: `cpu.py` (host memory), `cuda.py` and `sim.py` later. Nothing above this line knows
which of them runs.
"""

from typing import Protocol

import torch


class Backend(Protocol):
    """One device. All offsets and sizes are bytes of the arena."""

    @property
    def name(self) -> str:
        """Device in words, for logs and the Welcome message."""

    @property
    def device(self) -> torch.device:
        """Where step tensors live."""

    @property
    def arena(self) -> torch.Tensor:
        """The one buffer: uint8 [arena_bytes], aligned to 4096 bytes."""

    def copy_in(self, offset: int, source: memoryview) -> None:
        """Copy host bytes to arena[offset:]. May run in a loader thread beside steps."""

    def host_view(self, offset: int, num_bytes: int) -> memoryview | None:
        """Those arena bytes as writable host memory, or None where the host cannot reach them.

        Lets a loader read a file straight into the arena. May be called in a loader thread.
        """

    def launched(self, step: int) -> None:
        """Step `step` has been launched."""

    def last_done(self) -> int:
        """The highest step known to have ended together with all before it (0: none)."""
