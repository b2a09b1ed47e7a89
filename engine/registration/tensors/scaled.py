"""What most quantized formats share: small codes, and one scale for a block of them.

    weight[n, k] = (code[n, k] - zero[n', k']) * scale[n', k'],  n' = n // block rows, k' likewise

in float32, some rows at a time. A format says where its codes lie and how they are spelled
(`row_formats.py`, `column_formats.py`); this file reads scales, checks that they fit, and applies
them. Headers are checked when a checkpoint is opened, values when they are read.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch.nn import functional

from engine.errors import RegistrationRefused
from engine.registration.tensors.files import SourceTensors
from kernels.int4_blocks import FORMS, Steps

Rows = Callable[[int, int], torch.Tensor]
"""The rows from one number to another, float32 [stop - start, ...]."""

SCALE_DTYPES = frozenset({"F32", "F16", "BF16", "F8_E4M3", "F8_E8M0", "U8"})
# The values of four bits with two of exponent and one of mantissa; the upper half is negative.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_VALUES = torch.tensor((*_FP4, *(-value for value in _FP4)))


@dataclass(frozen=True, slots=True)
class Kept:
    """How an int4 or fp8 pack keeps the codes of a weight [n, k] as they are.

    scheme   the form in blocks (kernels/int4_blocks.py), or FP8_SCHEME: steps are [n, 1] then
    steps    what reads its scales and zeros
    """

    scheme: str
    steps: Callable[[], Steps]


def _not_kept() -> Kept | None:
    return None


@dataclass(frozen=True, slots=True)
class Quantized:
    """A weight that is not in the files as values. `open` reads what all its rows need.

    `kept`: how a pack keeps its codes; None where no form has a place for them. May read
    some small tensors.
    """

    shape: tuple[int, ...]
    open: Callable[[], Rows]
    kept: Callable[[], Kept | None] = _not_kept


@dataclass(frozen=True, slots=True)
class Grid:
    """Scales (and zeros) float32 [n', k']; `block`: of how many rows and columns one is.

    `columns`: which k' a column takes, int64 [k], where that is not by its place (act-order).
    """

    scale: torch.Tensor
    block: tuple[int, int]
    zero: torch.Tensor | None = None
    columns: torch.Tensor | None = None

    def apply(self, codes: torch.Tensor, start: int) -> torch.Tensor:
        """What float32 codes [r, k], from row `start` on, stand for; in their place."""
        rows = torch.arange(start, start + len(codes)) // self.block[0]
        groups, k = self.scale.shape[1], codes.shape[1]
        parts = codes
        if self.columns is None and k % groups == 0 and k // groups == self.block[1]:
            parts = codes.view(len(codes), groups, -1)  # a group's scale is broadcast
        if self.zero is not None:
            parts -= self._spread(self.zero[rows], parts)
        parts *= self._spread(self.scale[rows], parts)
        return codes

    def _spread(self, values: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
        if parts.dim() == 3:
            return values[:, :, None]
        if self.columns is not None:
            return values[:, self.columns]
        if values.shape[1] == 1:
            return values
        return values.repeat_interleave(self.block[1], 1)[:, : parts.shape[1]]


def is_kept(scheme: str, group: int, k: int) -> bool:
    """Whether blocks have a scale for each group of columns: theirs are whole parts of it."""
    return group >= k or group % FORMS[scheme].neighbours == 0


def steps_of(
    scheme: str, group: int, k: int, scale: torch.Tensor, zero: torch.Tensor | None = None
) -> Steps:
    """Scales and zeros [n, groups] for as many columns as blocks have them for.

    `zero`: as the format has it, for codes from 0 on; blocks count from -8 on.
    """
    form = FORMS[scheme]
    places = (torch.arange(0, k, form.neighbours) // group).clamp_(max=scale.shape[1] - 1)
    zeros = (zero[:, places] - 8 if zero is not None else None) if form.zeros else None
    return Steps(scale[:, places] * form.unit, zeros)


def bad(key: str, why: str) -> RegistrationRefused:
    """What is wrong with a tensor of a quantized weight."""
    return RegistrationRefused(
        "bad_weights",
        f"tensor {key} of the quantized checkpoint {why}; download the model again, or use "
        "another checkpoint",
    )


def need(
    files: SourceTensors, key: str, dtypes: Collection[str], shape: tuple[int, ...] | None = None
) -> str:
    """`key`, if it is there with one of these types and this shape. Raises RegistrationRefused."""
    if key not in files.shapes:
        raise bad(key, "is missing")
    if files.dtypes[key] not in dtypes:
        raise bad(key, f"has the type {files.dtypes[key]}, not {' or '.join(sorted(dtypes))}")
    if shape is not None and files.shapes[key] != shape:
        raise bad(key, f"has the shape {files.shapes[key]}, not {shape}")
    return key


def read_scale(files: SourceTensors, key: str, *, may_be_zero: bool = False) -> torch.Tensor:
    """Float32, finite, and not all zero: a few zeros are published, for channels of zeros.

    `may_be_zero`: where a scale is what the largest weight is, and zero for a weight of zeros.
    """
    kept = files.read(key)
    if kept.dtype == torch.uint8:  # exponents of two, the last of them NaN
        kept = kept.view(torch.float8_e8m0fnu)
    scale = kept.to(torch.float32)
    if not bool(scale.isfinite().all()):
        raise bad(key, "has scales that are not finite (NaN or infinity)")
    if scale.numel() and not may_be_zero and not bool(scale.any()):
        raise bad(key, "has no scale but zero")
    return scale


def block_of(
    key: str,
    shape: tuple[int, int],
    grid: tuple[int, int],
    declared: Collection[tuple[int, int]],
) -> tuple[int, int]:
    """Of how many rows and columns a scale is, where there are `grid` of them for `shape`.

    One for all, one a row, or a block that the configuration declares. Anything else cannot be
    assigned: projections that were joined, say, with a scale each and no word of their sizes.
    """
    for block in (shape, (1, shape[1]), *declared):
        if tuple(-(-size // part) for size, part in zip(shape, block, strict=True)) == grid:
            return block
    blocks = ", ".join(f"{rows} x {columns}" for rows, columns in declared) or "none"
    raise bad(
        key,
        f"has {grid[0]} x {grid[1]} scales for a weight of {shape[0]} x {shape[1]}: neither one, "
        f"nor one a row, nor one for each block that config.json names ({blocks})",
    )


def nibbles(packed: torch.Tensor, values: torch.Tensor = FP4_VALUES) -> torch.Tensor:
    """Bytes [..., b] as what their two halves index in `values` [16], the lower first:
    float32 [..., 2 b]."""
    byte = torch.arange(256)
    pairs = torch.stack([values[byte & 15], values[byte >> 4]], 1)
    found = functional.embedding(packed.to(torch.int32), pairs)
    return found.view(*packed.shape[:-1], -1)


def fields(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Words int32 [..., w] as their fields of `bits` bits, the lowest first: [..., w 32 / bits]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    found = (words[..., None] >> shifts) & ((1 << bits) - 1)
    return found.view(*words.shape[:-1], -1)
