"""y = x W^T + bias for one to four rows, in one launch with the norm before it and the gate behind.

    x         [T, k]   T <= 4; bfloat16, float16 or float32
    weight    [n, k]   the dtype of x; with an activation gate | up, [2 n, k]
    bias      [n]      or None; [2 n] with an activation
    residual  [T, k]   the stream, or None; only with a norm
    y         [T, n]

    h = residual + m x;  z = norm(h)                  `norm`, as kernels/rms_norm.py; else z = x
    y = z W^T + bias                                  or
    y = act(z Wgate^T + bgate) (z Wup^T + bup)        `activation`, as kernels/gate_mul.py

Every value that the separate calls write to memory is rounded here, too: h, z, gate and up. Sums
are float32, in an order that depends on the form of the launch alone.

Bytes moved: n k elements; a product of few rows is as fast as its weight is read. So:

- A program has a few channels (BLOCK_N) and goes along all of k in steps of BLOCK_K, 16 bytes a
  thread and load, the next tile asked for before this one is multiplied. Narrow blocks of channels
  make programs enough to fill a GPU, so k is cut among threads only and nothing is joined.
- The eight neighbours that a thread holds are summed at once: an eighth of the accumulators.
- Each program computes the norm of the rows itself. They lie in the caches; W does not.
- Launches are dependent (dependent.py): a program asks for its first weights while the launch
  before drains, and only then waits for it. Weights are moved and loaded by ordinary launches and
  copies, and every step begins with some, so they are there before the first of these can start.

On an H200 all products of a layer of 8B at one row take 113 us so (91 % of the copy bandwidth), 119
without dependent launches, and 124 to 127 as cuBLAS' products and separate calls
(bench/few_rows.py).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from kernels.dependent import dependent, enter
from kernels.gate_mul import ACTIVATION_CODES, Activation, activated, gate_mul_ref
from kernels.prefill_shape import HOPPER
from kernels.rms_norm import rms_norm_ref
from kernels.triton_api import (
    ARCHS,
    Declared,
    cdiv,
    check_out,
    check_rows,
    jit,
    next_power_of_2,
    tl,
)

MAX_ROWS = 4
# Of a norm's row: a program keeps all of it in registers for a moment.
MAX_NORM_COLUMNS = 16384
# Values that a 16-byte load of bfloat16 gives a thread.
VECTOR = 8


@dataclass(frozen=True, slots=True)
class InputNorm:
    """The norm before a product; as `rms_norm` takes it."""

    weight: torch.Tensor | None
    eps: float
    multiplier: float = 1.0
    unit_offset: bool = False
    center: bool = False


class LaunchShape(NamedTuple):
    """How a launch is cut: channels a program (of gate, and as many of up), places of k, warps."""

    block_n: int
    block_k: int
    num_warps: int


# (rows, n, k, with an activation) to the shape that bench/few_rows.py found fastest on an H200.
TUNED: dict[tuple[int, int, int, bool], LaunchShape] = {
    (1, 6144, 4096, False): LaunchShape(16, 512, 8),
    (1, 4096, 4096, False): LaunchShape(4, 1024, 4),
    (1, 14336, 4096, True): LaunchShape(16, 256, 4),
    (1, 4096, 14336, False): LaunchShape(4, 1024, 4),
    (1, 128256, 4096, False): LaunchShape(1, 2048, 4),
}


def shape_for(rows: int, n: int, k: int, gated: bool) -> LaunchShape:
    """`rows`: 1, 2 or 4. Where nothing was measured, some 500 programs and a tile of 16 KiB."""
    found = TUNED.get((rows, n, k, gated))
    if found is not None:
        return found
    block_k = max(16, min(1024, next_power_of_2(k)))
    most = 4 if gated or rows == MAX_ROWS else 8
    return LaunchShape(max(1, min(most, next_power_of_2(n // 512 + 1) // 2)), block_k, 4)


def takes(x: torch.Tensor, weight: torch.Tensor, normed: bool = False) -> bool:
    """Whether a product is for this kernel: few rows, and a plain weight that can be read widely.

    `normed`: with a norm, whose rows may not be too long.
    """
    return (
        0 < len(x) <= MAX_ROWS
        and x.dim() == weight.dim() == 2
        and x.shape[1] == weight.shape[1]
        and x.dtype == weight.dtype
        and weight.is_contiguous()
        and weight.shape[1] % 16 == 0
        and not (normed and weight.shape[1] > MAX_NORM_COLUMNS)
    )


def few_rows_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm: InputNorm | None = None,
    residual: torch.Tensor | None = None,
    activation: Activation | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, by the separate operations: (y, h); h is x where there is no residual."""
    z, h = x, x
    if norm is not None:
        z, h = rms_norm_ref(
            x, norm.weight, norm.eps, residual, norm.multiplier, norm.unit_offset, norm.center
        )
    y = functional.linear(z, weight, bias)
    return (y if activation is None else gate_mul_ref(y, activation)), h


