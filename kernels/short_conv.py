"""Depthwise causal convolution of a few taps over each row of a step (Mamba, Qwen3-Next, LFM2).

    x [T, C], rows a stride apart    weight [C, K]    bias [C] or none    out [T, C]
    state [C, K]  the last K inputs of a sequence, oldest first; zeros before its beginning

    y[t, c] = act(bias[c] + sum over j of weight[c, j] x[t - K + 1 + j, c])      act: SiLU or none

One entry more is kept than the next token needs, as transformers keeps it. Float32 inside, rounded
once (the library rounds before the SiLU too). Bytes moved: x and y once, weight once, and the state
once in and once out for each row.
"""

from typing import Any

import torch
from torch.nn import functional

from kernels.mixer_state import (
    STATE_TYPES,
    MixerState,
    advance_ref,
    state_arguments,
    state_at,
    state_constants,
)
from kernels.state_rows import StateGeometry
from kernels.triton_api import Declared, cdiv, check_rows, jit, next_power_of_2, tl

# Taps that the C++ kernel has code for.
MAX_TAPS = 8
# Channels and tokens of a program's tile: a decode step has one token a row.
CHANNEL_BLOCK, TOKEN_BLOCK = 64, 16
NUM_WARPS = 4


def check_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: MixerState
) -> None:
    """Raises ValueError for shapes and types that do not fit."""
    channels, taps = weight.shape
    state.check((channels, taps), x.dtype)
    if x.shape[1] != channels or not 2 <= taps <= MAX_TAPS:
        raise ValueError(f"{x.shape[1]} channels for a weight {channels} x {taps}")
    if (
        not weight.is_contiguous()
        or weight.dtype != x.dtype
        or (bias is not None and bias.dtype != x.dtype)
    ):
        raise ValueError("x, weight and bias have one type, and the weight has no gaps")
    check_rows(x)


def short_conv_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
    state: MixerState,
) -> torch.Tensor:
    """The definition: out [T, C]; states are moved on in the arena."""
    check_conv(x, weight, bias, state)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)

    def step(states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        states = torch.cat([states[:, :, 1:], x[tokens, :, None]], -1)
        y = (states.float() * weight.float()).sum(-1)
        y = y if bias is None else y + bias.float()
        out[tokens] = (functional.silu(y) if silu else y).to(x.dtype)
        return states

    advance_ref(state, step)
    return out


@jit
def _short_conv_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    arena: tl.tensor,
    table: tl.tensor,
    read_chunk: tl.tensor,
    read_slot: tl.tensor,
    write_chunk: tl.tensor,
    write_slot: tl.tensor,
    starts: tl.tensor,
    fresh: tl.tensor,
    num_chunks: tl.tensor,
    CHANNELS: tl.constexpr,
    PIECE_CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    TAPS_PAD: tl.constexpr,
    PIECE_UNITS: tl.constexpr,
    UNIT: tl.constexpr,
    SILU: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    """Program (r, b): BLOCK channels of row r, TOKENS tokens at a time."""
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    begin, end = tl.load(starts + row), tl.load(starts + row + 1)
    if begin < end:
        goes_on = inside & (tl.load(fresh + row) == 0)
        piece, place = channel // PIECE_CHANNELS, channel % PIECE_CHANNELS * TAPS
        source = place + state_at(
            table, read_chunk, read_slot, row, piece, goes_on, num_chunks, PIECE_UNITS, UNIT
        )
        target = place + state_at(
            table, write_chunk, write_slot, row, piece, inside, num_chunks, PIECE_UNITS, UNIT
        )
        shift = tl.zeros([BLOCK], tl.float32)
        if BIASED:
            shift += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
        for first in range(begin, end, TOKENS):
            token = first + tl.arange(0, TOKENS)
            live = (token < end)[:, None] & inside[None, :]
            total = tl.zeros([TOKENS, BLOCK], tl.float32) + shift[None, :]
            for tap in tl.static_range(TAPS):
                came = token - (TAPS - 1) + tap
                is_new = (came >= begin)[:, None]
                new_at = x + came[:, None] * x_stride + channel[None, :]
                new = tl.load(new_at, mask=live & is_new, other=0.0).to(tl.float32)
                old_at = arena + source[None, :] + (TAPS + came - begin)[:, None]
                is_old = live & goes_on[None, :] & (came < begin)[:, None]
                old = tl.load(old_at, mask=is_old, other=0.0).to(tl.float32)
                factor = tl.load(weight + channel * TAPS + tap, mask=inside, other=0.0)
                total += factor.to(tl.float32)[None, :] * (new + old)
            if SILU:
                total = total / (1.0 + tl.exp(-total))
            y_at = out + token[:, None] * CHANNELS + channel[None, :]
            tl.store(y_at, total.to(out.dtype.element_ty), mask=live)
        # The state behind the row: its last inputs, and of the old ones what is left.
        entry = tl.arange(0, TAPS_PAD)
        kept = inside[:, None] & (entry < TAPS)[None, :]
        came = end - TAPS + entry
        is_new = (came >= begin)[None, :]
        new_at = x + came[None, :] * x_stride + channel[:, None]
        new = tl.load(new_at, mask=kept & is_new, other=0.0)
        old_at = arena + source[:, None] + (TAPS + came - begin)[None, :]
        is_old = kept & goes_on[:, None] & (came < begin)[None, :]
        old = tl.load(old_at, mask=is_old, other=0.0)
        # The slot may be the one that other threads of this program still read.
        tl.debug_barrier()
        tl.store(arena + target[:, None] + entry[None, :], tl.where(is_new, new, old), mask=kept)


def _constants(
    geometry: StateGeometry, silu: bool, biased: bool, token_block: int
) -> dict[str, Any]:
    channels, taps = geometry.shape
    return {
        "CHANNELS": channels,
        "PIECE_CHANNELS": geometry.piece_shape[0],
        "TAPS": taps,
        "TAPS_PAD": next_power_of_2(taps),
        "SILU": silu,
        "BIASED": biased,
        "BLOCK": CHANNEL_BLOCK,
        "TOKENS": token_block,
        **state_constants(geometry),
    }


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
    state: MixerState,
) -> torch.Tensor:
    """`short_conv_ref` by the kernel."""
    check_conv(x, weight, bias, state)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(x):
        # One token a row: a decode step, or one that only looks like it.
        tokens = 1 if len(x) <= state.num_rows else TOKEN_BLOCK
        _short_conv_kernel[(state.num_rows, cdiv(len(weight), CHANNEL_BLOCK))](
            x,
            weight,
            weight if bias is None else bias,
            out,
            x.stride(0),
            *state_arguments(state),
            **_constants(state.geometry, silu, bias is not None, tokens),
            num_warps=NUM_WARPS,
        )
    return out


DECLARED = (
    Declared(
        "short_conv/qwen3-next",
        _short_conv_kernel,
        dict.fromkeys(("x", "weight", "bias", "out", "arena"), "*bf16:16")
        | {"x_stride": "i32:16", **STATE_TYPES},
        _constants(StateGeometry((8192, 4), torch.bfloat16, 1, 1 << 16), True, False, TOKEN_BLOCK),
        NUM_WARPS,
    ),
)
