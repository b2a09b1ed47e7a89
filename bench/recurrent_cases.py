"""Recurrent mixers beside transformers' functions: cases of bench.kernels and bench.cpu.

True shapes: Qwen3-Next's convolution and delta rule, 64 of Mamba-2's heads of 64 x 128.
On a GPU rows read one slot and write another, so that a repeat finds what the one before found; on
a processor they stay in theirs. The peer is what the library runs for a decode step or for a chunk,
on states that are its own tensors.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from bench.kernel_cases import Call, Case, Prepared, Rig
from kernels import delta_rule, short_conv, ssd
from kernels.mixer_state import MixerState
from kernels.state_rows import StateBatch, StateGeometry

Run = Callable[..., torch.Tensor]
KERNELS: Mapping[str, Run] = {
    "short_conv": short_conv.short_conv,
    "delta_rule": delta_rule.delta_rule,
    "ssd": ssd.ssd,
}
DEFINITIONS: Mapping[str, Run] = {
    "short_conv": short_conv.short_conv_ref,
    "delta_rule": delta_rule.delta_rule_ref,
    "ssd": ssd.ssd_ref,
}
UNIT_BYTES = 64
# Rows and tokens of each: decode steps, a chunk of a prompt.
SHAPES = ((1, 1), (16, 1), (1, 512))


@dataclass(frozen=True, slots=True)
class Step:
    """A step of one layer: a kernel's inputs, and the same by the library."""

    inputs: tuple[Any, ...]
    state: MixerState
    library: Call


def _state(
    rig: Rig, rows: int, tokens: int, shape: tuple[int, ...], dtype: torch.dtype
) -> MixerState:
    """Rows of so many tokens each. Slots 0 to rows - 1 are read, those behind them written."""
    geometry = StateGeometry(shape, dtype, 1, UNIT_BYTES)
    arena = rig.rand(2 * rows, *shape).to(dtype).flatten().view(torch.uint8)
    number = torch.arange(rows, device=rig.device)
    table, zeros = torch.zeros(1, 1, dtype=torch.int64, device=rig.device), torch.zeros_like(number)
    starts = torch.arange(rows + 1, device=rig.device) * tokens
    batch = StateBatch(table, zeros, number, zeros, number + rows, starts, zeros.bool())
    return MixerState(arena, geometry, table, batch)


def _copied(state: MixerState) -> torch.Tensor:
    """What the rows read, [rows, *shape], for the library to write into."""
    kept = state.geometry
    return state.arena.view(kept.dtype).view(-1, *kept.shape)[: state.num_rows].clone()


def _conv(rig: Rig, rows: int, tokens: int, tiny: bool) -> Step:
    channels, taps = 32 if tiny else 8192, 4
    state = _state(rig, rows, tokens, (channels, taps), rig.dtype)
    x, weight = rig.randn(rows * tokens, channels), rig.randn(channels, taps)
    inputs = (x, weight, None, True)
    if tokens > 1:
        call = partial(qwen3_next.causal_conv1d_fn, x.T[None], weight)
        return Step(inputs, state, partial(call, activation="silu"))
    call = partial(qwen3_next.causal_conv1d_update, x[:, :, None], _copied(state), weight)
    return Step(inputs, state, partial(call, activation="silu"))


def _delta(rig: Rig, rows: int, tokens: int, tiny: bool) -> Step:
    k_heads, v_heads, dim = (1, 2, 16) if tiny else (16, 32, 128)
    state = _state(rig, rows, tokens, (v_heads, dim, dim), torch.float32)
    total = rows * tokens
    q, k, v = (rig.randn(total, heads, dim) for heads in (k_heads, k_heads, v_heads))
    g, beta = -rig.rand(total, v_heads), rig.rand(total, v_heads)
    chunk = qwen3_next.torch_chunk_gated_delta_rule
    call = partial(
        chunk if tokens > 1 else qwen3_next.torch_recurrent_gated_delta_rule,
        *(tensor.view(rows, tokens, *tensor.shape[1:]) for tensor in (q, k, v, g, beta)),
        initial_state=_copied(state),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return Step((q, k, v, g, beta), state, call)


def _ssd(rig: Rig, rows: int, tokens: int, tiny: bool) -> Step:
    heads, dim, size = (2, 8, 16) if tiny else (64, 64, 128)
    state = _state(rig, rows, tokens, (heads, dim, size), torch.float32)
    total = rows * tokens
    x, dt = rig.randn(total, heads, dim), rig.rand(total, heads)
    a, d = -rig.rand(heads), rig.rand(heads)
    b, c = rig.randn(total, 1, size), rig.randn(total, 1, size)
    inputs = (x, dt, a, b, c, d)
    if tokens > 1:
        many = (tensor.view(rows, tokens, *tensor.shape[1:]) for tensor in (x, dt, b, c))
        x_many, dt_many, b_many, c_many = many
        call = partial(mamba2.mamba2_chunk_scan, x_many, dt_many, a, b_many, c_many, 256, d)
        first = _copied(state)
        return Step(inputs, state, partial(call, initial_states=first, return_final_states=True))
    call = partial(
        mamba2.mamba2_selective_state_update,
        _copied(state),
        x,
        dt[:, :, None].expand(-1, -1, dim),
        a[:, None, None].expand(-1, dim, size),
        b,
        c,
        d[:, None].expand(-1, dim),
    )
    return Step(inputs, state, call)


_STEPS = {"short_conv": _conv, "delta_rule": _delta, "ssd": _ssd}


def _build(name: str, rows: int) -> Callable[[Rig, bool], Prepared]:
    def build(rig: Rig, tiny: bool) -> Prepared:
        step = _STEPS[name](rig, 2 if tiny else rows, 1, tiny)

        def by(runs: Mapping[str, Run]) -> tuple[torch.Tensor, ...]:
            return (runs[name](*step.inputs, step.state),)

        geometry = step.state.geometry
        moved = 2 * step.state.num_rows * geometry.piece_units * geometry.unit_bytes
        return Prepared(
            partial(by, KERNELS),
            partial(by, KERNELS),
            partial(by, DEFINITIONS),
            rig.tolerance,
            moved,
            peers={"transformers": step.library},
        )

    return build


CASES = tuple(
    Case(f"{name} rows={rows}", "bytes", _build(name, rows))
    for name in _STEPS
    for rows in (1, 16, 128)
)


def on_processor(
    runs: Mapping[str, Run], repeats: int, dtype: torch.dtype, tiny: bool = False
) -> str:
    """A table: each kernel and the library take turns; the fastest of each counts."""
    head = "| kernel | rows x tokens | transformers ms | ours ms | times |"
    lines = [head, "|---|---|---|---|---|"]
    rig = Rig(torch.device("cpu"), dtype, torch.Generator().manual_seed(0))
    for name, make in _STEPS.items():
        for rows, tokens in SHAPES:
            step = make(rig, rows, tokens, tiny)
            calls = {"library": step.library}
            batch = replace(step.state.batch, write_slot=step.state.batch.read_slot)
            calls["ours"] = partial(runs[name], *step.inputs, replace(step.state, batch=batch))
            best = dict.fromkeys(calls, float("inf"))
            for _ in range(repeats):
                for who, call in calls.items():
                    begin = time.perf_counter()
                    call()
                    best[who] = min(best[who], (time.perf_counter() - begin) * 1e3)
            times = best["library"] / best["ours"]
            cells = f"{best['library']:.2f} | {best['ours']:.3f} | {times:.1f}"
            lines.append(f"| {name} | {rows} x {tokens} | {cells} |")
    return "\n".join(lines)
