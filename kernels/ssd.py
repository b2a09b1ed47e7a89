"""State space models over each row of a step: Mamba-2's heads, Mamba-1's selective scan.

`ssd` (mamba2, bamba, granitemoehybrid, nemotron_h, falcon_h1, zamba2):

    x [T, heads, p]    dt [T, heads]    A, D [heads]    B, C [T, groups, n]    out [T, heads, p]
    state h [heads, p, n] float32, zeros at a sequence's beginning
    h <- e^(dt A) h + dt x B^T;   out = h C + D x         head i has group i // (heads / groups)

`selective_scan` (mamba, falcon_mamba, jamba): a head is a channel, and A is a row:

    x, dt [T, inner]    A [inner, n]    D [inner]    B, C [T, n]    out [T, inner]
    state h [inner, n] float32;   h <- e^(dt A) h + dt x B;   out = h C + D x

dt is what comes behind its bias, the softplus and the limits; A is negative; D may be missing; a
gate is the caller's. Float32 inside, whatever x, B and C are.

Bytes moved by a decode step: the state once in and once out.
"""

from typing import Any

import torch

from kernels.delta_rule import MAX_DIM, check_heads
from kernels.state_rows import LayerState, advance_ref
from kernels.triton_api import Declared, cdiv, jit, next_power_of_2, tl


def check_ssd(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    state: LayerState,
) -> None:
    """Raises ValueError for shapes and types that do not fit. Of a scan: as heads of one value."""
    (num_tokens, heads, dim), (_, groups, size) = x.shape, b.shape
    state.check((heads, size) if a.dim() == 2 else (heads, dim, size), torch.float32)
    if b.shape != c.shape or len(b) != num_tokens or heads % groups or size > MAX_DIM:
        raise ValueError(f"x {list(x.shape)}, B {list(b.shape)}, C {list(c.shape)}")
    if dt.shape != x.shape[:2] or a.shape[0] != heads or (d is not None and d.shape != (heads,)):
        raise ValueError(f"dt {list(dt.shape)}, A {list(a.shape)} for x {list(x.shape)}")
    if a.dim() == 2 and (dim, groups) != (1, 1):
        raise ValueError("a scan has heads of one value, and one B and C for all")
    if not x.dtype == b.dtype == c.dtype:
        raise ValueError("x, B and C have one type")
    check_heads(x, b, c)


def ssd_ref(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    state: LayerState,
) -> torch.Tensor:
    """The definition: out [T, heads, p] of x's type; states are moved on in the arena."""
    check_ssd(x, dt, a, b, c, d, state)
    times = x.shape[1] // b.shape[1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    skip = 0.0 if d is None else d.float()[:, None]

    def step(states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        kept = states.view(len(tokens), x.shape[1], x.shape[2], -1)
        wide, by = x[tokens].float(), dt[tokens].float()
        b_in, c_out = (s[tokens].float().repeat_interleave(times, 1) for s in (b, c))
        a_row = a.float().view(len(a), 1, -1)
        kept = kept * (by[..., None, None] * a_row).exp()
        kept = kept + (by[..., None] * wide)[..., None] * b_in[:, :, None]
        y = (kept * c_out[:, :, None]).sum(-1) + skip * wide
        out[tokens] = y.to(x.dtype)
        return kept.view(states.shape)

    advance_ref(state, step)
    return out


def selective_scan_ref(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    state: LayerState,
) -> torch.Tensor:
    """The definition: out [T, inner] of x's type; states are moved on in the arena."""
    return ssd_ref(x[:, :, None], dt, a, b[:, None], c[:, None], d, state)[:, :, 0]
