"""Short convolutions: the definition against transformers, the kernel against the definition."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from kernels import short_conv as module
from kernels.short_conv import short_conv
from tests.kernels.guarded import CAUGHT, planted
from tests.kernels.recurrent_inputs import Inputs, conv_inputs
from tests.kernels.recurrent_library import library
from tests.kernels.state_case import SHORT, StateRow, agree, error, ragged_rows


def difference(kernel: ModuleType, inputs: Inputs) -> float:
    """Of results and states, over poisoned memory."""
    return agree(
        inputs.case,
        lambda state, guards: inputs.run(kernel.short_conv, state, guards),
        inputs.reference,
    )


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize(("channels", "taps", "pieces"), [(6, 4, 1), (9, 3, 3), (70, 2, 2)])
def test_definition_is_the_librarys(channels: int, taps: int, pieces: int, silu: bool) -> None:
    inputs = conv_inputs(channels, taps, pieces, biased=channels != 9, silu=silu)
    out, _ = library(inputs)
    assert error(inputs.reference(inputs.case.copy()), out) <= 1e-6


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize(("channels", "taps", "pieces"), [(6, 4, 1), (90, 3, 3), (70, 8, 2)])
def test_kernel_is_the_definition(channels: int, taps: int, pieces: int, silu: bool) -> None:
    inputs = conv_inputs(channels, taps, pieces, biased=channels != 90, silu=silu)
    assert difference(module, inputs) <= 1e-6


def test_chunks_longer_than_a_tile_and_decode_steps() -> None:
    for lengths in ((35, 1, 16), (1, 1, 1)):
        assert difference(module, conv_inputs(5, 4, rows=ragged_rows(lengths))) <= 1e-6
    half = conv_inputs(70, 4, dtype=torch.float16)
    assert difference(module, half) <= 1e-3


def test_no_tokens_and_what_does_not_fit() -> None:
    empty = conv_inputs(6, 4, rows=[StateRow(0)])
    assert empty.run(short_conv, empty.case.copy()).shape == (0, 6)
    inputs = conv_inputs(6, 4)
    x, weight, bias = inputs.values
    assert x is not None
    assert weight is not None
    with pytest.raises(ValueError, match="channels for a weight"):
        short_conv(x[:, :5], weight, bias, True, inputs.case.copy())
    with pytest.raises(ValueError, match="a state"):
        short_conv(x, weight[:5], bias, True, inputs.case.copy())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("inside = channel < CHANNELS", "inside = channel <= CHANNELS"),
        ("goes_on = inside & (tl.load(fresh + row) == 0)", "goes_on = inside"),
        ("channel // PIECE_CHANNELS, channel", "channel // CHANNELS, channel"),
        ("table, read_chunk, read_slot", "table, write_chunk, write_slot"),
        ("table, write_chunk, write_slot", "table, read_chunk, read_slot"),
        ("(token < end)[:, None]", "(token <= end)[:, None]"),
        ("token - (TAPS - 1) + tap", "token - TAPS + tap"),
        ("(came >= begin)[:, None]", "(came >= 0)[:, None]"),
        ("(came >= begin)[None, :]", "(came >= 0)[None, :]"),
        ("(TAPS + came - begin)[:, None]", "(TAPS + came - end)[:, None]"),
        ("(TAPS + came - begin)[None, :]", "entry[None, :]"),
        ("came = end - TAPS + entry", "came = end - TAPS_PAD + entry"),
        ("(entry < TAPS)[None, :]", "(entry < TAPS_PAD)[None, :]"),
        ("if begin < end:", "if begin <= end:"),
        ("1.0 + tl.exp(-total)", "1.0 + tl.exp(total)"),
        ("weight + channel * TAPS + tap", "weight + channel * TAPS + TAPS - 1 - tap"),
    ],
)
def test_planted_errors_are_caught(old: str, new: str, tmp_path: Path) -> None:
    bad = planted(module, tmp_path, old, new)
    with pytest.raises(CAUGHT):
        assert difference(bad, conv_inputs(70, 3, 2, rows=ragged_rows(SHORT))) < 1e-3
