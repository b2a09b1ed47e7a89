"""y = x W^T + bias with W in blocks of four bits a weight: a processor's int4.

    x       [..., k]  bfloat16 or float32
    blocks  [n / 16, ceil(k / 64), 576]  uint8; stands for [n, k], w = (q - 8) * scale
    bias    [n]       or None
    y       [..., n]  the dtype of x

One scale (bfloat16) for GROUP neighbours of a row. 16 rows and 64 columns are a block:

    bytes 0..63    scales: of the rows' first 32 columns [16], of the others [16]
    bytes 64..575  eight lines of 64; line i, row r, byte j: column 8 i + j in the lower half,
                   8 i + 4 + j in the upper one

so that a register's lanes are rows, four columns each, and a lane's scale is one load: what
kernels/native/bytes.h multiplies without turning anything round. Scales lie with their weights, so
a linear is one tensor, and linears of the same input behind one another are one linear: 4.5 bits a
weight. Columns behind the last are zeros.

Here are the definition and torch's way, for machines without the C++ kernels. Those round x too, to
eight bits in groups of 32 (`rounded_rows`). GPUs have a layout of their own (int4_layouts.py).
"""

import itertools
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from kernels.int8_linear import BLOCK_BYTES as WIDE_BYTES
from kernels.int8_linear import product_dtype

GROUP = 32
ROWS = 16
COLUMNS = 64
BLOCK_BYTES = 576
_SCALE_BYTES = 64
_LINES = 8
# What the largest weight of a group may be in steps: -8 uses all sixteen of them; a smaller step is
# finer for all the others, and the largest is cut.
LARGEST = (-8.5, -8.0, -7.5, -7.0, -6.5, -6.0, 6.0, 6.5, 7.0, 7.5, 8.0)
# Weights whose float32 copies are in memory together: six of them.
QUANTIZED_AT_ONCE = 1 << 21
MAX_COLUMNS = 1 << 20
LIMIT = 127
"""Of an activation in eight bits."""
TINY = 1e-30


def fits(shape: torch.Size | tuple[int, ...]) -> bool:
    """Whether a weight [n, k] can be cut into blocks, and read 16 rows at a time."""
    return len(shape) == 2 and shape[0] % ROWS == 0 and shape[1] <= MAX_COLUMNS


def block_shape(shape: torch.Size | tuple[int, ...]) -> tuple[int, int, int]:
    """Of the blocks of a weight [n, k]."""
    n, k = shape
    return n // ROWS, -(-k // COLUMNS), BLOCK_BYTES


