"""Experts that take rows scaled by the router's scores: Llama 4's block, behind our experts.

The library's block repeats all rows for every expert, each times its score, which is 0 where an
expert was not chosen, and multiplies them all: as many products as experts, and the module is not
behind transformers' experts interface. The maths, with S(t) the experts chosen for token t:

    out(t) = shared(x_t) + sum over e in S(t) of expert_e(score_te * x_t)

so here only the pairs (t, e) that were chosen are rows of `experts_forward`, each with weight 1.

    mark_experts(model)     gives such experts the flags of the interface, so that they are rounded,
                            packed and recognized as all stacked experts are; their own forward
                            stays as it is
    replace_blocks(model)   their blocks compute by `experts_forward` from now on

A block is known by its parts: a router with `top_k` that is one product, stacked weights
`gate_up_proj` [E, H, 2 I] and `down_proj` [E, I, H] without biases, and a shared expert.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import _default_apply_gate

from engine.modules.experts import experts_forward, is_experts

MOST_PADDING = 2
"""Padded rows for one of a token, at most, where they are more than a few."""
FEW_ROWS = 8
_PARTS = {"router", "experts", "shared_expert"}
_STACK = {"gate_up_proj", "down_proj"}
_FLAGS = {
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_transposed": True,
    "is_concatenated": True,
    "_is_expert_parallel": False,
    "_apply_gate": _default_apply_gate,
}


def mark_experts(model: nn.Module) -> None:
    """Of all blocks of the model. Idempotent."""
    for block in model.modules():
        if _is_block(block):
            experts: Any = block.experts
            if not is_experts(experts):
                kind = type(experts)
                experts.__class__ = type(kind.__name__, (kind,), dict(_FLAGS))


def replace_blocks(model: nn.Module) -> None:
    """Of all blocks of the model, whose experts are marked."""
    for block in model.modules():
        if _is_block(block):
            block.forward = partial(block_forward, block)


def block_forward(block: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [..., H] to [T, H], and what the router has put out."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    scores, logits = block.router(rows)
    # Of experts that were not chosen the score is 0.
    chosen, index = scores.topk(block.router.top_k, dim=-1)
    scaled = (rows[:, None] * chosen[..., None]).reshape(-1, rows.shape[-1])
    index = index.reshape(-1)
    said = _side_by_side(block.experts, scaled, index)
    if said is None:
        ones = torch.ones(len(index), 1, dtype=rows.dtype, device=rows.device)
        said = experts_forward(block.experts, scaled, index[:, None], ones)
    routed = said.view(len(rows), -1, rows.shape[-1]).sum(1)
    return block.shared_expert(rows) + routed, logits


def _side_by_side(experts: Any, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor | None:
    """All experts in one batched product on a processor, each with as many rows as the one that
    has most; rows [P, H] and index [P] to [P, H].

    Products of a few rows by weights that lie this way round take five times as long one after the
    other (16 experts of 10 MiB: 320 ms by grouped_mm, 60 in one). None: not here, or not worth it,
    because few experts have rows, or one has far more than the others.
    """
    up, down = experts.gate_up_proj, experts.down_proj
    if rows.device.type != "cpu" or up.dtype != rows.dtype or len(rows) < len(up) // 4:
        return None
    counts = torch.bincount(index, minlength=len(up))
    most = int(counts.max())
    if most * len(up) > MOST_PADDING * len(rows) and most > FEW_ROWS:
        return None
    order = index.argsort(stable=True)
    owner = index[order]
    place = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[owner]
    padded = rows.new_zeros(len(up), most, rows.shape[-1])
    padded[owner, place] = rows[order]
    out = torch.bmm(experts._apply_gate(torch.bmm(padded, up)), down)
    said = torch.empty_like(rows)
    said[order] = out[owner, place]
    return said


def _is_block(module: Any) -> bool:
    if {name for name, _ in module.named_children()} != _PARTS:
        return False
    router, experts = module.router, module.experts
    if not isinstance(router, nn.Linear) or not hasattr(router, "top_k"):
        return False
    stack = dict(experts.named_parameters(recurse=False))
    if set(stack) != _STACK or not hasattr(experts, "act_fn"):
        return False
    up, down = tuple(stack["gate_up_proj"].shape), tuple(stack["down_proj"].shape)
    return len(down) == 3 and up == (down[0], down[2], 2 * down[1])
