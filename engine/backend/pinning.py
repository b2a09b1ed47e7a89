"""Shared memory that the device may read directly: registered with its driver in the background.

Registering costs about 0.3 s a GB, so nobody waits for it: a thread does it slice by slice, and
whoever copies asks which pieces are pinned by now; the others go through a staging buffer. A copy
never crosses the border of two slices, which are registrations of their own.

    hold -> (slices are pinned, one after the other) -> let_go: all are unpinned, then it returns

Whoever lets go has no copy under way. Knows addresses; packs and tiers are
engine/packs/host_tier.py.
"""

import logging
import mmap
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from engine.backend.device import Device

SLICE_BYTES = 64 << 20

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Region:
    """Memory from `address` on, of which the first `num_pinned` slices are pinned."""

    address: int
    num_bytes: int
    num_pinned: int = 0
    gone: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class Pinner:
    """Pins mappings in a thread of its own. Thread-safe."""

    def __init__(self, device: Device, slice_bytes: int = SLICE_BYTES) -> None:
        self._device = device
        self._slice_bytes = slice_bytes
        self._regions: dict[int, _Region] = {}
        self._inbox: queue.SimpleQueue[_Region | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def hold(self, mapping: mmap.mmap) -> None:
        """Begin to pin it. Returns at once."""
        region = _Region(address_of(mapping), len(mapping))
        self._regions[region.address] = region
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="pinning", daemon=True)
            self._thread.start()
        self._inbox.put(region)

    def let_go(self, mapping: mmap.mmap) -> None:
        """Unpin what is pinned of it; afterwards it may be unmapped."""
        region = self._regions.pop(address_of(mapping), None)
        if region is None:
            return
        with region.lock:
            region.gone = True
            for number in range(region.num_pinned):
                self._device.unpin(region.address + number * self._slice_bytes)

    def pieces(self, address: int, num_bytes: int) -> Iterator[tuple[int, int, bool]]:
        """(offset, bytes, whether it is pinned) of memory from `address` on, without gaps."""
        region = self._region_of(address, num_bytes)
        if region is None:
            yield 0, num_bytes, False
            return
        done = 0
        start = address - region.address
        pinned_end = min(region.num_pinned * self._slice_bytes, region.num_bytes)
        while done < num_bytes:
            at = start + done
            if at >= pinned_end:
                yield done, num_bytes - done, False
                return
            size = min(self._slice_bytes - at % self._slice_bytes, num_bytes - done)
            yield done, size, True
            done += size

    @property
    def pinned_bytes(self) -> int:
        """Pinned by now."""
        return sum(
            min(region.num_pinned * self._slice_bytes, region.num_bytes)
            for region in list(self._regions.values())
        )

    def close(self) -> None:
        """Stop the thread. What is pinned ends with the process."""
        if self._thread is not None:
            for region in list(self._regions.values()):
                region.gone = True
            self._inbox.put(None)
            self._thread.join()
            self._thread = None

    def _region_of(self, address: int, num_bytes: int) -> _Region | None:
        for region in list(self._regions.values()):
            inside = address - region.address
            if inside >= 0 and inside + num_bytes <= region.num_bytes:
                return region
        return None

    def _work(self) -> None:
        while (region := self._inbox.get()) is not None:
            while self._pin_next(region):
                pass

    def _pin_next(self, region: _Region) -> bool:
        """One more slice; False: there is none, or none can be had."""
        with region.lock:
            start = region.num_pinned * self._slice_bytes
            if region.gone or start >= region.num_bytes:
                return False
            size = min(self._slice_bytes, region.num_bytes - start)
            try:
                self._device.pin(region.address + start, size)
            except OSError as error:
                logger.warning(
                    "host tier: cannot pin memory, copies use a staging buffer: %s", error
                )
                return False
            region.num_pinned += 1
            return True


def address_of(mapping: mmap.mmap) -> int:
    """Where it begins in this process."""
    return int(np.frombuffer(mapping, dtype=np.uint8).ctypes.data)
