"""The recurrent C++ kernels against their definitions and transformers': every build that the
processor runs."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kernels.native_calls import NativeLibrary, find
from kernels.native_recurrent import NativeRecurrent
from kernels.state_rows import read_states
from tests.kernels.guarded import Guards
from tests.kernels.recurrent_inputs import (
    Inputs,
    Kernel,
    conv_inputs,
    delta_inputs,
    scan_inputs,
    ssd_inputs,
)
from tests.kernels.recurrent_library import library
from tests.kernels.state_case import StateRow, agree, error, ragged_rows
from tests.kernels.test_native_calls import BUILDS, NOTHING

# Widths that fill registers and ones that do not; states cut into pieces; both ways of KDA and GDN.
INPUTS = {
    "conv, 4 taps": lambda: conv_inputs(128, 4, 2),
    "conv, ragged pieces": lambda: conv_inputs(210, 3, 3, biased=False, silu=False),
    "conv, narrow": lambda: conv_inputs(5, 2),
    "conv, 8 taps": lambda: conv_inputs(70, 8),
    "delta, 128": lambda: delta_inputs(2, 4, 128, 128, 2),
    "delta, ragged": lambda: delta_inputs(1, 3, 11, 45, 3),
    "delta, few": lambda: delta_inputs(1, 1, 1, 2),
    "kda": lambda: delta_inputs(2, 2, 64, 80, per_channel=True),
    "kda, ragged": lambda: delta_inputs(1, 2, 33, 200, 2, per_channel=True),
    "ssd, 64 x 128": lambda: ssd_inputs(4, 2, 64, 128, 2),
    "ssd, ragged": lambda: ssd_inputs(3, 1, 5, 21, 3, skips=False),
    "ssd, groups": lambda: ssd_inputs(8, 4, 6, 16),
    "scan, 16": lambda: scan_inputs(140, 16, 2),
    "scan, ragged": lambda: scan_inputs(7, 5, skips=False),
}


@pytest.fixture(name="native", scope="module", params=[*map(pytest.param, BUILDS)] or [NOTHING])
def _native(request: pytest.FixtureRequest) -> NativeRecurrent:
    path = find(request.param)
    assert path is not None
    built = NativeLibrary(path)
    built.set_threads(3)
    return NativeRecurrent(built)


def kernel_of(native: NativeRecurrent, inputs: Inputs) -> Kernel:
    kernel: Kernel = getattr(native, inputs.kernel)
    return kernel


@pytest.mark.parametrize("name", INPUTS)
def test_kernels_are_the_definition(native: NativeRecurrent, name: str) -> None:
    """Fresh rows over NaN, rows that move to another slot, inputs a stride apart and guarded."""
    inputs = INPUTS[name]()
    kernel = kernel_of(native, inputs)
    found = agree(inputs.case, lambda s, guards: inputs.run(kernel, s, guards), inputs.reference)
    assert found <= 1e-6


@pytest.mark.parametrize("name", INPUTS)
def test_numbers_are_the_librarys(native: NativeRecurrent, name: str) -> None:
    inputs = INPUTS[name]()
    state = inputs.case.copy()
    out = inputs.run(kernel_of(native, inputs), state)
    wanted, states = library(inputs)
    assert error(out, wanted) <= 1e-6
    back = replace(
        state.batch, read_chunk=state.batch.write_chunk, read_slot=state.batch.write_slot
    )
    back = replace(back, fresh=torch.zeros_like(back.fresh))
    for row, final in enumerate(states):
        if final is not None:
            found = read_states(state.arena, state.geometry, state.table, back, torch.tensor([row]))
            assert error(found[0], final) <= 1e-6, row


@pytest.mark.parametrize("name", INPUTS)
def test_a_row_is_the_same_alone(native: NativeRecurrent, name: str) -> None:
    """To the bit, result and state: whatever a request is batched with."""
    inputs = INPUTS[name]()
    kernel, whole = kernel_of(native, inputs), inputs.case.copy()
    out = inputs.run(kernel, whole)
    for row in range(whole.num_rows):
        state = inputs.case.alone(row)
        alone = inputs.alone(row).run(kernel, state)
        assert torch.equal(alone, out[inputs.case.tokens(row)]), row
        if len(alone):
            rows = torch.tensor([0])
            back = replace(
                state.batch,
                read_chunk=state.batch.write_chunk,
                read_slot=state.batch.write_slot,
                fresh=torch.tensor([False]),
            )
            place = state.geometry, state.table, back, rows
            assert torch.equal(read_states(state.arena, *place), read_states(whole.arena, *place))


@pytest.mark.parametrize("name", INPUTS)
def test_a_chunk_is_its_tokens_one_by_one(native: NativeRecurrent, name: str) -> None:
    """To the bit: wherever a prompt is cut."""
    inputs = INPUTS[name]()
    kernel, whole = kernel_of(native, inputs), inputs.case.copy()
    out = inputs.run(kernel, whole)
    row = 1  # five tokens, fresh, moves
    state, part = inputs.case.alone(row), inputs.alone(row)
    for t in range(5):
        values = tuple(
            value[t : t + 1] if value is not None and at in part.by_token else value
            for at, value in enumerate(part.values)
        )
        batch = replace(state.batch, starts=torch.tensor([0, 1]))
        one = replace(part, values=values).run(kernel, replace(state, batch=batch))
        assert torch.equal(one[0], out[inputs.case.tokens(row)][t])
        state = replace(
            state,
            batch=replace(
                state.batch,
                read_chunk=state.batch.write_chunk,
                read_slot=state.batch.write_slot,
                fresh=torch.tensor([False]),
            ),
        )


@pytest.mark.parametrize(
    "inputs",
    [
        lambda rows: conv_inputs(70, 4, dtype=torch.bfloat16, rows=rows),
        lambda rows: delta_inputs(2, 4, 40, 72, dtype=torch.bfloat16, rows=rows),
        lambda rows: ssd_inputs(4, 2, 18, 40, dtype=torch.bfloat16, rows=rows),
        lambda rows: scan_inputs(70, 16, dtype=torch.bfloat16, rows=rows),
    ],
    ids=["conv", "delta", "ssd", "scan"],
)
def test_bfloat16_is_rounded_once(
    native: NativeRecurrent, inputs: Callable[[list[StateRow]], Inputs]
) -> None:
    made = inputs(ragged_rows())
    kernel = kernel_of(native, made)
    assert agree(made.case, lambda s, guards: made.run(kernel, s, guards), made.reference) <= 4e-3


def test_long_decays_and_large_steps(native: NativeRecurrent) -> None:
    """What leaves nothing of a state leaves zeros, and no NaN."""
    inputs = delta_inputs(1, 2, 32, 32, per_channel=True, rows=[StateRow(3), StateRow(1)])
    assert inputs.values[3] is not None
    inputs.values[3].mul_(1e4)
    kernel = kernel_of(native, inputs)
    assert agree(inputs.case, lambda s, _: inputs.run(kernel, s), inputs.reference) <= 1e-6


def test_no_rows_and_broken_neighbours(native: NativeRecurrent) -> None:
    """NaN in one row's state and inputs stays there."""
    empty = conv_inputs(8, 4, rows=[StateRow(0)])
    assert len(empty.run(native.short_conv, empty.case.copy())) == 0
    inputs = delta_inputs(1, 2, 32, 32, rows=[StateRow(1), StateRow(4), StateRow(1)])
    good = inputs.run(native.delta_rule, inputs.case.copy())
    assert inputs.values[0] is not None
    inputs.values[0][1:5] = torch.nan
    bad = inputs.run(native.delta_rule, inputs.case.copy(Guards()))
    assert bad[1:5].isnan().all()
    assert torch.equal(bad[[0, 5]], good[[0, 5]])


def test_what_does_not_fit_is_refused(native: NativeRecurrent) -> None:
    made = conv_inputs(8, 4)
    x, weight, bias = made.values
    assert x is not None
    assert weight is not None
    state = made.case.copy()
    with pytest.raises(ValueError, match="channels for a weight"):
        native.short_conv(x[:, :7], weight, bias, True, state)
    with pytest.raises(ValueError, match="a state"):
        native.short_conv(x, weight[:, :3].contiguous(), bias, True, state)
    with pytest.raises(ValueError, match="one type"):
        native.short_conv(x, weight.half(), bias, True, state)
    half = conv_inputs(8, 4, dtype=torch.float16)
    with pytest.raises(ValueError, match="bfloat16 or float32"):
        half.run(native.short_conv, half.case.copy())
