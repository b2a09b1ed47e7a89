"""y = x W^T + bias with W in blocks of four bits a weight: a processor's int4.

    x       [..., k]  bfloat16 or float32
    blocks  [n / 16, ceil(k / 64), 576 or 640]  uint8; stands for [n, k]
    bias    [n]       or None
    y       [..., n]  the dtype of x

A **form** (`FORMS`) says what the codes stand for, so that codes of published checkpoints can be
kept as they are:

    w = (values[code] - zero) * scale

`values` are sixteen whole numbers; scales are bfloat16, one for GROUP neighbours of a row, or one
for each half of them; zeros, bfloat16 too, are there in one form only. 16 rows and 64 columns are a
block:

    head   for each of its two groups of columns the rows' scales [16]; where a form has two scales
           for a group or a zero, these behind them [16]: 64 bytes, or 128
    lines  eight of 64 bytes; line i, row r, byte j: column 8 i + j in the lower half, 8 i + 4 + j
           in the upper one

so that a register's lanes are rows, four columns each, and a lane's scale is one load: what
kernels/native/int4.h multiplies without turning anything round. Scales lie with their weights, so
a linear is one tensor, and linears of the same input behind one another are one linear: 4.5 bits a
weight, or 5. Columns behind the last are zeros.

Here are the definition and torch's way, for machines without the C++ kernels. Those round x too, to
eight bits in groups of 32 (`rounded_rows`). GPUs have a layout of their own (int4_layouts.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.int8_linear import BLOCK_BYTES as WIDE_BYTES
from kernels.int8_linear import product_dtype

GROUP = 32
ROWS = 16
COLUMNS = 64
_HEAD_BYTES = 64
_LINES = 8
_LINE_BYTES = 64
# What the largest weight of a group may be in steps: -8 uses all sixteen of them; a smaller step is
# finer for all the others, and the largest is cut.
LARGEST = (-8.5, -8.0, -7.5, -7.0, -6.5, -6.0, 6.0, 6.5, 7.0, 7.5, 8.0)
# The same of other tables, in parts of their largest value.
_PARTS = (0.85, 0.92, 1.0, 1.08)
# Steps from a group's least weight to its largest, where it has a zero.
_SPANS = (13.5, 14.25, 15.0, 15.75)
# Weights whose float32 copies are in memory together: six of them.
QUANTIZED_AT_ONCE = 1 << 21
MAX_COLUMNS = 1 << 18
"""Of wider weights not even 16 rows in float32 fit into a piece (tensors/plain.py)."""
LIMIT = 127
"""Of an activation in eight bits."""
TINY = 1e-30


@dataclass(frozen=True, slots=True)
class Form:
    """What the codes of a weight stand for.

    values  of the sixteen codes
    unit    what 1 of them is in the table of the format that they come from
    halves  whether each half of GROUP neighbours has a scale of its own
    zeros   whether GROUP neighbours have a zero, which is taken off the values
    """

    values: tuple[int, ...]
    unit: float = 1.0
    halves: bool = False
    zeros: bool = False

    @property
    def neighbours(self) -> int:
        """Weights of a row that share a scale."""
        return GROUP // 2 if self.halves else GROUP

    @property
    def block_bytes(self) -> int:
        """Of 16 rows and 64 columns."""
        return (2 if self.halves or self.zeros else 1) * _HEAD_BYTES + _LINES * _LINE_BYTES


_STEPS = tuple(range(-8, 8))
# Two bits of exponent and one of mantissa (MXFP4, NVFP4), times 2.
_E2M1_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
# bitsandbytes' and llama.cpp's tables over 128 steps: what sums of products in 16 bits hold. Of the
# units that fit, those that round least (0.7 and 0.4 % of the values' root mean square).
_NF4_VALUES = (-64, -45, -34, -25, -18, -12, -6, 0, 5, 10, 16, 22, 28, 36, 46, 64)
_FP4_VALUES = (0, 0, 32, 48, 16, 24, 8, 12, 0, 0, -32, -48, -16, -24, -8, -12)
_IQ4_VALUES = (-64, -53, -42, -33, -25, -18, -11, -5, 1, 7, 13, 19, 27, 35, 45, 57)

INT4_BLOCKS, ZEROS = "int4_blocks", "int4_zeros"
E2M1, E2M1_HALVES = "int4_e2m1", "int4_e2m1_16"
NF4, FP4, IQ4 = "int4_nf4", "int4_fp4", "int4_iq4"
FORMS = {
    INT4_BLOCKS: Form(_STEPS),
    ZEROS: Form(_STEPS, zeros=True),
    E2M1: Form(_E2M1_VALUES, 0.5),
    E2M1_HALVES: Form(_E2M1_VALUES, 0.5, halves=True),
    NF4: Form(_NF4_VALUES, 0.01561048),
    FP4: Form(_FP4_VALUES, 1 / 48),
    IQ4: Form(_IQ4_VALUES, 1.9746530),
}
"""By the names that packs call them."""


@dataclass(frozen=True, slots=True)
class Steps:
    """How somebody has rounded a weight [n, k] already: scales, and zeros where the form has them,
    float32 [n, ceil(k / neighbours)]."""

    scale: torch.Tensor
    zero: torch.Tensor | None = None

    def of_rows(self, start: int, stop: int) -> "Steps":
        """Of some of them."""
        zero = None if self.zero is None else self.zero[start:stop]
        return Steps(self.scale[start:stop], zero)

    def of_expert(self, number: int) -> "Steps":
        """Of one of several weights [E, n, k]."""
        return Steps(self.scale[number], None if self.zero is None else self.zero[number])

    def in_order(self, order: torch.Tensor) -> "Steps":
        """Of the rows that `order` names."""
        return Steps(self.scale[order], None if self.zero is None else self.zero[order])

    def with_zeros(self) -> "Steps":
        """The same where the form has zeros, and nobody had any."""
        return Steps(self.scale, torch.zeros_like(self.scale) if self.zero is None else self.zero)


def fits(shape: torch.Size | tuple[int, ...]) -> bool:
    """Whether a weight [n, k] can be cut into blocks, and read 16 rows at a time."""
    return len(shape) == 2 and shape[0] % ROWS == 0 and shape[1] <= MAX_COLUMNS


def block_shape(
    shape: torch.Size | tuple[int, ...], scheme: str = INT4_BLOCKS
) -> tuple[int, int, int]:
    """Of the blocks of a weight [n, k]."""
    n, k = shape
    return n // ROWS, -(-k // COLUMNS), FORMS[scheme].block_bytes


def quantize(
    weight: torch.Tensor,
    largest: Sequence[float] = LARGEST,
    steps: Steps | None = None,
    scheme: str = INT4_BLOCKS,
) -> torch.Tensor:
    """[n, k] of any float to blocks, each group by the scale (and zero) that loses least.

    `largest`: the scales that are tried make a group's largest weight so many steps; the one with
    the least sum of squared errors is kept. `steps`: tried before these: where somebody has rounded
    the weights to this form already, they are kept as they are. Raises ValueError on NaN, and on
    weights so large that their squares are not finite.
    """
    step = max(1, QUANTIZED_AT_ONCE // (ROWS * weight.shape[1])) * ROWS
    made = []
    for start in range(0, len(weight), step):
        given = None if steps is None else steps.of_rows(start, start + step)
        made.append(_quantize(weight[start : start + step], largest, given, FORMS[scheme]))
    return torch.cat(made)


def _quantize(
    weight: torch.Tensor, steps_of_largest: Sequence[float], steps: Steps | None, form: Form
) -> torch.Tensor:
    n, k = weight.shape
    wide = weight.to(torch.float32).contiguous()
    exact = F.pad(wide, (0, -k % COLUMNS)).view(n, -1, form.neighbours)
    if not bool(exact.abs().amax().isfinite()):
        raise ValueError("weights that are not finite cannot be quantized")
    least = exact.new_full((*exact.shape[:2], 1), torch.inf)
    scale, zero = torch.zeros_like(least), torch.zeros_like(least)
    codes = torch.zeros_like(exact, dtype=torch.uint8)
    for choice, offset in _choices(exact, steps_of_largest, steps, form):
        tried = choice.to(torch.bfloat16).to(torch.float32)
        # A scale of nothing makes zeros, also of tables that have none.
        by = torch.where(tried == 0, torch.ones_like(tried), tried)
        taken = offset.to(torch.bfloat16).to(torch.float32) if form.zeros else None
        found, values = _nearest(exact / by, taken, form)
        error = (values * tried).sub_(exact).square_().sum(-1, keepdim=True)
        better = error < least
        least = torch.where(better, error, least)
        scale = torch.where(better, tried, scale)
        codes = torch.where(better, found, codes)
        if taken is not None:
            zero = torch.where(better, taken, zero)
    if not bool(torch.isfinite(least).all()):
        raise ValueError(f"weights of up to {float(exact.abs().max()):.3g} are too large for int4")
    scale.masked_fill_(scale == 0, 0.0)  # one zero, not two
    return pack(codes.view(n, -1), scale.view(n, -1), zero.view(n, -1) if form.zeros else None)


def _choices(
    exact: torch.Tensor, steps_of_largest: Sequence[float], steps: Steps | None, form: Form
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Scales and zeros [n, groups, 1] to try for weights [n, groups, neighbours]."""
    none = exact.new_zeros(1, 1, 1)
    if steps is not None:
        missing = exact.shape[1] - steps.scale.shape[1]
        zero = none if steps.zero is None else F.pad(steps.zero, (0, missing)).unsqueeze(-1)
        yield F.pad(steps.scale, (0, missing)).unsqueeze(-1), zero
    largest = exact.gather(-1, exact.abs().argmax(-1, keepdim=True))
    if form.values == _STEPS:
        for count in steps_of_largest:
            yield largest / count, none
    else:
        for most in {max(form.values), min(form.values)}:
            for part in _PARTS:
                yield largest / (most * part), none
    if form.zeros:
        low, high = exact.amin(-1, keepdim=True), exact.amax(-1, keepdim=True)
        for span in _SPANS:
            scale = (high - low) / span
            by = torch.where(scale == 0, torch.ones_like(scale), scale)
            yield scale, -0.5 - (high + low) / (2 * by)