@jit
def _stream(
    x: tl.tensor,
    residual: tl.tensor,
    place: tl.tensor,
    inside: tl.tensor,
    multiplier: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,
) -> tl.tensor:
    """h at some places of a row, rounded as it is kept, in float32."""
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        stream = tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        value = (stream + multiplier * value).to(x.dtype.element_ty).to(tl.float32)
    return value


@jit
def _statistics(
    x: tl.tensor,
    residual: tl.tensor,
    h: tl.tensor,
    k: tl.tensor,
    multiplier: tl.tensor,
    eps: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,
    CENTER: tl.constexpr,
    K_PAD: tl.constexpr,
) -> tl.tensor:
    """A row's mean and the factor that norms it; the first program writes h."""
    column = tl.arange(0, K_PAD)
    inside = column < k
    value = _stream(x, residual, column, inside, multiplier, HAS_RESIDUAL)
    if HAS_RESIDUAL:  # noqa: SIM102 - a constant, and a branch of the program
        if tl.program_id(0) == 0:
            tl.store(h + column, value.to(h.dtype.element_ty), mask=inside)
    mean = 0.0
    if CENTER:
        mean = tl.sum(value, 0) / k
        value = tl.where(inside, value - mean, 0.0)
    return mean, tl.rsqrt(tl.sum(value * value, 0) / k + eps)


