"""Many small arrays as one run of bytes, so that one copy brings them to a device."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

ALIGN = 16
"""Bytes; what kernels are compiled for where they load several elements at a time."""

_TYPES = {
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
    "float64": torch.float64,
}


@dataclass(frozen=True, slots=True)
class Field:
    """Where an array lies in the run."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def of(self, run: torch.Tensor) -> torch.Tensor:
        """The array as a view of uint8 `run`."""
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return run[self.offset : self.offset + size].view(self.dtype).view(self.shape)


class Packer:
    """Collects arrays, then writes them."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._parts: list[tuple[int, Any]] = []

    def add(self, array: Any) -> Field:
        """A numpy array; it must not change before `write`."""
        place = Field(self.num_bytes, array.shape, _TYPES[array.dtype.name])
        self._parts.append((self.num_bytes, np.ascontiguousarray(array)))
        self.num_bytes += -(-array.nbytes // ALIGN) * ALIGN
        return place

    def write(self, run: Any) -> None:
        """Into a numpy array of `num_bytes` bytes."""
        for offset, array in self._parts:
            run[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
