"""Mixtures' experts as layers have them, few tokens and many: cases of bench/kernels.py.

Each token's experts are drawn alike. Bytes are the weights of those that were hit, read once, and x
and y; operations are those of every pair of a token and an expert. Peers: a loop over the experts,
which waits for the device, and torch's grouped product over pairs sorted by torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from bench.kernel_cases import Case, Prepared, Rig
from kernels.expert_mlp import ExpertStack, expert_mlp_ref
from kernels.expert_products import expert_mlp


@dataclass(frozen=True, slots=True)
class Mixture:
    """h, i, E and k of a layer; `is_gpt_oss`: its gate, biases and turned weights."""

    name: str
    size: int
    inner: int
    num_experts: int
    top_k: int
    is_gpt_oss: bool = False


MIXTURES = (
    Mixture("30B-A3B", 2048, 768, 128, 8),
    Mixture("Mixtral", 4096, 14336, 8, 2),
    Mixture("gpt-oss-20b", 2880, 2880, 32, 4, is_gpt_oss=True),
)
TOKENS = (1, 64, 256, 2048)


def stack_of(mixture: Mixture, rig: Rig) -> ExpertStack:
    """Random weights, of values that keep results near one."""
    experts, size, inner = mixture.num_experts, mixture.size, mixture.inner
    up = rig.randn(experts, 2 * inner, size).mul_(size**-0.5)
    down = rig.randn(experts, size, inner).mul_(inner**-0.5)
    if not mixture.is_gpt_oss:
        return ExpertStack(up, down)
    how: dict[str, Any] = {"transposed": True, "interleaved": True}
    return ExpertStack(
        up.view(experts, size, 2 * inner),
        down.view(experts, inner, size),
        gate_up_bias=rig.randn(experts, 2 * inner),
        down_bias=rig.randn(experts, size),
        limit=7.0,
        alpha=1.702,
        plus=1.0,
        **how,
    )


def _exact(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, stack: ExpertStack
) -> torch.Tensor:
    """In float64, an expert at a time, nothing rounded on the way."""
    y = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in range(stack.num_experts):
        token, choice = torch.where(ids == expert)
        one = ExpertStack(
            stack.gate_up[expert, None].double(),
            stack.down[expert, None].double(),
            gate_up_bias=_double(stack.gate_up_bias, expert),
            down_bias=_double(stack.down_bias, expert),
            transposed=stack.transposed,
            interleaved=stack.interleaved,
            limit=stack.limit,
            alpha=stack.alpha,
            plus=stack.plus,
        )
        y.index_add_(0, token, weights[token, choice, None].double() * _one(x[token].double(), one))
    return y


def _double(values: torch.Tensor | None, expert: int) -> torch.Tensor | None:
    return None if values is None else values[expert, None].double()


def _one(x: torch.Tensor, stack: ExpertStack) -> torch.Tensor:
    """All rows by the only expert, in the dtype of x, by plain operators."""
    up, down = (w[0].t() if stack.transposed else w[0] for w in (stack.gate_up, stack.down))
    wide = functional.linear(x, up, None if stack.gate_up_bias is None else stack.gate_up_bias[0])
    inner = _gated(wide, stack)
    return functional.linear(inner, down, None if stack.down_bias is None else stack.down_bias[0])


def _gated(wide: torch.Tensor, stack: ExpertStack) -> torch.Tensor:
    gate, up = (wide[:, ::2], wide[:, 1::2]) if stack.interleaved else wide.chunk(2, -1)
    if stack.limit is None:
        return functional.silu(gate) * up
    gate, up = gate.clamp(max=stack.limit), up.clamp(-stack.limit, stack.limit) + stack.plus
    return gate * torch.sigmoid(stack.alpha * gate) * up


def _grouped(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, stack: ExpertStack
) -> torch.Tensor:
    """As transformers does it: sorted by torch, two grouped products, back to the tokens' order."""
    top_k = ids.shape[1]
    chosen, order = torch.sort(ids.flatten())
    counts = torch.histc(chosen.int(), bins=stack.num_experts, min=0, max=stack.num_experts - 1)
    ends = counts.cumsum(0, dtype=torch.int32)
    up, down = (w if stack.transposed else w.transpose(1, 2) for w in (stack.gate_up, stack.down))
    grouped: Any = getattr(functional, "grouped_mm", None) or torch._grouped_mm
    wide = grouped(x[order // top_k], up, offs=ends)
    if stack.gate_up_bias is not None:
        wide = wide + stack.gate_up_bias[chosen]
    told = grouped(_gated(wide, stack), down, offs=ends)
    if stack.down_bias is not None:
        told = told + stack.down_bias[chosen]
    told = told * weights.flatten()[order, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    found: torch.Tensor = told[back].view(len(x), top_k, -1).sum(1)
    return found


def _experts(mixture: Mixture, tokens: int) -> Callable[[Rig, bool], Prepared]:
    def build(rig: Rig, tiny: bool) -> Prepared:
        full = mixture
        if tiny:
            full = Mixture("tiny", 32, 16, 4, 2, mixture.is_gpt_oss)
        rows = min(tokens, 3) if tiny else tokens
        stack = stack_of(full, rig)
        x = rig.randn(rows, full.size)
        scores, ids = rig.rand(rows, full.num_experts).topk(full.top_k, -1)
        weights = (scores / scores.sum(-1, keepdim=True)).to(rig.dtype)
        given = (x, ids, weights, stack)
        num_hit, per_expert = len(set(ids.flatten().tolist())), 3 * full.size * full.inner
        return Prepared(
            lambda: expert_mlp(*given),
            lambda: (expert_mlp(*given),),
            lambda: (_exact(*given),),
            rig.tolerance,
            (num_hit * per_expert + 2 * x.numel()) * rig.dtype.itemsize,
            2 * ids.numel() * per_expert,
            {"loop": lambda: expert_mlp_ref(*given)},
            {"torch grouped_mm": lambda: _grouped(*given)},
            waiting=frozenset({"loop"}),
        )

    return build


CASES = tuple(
    Case(
        f"experts {mixture.name} tokens={tokens}",
        "flops" if tokens > 256 else "bytes",
        _experts(mixture, tokens),
    )
    for mixture in MIXTURES
    for tokens in TOKENS
)
