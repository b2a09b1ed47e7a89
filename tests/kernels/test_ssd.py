"""State space models: the definition against transformers, the kernel against the definition."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from kernels import ssd as module
from tests.kernels.guarded import CAUGHT, planted
from tests.kernels.recurrent_inputs import Inputs, scan_inputs, ssd_inputs
from tests.kernels.recurrent_library import library
from tests.kernels.state_case import SHORT, StateRow, agree, error, ragged_rows

# Heads, groups, dims, sizes, pieces.
SHAPES = [(2, 1, 8, 16, 1), (4, 2, 5, 21, 2), (3, 3, 9, 4, 3)]
SCANS = [(6, 16, 1), (70, 5, 2)]


def difference(kernel: ModuleType, inputs: Inputs) -> float:
    """Of results and states, over poisoned memory."""
    return agree(
        inputs.case,
        lambda state, guards: inputs.run(getattr(kernel, inputs.kernel), state, guards),
        inputs.reference,
    )


def every(skips: bool) -> list[Inputs]:
    """Of both kinds."""
    return [
        *(ssd_inputs(*shape, skips) for shape in SHAPES),
        *(scan_inputs(*shape, skips) for shape in SCANS),
    ]


@pytest.mark.parametrize("skips", [False, True])
def test_definition_is_the_librarys(skips: bool) -> None:
    for inputs in every(skips):
        out, _ = library(inputs)
        assert error(inputs.reference(inputs.case.copy()), out) <= 1e-6


@pytest.mark.parametrize("skips", [False, True])
def test_kernel_is_the_definition(skips: bool) -> None:
    for inputs in every(skips):
        assert difference(module, inputs) <= 1e-6


def test_heads_and_channels_of_several_programs() -> None:
    rows = ragged_rows((1, 2))
    assert difference(module, ssd_inputs(2, 1, 70, 100, rows=rows)) <= 1e-6
    assert difference(module, scan_inputs(300, 16, rows=rows)) <= 1e-6
    assert difference(module, ssd_inputs(2, 1, 8, 16, dtype=torch.float16)) <= 1e-3


def test_no_tokens_and_what_does_not_fit() -> None:
    empty = scan_inputs(6, 4, rows=[StateRow(0)])
    assert empty.run(module.selective_scan, empty.case.copy()).shape == (0, 6)
    inputs = ssd_inputs(4, 2, 8, 16)
    x, dt, a, b, c, _ = inputs.values
    assert x is not None
    assert dt is not None
    assert a is not None
    assert b is not None
    assert c is not None
    state = inputs.case.copy()
    with pytest.raises(ValueError, match="x "):
        module.ssd(x, dt, a, b, c[:, :1], None, state)
    with pytest.raises(ValueError, match="dt "):
        module.ssd(x, dt[:, :2], a, b, c, None, state)
    with pytest.raises(ValueError, match="a state"):
        module.ssd(x[:, :2], dt, a, b, c, None, state)
    with pytest.raises(ValueError, match="one type"):
        module.ssd(x.half(), dt, a, b, c, None, state)
    scan = scan_inputs(4, 16)
    with pytest.raises(ValueError, match="a scan"):
        module.ssd(x, dt, a[:, None].expand(-1, 16), b, c, None, scan.case.copy())


def _few(scan: bool) -> Inputs:
    rows = ragged_rows(SHORT)
    return scan_inputs(70, 5, 2, rows=rows) if scan else ssd_inputs(4, 2, 5, 21, 2, rows=rows)


_PLANTED = [
    ("in_c, in_n = of_head < DIM, n < SIZE", "in_c, in_n = of_head <= DIM, n < SIZE"),
    ("in_c, in_n = of_head < DIM, n < SIZE", "in_c, in_n = of_head < DIM, n <= SIZE"),
    ("goes_on = in_c & (tl.load(fresh + row) == 0)", "goes_on = in_c"),
    ("channel // PIECE_CHANNELS, channel", "channel // WIDTH, channel"),
    ("channel % PIECE_CHANNELS * SIZE", "channel * SIZE"),
    ("table, read_chunk, read_slot", "table, write_chunk, write_slot"),
    ("table, write_chunk, write_slot", "table, read_chunk, read_slot"),
    ("tl.exp(step[:, None] * rate)", "tl.exp(rate)"),
    ("(step * value)[:, None]", "value[:, None]"),
    ("y += tl.load(d + share, mask=in_c, other=0.0) * value", "y += value"),
    ("share = channel // SHARED_BY", "share = channel % (WIDTH // SHARED_BY)"),
    ("tl.sum(state * c_out[None, :], 1)", "tl.sum(state * b_in[None, :], 1)"),
    ("tl.program_id(1) // OF_GROUP * SIZE", "tl.program_id(1) * 0"),
    ("token * (WIDTH // SHARED_BY) + share", "token * WIDTH + share"),
    ("if begin < end:", "if begin <= end:"),
    ("a + share[:, None] * SIZE + n[None, :]", "a + share[:, None] * SIZE_PAD + n[None, :]"),
]


@pytest.mark.parametrize(("old", "new"), _PLANTED)
def test_planted_errors_are_caught(old: str, new: str, tmp_path: Path) -> None:
    bad = planted(module, tmp_path, old, new)
    inputs = _few(scan="a + share" in old)
    with pytest.raises(CAUGHT):
        assert difference(bad, inputs) < 1e-3