def quantize(
    weight: torch.Tensor,
    largest: Sequence[float] = LARGEST,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """[n, k] of any float to blocks, each group by the scale that loses least.

    `largest`: the scales that are tried make a group's largest weight so many steps; the one with
    the least sum of squared errors is kept. `scales` [n, ceil(k / 32)]: tried before these, where
    somebody has rounded the weights already: their steps are then kept as they are. Raises
    ValueError on NaN, and on weights so large that their squares are not finite.
    """
    step = max(1, QUANTIZED_AT_ONCE // (ROWS * weight.shape[1])) * ROWS
    made = []
    for start in range(0, len(weight), step):
        given = None if scales is None else scales[start : start + step]
        made.append(_quantize(weight[start : start + step], largest, given))
    return torch.cat(made)


def _quantize(
    weight: torch.Tensor, steps_of_largest: Sequence[float], scales: torch.Tensor | None
) -> torch.Tensor:
    n, k = weight.shape
    exact = F.pad(weight.to(torch.float32), (0, -k % COLUMNS)).view(n, -1, GROUP)
    largest = exact.gather(-1, exact.abs().argmax(-1, keepdim=True))
    if not bool(torch.isfinite(largest).all()):
        raise ValueError("weights that are not finite cannot be quantized")
    least = torch.full_like(largest, torch.inf)
    scale = torch.ones_like(largest)
    values = torch.zeros_like(exact)
    choices: Iterator[torch.Tensor] = (largest / steps for steps in steps_of_largest)
    if scales is not None:
        padded = F.pad(scales, (0, exact.shape[1] - scales.shape[1]))
        choices = itertools.chain([padded.unsqueeze(-1)], choices)
    for choice in choices:
        tried = choice.to(torch.bfloat16).to(torch.float32)
        tried = torch.where(tried == 0, torch.ones_like(tried), tried)
        rounded = (exact / tried).round_().clamp_(-8, 7)
        error = (rounded * tried).sub_(exact).square_().sum(-1, keepdim=True)
        better = error < least
        least = torch.where(better, error, least)
        scale = torch.where(better, tried, scale)
        values = torch.where(better, rounded, values)
    if not bool(torch.isfinite(least).all()):
        raise ValueError(f"weights of up to {float(exact.abs().max()):.3g} are too large for int4")
    return pack(values.view(n, -1), scale.view(n, -1))


def pack(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Blocks of values [n, k], -8..7, and scales [n, k / 32]; k a multiple of COLUMNS."""
    n, k = values.shape
    halves = (values + 8).to(torch.uint8).view(n // ROWS, ROWS, k // COLUMNS, _LINES, 2, 4)
    lower, upper = halves.permute(4, 0, 2, 3, 1, 5).unbind()
    lines = (lower | (upper << 4)).reshape(n // ROWS, k // COLUMNS, -1)
    scales = scale.to(torch.bfloat16).view(n // ROWS, ROWS, k // COLUMNS, 2).permute(0, 2, 3, 1)
    head = scales.contiguous().view(torch.uint8).reshape(n // ROWS, k // COLUMNS, -1)
    return torch.cat([head, lines], -1)


def dequantize(blocks: torch.Tensor, k: int) -> torch.Tensor:
    """What blocks stand for, exactly: float32 [n, k]."""
    num, columns, _ = blocks.shape
    head, lines = blocks[..., :_SCALE_BYTES], blocks[..., _SCALE_BYTES:]
    lines = lines.reshape(num, columns, _LINES, ROWS, 4)
    halves = torch.stack([lines & 15, lines >> 4], 3).to(torch.float32) - 8
    # [num, columns, line, half, row, 4] to rows of columns.
    values = halves.permute(0, 4, 1, 2, 3, 5).reshape(num, ROWS, columns, 2, GROUP)
    scale = head.contiguous().view(torch.bfloat16).view(num, columns, 2, ROWS).permute(0, 3, 1, 2)
    wide = values * scale.to(torch.float32)[..., None]
    return wide.reshape(num * ROWS, columns * COLUMNS)[:, :k]


def int4_blocks_linear_ref(
    x: torch.Tensor, blocks: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The definition, x as it is, in float32, rounded once."""
    y = x.to(torch.float32) @ dequantize(blocks, x.shape[-1]).T
    return (y if bias is None else y + bias.to(torch.float32)).to(x.dtype)


def int4_blocks_linear(
    x: torch.Tensor, blocks: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The same, some blocks of rows at a time, on any device."""
    k = x.shape[-1]
    rows = x.reshape(-1, k)
    out = rows.new_empty(len(rows), len(blocks) * ROWS)
    wide = rows.to(product_dtype(rows))
    step = max(1, WIDE_BYTES // (k * ROWS * 4))
    for start in range(0, len(blocks), step):
        weight = dequantize(blocks[start : start + step], k).to(wide.dtype)
        out[:, start * ROWS : (start + step) * ROWS] = F.linear(wide, weight)
    if bias is not None:
        out = out + bias
    return out.reshape(*x.shape[:-1], out.shape[-1])


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    """float32 [..., k]: what the C++ kernels take x for in products with bytes.

    Whole multiples of a scale, which is 1/127 of a group's largest; NaN where a group has a value
    that is not finite.
    """
    k = x.shape[-1]
    padded = F.pad(x.to(torch.float32), (0, -k % GROUP))
    groups = padded.view(*x.shape[:-1], -1, GROUP)
    largest = groups.abs().amax(-1, keepdim=True)
    # `LIMIT / largest` would be LIMIT times the reciprocal, which is rounded twice.
    steps = torch.full_like(largest, LIMIT) / largest
    steps = torch.where(largest > TINY, steps, torch.zeros_like(steps))
    rounded = (groups * steps).round_() * (largest / LIMIT)
    broken = ~groups.isfinite().all(-1, keepdim=True)
    return rounded.masked_fill_(broken, torch.nan).flatten(-2)[..., :k]
