"""Rotary alone against its reference, and the reference against transformers' own."""

from pathlib import Path

import pytest
import torch
from transformers.models.cohere import modeling_cohere
from transformers.models.llama import modeling_llama

from kernels import rotary
from kernels.rotary import rotary_ref
from tests.kernels.guarded import Guards, planted

TOKENS = 3


def angles(half: int) -> torch.Tensor:
    """float32 [TOKENS, half]"""
    return torch.rand(TOKENS, half, generator=torch.Generator().manual_seed(1)) * 6


def test_reference_is_what_transformers_computes() -> None:
    x = torch.randn(TOKENS, 4, 16, generator=torch.Generator().manual_seed(2))
    angle = angles(8)
    for interleaved, own, twice in (
        (False, modeling_llama, torch.cat([angle, angle], -1)),
        (True, modeling_cohere, angle.repeat_interleave(2, -1)),
    ):
        q, _ = own.apply_rotary_pos_emb(
            x.transpose(0, 1)[None], x.transpose(0, 1)[None], twice.cos()[None], twice.sin()[None]
        )
        given = twice[:, ::2] if interleaved else twice[:, :8]
        ours = rotary_ref(x, given.cos(), given.sin(), interleaved)
        assert torch.allclose(q[0].transpose(0, 1).double(), ours, atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "dim", "half"), [(9, 16, 8), (3, 26, 5)])
@pytest.mark.parametrize("in_place", [False, True])
def test_equals_the_reference(
    interleaved: bool, heads: int, dim: int, half: int, in_place: bool
) -> None:
    guards = Guards()
    x = torch.randn(TOKENS, heads, dim, generator=torch.Generator().manual_seed(4))
    twice = angles(half).repeat_interleave(2, -1)  # given with a stride, as transformers' is
    cos, sin = guards.input(twice.cos())[:, ::2], guards.input(twice.sin())[:, ::2]
    given = guards.inout(x, row_gap=3) if in_place else guards.input(x, row_gap=3)
    out = given if in_place else guards.output(*x.shape, dtype=x.dtype, row_gap=1)
    rotary.rotary(given, cos, sin, out, interleaved)
    guards.check()
    assert torch.allclose(out.double(), rotary_ref(x, cos, sin, interleaved), atol=1e-5)


ERRORS = {
    "the partner": (
        "pair * 2 if INTERLEAVED else pair\n",
        "pair * 2 if INTERLEAVED else pair * 2\n",
    ),
    "the sign": ("x1 * cos - x2 * sin, ", "x1 * cos + x2 * sin, "),
    "what is not rotated": ("tl.store(out_head + rest[None, :], value, mask=mask)", "pass"),
    "one head too many": ("is_head = (head < num_heads)", "is_head = (head <= num_heads)"),
}


@pytest.mark.parametrize("error", ERRORS)
def test_a_planted_error_is_caught(error: str, tmp_path: Path) -> None:
    guards = Guards()
    x = torch.randn(TOKENS, 3, 20, generator=torch.Generator().manual_seed(4))
    cos, sin = guards.input(angles(8).cos()), guards.input(angles(8).sin())
    out = guards.output(*x.shape, dtype=x.dtype)
    planted(rotary, tmp_path, *ERRORS[error]).rotary(guards.input(x), cos, sin, out)
    right = torch.allclose(out.double(), rotary_ref(x, cos, sin), atol=1e-5)
    assert not (right and guards.are_whole())


def test_a_width_that_does_not_fit_is_refused() -> None:
    x = torch.zeros(TOKENS, 3, 8)
    with pytest.raises(ValueError, match="no wider"):
        rotary.rotary(x, angles(5), angles(5), x)
