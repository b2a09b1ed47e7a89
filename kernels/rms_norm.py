"""RMSNorm, with the residual stream added on the way: h = residual + m x, y = norm(h) w.

    x         [T, d]  what the branch before gave; m is granite's residual multiplier, 1 elsewhere
    residual  [T, d]  the stream, or None at the first layer of a model (h = x then)
    weight    [d]     or None (Olmo's norm has none)
    h         [T, d]  the new stream, rounded to the dtype of x: what the norm is taken of
    y         [T, d]  h / sqrt(mean(h^2) + eps) w                              Llama and its kin
                      h / sqrt(mean(h^2) + eps) (1 + w)                        Gemma: `unit_offset`
                      (h - mean(h)) / sqrt(var(h) + eps) w                     Olmo: `center`

Sums are float32. Llama's modules round the normed value to the dtype of x before they multiply by
the weight, Gemma's multiply in float32; in half precision we round once, at the end, for both.

Bytes moved: T d (read x, residual; write h, y) = 4 T d elements, against 8 T d for an addition and
a norm of separate operators in float32 steps. `rms_norm` alone moves 2 T d.

A row is one program: it is read once and stays in registers.
"""

import torch

from kernels.triton_api import Declared, check_out, check_rows, jit, next_power_of_2, tl

# A row has to stay in the registers of one block.
MAX_COLUMNS = 32768


def rms_norm_ref(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
    multiplier: float = 1.0,
    unit_offset: bool = False,
    center: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition: (y, h) in the dtype of x; h is x where there is no residual."""
    h = x
    if residual is not None:
        h = (residual.float() + multiplier * x.float()).to(x.dtype)
    wide = h.float()
    if center:
        wide = wide - wide.mean(-1, keepdim=True)
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * (weight.float() + 1.0 if unit_offset else weight.float())
    return y.to(x.dtype), h


@jit
def _rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    y: tl.tensor,
    h: tl.tensor,
    columns: tl.tensor,
    x_stride: tl.tensor,
    multiplier: tl.tensor,
    eps: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    CENTER: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        stream = tl.load(residual + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        # The stream is kept rounded, and the norm is of what is kept.
        rounded = (stream + multiplier * value).to(h.dtype.element_ty)
        tl.store(h + row * columns + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    if CENTER:
        mean = tl.sum(value, 0) / columns
        value = tl.where(inside, value - mean, 0.0)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / columns + eps)
    if HAS_WEIGHT:
        factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        if UNIT_OFFSET:
            factor += 1.0
        value = value * factor
    tl.store(y + row * columns + column, value.to(y.dtype.element_ty), mask=inside)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
    multiplier: float = 1.0,
    unit_offset: bool = False,
    center: bool = False,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm_ref` by the kernel. x [..., d] with rows one stride apart; `out`: y and h.

    `out[1]` may be `residual` itself: a row is read before it is written.
    """
    columns = x.shape[-1]
    if columns > MAX_COLUMNS:
        raise ValueError(f"rows of {columns}, more than {MAX_COLUMNS}")
    rows = x.view(-1, columns)
    if residual is not None and not residual.is_contiguous():
        raise ValueError("the residual stream has to be contiguous")
    y, h = out or (
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
        x if residual is None else torch.empty_like(residual),
    )
    check_rows(rows)
    check_out(y, h if residual is not None else y)
    if len(rows):
        block = next_power_of_2(columns)
        _rms_norm_kernel[(len(rows),)](
            rows,
            residual,
            weight,
            y,
            h,
            columns,
            rows.stride(0),
            multiplier,
            eps,
            HAS_RESIDUAL=residual is not None,
            HAS_WEIGHT=weight is not None,
            UNIT_OFFSET=unit_offset,
            CENTER=center,
            BLOCK=block,
            num_warps=num_warps_for(block),
        )
    return y, h


def num_warps_for(block: int) -> int:
    """16 elements a thread, between one warp and 16."""
    return max(1, min(16, block // 512))


def _declared(name: str, block: int, residual: bool, **special: bool) -> Declared:
    pointers = {
        "x": "*bf16:16",
        "residual": "*bf16:16",
        "weight": "*bf16:16",
        "y": "*bf16:16",
        "h": "*bf16:16",
    }
    flags = {"UNIT_OFFSET": False, "CENTER": False, **special}
    numbers = {"columns": "i32:16", "x_stride": "i32:16", "multiplier": "fp32", "eps": "fp32"}
    return Declared(
        f"rms_norm/{name}",
        _rms_norm_kernel,
        pointers | numbers,
        {"HAS_RESIDUAL": residual, "HAS_WEIGHT": True, "BLOCK": block, **flags},
        num_warps=num_warps_for(block),
    )


DECLARED = (
    _declared("residual", 4096, residual=True),
    _declared("wide-gemma", 16384, residual=True, UNIT_OFFSET=True),
)
