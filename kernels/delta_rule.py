"""The gated delta rule over each row of a step (Qwen3-Next, Qwen3.5, Olmo Hybrid; Kimi's KDA).

    q, k [T, k heads, dk]    v [T, v heads, dv]    g, beta [T, v heads]    out [T, v heads, dv]
    state S [v heads, dk, dv] float32, zeros at a sequence's beginning

    q <- q / sqrt(|q|^2 + 1e-6) / sqrt(dk)      k <- k / sqrt(|k|^2 + 1e-6)
    S <- e^g S;   S <- S + k (beta (v - k^T S))^T;   out = q^T S

Value head h has key head h // (v heads / k heads). g is the logarithm of the decay; of KDA it is
[T, v heads, dk], one for each key channel. Float32 inside, whatever q, k and v are.

Bytes moved by a decode step: the state once in and once out, 128 KiB a head of 128 x 128; all else
is a hundredth of that. Chunks go token by token, too, with the state in the cache or in registers.
"""

from typing import Any

import torch

from kernels.state_rows import LayerState, advance_ref
from kernels.triton_api import Declared, cdiv, jit, next_power_of_2, tl

# Of a key or a value: the C++ kernel has work space for it.
MAX_DIM = 512
EPS = 1e-6


def check_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: LayerState,
) -> None:
    """Raises ValueError for shapes and types that do not fit."""
    (num_tokens, v_heads, v_dim), (_, k_heads, k_dim) = v.shape, k.shape
    state.check((v_heads, k_dim, v_dim), torch.float32)
    if q.shape != k.shape or len(k) != num_tokens or v_heads % k_heads:
        raise ValueError(f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}")
    if g.shape not in (v.shape[:2], (*v.shape[:2], k_dim)) or beta.shape != v.shape[:2]:
        raise ValueError(f"g {list(g.shape)}, beta {list(beta.shape)} for v {list(v.shape)}")
    if max(k_dim, v_dim) > MAX_DIM or not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"heads are at most {MAX_DIM}; q, k and v have one type")
    check_heads(q, k, v)


def check_heads(*tensors: torch.Tensor) -> None:
    """Raises ValueError where what belongs to a token [heads, dim] has gaps; tokens may have."""
    for tensor in tensors:
        if len(tensor) and not tensor[0].is_contiguous():
            raise ValueError("the heads of a token lie side by side")


def unit_length(x: torch.Tensor) -> torch.Tensor:
    """Of length one, float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + EPS)


def delta_rule_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: LayerState,
) -> torch.Tensor:
    """The definition: out [T, v heads, dv] of v's type; states are moved on in the arena."""
    check_delta(q, k, v, g, beta, state)
    groups = v.shape[1] // k.shape[1]
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    decay = g.float().exp().view(*v.shape[:2], -1, 1)

    def step(states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        query = unit_length(q[tokens]).repeat_interleave(groups, 1) * q.shape[-1] ** -0.5
        key = unit_length(k[tokens]).repeat_interleave(groups, 1)
        states = states * decay[tokens]
        recalled = (states * key[..., None]).sum(-2)
        delta = (v[tokens].float() - recalled) * beta[tokens, :, None].float()
        states = states + key[..., None] * delta[:, :, None]
        out[tokens] = (states * query[..., None]).sum(-2).to(v.dtype)
        return states

    advance_ref(state, step)
    return out