def _nearest(
    steps: torch.Tensor, zero: torch.Tensor | None, form: Form
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 and what they are, of weights in steps: zeros are taken off."""
    if form.values == _STEPS:
        low, high = _STEPS[0], _STEPS[-1]
        if zero is None:
            values = steps.round_().clamp_(low, high)
            return (values - low).to(torch.uint8), values
        values = steps.add_(zero).round_().clamp_(low, high)
        return (values - low).to(torch.uint8), values - zero
    table = torch.tensor(form.values, dtype=torch.float32)
    order = table.argsort(stable=True)
    bounds = (table[order][1:] + table[order][:-1]) / 2
    codes = order[torch.bucketize(steps, bounds)]
    return codes.to(torch.uint8), table[codes]


def pack(
    codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None
) -> torch.Tensor:
    """Blocks of codes uint8 [n, k] and scales [n, k / neighbours]; k a multiple of COLUMNS."""
    n, k = codes.shape
    halves = codes.view(n // ROWS, ROWS, k // COLUMNS, _LINES, 2, 4)
    lower, upper = halves.permute(4, 0, 2, 3, 1, 5).unbind()
    lines = (lower | (upper << 4)).reshape(n // ROWS, k // COLUMNS, -1)
    kept = [part for part in (scale, zero) if part is not None]
    grouped = torch.stack([part.to(torch.bfloat16).view(n, k // GROUP, -1) for part in kept], 2)
    # [n, groups, scale or zero, halves] to the heads of the blocks.
    heads = grouped.view(n // ROWS, ROWS, k // COLUMNS, -1).permute(0, 2, 3, 1)
    head = heads.contiguous().view(torch.uint8).reshape(n // ROWS, k // COLUMNS, -1)
    return torch.cat([head, lines], -1)


def dequantize(blocks: torch.Tensor, k: int, scheme: str = INT4_BLOCKS) -> torch.Tensor:
    """What blocks stand for, exactly: float32 [n, k]."""
    form = FORMS[scheme]
    num, columns, _ = blocks.shape
    head_bytes = form.block_bytes - _LINES * _LINE_BYTES
    head, lines = blocks[..., :head_bytes], blocks[..., head_bytes:]
    lines = lines.reshape(num, columns, _LINES, ROWS, 4)
    codes = torch.stack([lines & 15, lines >> 4], 3)
    table = torch.tensor(form.values, dtype=torch.float32, device=blocks.device)
    values = F.embedding(codes.to(torch.int32), table[:, None])[..., 0]
    # [num, columns, line, half, row, 4] to rows of columns.
    values = values.permute(0, 4, 1, 2, 3, 5).reshape(num, ROWS, columns, 2, -1, form.neighbours)
    heads = head.contiguous().view(torch.bfloat16).view(num, columns, 2, -1, ROWS)
    heads = heads.permute(0, 4, 1, 2, 3).to(torch.float32)[..., None]
    if form.zeros:
        values = values - heads[..., 1:, :]
        heads = heads[..., :1, :]
    wide: torch.Tensor = values * heads
    return wide.reshape(num * ROWS, columns * COLUMNS)[:, :k]


def int4_blocks_linear_ref(
    x: torch.Tensor,
    blocks: torch.Tensor,
    bias: torch.Tensor | None = None,
    scheme: str = INT4_BLOCKS,
) -> torch.Tensor:
    """The definition, x as it is, in float32, rounded once."""
    y = x.to(torch.float32) @ dequantize(blocks, x.shape[-1], scheme).T
    return (y if bias is None else y + bias.to(torch.float32)).to(x.dtype)


def int4_blocks_linear(
    x: torch.Tensor,
    blocks: torch.Tensor,
    bias: torch.Tensor | None = None,
    scheme: str = INT4_BLOCKS,
) -> torch.Tensor:
    """The same, some blocks of rows at a time, on any device."""
    k = x.shape[-1]
    rows = x.reshape(-1, k)
    out = rows.new_empty(len(rows), len(blocks) * ROWS)
    wide = rows.to(product_dtype(rows))
    step = max(1, WIDE_BYTES // (k * ROWS * 4))
    for start in range(0, len(blocks), step):
        weight = dequantize(blocks[start : start + step], k, scheme).to(wide.dtype)
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
