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

from kernels.mixer_state import (
    STATE_TYPES,
    MixerState,
    advance_ref,
    state_arguments,
    state_at,
    state_constants,
)
from kernels.state_rows import StateGeometry
from kernels.triton_api import Declared, cdiv, jit, next_power_of_2, tl

# Of a key or a value: the C++ kernel has work space for it.
MAX_DIM = 512
EPS = 1e-6
# Columns of a head's state that a program has: 128 x 32 are 32 registers of a thread.
COLUMN_BLOCK = 32
NUM_WARPS = 4


def check_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: MixerState,
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
    state: MixerState,
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


@jit
def _delta_rule_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    g: tl.tensor,
    beta: tl.tensor,
    out: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    scale: tl.tensor,
    arena: tl.tensor,
    table: tl.tensor,
    read_chunk: tl.tensor,
    read_slot: tl.tensor,
    write_chunk: tl.tensor,
    write_slot: tl.tensor,
    starts: tl.tensor,
    fresh: tl.tensor,
    num_chunks: tl.tensor,
    V_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    PIECE_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    PIECE_UNITS: tl.constexpr,
    UNIT: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    EPS: tl.constexpr,
    K_PAD: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Program (b, h, r): COLUMNS columns of value head h of row r, in registers all the while."""
    head, row = tl.program_id(1), tl.program_id(2)
    i = tl.arange(0, K_PAD)
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_k, in_v = i < K_DIM, j < V_DIM
    begin, end = tl.load(starts + row), tl.load(starts + row + 1)
    if begin < end:
        goes_on = tl.load(fresh + row) == 0
        piece = head // PIECE_HEADS
        source = state_at(
            table, read_chunk, read_slot, row, piece, goes_on, num_chunks, PIECE_UNITS, UNIT
        )
        target = state_at(
            table, write_chunk, write_slot, row, piece, True, num_chunks, PIECE_UNITS, UNIT
        )
        place = head % PIECE_HEADS * K_DIM * V_DIM + i[:, None] * V_DIM + j[None, :]
        inside = in_k[:, None] & in_v[None, :]
        state = tl.load(arena + source + place, mask=inside & goes_on, other=0.0)
        k_head = head // GROUPS
        for token in range(begin, end):
            q_at = q + token * q_stride + k_head * K_DIM + i
            query = tl.load(q_at, mask=in_k, other=0.0).to(tl.float32)
            query = query * (scale * tl.rsqrt(tl.sum(query * query, 0) + EPS))
            k_at = k + token * k_stride + k_head * K_DIM + i
            key = tl.load(k_at, mask=in_k, other=0.0).to(tl.float32)
            key = key * tl.rsqrt(tl.sum(key * key, 0) + EPS)
            at = token * V_HEADS + head
            if PER_CHANNEL:
                state *= tl.exp(tl.load(g + at * K_DIM + i, mask=in_k, other=0.0))[:, None]
            else:
                state *= tl.exp(tl.load(g + at))
            v_at = v + token * v_stride + head * V_DIM + j
            value = tl.load(v_at, mask=in_v, other=0.0).to(tl.float32)
            recalled = tl.sum(state * key[:, None], 0)
            delta = (value - recalled) * tl.load(beta + at)
            state += key[:, None] * delta[None, :]
            y = tl.sum(state * query[:, None], 0)
            tl.store(out + at * V_DIM + j, y.to(out.dtype.element_ty), mask=in_v)
        # The slot may be the one that other threads of this program still read.
        tl.debug_barrier()
        tl.store(arena + target + place, state, mask=inside)


def _constants(geometry: StateGeometry, k_heads: int, per_channel: bool) -> dict[str, Any]:
    v_heads, k_dim, v_dim = geometry.shape
    return {
        "V_HEADS": v_heads,
        "GROUPS": v_heads // k_heads,
        "PIECE_HEADS": geometry.piece_shape[0],
        "K_DIM": k_dim,
        "V_DIM": v_dim,
        "PER_CHANNEL": per_channel,
        "EPS": EPS,
        "K_PAD": next_power_of_2(k_dim),
        "COLUMNS": min(COLUMN_BLOCK, next_power_of_2(v_dim)),
        **state_constants(geometry),
    }


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: MixerState,
) -> torch.Tensor:
    """`delta_rule_ref` by the kernel."""
    check_delta(q, k, v, g, beta, state)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if len(v):
        constants = _constants(state.geometry, k.shape[1], g.dim() == 3)
        blocks = cdiv(v.shape[2], constants["COLUMNS"])
        _delta_rule_kernel[(blocks, v.shape[1], state.num_rows)](
            q,
            k,
            v,
            g.float().contiguous(),
            beta.float().contiguous(),
            out,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            k.shape[2] ** -0.5,
            *state_arguments(state),
            **constants,
            num_warps=NUM_WARPS,
        )
    return out


def _declare(name: str, k_heads: int, v_heads: int, per_channel: bool) -> Declared:
    return Declared(
        f"delta_rule/{name}",
        _delta_rule_kernel,
        dict.fromkeys(("q", "k", "v", "out"), "*bf16:16")
        | dict.fromkeys(("g", "beta", "arena"), "*fp32:16")
        | dict.fromkeys(("q_stride", "k_stride", "v_stride"), "i32:16")
        | {"scale": "fp32", **STATE_TYPES},
        _constants(
            StateGeometry((v_heads, 128, 128), torch.float32, 1, 1 << 16), k_heads, per_channel
        ),
        NUM_WARPS,
    )


DECLARED = (_declare("qwen3-next", 16, 32, False), _declare("kimi", 32, 32, True))
