"""The seam between the engine and a device: one arena of bytes, steps in order, copies, fences.

Two orders of things:

    device order    what `launch` and `copy_within` hand over runs in the order it was handed over;
                    whoever writes memory in it needs no fence against earlier readers in it
    beside it       loaders' copies (`copy_in`, `host_view`): these need pages whose fence passed

Siblings: `cpu.py` (host memory) and `cuda.py`; the simulator has its own (`bench/sim/device.py`).
Nothing above this line knows which of them runs.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """Work that was handed to the device."""

    def value(self) -> T_co:
        """What the work returned, for the work of a later `launch` (tensors, perhaps unfinished).

        Raises the work's own exception.
        """

    def wait(self) -> T_co:
        """The same once the work has ended: its tensors may be read by the host."""

    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once."""

    @property
    def device_s(self) -> float:
        """Seconds of the device it took; known once it has ended."""


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

    def copy_within(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copy (source offset, target offset, bytes) inside the arena, one after the other.

        In device order: sources are still read when the step launched before has ended, so they
        must be fenced by the next step (`PagePool.begin_copies`). A move overlaps itself only
        towards lower offsets, and its bytes arrive as they were.
        """

    def launch(self, step: int, work: Callable[[], T]) -> Pending[T]:
        """Run `work` as step `step` (rising), in device order. Never raises what `work` raises."""

    def launched(self, step: int) -> None:
        """An empty step `step`: it has ended when everything before it has."""

    def last_done(self) -> int:
        """The highest step known to have ended together with all before it (0: none)."""

    def close(self) -> None:
        """Wait for what was handed over and stop. Idempotent."""
