"""What scales the four-bit blocks of a GGUF file have, so that an int4 pack keeps their codes.

    Q4_0    d F16; 32 codes around 8: w = d (q - 8)
    Q4_1    d, m F16; w = d q + m
    Q4_K    d, e F16; eight six-bit scales s and leasts l for 32 each: w = d s q - e l
    IQ4_NL  d F16; 32 codes of llama.cpp's table
    IQ4_XS  d F16; eight six-bit scales for 32 each: w = d (s - 32) table[q]

The values themselves are made by transformers (`gguf_file.py`). Where a scale is zero the codes
mean nothing; the weights are then rounded anew.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from engine.registration.tensors.files import PIECE_BYTES, piece_rows
from engine.registration.tensors.gguf_file import GgufFile
from engine.registration.tensors.scaled import Kept
from kernels.int4_blocks import FORMS, INT4_BLOCKS, IQ4, ZEROS, Steps

_Read = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
"""Blocks uint8 [b, bytes] to scales and zeros [b, values / 32]; codes count from 0 on."""


@dataclass(frozen=True, slots=True)
class _Blocks:
    """A block type: its bytes, the form in an int4 pack, and what reads its scales."""

    num_bytes: int
    scheme: str
    read: _Read


def gguf_scheme(file: GgufFile) -> str:
    """The form that keeps the codes of most of the file's weights, "" for none."""
    sizes: dict[str, int] = {}
    for key, shape in file.shapes.items():
        found = _TYPES.get(file.dtypes[key])
        scheme = found.scheme if found else ""
        sizes[scheme] = sizes.get(scheme, 0) + torch.Size(shape).numel()
    return max(sizes, key=lambda scheme: sizes[scheme], default="")


def kept_of(
    file: GgufFile, key: str, order: torch.Tensor | None, first: int, rows: int
) -> Kept | None:
    """Rows [first, first + rows) of a tensor, or those rows in the order of `order`."""
    found = _TYPES.get(file.dtypes[key])
    if found is None:
        return None
    blocks = found  # bound for the function below

    def steps() -> Steps:
        scales, zeros = [], []
        step = piece_rows(file.row_bytes(key), PIECE_BYTES)
        for start in range(first, first + rows, step):
            packed = file.rows(key, start, min(start + step, first + rows))
            scale, zero = blocks.read(packed.reshape(-1, blocks.num_bytes))
            scales.append(scale.reshape(len(packed), -1) * FORMS[blocks.scheme].unit)
            if zero is not None:
                zeros.append(zero.reshape(len(packed), -1))
        made = Steps(torch.cat(scales), torch.cat(zeros) - 8 if zeros else None)
        return made if order is None else made.in_order(order)

    return Kept(blocks.scheme, steps)


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    return blocks[:, start : start + 2].contiguous().view(torch.float16).to(torch.float32)


def _zero(least: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """In steps, where there are any: w = (q - zero) scale = scale q - least."""
    return torch.where(scale == 0, torch.zeros_like(least), least / scale)


def _plain(blocks: torch.Tensor) -> tuple[torch.Tensor, None]:
    return _half(blocks, 0), None


def _with_least(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = _half(blocks, 0)
    return scale, _zero(-_half(blocks, 2), scale)


def _superblock(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    fields = blocks[:, 4:16]
    first, second, upper = fields[:, :4], fields[:, 4:8], fields[:, 8:]
    scales = torch.cat([first & 63, (upper & 15) | (first >> 6) << 4], 1)
    leasts = torch.cat([second & 63, (upper >> 4) | (second >> 6) << 4], 1)
    scale = _half(blocks, 0) * scales.to(torch.float32)
    return scale, _zero(_half(blocks, 2) * leasts.to(torch.float32), scale)


def _table_superblock(blocks: torch.Tensor) -> tuple[torch.Tensor, None]:
    upper = blocks[:, 2:4].contiguous().view(torch.int16).to(torch.int32)
    upper = (upper >> torch.arange(0, 16, 2, dtype=torch.int32)) & 3
    lower = torch.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], 2).view(len(blocks), -1)
    return _half(blocks, 0) * (lower.to(torch.float32) + 16.0 * upper - 32.0), None


_TYPES: Mapping[str, _Blocks] = {
    "Q4_0": _Blocks(18, INT4_BLOCKS, _plain),
    "Q4_1": _Blocks(20, ZEROS, _with_least),
    "Q4_K": _Blocks(144, ZEROS, _superblock),
    "IQ4_NL": _Blocks(18, IQ4, _plain),
    "IQ4_XS": _Blocks(136, IQ4, _table_superblock),
}
