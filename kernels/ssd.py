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

# Values of a state that a program has in registers: 32 of each thread.
TILE = 4096
NUM_WARPS = 4


def check_ssd(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    state: MixerState,
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
    state: MixerState,
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
    state: MixerState,
) -> torch.Tensor:
    """The definition: out [T, inner] of x's type; states are moved on in the arena."""
    return ssd_ref(x[:, :, None], dt, a, b[:, None], c[:, None], d, state)[:, :, 0]


@jit
def _ssd_kernel(
    x: tl.tensor,
    dt: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    c: tl.tensor,
    d: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    b_stride: tl.tensor,
    c_stride: tl.tensor,
    arena: tl.tensor,
    table: tl.tensor,
    read_chunk: tl.tensor,
    read_slot: tl.tensor,
    write_chunk: tl.tensor,
    write_slot: tl.tensor,
    starts: tl.tensor,
    fresh: tl.tensor,
    num_chunks: tl.tensor,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARED_BY: tl.constexpr,
    OF_GROUP: tl.constexpr,
    PIECE_CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    PIECE_UNITS: tl.constexpr,
    UNIT: tl.constexpr,
    SELECTIVE: tl.constexpr,
    SKIPS: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (b, h, r): BLOCK of the DIM channels of head h of row r; a scan has one head of all.

    WIDTH: channels of all heads; SHARED_BY: how many neighbours share a dt, an A and a D.
    """
    row = tl.program_id(2)
    of_head = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel, n = tl.program_id(1) * DIM + of_head, tl.arange(0, SIZE_PAD)
    in_c, in_n = of_head < DIM, n < SIZE
    begin, end = tl.load(starts + row), tl.load(starts + row + 1)
    if begin < end:
        goes_on = in_c & (tl.load(fresh + row) == 0)
        piece, place = channel // PIECE_CHANNELS, channel % PIECE_CHANNELS * SIZE
        source = place + state_at(
            table, read_chunk, read_slot, row, piece, goes_on, num_chunks, PIECE_UNITS, UNIT
        )
        target = place + state_at(
            table, write_chunk, write_slot, row, piece, in_c, num_chunks, PIECE_UNITS, UNIT
        )
        inside = in_c[:, None] & in_n[None, :]
        state_in = arena + source[:, None] + n[None, :]
        state = tl.load(state_in, mask=goes_on[:, None] & in_n[None, :], other=0.0)
        share = channel // SHARED_BY
        if SELECTIVE:
            rate = tl.load(a + share[:, None] * SIZE + n[None, :], mask=inside, other=0.0)
        else:
            rate = tl.load(a + share, mask=in_c, other=0.0)[:, None]
        group = tl.program_id(1) // OF_GROUP * SIZE
        for token in range(begin, end):
            value = tl.load(x + token * x_stride + channel, mask=in_c, other=0.0).to(tl.float32)
            step = tl.load(dt + token * (WIDTH // SHARED_BY) + share, mask=in_c, other=0.0)
            b_in = tl.load(b + token * b_stride + group + n, mask=in_n, other=0.0).to(tl.float32)
            c_out = tl.load(c + token * c_stride + group + n, mask=in_n, other=0.0).to(tl.float32)
            state = state * tl.exp(step[:, None] * rate) + (step * value)[:, None] * b_in[None, :]
            y = tl.sum(state * c_out[None, :], 1)
            if SKIPS:
                y += tl.load(d + share, mask=in_c, other=0.0) * value
            tl.store(out + token * WIDTH + channel, y.to(out.dtype.element_ty), mask=in_c)
        # The slot may be the one that other threads of this program still read.
        tl.debug_barrier()
        tl.store(arena + target[:, None] + n[None, :], state, mask=inside)


def _constants(geometry: StateGeometry, groups: int, skips: bool) -> dict[str, Any]:
    heads, *dims, size = geometry.shape
    selective = not dims
    dim = heads if selective else dims[0]
    size_pad = next_power_of_2(size)
    return {
        "DIM": dim,
        "WIDTH": heads if selective else heads * dim,
        "SHARED_BY": 1 if selective else dim,
        "OF_GROUP": 1 if selective else heads // groups,
        "PIECE_CHANNELS": geometry.piece_shape[0] * (1 if selective else dim),
        "SIZE": size,
        "SELECTIVE": selective,
        "SKIPS": skips,
        "SIZE_PAD": size_pad,
        "BLOCK": min(next_power_of_2(dim), max(1, TILE // size_pad)),
        **state_constants(geometry),
    }


def ssd(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    state: MixerState,
) -> torch.Tensor:
    """`ssd_ref` by the kernel."""
    check_ssd(x, dt, a, b, c, d, state)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(x):
        constants = _constants(state.geometry, b.shape[1], d is not None)
        heads = constants["WIDTH"] // constants["DIM"]
        a = a.float().contiguous()
        _ssd_kernel[(cdiv(constants["DIM"], constants["BLOCK"]), heads, state.num_rows)](
            x,
            dt.float().contiguous(),
            a,
            b,
            c,
            a if d is None else d.float().contiguous(),
            out,
            x.stride(0),
            b.stride(0),
            c.stride(0),
            *state_arguments(state),
            **constants,
            num_warps=NUM_WARPS,
        )
    return out


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    state: MixerState,
) -> torch.Tensor:
    """`selective_scan_ref` by the kernel."""
    return ssd(x[:, :, None], dt, a, b[:, None], c[:, None], d, state)[:, :, 0]


def _declare(name: str, shape: tuple[int, ...]) -> Declared:
    return Declared(
        f"ssd/{name}",
        _ssd_kernel,
        dict.fromkeys(("x", "b", "c", "out"), "*bf16:16")
        | dict.fromkeys(("dt", "a", "d", "arena"), "*fp32:16")
        | dict.fromkeys(("x_stride", "b_stride", "c_stride"), "i32:16")
        | STATE_TYPES,
        _constants(StateGeometry(shape, torch.float32, 1, 1 << 14), 1, True),
        NUM_WARPS,
    )


DECLARED = (_declare("mamba2", (128, 64, 128)), _declare("mamba", (8192, 16)))
