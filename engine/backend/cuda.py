"""A GPU as a device of the engine: one buffer, one stream of steps, streams of copies beside it.

    steps, copies inside the arena   one stream, in the order of the calls
    loaders' copies                  streams of their own (`HostCopies`), ended when they return
    fences                           an event behind each step: `last_done` asks them in order

`launch` runs the work at once: it launches kernels and returns long before they have ended, so the
host prepares the next step meanwhile. What the work raises on the way (a shape, a lack of memory)
is kept for whoever waits; a device that has failed raises DeviceLost, which ends the worker.

What is here calls no driver: `device` does (backend/cuda_device.py), or a fake that keeps the work
for later, in any order that streams leave open.

`HostCopies` are the loaders' copies from the host into the arena, beside the steps, in streams of
their own. A copy has ended when `copy_in` returns, so a job whose parts have returned has its bytes
on the device, and steps launched then see them; that pages are ripe before is the pool's business.
So neither side waits for the other on the device, and a load under way holds up no step. Pinned
memory is read by the device where it lies. Anything else goes through a lane's two pinned slots in
turn: one is filled while the other is on its way.
"""

import queue
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import torch

from engine.backend.device import Device, Event, Stream
from engine.backend.pinning import Pinner
from engine.errors import IntegrityError

SLOT_BYTES = 8 << 20
NUM_SLOTS = 2
NUM_LANES = 2
T = TypeVar("T")
Move: TypeAlias = tuple[int, int, int]
Mover: TypeAlias = Callable[[torch.Tensor, Sequence[Move]], None]
"""Carries moves inside the arena out, in their order: `kernels.page_copy.page_copy`."""


@dataclass(slots=True, eq=False)
class _Slot:
    """A pinned buffer; `busy` marks the end of the copy that reads it."""

    buffer: torch.Tensor
    busy: Event | None = None


@dataclass(slots=True, eq=False)
class _Lane:
    """One copy at a time."""

    stream: Stream
    slots: list[_Slot]


class HostCopies:
    """Copies into one arena. Thread-safe; more callers than lanes wait for one another."""

    def __init__(
        self,
        device: Device,
        arena: torch.Tensor,
        pinner: Pinner,
        slot_bytes: int = SLOT_BYTES,
        num_lanes: int = NUM_LANES,
    ) -> None:
        self._device = device
        self._arena = arena
        self._pinner = pinner
        self._slot_bytes = slot_bytes
        self._lanes: queue.SimpleQueue[_Lane] = queue.SimpleQueue()
        for _ in range(num_lanes):
            self._lanes.put(_Lane(device.stream(), []))

    def copy_in(self, offset: int, source: memoryview) -> None:
        """Copy `source` to arena[offset:]. Returns when it has arrived. Raises DeviceLost."""
        data = np.frombuffer(source, dtype=np.uint8)
        with self._lane() as lane:
            for start, size, pinned in self._pinner.pieces(int(data.ctypes.data), len(data)):
                piece = data[start : start + size]
                if pinned and data.flags.writeable:
                    self._send(lane, offset + start, torch.from_numpy(piece))
                else:
                    self._stage(lane, offset + start, piece)
            # Both the source and the slots are free again once everything has arrived.
            lane.stream.record().wait()

    def _stage(
        self, lane: _Lane, offset: int, data: "np.ndarray[tuple[int], np.dtype[np.uint8]]"
    ) -> None:
        if not lane.slots:
            lane.slots = [
                _Slot(self._device.host_buffer(self._slot_bytes)) for _ in range(NUM_SLOTS)
            ]
        for number, start in enumerate(range(0, len(data), self._slot_bytes)):
            slot = lane.slots[number % NUM_SLOTS]
            if slot.busy is not None:
                slot.busy.wait()
            piece = data[start : start + self._slot_bytes]
            # numpy's copy releases the GIL and takes one thread.
            np.copyto(slot.buffer[: len(piece)].numpy(), piece)
            self._send(lane, offset + start, slot.buffer[: len(piece)])
            slot.busy = lane.stream.record()

    def _send(self, lane: _Lane, offset: int, data: torch.Tensor) -> None:
        target = self._arena[offset : offset + len(data)]
        lane.stream.run(lambda: target.copy_(data, non_blocking=True))

    @contextmanager
    def _lane(self) -> Iterator[_Lane]:
        lane = self._lanes.get()
        try:
            yield lane
        finally:
            self._lanes.put(lane)


