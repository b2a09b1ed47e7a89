"""What a backend needs of a device with streams: one Protocol, under which a driver or a test lies.

    stream   work and copies in the order in which they were handed over
    event    a mark in a stream: the host asks for it or waits for it, another stream waits for it
    graph    work that was recorded once and is replayed at the same addresses

`Stream.run` takes a closure whose effects on tensors of the device happen in stream order. A driver
runs the closure at once and the device carries out later what it has launched; a fake may keep the
closure itself for later. So a closure reads nothing of the host that changes after it was handed
over, and whoever wants its result waits for an event behind it.

Siblings: `cuda_device.py`, and `tests/engine/fake_device.py`, which delays, reorders what streams
leave open and poisons.
"""

from collections.abc import Callable
from typing import Protocol

import torch


class Event(Protocol):
    """A mark in a stream."""

    def done(self) -> bool:
        """Whether everything before it in its stream has ended. Raises DeviceLost."""

    def wait(self) -> None:
        """Until then; the calling thread sleeps and holds no lock. Raises DeviceLost."""

    def seconds_since(self, earlier: "Event") -> float:
        """Time of the device between two timed marks that have both been reached."""


class Stream(Protocol):
    """Work in order. Threads may share one; what they hand over is then in some order."""

    def run(self, work: Callable[[], object]) -> None:
        """Hand over what `work` does to tensors of the device."""

    def record(self, timed: bool = False) -> Event:
        """A mark behind everything handed over so far."""

    def wait_for(self, event: Event) -> None:
        """What is handed over from now on runs behind `event`, of whatever stream."""


class Graph(Protocol):
    """Recorded work."""

    @property
    def num_bytes(self) -> int:
        """Memory of the device that it takes to keep."""

    def replay(self) -> None:
        """Again, at the same addresses. Called inside `Stream.run`."""


class Device(Protocol):
    """One device. Methods may be called from any thread; `capture` only inside `Stream.run`."""

    @property
    def name(self) -> str:
        """In words, for logs and operators."""

    @property
    def torch_device(self) -> torch.device:
        """Where its tensors live."""

    @property
    def num_processors(self) -> int:
        """Multiprocessors: what a launch should fill."""

    def memory(self) -> tuple[int, int]:
        """Bytes free and in all."""

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes] of the device, not initialised. Raises DeviceUnusable."""

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes] of the host that the device reads and writes without a copy between.

        It may be dropped as soon as the copies that read or write it were handed over.
        """

    def stream(self, urgent: bool = False) -> Stream:
        """A new one. `urgent`: goes first where the device has to choose."""

    def pin(self, address: int, num_bytes: int) -> None:
        """Let the device read memory of this process directly. Raises OSError."""

    def unpin(self, address: int) -> None:
        """No copy may read it any more, and none may be under way."""

    def capture(self, work: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        """Record what `work` launches without running it; its result is written by replays.

        Raises CaptureFailed; then nothing was recorded.
        """
