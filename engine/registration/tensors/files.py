"""The tensors of a checkpoint's safetensors files, by their names there, as they are.

Read in pieces of some rows, and never mapped: what is touched of a mapping stays with the process
until the file is closed, and looks like memory that registering a large model needs. Knows headers
and bytes, but neither what the names mean (`checkpoint.py`) nor what quantized values stand for
(`plain.py`).
"""

import json
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import RegistrationRefused

PIECE_BYTES = 64 << 20
MAX_TENSORS = 1 << 19
"""Twice what the largest published checkpoints have, their scales included."""
MAX_HEADER_BYTES = 100_000_000
"""Of a file; the library has the same bound."""

# As safetensors headers spell them. Anything else is a quantized checkpoint.
FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
PLAIN_DTYPES = frozenset({*FLOAT_BYTES, "I64", "I32", "I16", "I8", "U8", "BOOL"})
_TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}


def piece_rows(row_bytes: int, max_bytes: int = PIECE_BYTES) -> int:
    """Rows of a piece: where there are more than 16 a multiple of them, int4's blocks of rows."""
    rows = max(1, max_bytes // max(1, row_bytes))
    return rows - rows % 16 if rows > 16 else rows


class SourceTensors:
    """A checkpoint's tensors by their names in the files, read one at a time. A context manager."""

    def __init__(self, files: list[Path]) -> None:
        self._stack = ExitStack()
        self._places: dict[str, tuple[int, int]] = {}
        self.dtypes: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.refused: dict[str, RegistrationRefused] = {}
        try:
            for path in files:
                self._open(path)
        except BaseException:
            self._stack.close()
            raise

    def _open(self, path: Path) -> None:
        try:
            file = self._stack.enter_context(path.open("rb", buffering=0))
            length = int.from_bytes(file.read(8), "little")
            text = os.pread(file.fileno(), min(length, MAX_HEADER_BYTES), 8)
            # A shape and a place each: counted before they take a hundred times their bytes.
            if len(self._places) + text.count(b"[") // 2 > MAX_TENSORS:
                raise _too_many()
            with safe_open(str(path), framework="pt"):
                pass  # the library checks the header: sizes, overlaps, the end of the file
            header = json.loads(text, object_pairs_hook=_named_once)
        except (SafetensorError, OSError, ValueError) as error:
            raise RegistrationRefused(
                "bad_weights", f"{path} is damaged ({error}); download it again"
            ) from error
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if name in self._places:
                raise RegistrationRefused(
                    "bad_weights",
                    f"tensor {name} is in more than one shard; download the model again",
                )
            if not isinstance(entry, dict):
                # The library takes lists of the three values, too, which nobody writes.
                raise RegistrationRefused(
                    "bad_weights", f"{path} is damaged ({name} is no object); download it again"
                )
            if entry["dtype"] not in _TORCH_DTYPES:
                self.refused[name] = RegistrationRefused(
                    "quantized_weights",
                    f"tensor {name} has the unsupported type {entry['dtype']}; register the "
                    "unquantized checkpoint",
                )
            if math.prod(size or 1 for size in entry["shape"]) >> 63:
                raise RegistrationRefused(
                    "bad_weights",
                    f"tensor {name} has the shape {entry['shape']}, which no tensor can have; "
                    "download the model again",
                )
            self._places[name] = file.fileno(), 8 + length + entry["data_offsets"][0]
            self.dtypes[name] = entry["dtype"]
            self.shapes[name] = tuple(entry["shape"])

    def pieces(self, name: str, max_bytes: int = PIECE_BYTES) -> Iterator[torch.Tensor]:
        """The tensor in the file's dtype, some of its rows (its first axis) at a time.

        Raises RegistrationRefused where the file is damaged.
        """
        shape = self.shapes[name]
        if not shape:
            yield self.read(name)
            return
        item_bytes = _TORCH_DTYPES[self.dtypes[name]].itemsize
        step = piece_rows(torch.Size(shape[1:]).numel() * item_bytes, max_bytes)
        for start in range(0, shape[0], step):
            yield self.rows(name, start, min(start + step, shape[0]))

    def read(self, name: str) -> torch.Tensor:
        """The tensor, in the file's dtype. Raises RegistrationRefused where the file is damaged."""
        shape = self.shapes[name]
        return self.rows(name, 0, shape[0] if shape else 1).view(shape)

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """[stop - start, ...] of a tensor in the file's dtype; of a number: a list of it."""
        inner, dtype = self.shapes[name][1:], _TORCH_DTYPES[self.dtypes[name]]
        row_bytes = torch.Size(inner).numel() * dtype.itemsize
        piece = self.flat_bytes(name, start * row_bytes, stop * row_bytes)
        return piece.view(dtype).view(stop - start, *inner)

    def flat_bytes(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Some of a tensor's bytes, uint8 [stop - start], whatever its axes."""
        descriptor, place = self._places[name]
        piece = torch.empty(stop - start, dtype=torch.uint8)
        target, done = piece.numpy().data, 0
        while done < len(target):
            got = os.preadv(descriptor, [target[done:]], place + start + done)
            if not got:
                raise RegistrationRefused(
                    "bad_weights", f"tensor {name} is truncated; download the model again"
                )
            done += got
        return piece

    def float_dtype(self) -> str:
        """The floating type most bytes are in, as safetensors spells it; "F32" if there is none."""
        size: dict[str, int] = {}
        for name, dtype in self.dtypes.items():
            if dtype in FLOAT_BYTES:
                count = torch.Size(self.shapes[name]).numel()
                size[dtype] = size.get(dtype, 0) + count * FLOAT_BYTES[dtype]
        return max(size, key=lambda dtype: size[dtype]) if size else "F32"

    def check(self, name: str) -> None:
        """Raises RegistrationRefused for a tensor that cannot be read."""
        if name in self.refused:
            raise self.refused[name]

    def kept(self, name: str) -> None:
        """No weight has codes."""

    def adds_nothing(self, name: str) -> bool:
        """Whether the model is the same without this tensor."""
        return False

    def __enter__(self) -> "SourceTensors":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()


def _named_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object of a header. Raises ValueError where readers would have to choose."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("it has a name twice")
    return found


def _too_many() -> RegistrationRefused:
    return RegistrationRefused(
        "bad_weights", f"the checkpoint has more than {MAX_TENSORS} tensors; use another one"
    )
