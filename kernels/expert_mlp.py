"""A mixture's experts: each token's chosen ones, as gated MLPs over weights stacked in one tensor.

    x        [T, h]        bfloat16, float16 or float32
    ids      [T, k]        the experts of each token, on the device; outside of [0, E): none
    weights  [T, k]        any float type
    gate_up  [E, 2 i, h]   or [E, h, 2 i] (`transposed`); the dtype of x, or int8 with scales
    down     [E, h, i]     or [E, i, h]
    y        [T, h]

    y[t] = sum over c of weights[t, c] down_e(act(gate_e(x[t])) up_e(x[t])),   e = ids[t, c]

Gate and up lie behind one another (i rows each), or are neighbours (`interleaved`). The gate is an
activation as in kernels/gate_mul.py, or with a `limit` gpt-oss's:

    g = min(gate, limit);  u = clamp(up, -limit, limit);  (u + plus) g / (1 + exp(-alpha g))

Rounded to the dtype of x where separate operations write to memory: gate, up, the gated product,
each expert's result. The weighted sum is float32, in the order of a token's choices, and rounded
once. So the same input gives the same bits every time.

Two ways by kernels, which read ids on the device and are launched by shapes alone, so that a graph
can record them: `expert_rows.py` for few pairs, one product of one row each, and
`expert_products.py` for many, sorted by expert. This file has what both share and the definition.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.gate_mul import Activation, activated
from kernels.triton_api import check_rows, jit, tl


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """The experts of one layer. Biases [E, 2 i] and [E, h], or None; scales, of int8 rows, too.

    limit: where gate and up are cut, with `alpha` and `plus` as above; None: `activation`.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    activation: Activation = "silu"
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    gate_up_scale: torch.Tensor | None = None
    down_scale: torch.Tensor | None = None
    transposed: bool = False
    interleaved: bool = False
    limit: float | None = None
    alpha: float = 1.0
    plus: float = 0.0

    @property
    def num_experts(self) -> int:
        """E."""
        return len(self.down)

    @property
    def size(self) -> int:
        """h."""
        return self.down.shape[2 if self.transposed else 1]

    @property
    def inner(self) -> int:
        """i."""
        return self.down.shape[1 if self.transposed else 2]


def check_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, stack: ExpertStack
) -> None:
    """Raises ValueError for what no kernel takes: they look at nothing."""
    up = (2 * stack.inner, stack.size)
    wanted = (stack.num_experts, *(reversed(up) if stack.transposed else up))
    if stack.gate_up.shape != wanted or x.dim() != 2 or x.shape[1] != stack.size:
        raise ValueError(f"experts of {list(stack.gate_up.shape)} for rows of {list(x.shape)}")
    if ids.dim() != 2 or len(ids) != len(x) or ids.shape != weights.shape:
        raise ValueError(f"{list(ids.shape)} choices, {list(weights.shape)} weights")
    if not (ids.is_contiguous() and weights.is_contiguous()) or ids.is_floating_point():
        raise ValueError("choices are whole numbers, and they and their weights lie together")
    for weight, scale, bias in (
        (stack.gate_up, stack.gate_up_scale, stack.gate_up_bias),
        (stack.down, stack.down_scale, stack.down_bias),
    ):
        kept = x.dtype if scale is None else torch.int8
        if weight.dtype != kept or not weight.is_contiguous():
            raise ValueError(f"experts are {kept} and lie together, not {weight.dtype}")
        rows = weight.shape[2 if stack.transposed else 1]
        for values in (scale, bias):
            if values is not None and (
                values.shape != (stack.num_experts, rows) or not values.is_contiguous()
            ):
                raise ValueError(f"{list(values.shape)} values for {rows} rows of each expert")
    check_rows(x)


def expert_mlp_ref(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, stack: ExpertStack
) -> torch.Tensor:
    """The definition, an expert at a time, by separate operations. Waits for the device."""
    told = torch.zeros(*ids.shape, stack.size, dtype=x.dtype, device=x.device)
    for expert in sorted(set(ids.flatten().tolist())):
        if not 0 <= expert < stack.num_experts:
            continue
        token, choice = torch.where(ids == expert)
        wide = _linear_ref(
            x[token], stack.gate_up, stack.gate_up_scale, stack.gate_up_bias, expert, stack
        )
        inner = _gated_ref(wide, stack)
        told[token, choice] = _linear_ref(
            inner, stack.down, stack.down_scale, stack.down_bias, expert, stack
        )
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    known = (ids >= 0) & (ids < stack.num_experts)
    for place in range(ids.shape[1]):
        part = weights[:, place, None].float() * told[:, place].float()
        y += torch.where(known[:, place, None], part, 0.0)
    return y.to(x.dtype)


def _linear_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    expert: int,
    stack: ExpertStack,
) -> torch.Tensor:
    own = weight[expert].t() if stack.transposed else weight[expert]
    if scale is None:
        return functional.linear(x, own, None if bias is None else bias[expert])
    y = (x.float() @ own.float().t()) * scale[expert].float()
    return (y if bias is None else y + bias[expert].float()).to(x.dtype)


def _gated_ref(wide: torch.Tensor, stack: ExpertStack) -> torch.Tensor:
    rows = wide.float()
    gate, up = (rows[:, ::2], rows[:, 1::2]) if stack.interleaved else rows.chunk(2, -1)
    if stack.limit is not None:
        gate, up = gate.clamp(max=stack.limit), up.clamp(-stack.limit, stack.limit) + stack.plus
        gate = gate * torch.sigmoid(stack.alpha * gate)
    elif stack.activation == "silu":
        gate = functional.silu(gate)
    else:
        approximate = "tanh" if stack.activation == "gelu_tanh" else "none"
        gate = functional.gelu(gate, approximate=approximate)
    return (gate * up).to(wide.dtype)


@jit
def weight_rows(
    block: tl.tensor,
    n: tl.tensor,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """The rows of a weight that a program has, and which there are; `n`: results.

    With a gate they are rows of gate and of up in turn, however these lie: neighbours in a tile's
    columns are in one thread's registers, where the gate wants them.
    """
    column = tl.arange(0, COLUMNS)
    row = block * COLUMNS + column
    real = row < n
    if GATED:
        if INTERLEAVED:
            real = row < 2 * n
        else:
            row = block * (COLUMNS // 2) + column // 2
            real = row < n
            row += (column % 2) * n
    return row, real


@jit
def gated(
    gate: tl.tensor,
    up: tl.tensor,
    limit: tl.tensor,
    alpha: tl.tensor,
    plus: tl.tensor,
    ACTIVATION: tl.constexpr,
    CLAMPED: tl.constexpr,
) -> tl.tensor:
    """The gated product, in float32, of rounded values."""
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + plus
        gate = gate / (1.0 + tl.exp(tl.minimum(-alpha * gate, 80.0)))
    else:
        gate = activated(gate, ACTIVATION)
    return gate * up