@jit
def _few_rows_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    norm_weight: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    h: tl.tensor,
    y: tl.tensor,
    num_rows: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    x_stride: tl.tensor,
    multiplier: tl.tensor,
    eps: tl.tensor,
    ROWS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NORM_WEIGHT: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    CENTER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DEPENDENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr,
    K_PAD: tl.constexpr,
) -> None:
    """Program b: channels b BLOCK_N and on, of every row. ACTIVATION -1: none.

    Of three rows the last is computed twice: both write the same.
    """
    PARTS: tl.constexpr = 1 if ACTIVATION < 0 else 2
    dtype = y.dtype.element_ty
    channel = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    real = channel < n
    step = tl.arange(0, BLOCK_K)
    first = real[:, None] & (step < k)[None, :]
    tiles, pieces, totals = (), (), ()
    for part in tl.static_range(PARTS):
        tile = weight + (channel + part * n).to(tl.int64)[:, None] * k + step[None, :]
        tiles += (tile,)  # type: ignore[assignment]
        piece = tl.load(tile, mask=first, other=0.0, eviction_policy="evict_first")
        pieces += (piece,)  # type: ignore[assignment]
    enter(DEPENDENT)

    offsets, means, factors = (), (), ()
    for r in tl.static_range(ROWS):
        row = r if ROWS < 4 else tl.minimum(r, num_rows - 1)
        offsets += (row,)  # type: ignore[assignment]
        for _ in tl.static_range(PARTS):
            totals += (tl.zeros((BLOCK_N, BLOCK_K // VECTOR), tl.float32),)  # type: ignore[assignment]
        if HAS_NORM:
            mean, factor = _statistics(
                x + row * x_stride,
                residual + row * k,
                h + row * k,
                k,
                multiplier,
                eps,
                HAS_RESIDUAL,
                CENTER,
                K_PAD,
            )
            means += (mean,)  # type: ignore[assignment]
            factors += (factor,)  # type: ignore[assignment]

    for start in range(0, k, BLOCK_K):
        place = start + step
        inside = place < k
        later = real[:, None] & (place + BLOCK_K < k)[None, :]
        following, sums = (), ()
        for part in tl.static_range(PARTS):
            ahead = tiles[part] + start + BLOCK_K
            piece = tl.load(ahead, mask=later, other=0.0, eviction_policy="evict_first")
            following += (piece,)  # type: ignore[assignment]
        if HAS_NORM_WEIGHT:
            scale = tl.load(norm_weight + place, mask=inside, other=0.0).to(tl.float32)
            if UNIT_OFFSET:
                scale += 1.0
        for r in tl.static_range(ROWS):
            row = offsets[r]
            value = _stream(
                x + row * x_stride, residual + row * k, place, inside, multiplier, HAS_RESIDUAL
            )
            if HAS_NORM:
                if CENTER:
                    value = tl.where(inside, value - means[r], 0.0)
                value = value * factors[r]
                if HAS_NORM_WEIGHT:
                    value = value * scale
                value = value.to(dtype).to(tl.float32)
            for part in tl.static_range(PARTS):
                products = pieces[part].to(tl.float32) * value[None, :]
                near = tl.reshape(products, (BLOCK_N, BLOCK_K // VECTOR, VECTOR))
                sums += (totals[r * PARTS + part] + tl.sum(near, 2),)
        totals, pieces = sums, following

    for r in tl.static_range(ROWS):
        out = tl.sum(totals[r * PARTS], 1)
        if HAS_BIAS:
            out += tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)
        if ACTIVATION >= 0:
            up = tl.sum(totals[r * PARTS + 1], 1)
            if HAS_BIAS:
                up += tl.load(bias + n + channel, mask=real, other=0.0).to(tl.float32)
            gate = activated(out.to(dtype).to(tl.float32), ACTIVATION)
            out = gate * up.to(dtype).to(tl.float32)
        tl.store(y + offsets[r] * n + channel, out.to(dtype), mask=real)


def few_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm: InputNorm | None = None,
    residual: torch.Tensor | None = None,
    activation: Activation | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    shape: LaunchShape | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`few_rows_ref` by the kernel. `out`: y, and an h that is not `residual`; `shape`: to measure.

    Rows of x may lie a stride apart. Raises ValueError for what `takes` does not, and a residual
    without a norm or not contiguous.
    """
    if not takes(x, weight, norm is not None) or weight.shape[0] % (1 if activation is None else 2):
        raise ValueError(f"{list(x.shape)} by {list(weight.shape)} is no product of few rows")
    if residual is not None and (norm is None or not residual.is_contiguous()):
        raise ValueError("a residual is contiguous, and wants a norm")
    m, k = x.shape
    n = len(weight) // (1 if activation is None else 2)
    y, h = out or (x.new_empty(m, n), x if residual is None else torch.empty_like(residual))
    check_rows(x)
    check_out(y, h if residual is not None else y)
    rows = next_power_of_2(m)
    cut = shape or shape_for(rows, n, k, activation is not None)
    how = norm or InputNorm(None, 0.0)
    _few_rows_kernel[(cdiv(n, cut.block_n),)](
        x,
        residual if residual is not None else x,
        how.weight,
        weight,
        bias,
        h,
        y,
        m,
        n,
        k,
        x.stride(0),
        how.multiplier,
        how.eps,
        ROWS=rows,
        HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual is not None,
        HAS_NORM_WEIGHT=how.weight is not None,
        UNIT_OFFSET=how.unit_offset,
        CENTER=how.center,
        HAS_BIAS=bias is not None,
        ACTIVATION=-1 if activation is None else ACTIVATION_CODES[activation],
        BLOCK_N=cut.block_n,
        BLOCK_K=cut.block_k,
        VECTOR=VECTOR,
        K_PAD=next_power_of_2(k) if norm is not None else 1,
        num_warps=cut.num_warps,
        **dependent(x.device),
    )
    return y, h


def _declared(
    name: str,
    rows: int,
    shape: LaunchShape,
    norm: bool = False,
    activation: int = -1,
    arch: int = HOPPER,
) -> Declared:
    names = ("x", "residual", "norm_weight", "weight", "bias", "h", "y")
    flags = dict.fromkeys(("HAS_NORM", "HAS_RESIDUAL", "HAS_NORM_WEIGHT"), norm)
    flags |= {"UNIT_OFFSET": False, "CENTER": False, "HAS_BIAS": norm}
    return Declared(
        f"few_rows/{name}",
        _few_rows_kernel,
        dict.fromkeys(names, "*bf16:16")
        | dict.fromkeys(("n", "k", "x_stride"), "i32:16")
        | {"num_rows": "i32", "multiplier": "fp32", "eps": "fp32"},
        {
            **flags,
            "ROWS": rows,
            "ACTIVATION": activation,
            "DEPENDENT": arch >= HOPPER,
            "BLOCK_N": shape.block_n,
            "BLOCK_K": shape.block_k,
            "VECTOR": VECTOR,
            "K_PAD": 4096 if norm else 1,
        },
        shape.num_warps,
        archs=tuple(one for one in ARCHS if (one >= HOPPER) == (arch >= HOPPER)),
    )


_GATE_UP = shape_for(1, 14336, 4096, gated=True), shape_for(4, 14336, 4096, gated=True)

DECLARED = (
    _declared("one", 1, shape_for(1, 4096, 4096, gated=False)),
    _declared("four norm", 4, shape_for(4, 6144, 4096, gated=False), norm=True),
    _declared("one norm gate", 1, _GATE_UP[0], norm=True, activation=0),
    _declared("four norm gate ampere", 4, _GATE_UP[1], norm=True, activation=0, arch=80),
)
