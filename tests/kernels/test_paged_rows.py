"""Rows laid flat; pages of a tile are found in 64 bits, and only where they are seen."""

import pytest
import torch

from kernels.paged_attention import LayerGeometry
from kernels.paged_rows import capped, flat_rows, page_bases
from kernels.triton_api import jit, tl
from tests.kernels.guarded import Guards
from tests.kernels.paged_case import PagedCase

# A soft cap's exponential of a large score; a GPU says nothing.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")

BLOCK_TOKENS = 4
UNIT = 8
BLOCK_UNITS = 96


@jit
def _bases_kernel(
    out_ptr: tl.tensor,
    table_ptr: tl.tensor,
    chunk_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    tile: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    PAGES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_UNITS: tl.constexpr,
) -> None:
    base = page_bases(
        table_ptr, chunk_ptr, slot_ptr, tile, low, high, PAGES, BLOCK_TOKENS, UNIT, BLOCK_UNITS
    )
    tl.store(out_ptr + tl.arange(0, PAGES), base)


@jit
def _cap_kernel(x_ptr: tl.tensor, out_ptr: tl.tensor, SOFTCAP: tl.constexpr) -> None:
    at = tl.arange(0, 16)
    tl.store(out_ptr + at, capped(tl.load(x_ptr + at), SOFTCAP))


def test_addresses_are_of_64_bits_and_unseen_pages_are_not_looked_up() -> None:
    guards = Guards()
    # Chunks far beyond 2^31 elements. The last entries of the row name no chunk at all.
    table = [5 << 33, 3, (7 << 40) + 1]
    chunk, slot = [0, 2, 1, 2, 1, 1 << 30, 1 << 30], [1, 30000, 0, 2, 1, 0, 0]
    out = guards.output(4, dtype=torch.int64)
    _bases_kernel[(1,)](
        out,
        guards.input(torch.tensor(table)),
        guards.input(torch.tensor(chunk, dtype=torch.int32)),
        guards.input(torch.tensor(slot, dtype=torch.int32)),
        1,  # pages 4 to 7
        3,
        18,  # page 4 is the last that is seen
        PAGES=4,
        BLOCK_TOKENS=BLOCK_TOKENS,
        UNIT=UNIT,
        BLOCK_UNITS=BLOCK_UNITS,
    )
    guards.check()
    assert out.tolist() == [(table[1] + BLOCK_UNITS) * UNIT, 0, 0, 0]
    _bases_kernel[(1,)](
        out,
        torch.tensor(table),
        torch.tensor([1 << 30, *chunk[1:]], dtype=torch.int32),
        torch.tensor(slot, dtype=torch.int32),
        0,
        4,  # page 0 left the window
        18,
        PAGES=4,
        BLOCK_TOKENS=BLOCK_TOKENS,
        UNIT=UNIT,
        BLOCK_UNITS=BLOCK_UNITS,
    )
    wanted = [
        (table[c] + s * BLOCK_UNITS) * UNIT for c, s in zip(chunk, slot, strict=True) if c < 3
    ]
    assert out.tolist() == [0, *wanted[1:4]]


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_capped_is_the_tangent_far_out_too(softcap: float) -> None:
    x = torch.cat([torch.linspace(-3, 3, 12), torch.tensor([-1e4, -200.0, 200.0, 1e4])]) * softcap
    out = torch.empty(16)
    _cap_kernel[(1,)](x, out, SOFTCAP=softcap)
    wanted = torch.tanh(x.double() / softcap) * softcap
    assert torch.allclose(out.double(), wanted, atol=1e-6 * softcap)


def test_flat_rows_are_the_groups_side_by_side() -> None:
    case = PagedCase(LayerGeometry(1, 8, 8, window=5), [(9, 1), (30, 20), (4, 2)], 1)
    flat = flat_rows(case.batch.rows)
    assert flat.q_lens == (1, 20, 2)
    assert flat.contexts == (9, 30, 4)
    assert flat.q_start.tolist() == [0, 1, 21]
    assert flat.q_len.tolist() == [1, 20, 2]
    assert flat.first.tolist() == [4, 4, 0]
    for row, rows in enumerate(case.batch.rows):
        width = rows.chunk.shape[1]
        assert flat.chunk[row, :width].tolist() == rows.chunk[0].tolist()
        assert flat.slot[row, :width].tolist() == rows.slot[0].tolist()
