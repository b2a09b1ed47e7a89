"""y = x W^T + b with W kept as int8 and one scale for each output channel.

    x       [..., k]  bfloat16, float16 or float32
    weight  [n, k]    int8; what it stands for is weight[n, k] * scale[n]
    scale   [n]       x's dtype
    bias    [n]       x's dtype, or None
    y       [..., n]  x's dtype:  y = (x weight^T) * scale + bias

The scale is common to a whole output channel, so it is applied once to the sum and not to each
weight; an int8 value is exact in each of these dtypes.

At few rows a product reads each weight once and does little with it, so its time is its bytes: n k
instead of 2 n k. `torch._weight_int8pack_mm` reads int8 and multiplies in registers. At many rows
that kernel is slower than a bfloat16 product, and a block of the weight is widened into a buffer
that stays in the core's cache and multiplied from there: memory is still read once, as int8.
"""

import torch
import torch.nn.functional as F

# Above as many rows the widened product is faster (bench/results/cpu-int8.json).
MAX_DIRECT_ROWS = 8
# The library's kernel steps through k by 16 and reads over the end where something is left.
DIRECT_STEP = 32
# One block of widened weight: it should stay in the processor's cache.
BLOCK_BYTES = 2 << 20


def int8_linear_ref(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The definition, in float32, rounded once."""
    wide = weight.to(torch.float32) * scale.to(torch.float32)[:, None]
    return F.linear(x.to(torch.float32), wide, None if bias is None else bias.to(torch.float32)).to(
        x.dtype
    )


def int8_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The same, by whichever way is fast for this many rows on this device."""
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) <= MAX_DIRECT_ROWS and _has_direct(rows, weight):
        out = torch._weight_int8pack_mm(rows.contiguous(), weight, scale)
    else:
        out = widened(rows, weight, scale)
    if bias is not None:
        out = out + bias
    return out.reshape(*x.shape[:-1], weight.shape[0])


def widened(rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[m, k] to [m, n], a block of output channels at a time."""
    out = rows.new_empty(len(rows), weight.shape[0])
    wide = rows.to(product_dtype(rows))
    step = max(1, BLOCK_BYTES // (weight.shape[1] * wide.element_size()))
    for start in range(0, weight.shape[0], step):
        block = slice(start, start + step)
        out[:, block] = F.linear(wide, weight[block].to(wide.dtype)) * scale[block]
    return out


def product_dtype(rows: torch.Tensor) -> torch.dtype:
    """Processors without bfloat16 instructions multiply it ten times slower than float32."""
    if rows.device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.float32
    return rows.dtype


def _has_direct(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        rows.device.type == "cpu"
        and rows.dtype in (torch.bfloat16, torch.float32)
        and weight.shape[1] % DIRECT_STEP == 0
        and weight.is_contiguous()
        and len(rows) > 0
    )
