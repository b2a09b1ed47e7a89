"""What recurrent kernels are compared over: inputs of a step's rows, and the states they step.

Tokens of a kernel's inputs lie apart as the parts of a fused row do, with NaN between them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.delta_rule import delta_rule_ref
from kernels.mixer_state import MixerState
from kernels.short_conv import short_conv_ref
from kernels.ssd import selective_scan_ref, ssd_ref
from tests.kernels.guarded import Guards
from tests.kernels.state_case import StateCase, StateRow, ragged_rows, state_case

Kernel = Callable[..., torch.Tensor]
REFERENCES: dict[str, Kernel] = {
    "short_conv": short_conv_ref,
    "delta_rule": delta_rule_ref,
    "ssd": ssd_ref,
    "selective_scan": selective_scan_ref,
}


@dataclass(frozen=True)
class Inputs:
    """`by_token`: how many of `values`, from the first on, have a row for each token."""

    kernel: str
    values: tuple[torch.Tensor | None, ...]
    by_token: frozenset[int]
    case: StateCase
    flags: tuple[bool, ...] = ()

    def run(self, kernel: Kernel, state: MixerState, guards: Guards | None = None) -> torch.Tensor:
        """Called as the reference is; with `guards` on copies between them."""
        values = self.values
        if guards is not None:
            values = tuple(None if value is None else _placed(value, guards) for value in values)
        return kernel(*values, *self.flags, state)

    def reference(self, state: MixerState) -> torch.Tensor:
        """The definition's result."""
        return self.run(REFERENCES[self.kernel], state)

    def alone(self, row: int) -> "Inputs":
        """The tokens of one row."""
        part = self.case.tokens(row)
        values = tuple(
            value[part] if value is not None and at in self.by_token else value
            for at, value in enumerate(self.values)
        )
        return Inputs(self.kernel, values, self.by_token, self.case, self.flags)


class _Random:
    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(seed), dtype

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def apart(self, num_tokens: int, *shape: int) -> torch.Tensor:
        """The first values of wider rows, of which the rest is NaN."""
        width = torch.Size(shape).numel()
        rows = torch.full((num_tokens, width + 7), torch.nan, dtype=self.dtype)
        rows[:, :width] = self.normal(num_tokens, width)
        return rows[:, :width].view(num_tokens, *shape)

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=self.generator)


def _placed(value: torch.Tensor, guards: Guards) -> torch.Tensor:
    """Between guards; tokens stay as far apart as they are."""
    if value.is_contiguous():
        return guards.input(value)
    gap = value.stride(0) - value[0].numel()
    return guards.input(value.flatten(1), row_gap=gap).view(value.shape)


def _num_tokens(rows: list[StateRow]) -> int:
    return sum(row.num_tokens for row in rows)


def conv_inputs(
    channels: int,
    taps: int,
    num_pieces: int = 1,
    biased: bool = True,
    silu: bool = True,
    dtype: torch.dtype = torch.float32,
    rows: list[StateRow] | None = None,
) -> Inputs:
    """Of a convolution."""
    rows = ragged_rows() if rows is None else rows
    make = _Random(channels + taps, dtype)
    values = (
        make.apart(_num_tokens(rows), channels),
        make.normal(channels, taps),
        make.normal(channels) if biased else None,
    )
    case = state_case((channels, taps), rows, num_pieces, dtype)
    return Inputs("short_conv", values, frozenset({0}), case, (silu,))


def delta_inputs(
    k_heads: int,
    v_heads: int,
    k_dim: int,
    v_dim: int,
    num_pieces: int = 1,
    per_channel: bool = False,
    dtype: torch.dtype = torch.float32,
    rows: list[StateRow] | None = None,
) -> Inputs:
    """Of the delta rule; `per_channel`: Kimi's."""
    rows = ragged_rows() if rows is None else rows
    num_tokens, make = _num_tokens(rows), _Random(k_dim + v_dim, dtype)
    values = (
        make.apart(num_tokens, k_heads, k_dim),
        make.apart(num_tokens, k_heads, k_dim),
        make.apart(num_tokens, v_heads, v_dim),
        -2 * make.uniform(num_tokens, v_heads, *([k_dim] if per_channel else [])),
        make.uniform(num_tokens, v_heads),
    )
    case = state_case((v_heads, k_dim, v_dim), rows, num_pieces)
    return Inputs("delta_rule", values, frozenset(range(5)), case)


def ssd_inputs(
    heads: int,
    groups: int,
    dim: int,
    size: int,
    num_pieces: int = 1,
    skips: bool = True,
    dtype: torch.dtype = torch.float32,
    rows: list[StateRow] | None = None,
) -> Inputs:
    """Of Mamba-2; D where it `skips`."""
    rows = ragged_rows() if rows is None else rows
    num_tokens, make = _num_tokens(rows), _Random(dim + size, dtype)
    values = (
        make.apart(num_tokens, heads, dim),
        make.uniform(num_tokens, heads),
        -4 * make.uniform(heads),
        make.apart(num_tokens, groups, size),
        make.apart(num_tokens, groups, size),
        make.uniform(heads) if skips else None,
    )
    case = state_case((heads, dim, size), rows, num_pieces)
    return Inputs("ssd", values, frozenset({0, 1, 3, 4}), case)


def scan_inputs(
    inner: int,
    size: int,
    num_pieces: int = 1,
    skips: bool = True,
    dtype: torch.dtype = torch.float32,
    rows: list[StateRow] | None = None,
) -> Inputs:
    """Of Mamba-1."""
    rows = ragged_rows() if rows is None else rows
    num_tokens, make = _num_tokens(rows), _Random(inner + size, dtype)
    values = (
        make.apart(num_tokens, inner),
        make.uniform(num_tokens, inner),
        -4 * make.uniform(inner, size),
        make.apart(num_tokens, size),
        make.apart(num_tokens, size),
        make.uniform(inner) if skips else None,
    )
    case = state_case((inner, size), rows, num_pieces)
    return Inputs("selective_scan", values, frozenset({0, 1, 3, 4}), case)