class CudaPending(Generic[T]):
    """Implements `backend.base.Pending`. `started` and `ended` are marks around it."""

    def __init__(self, step: int, work: Callable[[], T], started: Event | None = None) -> None:
        self.step = step
        self.started = started
        self.ended: Event | None = None
        # Kept until the device is through: what the work refers to must not be reused before.
        self.work: Callable[[], T] | None = work
        self._handed_over = False
        self._value: T | None = None
        self._error: Exception | None = None
        self._device_s: float | None = None

    def run(self) -> None:
        """Hand the work's kernels over."""
        assert self.work is not None
        try:
            self._value = self.work()
        except Exception as error:  # noqa: BLE001 - `wait` raises it
            self._error = error
        self._handed_over = True

    def value(self) -> T:
        """For later work of the same stream: perhaps unfinished."""
        if not self._handed_over:
            raise IntegrityError(f"step {self.step} is read before it was handed over")
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # T may itself be optional

    def wait(self) -> T:
        """Sleeps until the device is through."""
        assert self.ended is not None
        self.ended.wait()
        self.work = None
        return self.value()

    def done(self) -> bool:
        """Asks the device."""
        assert self.ended is not None
        return self.ended.done()

    @property
    def device_s(self) -> float:
        """Between the marks; known once it has ended."""
        if self._device_s is None:
            assert self.started is not None
            assert self.ended is not None
            self._device_s = self.ended.seconds_since(self.started)
        return self._device_s


class CudaBackend:
    """Implements `backend.base.Backend`."""

    def __init__(
        self, device: Device, arena_bytes: int, move: Mover, pinner: Pinner | None = None
    ) -> None:
        """Raises DeviceUnusable where the device has no room for the arena."""
        self._device = device
        self._arena = device.buffer(arena_bytes)
        self._move = move
        self._steps = device.stream(urgent=True)
        self.pinner = pinner or Pinner(device)
        self._copies = HostCopies(device, self._arena, self.pinner)
        self._under_way: deque[CudaPending[Any]] = deque()
        self._last_launched = 0
        self._last_done = 0

    @property
    def name(self) -> str:
        """Device in words."""
        return self._device.name

    @property
    def device(self) -> torch.device:
        """Where step tensors live."""
        return self._device.torch_device

    @property
    def arena(self) -> torch.Tensor:
        """uint8 [arena_bytes]."""
        return self._arena

    def copy_in(self, offset: int, source: memoryview) -> None:
        """In a loader thread; the bytes have arrived when this returns."""
        self._copies.copy_in(offset, source)

    def host_view(self, offset: int, num_bytes: int) -> None:
        """The host cannot reach the arena."""

    def copy_within(self, moves: Sequence[Move]) -> None:
        """Behind the last step, before the next one."""
        moves = tuple(moves)
        self._hand_over(CudaPending(self._last_launched + 1, lambda: self._carry_out(moves)))

    def launch(self, step: int, work: Callable[[], T]) -> CudaPending[T]:
        """Into the stream of steps."""
        self._last_launched = step
        pending = CudaPending(step, work, self._steps.record(timed=True))
        self._hand_over(pending)
        return pending

    def launched(self, step: int) -> None:
        """An empty step ends with what was handed over before it."""
        self._last_launched = step

    def last_done(self) -> int:
        """The last step behind whose event, and all events before it, the device is."""
        while self._under_way and self._under_way[0].done():
            ended = self._under_way.popleft()
            ended.work = None
            if ended.started is None:
                ended.value()  # copies: nobody else asks whether they failed
        done = self._under_way[0].step - 1 if self._under_way else self._last_launched
        self._last_done = max(self._last_done, done)
        return self._last_done

    def mark(self) -> Event:
        """A mark behind all steps and copies handed over so far."""
        return self._steps.record()

    def close(self) -> None:
        """Wait for everything that was handed over."""
        if self._under_way:
            self._under_way[-1].ended.wait()  # type: ignore[union-attr]  # handed over
            self._under_way.clear()
        self.pinner.close()

    def _carry_out(self, moves: Sequence[Move]) -> None:
        self._move(self._arena, moves)

    def _hand_over(self, pending: CudaPending[Any]) -> None:
        self._steps.run(pending.run)
        pending.ended = self._steps.record(timed=pending.started is not None)
        self._under_way.append(pending)
