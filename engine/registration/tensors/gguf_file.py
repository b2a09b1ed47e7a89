"""A GGUF file: its metadata, and its tensors in rows of blocks or values.

    "GGUF", version (2 or 3), counts of tensors and of metadata; key, type, value ...; name,
    dimensions (the fastest first), block type, offset ...; padding; the tensors

Everything in the header is bounded before it is believed: counts, lengths, sizes, and where tensors
lie. transformers' own reader believes all that a file says, so it is used only for a header that
has been read here (`gguf_folder.py`). What blocks stand for comes from transformers.
"""

import io
import os
import struct
from pathlib import Path
from typing import Any

import torch
from transformers.integrations.gguf.dequant import GGML_BLOCK, GGML_NAME, dequantize

from engine.errors import RegistrationRefused

GGUF_SUFFIX = ".gguf"
MAX_HEADER_BYTES = 128 << 20
"""A vocabulary of a million tokens and their merges have a third of it."""
_HEADER_PIECE = 1 << 20
MAX_KEYS = 1 << 14
MAX_TENSORS = 1 << 16
MAX_ITEMS = 1 << 22
"""Of all arrays together: transformers' reader keeps each item as an object."""
MAX_KEPT_ITEMS = 1 << 12
MAX_VALUES = 1 << 40
_VALUES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
_VALUE_NAMES = {0: "F32", 1: "F16", 30: "BF16"}
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"}
_NUMBERS |= {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_Q5_0, _Q5_1 = 6, 7
# Values and bytes of a block; two types are not among transformers', but in files for widths that
# 256 does not divide.
_BLOCKS = {**GGML_BLOCK, _Q5_0: (32, 22), _Q5_1: (32, 24)}
_BLOCK_NAMES = {**GGML_NAME, _Q5_0: "Q5_0", _Q5_1: "Q5_1"}


class GgufFile:
    """An open file. A context manager.

    metadata   what is said of the model; of long arrays and of texts in arrays only how many
    shapes     by name, slowest axis first; dtypes: as ggml calls them
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb", buffering=0)
        self._types: dict[str, int] = {}
        self._places: dict[str, int] = {}
        self.metadata: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        try:
            self._size = os.fstat(self._file.fileno()).st_size
            self._read_header()
        except (struct.error, UnicodeDecodeError, IndexError) as error:
            self._file.close()
            raise self._bad(f"is damaged ({error})") from error
        except BaseException:
            self._file.close()
            raise
        self.dtypes = {
            name: _VALUE_NAMES.get(kind) or _BLOCK_NAMES[kind] for name, kind in self._types.items()
        }

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """The bytes of some rows (of all axes but the last), uint8 [stop - start, row bytes]."""
        size = self.row_bytes(name)
        piece = torch.empty((stop - start) * size, dtype=torch.uint8)
        target, done = piece.numpy().data, 0
        while done < len(target):
            place = self._places[name] + start * size + done
            got = os.preadv(self._file.fileno(), [target[done:]], place)
            if not got:
                raise self._bad(f"is too short for the tensor {name}")
            done += got
        return piece.view(stop - start, size)

    def values(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """What bytes [r, row bytes] stand for: float32 [r, k]."""
        kind = self._types[name]
        if kind in _VALUES:
            return rows.view(_VALUES[kind]).to(torch.float32)
        if kind in (_Q5_0, _Q5_1):
            made = _five_bits(rows.reshape(-1, _BLOCKS[kind][1]), with_least=kind == _Q5_1)
        else:
            made = dequantize(rows.reshape(-1), kind, torch.float32)
        return made.view(len(rows), self.shapes[name][-1])

    def row_bytes(self, name: str) -> int:
        """Of a row in the file."""
        kind, columns = self._types[name], self.shapes[name][-1]
        if kind in _VALUES:
            return columns * _VALUES[kind].itemsize
        values, size = _BLOCKS[kind]
        return int(columns // values * size)

    def _read_header(self) -> None:
        head = _Header(self._file)
        if head.take(4) != b"GGUF":
            raise self._bad("is no GGUF file")
        version, tensors, keys = head.unpack("<IQQ")
        if version not in (2, 3):
            raise self._bad(f"has the version {version}, not 2 or 3")
        if tensors > MAX_TENSORS or keys > MAX_KEYS:
            raise self._bad(f"has {tensors} tensors and {keys} keys, more than is supported")
        for _ in range(keys):
            key = head.text()
            if key in self.metadata:
                raise self._bad(f"has the key {key:.80} twice")
            (kind,) = head.unpack("<I")
            self.metadata[key] = head.value(kind)
        table = [self._entry(head) for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 1 << 16:
            raise self._bad(f"has the alignment {alignment!r:.20}")
        begin = -(-head.place // alignment) * alignment
        end = begin
        for offset, name in sorted(table):
            place = begin + offset
            if place < end:
                raise self._bad(f"has the tensor {name} over another one")
            end = place + torch.Size(self.shapes[name][:-1]).numel() * self.row_bytes(name)
            if end > self._size:
                raise self._bad(f"is too short for the tensor {name}")
            self._places[name] = place

    def _entry(self, head: "_Header") -> tuple[int, str]:
        name = head.text()
        (axes,) = head.unpack("<I")
        if not 1 <= axes <= 4 or name in self.shapes:
            raise self._bad(f"has the tensor {name:.80} twice, or with {axes} axes")
        shape = tuple(reversed(head.unpack(f"<{axes}Q")))
        kind, offset = head.unpack("<IQ")
        if kind not in _VALUES and kind not in _BLOCKS:
            known = ", ".join([*_VALUE_NAMES.values(), *_BLOCK_NAMES.values()])
            raise RegistrationRefused(
                "quantized_weights",
                f"the tensor {name:.80} of {self._path.name} has ggml's type {kind}, which is not "
                f"supported ({known} are)",
            )
        columns = _BLOCKS[kind][0] if kind in _BLOCKS else 1
        count = 1
        for size in shape:
            count *= size
        if not 0 < count <= MAX_VALUES or shape[-1] % columns:
            raise self._bad(f"has the tensor {name:.80} of the shape {shape}")
        self.shapes[name], self._types[name] = shape, kind
        return int(offset), name

    def _bad(self, why: str) -> RegistrationRefused:
        return RegistrationRefused(
            "bad_weights", f"{self._path} {why}; download it again, or use another file"
        )

    def __enter__(self) -> "GgufFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _five_bits(blocks: torch.Tensor, *, with_least: bool) -> torch.Tensor:
    """A scale (and the least value), 32 upper bits, and 16 bytes of lower ones; first halves first:
    float32 [blocks, 32]."""
    begin = 4 if with_least else 2
    halves = blocks[:, :begin].contiguous().view(torch.float16).to(torch.float32)
    bits = (blocks[:, begin : begin + 4, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    packed = blocks[:, begin + 4 :]
    codes = torch.cat([packed & 15, packed >> 4], 1) | bits.reshape(-1, 32) << 4
    if with_least:
        return halves[:, :1] * codes + halves[:, 1:]
    return halves * (codes.to(torch.float32) - 16)


class _Header:
    """The beginning of a file, read from the front, a piece at a time. Raises struct.error at its
    end."""

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self._piece, self._begin = b"", 0
        self.place = 0
        self._items_left = MAX_ITEMS

    def take(self, count: int) -> bytes:
        start = self.place - self._begin
        if count > len(self._piece) - start:
            wanted = min(max(count, _HEADER_PIECE), MAX_HEADER_BYTES - self.place)
            self._piece = os.pread(self._file.fileno(), max(0, wanted), self.place)
            self._begin, start = self.place, 0
        if count > len(self._piece) - start:
            raise struct.error("the header has no end")
        self.place += count
        return self._piece[start : start + count]

    def unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(form, self.take(struct.calcsize(form)))

    def text(self) -> str:
        (length,) = self.unpack("<Q")
        return self.take(length).decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind in _NUMBERS:
            return self.unpack(f"<{_NUMBERS[kind]}")[0]
        if kind != _ARRAY:
            raise struct.error(f"a value of type {kind}")
        inner, count = self.unpack("<IQ")
        if count > self._items_left:
            raise struct.error(f"an array of {count}")
        self._items_left -= count
        if inner in _NUMBERS:
            values = self.unpack(f"<{count}{_NUMBERS[inner]}")
            return list(values) if count <= MAX_KEPT_ITEMS else count
        if inner != _STRING:
            raise struct.error(f"an array of type {inner}")
        for _ in range(count):
            (length,) = self.unpack("<Q")
            self.take(length)
        return count
