"""The gated delta rule: the definition against transformers, the kernel against the definition."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from kernels import delta_rule as module
from kernels.delta_rule import delta_rule
from tests.kernels.guarded import CAUGHT, planted
from tests.kernels.recurrent_inputs import Inputs, delta_inputs
from tests.kernels.recurrent_library import library
from tests.kernels.state_case import SHORT, StateRow, agree, error, ragged_rows

# Key heads, value heads, dims, pieces: grouped and ragged ones.
SHAPES = [(1, 1, 8, 16, 1), (2, 4, 10, 40, 2), (1, 3, 33, 5, 3)]


def difference(kernel: ModuleType, inputs: Inputs) -> float:
    """Of results and states, over poisoned memory."""
    return agree(
        inputs.case,
        lambda state, guards: inputs.run(kernel.delta_rule, state, guards),
        inputs.reference,
    )


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_definition_is_the_librarys(
    shape: tuple[int, int, int, int, int], per_channel: bool
) -> None:
    inputs = delta_inputs(*shape, per_channel)
    out, _ = library(inputs)
    assert error(inputs.reference(inputs.case.copy()), out) <= 1e-6


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_is_the_definition(shape: tuple[int, int, int, int, int], per_channel: bool) -> None:
    inputs = delta_inputs(*shape, per_channel)
    assert difference(module, inputs) <= 1e-6


def test_decode_steps_and_half_precision() -> None:
    assert difference(module, delta_inputs(1, 2, 16, 16, rows=ragged_rows((1, 1, 1)))) <= 1e-6
    assert difference(module, delta_inputs(1, 2, 16, 40, dtype=torch.float16)) <= 1e-3


def test_no_tokens_and_what_does_not_fit() -> None:
    empty = delta_inputs(1, 2, 8, 8, rows=[StateRow(0)])
    assert empty.run(delta_rule, empty.case.copy()).shape == (0, 2, 8)
    inputs = delta_inputs(2, 4, 8, 8)
    q, k, v, g, beta = (value for value in inputs.values if value is not None)
    state = inputs.case.copy()
    with pytest.raises(ValueError, match="q "):
        delta_rule(q[:, :1], k, v, g, beta, state)
    with pytest.raises(ValueError, match="g "):
        delta_rule(q, k, v, g[:, :2], beta, state)
    with pytest.raises(ValueError, match="a state"):
        delta_rule(q, k, v[:, :2], g, beta, state)
    with pytest.raises(ValueError, match="one type"):
        delta_rule(q.half(), k, v, g, beta, state)
    with pytest.raises(ValueError, match="side by side"):
        delta_rule(q.mT.contiguous().mT, k, v, g, beta, state)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("in_k, in_v = i < K_DIM, j < V_DIM", "in_k, in_v = i <= K_DIM, j < V_DIM"),
        ("in_k, in_v = i < K_DIM, j < V_DIM", "in_k, in_v = i < K_DIM, j <= V_DIM"),
        ("goes_on = tl.load(fresh + row) == 0", "goes_on = row >= 0"),
        ("piece = head // PIECE_HEADS", "piece = head // V_HEADS"),
        ("place = head % PIECE_HEADS", "place = head"),
        ("table, read_chunk, read_slot", "table, write_chunk, write_slot"),
        ("table, write_chunk, write_slot", "table, read_chunk, read_slot"),
        ("i[:, None] * V_DIM + j[None, :]", "i[:, None] * COLUMNS + j[None, :]"),
        ("k_head = head // GROUPS", "k_head = head % (V_HEADS // GROUPS)"),
        ("scale * tl.rsqrt", "tl.rsqrt"),
        ("key = key * tl.rsqrt(tl.sum(key * key, 0) + EPS)", "key = key * 0.5"),
        ("state *= tl.exp(tl.load(g + at))", "state *= tl.load(g + at)"),
        ("tl.load(g + at * K_DIM + i", "tl.load(g + at * K_DIM + K_DIM - 1 - i"),
        ("(value - recalled)", "(value + recalled)"),
        ("delta = (value - recalled) * tl.load(beta + at)", "delta = value - recalled"),
        ("if begin < end:", "if begin <= end:"),
        ("for token in range(begin, end):", "for token in range(begin, end - 1):"),
    ],
)
def test_planted_errors_are_caught(old: str, new: str, tmp_path: Path) -> None:
    bad = planted(module, tmp_path, old, new)
    per_channel, rows = "K_DIM - 1" in new, ragged_rows(SHORT)
    with pytest.raises(CAUGHT):
        assert difference(bad, delta_inputs(2, 4, 10, 40, 2, per_channel, rows=rows)) < 1e-3
