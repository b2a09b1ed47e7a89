"""Norms of query and key heads, in place; values stay as they are."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from kernels import head_norm as module
from kernels.head_norm import head_norm_ref_
from tests.kernels.guarded import Guards, planted


def difference(
    kernel: ModuleType,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype = torch.float32,
    unit_offset: bool = False,
) -> float:
    """The largest error of values of size one."""
    generator = torch.Generator().manual_seed(heads)
    qkv = (3 * torch.randn(3, (heads + 2 * kv_heads) * dim, generator=generator)).to(dtype)
    q_norm, k_norm = torch.randn(2, dim, generator=generator).to(dtype)
    wanted, guards = qkv.clone(), Guards()
    head_norm_ref_(wanted, q_norm, k_norm, heads, kv_heads, 1e-6, unit_offset)
    got = guards.inout(qkv, row_gap=5)
    norms = guards.input(q_norm), guards.input(k_norm)
    kernel.head_norm_(got, *norms, heads, kv_heads, 1e-6, unit_offset)
    guards.check()
    assert torch.equal(got[:, -kv_heads * dim :], qkv[:, -kv_heads * dim :])
    return float((got.float() - wanted.float()).abs().max())


@pytest.mark.parametrize("unit_offset", [False, True])
def test_kernel_is_the_definition(unit_offset: bool) -> None:
    for heads, kv_heads, dim in ((1, 1, 8), (4, 2, 10), (14, 3, 16), (32, 1, 4)):
        assert difference(module, heads, kv_heads, dim, unit_offset=unit_offset) <= 3e-6
    assert difference(module, 4, 2, 10, torch.float16, unit_offset) <= 8e-3


def test_no_tokens_and_other_rows() -> None:
    weight = torch.ones(4)
    module.head_norm_(torch.empty(0, 16), weight, weight, 2, 1, 1e-6)
    with pytest.raises(ValueError, match="rows of 15"):
        module.head_norm_(torch.empty(1, 15), weight, weight, 2, 1, 1e-6)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(head < HEADS)[:, None]", "(head <= HEADS)[:, None]"),
        ("head < HEADS + KV_HEADS)", "head < HEADS + KV_HEADS + 1)"),
        ("tl.sum(value * value, 1) / DIM", "tl.sum(value * value, 1) / DIM_BLOCK"),
        ("factor += 1.0", "factor += 0.5"),
        ("tl.program_id(1) * HEAD_BLOCK", "tl.program_id(1) * HEADS"),
    ],
)
def test_planted_errors_are_caught(old: str, new: str, tmp_path: Path) -> None:
    bad = planted(module, tmp_path, old, new)
    with pytest.raises(AssertionError):  # the result, or the guards
        assert difference(bad, 18, 3, 10, unit_offset="factor" in old) < 1e-3
