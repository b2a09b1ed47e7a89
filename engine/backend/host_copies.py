"""Loaders' copies from the host into the arena: beside the steps, in streams of their own.

A copy has ended when `copy_in` returns, so a job whose parts have returned has its bytes on the
device, and steps launched then see them; that pages are ripe before is the pool's business. So
neither side waits for the other on the device, and a load under way holds up no step.

Pinned memory is read by the device where it lies. Anything else goes through a lane's two pinned
slots in turn: one is filled while the other is on its way.
"""

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from engine.backend.device import Device, Event, Stream
from engine.backend.pinning import Pinner

SLOT_BYTES = 8 << 20
NUM_SLOTS = 2
NUM_LANES = 2


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
