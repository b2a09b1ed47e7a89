"""y = x W^T + bias with fp8 (e4m3) on both sides, for more rows than weight-only products suit.

    x       [T, k]  bfloat16; each row rounded to e4m3 by its own scale, its largest / 448
    weight  [n, k]  float8_e4m3fn, stands for weight[n, k] * scale[n] (scaled_linear.quantize_fp8)
    scale   [n]     any float type
    bias    [n]     or None
    y       [T, n]  the dtype of x

    y[t, n] = sx[t] scale[n] sum_k qx[t, k] q[n, k] + bias[n]

A launch rounds the rows, and `torch._scaled_mm` multiplies with a scale for each row and channel:
tensor cores of Ada and Hopper have twice their bfloat16 rate in fp8. Bytes moved by the rounding:
3 T k, once for each product.

Beside weight-only fp8 (scaled_linear.py) x loses precision too, about 2 % of a row's root mean
square; a row's NaN stays its own. A row's numbers do not depend on the rows beside it.
"""

import functools
import logging

import torch
from torch.nn import functional

from kernels.int8_linear import widened
from kernels.prefill_shape import capability
from kernels.scaled_linear import scaled_linear
from kernels.triton_api import Declared, check_out, check_rows, jit, next_power_of_2, tl

logger = logging.getLogger(__name__)

# Below, products are as fast as the weight is read, and x need not be rounded.
LEAST_ROWS = 17
LEAST_CAPABILITY = 89
LARGEST = 448.0
# A row has to stay in the registers of one block.
MAX_COLUMNS = 32768
# Sums of the tensor cores are kept as they come, not promoted to float32 every so often.
FAST_ACCUMULATION = True


def takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a product is for this: many rows of bfloat16 on a GPU that has fp8."""
    n, k = weight.shape
    return (
        weight.dtype == torch.float8_e4m3fn
        and x.dtype == torch.bfloat16
        and x.numel() // k >= LEAST_ROWS
        and n % 16 == 0
        and k % 16 == 0
        and k <= MAX_COLUMNS
        and x.device.type == "cuda"
        and can_multiply(x.device)
    )


@functools.cache
def can_multiply(device: torch.device) -> bool:
    """Whether torch multiplies fp8 by rows and channels there: asked once, by a small product."""
    if capability(device) < LEAST_CAPABILITY:
        return False
    side = torch.zeros(16, 16, dtype=torch.float8_e4m3fn, device=device)
    ones = torch.ones(16, 1, device=device)
    try:
        torch._scaled_mm(side, side.t(), scale_a=ones, scale_b=ones.t(), out_dtype=torch.bfloat16)
    except RuntimeError as error:
        line = str(error).splitlines()[0]
        logger.warning("products in fp8 keep their inputs in bfloat16 on %s: %s", device, line)
        return False
    return True


def round_rows_ref(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, k] to e4m3 [T, k] and float32 scales [T, 1]."""
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True) / LARGEST
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return (wide / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale


def fp8_linear_ref(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The definition, in float32, of rounded rows."""
    return _multiply_ref(*round_rows_ref(x), weight, scale, bias).to(x.dtype)


def _multiply_ref(
    rounded: torch.Tensor,
    of_rows: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    y = functional.linear(rounded.float(), weight.float()) * of_rows * scale.float()
    return y if bias is None else y + bias.float()


@jit
def _e4m3(value: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    """The bits of the nearest e4m3, ties to even; of the largest beyond it.

    By hand, because Ampere has no instruction for it and the interpreter's is wrong.
    """
    sign = (value.to(tl.int32, bitcast=True) >> 24) & 0x80
    size = tl.minimum(tl.abs(value), LARGEST)
    bits = size.to(tl.int32, bitcast=True)
    # Three bits of mantissa are kept; the exponent's bias goes from 127 to 7.
    usual = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes are multiples of 2^-9; a float32 this large has no fraction left.
    small = (size * 512.0 + 12582912.0).to(tl.int32, bitcast=True) & 0xF
    return (tl.where(size < 0.015625, small, usual) | sign).to(tl.uint8)


@jit
def _round_rows_kernel(
    x: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,
    columns: tl.tensor,
    x_stride: tl.tensor,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(value), 0)
    # A maximum leaves NaN out.
    broken = tl.max((value != value).to(tl.int32), 0) > 0
    factor = tl.where(largest == 0.0, 1.0, largest / LARGEST)
    factor = tl.where(broken, float("nan"), factor)
    tl.store(out + row * columns + column, _e4m3(value / factor, LARGEST), mask=inside)
    tl.store(scale + row, factor)


def round_rows(
    x: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`round_rows_ref` by the kernel. Rows of x may lie a stride apart."""
    rows, columns = x.shape
    if columns > MAX_COLUMNS:
        raise ValueError(f"rows of {columns}, more than {MAX_COLUMNS}")
    rounded, scale = out or (
        torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=x.device),
        torch.empty(rows, 1, dtype=torch.float32, device=x.device),
    )
    check_rows(x)
    check_out(rounded, scale)
    if rows:
        block = next_power_of_2(columns)
        _round_rows_kernel[(rows,)](
            x,
            rounded.view(torch.uint8),
            scale,
            columns,
            x.stride(0),
            LARGEST=LARGEST,
            BLOCK=block,
            num_warps=max(1, min(16, block // 512)),
        )
    return rounded, scale


def fp8_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`fp8_linear_ref` by the kernels; for what `takes`, on a GPU. x [..., k]."""
    rounded, of_rows = round_rows(x.view(-1, x.shape[-1]))
    if x.device.type != "cuda":
        y = _multiply_ref(rounded, of_rows, weight, scale, bias).to(x.dtype)
        return y.view(*x.shape[:-1], len(weight))
    y = torch._scaled_mm(
        rounded,
        weight.t(),
        scale_a=of_rows,
        scale_b=scale.float()[None],
        bias=bias,
        out_dtype=x.dtype,
        use_fast_accum=FAST_ACCUMULATION,
    )
    return y.view(*x.shape[:-1], len(weight))


def fp8_weight_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """A product with fp8 weights by whichever way there is. x [..., k] to [..., n].

    On a GPU that has fp8: on both sides from LEAST_ROWS rows on, else weight-only. On a processor
    the weight is widened, a part of it at a time: right, but not fast.
    """
    rows = x.reshape(-1, x.shape[-1])
    if takes(rows, weight):
        y = fp8_linear(rows.contiguous(), weight, scale, bias)
    elif x.device.type == "cuda":
        y = scaled_linear(rows.contiguous(), weight, scale, bias)
    else:
        y = widened(rows, weight, scale)
        y = y if bias is None else y + bias
    return y.view(*x.shape[:-1], len(weight))


DECLARED = (
    Declared(
        "fp8_linear/round-rows",
        _round_rows_kernel,
        {
            "x": "*bf16:16",
            "out": "*u8:16",
            "scale": "*fp32:16",
            "columns": "i32:16",
            "x_stride": "i32:16",
        },
        {"LARGEST": LARGEST, "BLOCK": 4096},
        num_warps=8,
    ),
)
