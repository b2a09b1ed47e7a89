"""KV write with rotary against the reference: the cache byte by byte around it, errors planted."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kernels import kv_write
from kernels.kv_write import rotary_write_ref
from kernels.paged_attention import BlockGeometry, LayerGeometry, PagedBatch, largest_unit_bytes
from tests.kernels.guarded import Guards, planted

TOKENS = 3
BLOCK_TOKENS = 4


class WriteCase:
    """Tokens on their way to scattered places of a cache full of NaN."""

    def __init__(
        self,
        layer: LayerGeometry,
        heads: int,
        half: int,
        dtype: torch.dtype = torch.float32,
        interleaved: bool = False,
        in_place: bool = False,
    ) -> None:
        random = torch.Generator().manual_seed(3)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=random).to(dtype)

        self.guards = guards = Guards()
        self.dtype = dtype
        unit = largest_unit_bytes(layer, dtype, 4096)
        self.geometry = BlockGeometry(layer, BLOCK_TOKENS, dtype, unit)
        chunk_units = self.geometry.block_units * 2 + 3
        table = torch.tensor([2, 0, 1]) * chunk_units + 3
        self.empty = torch.full(((3 * chunk_units + 3) * unit,), 0xFF, dtype=torch.uint8)
        self.arena = guards.inout(self.empty)
        self.table = guards.input(table)
        self.batch = PagedBatch(
            table[None],
            guards.input(torch.tensor([1, 2, 1])),
            guards.input(torch.tensor([1, 0, 1])),
            guards.input(torch.tensor([3, 0, 1])),
            (),
        )
        q = normal(TOKENS, heads, layer.k_dim)
        self.q_before = q
        self.q = guards.inout(q, row_gap=2) if in_place else guards.input(q, row_gap=2)
        self.q_out = self.q if in_place else guards.output(*q.shape, dtype=dtype, row_gap=1)
        self.key = guards.input(normal(TOKENS, layer.num_kv_heads, layer.k_dim), row_gap=1)
        self.value = guards.input(normal(TOKENS, layer.num_kv_heads, layer.v_dim), row_gap=3)
        angle = torch.rand(TOKENS, half, generator=random) * 6
        self.angles: tuple[Any, Any] = (None, None)
        if half:
            self.angles = (guards.input(angle.cos()), guards.input(angle.sin()))
        self.interleaved = interleaved

    def launch(self, module: ModuleType = kv_write) -> None:
        module.rotary_write(
            self.arena, self.geometry, self.table, self.batch, self.q, self.q_out, self.key,
            self.value, *self.angles, self.interleaved,
        )  # fmt: skip

    def check(self) -> None:
        """Raises AssertionError where anything differs, in the cache or beside it."""
        self.guards.check()
        wanted = self.empty.clone()
        q = rotary_write_ref(
            wanted, self.geometry, self.table, self.batch, self.q_before, self.key, self.value,
            *self.angles, self.interleaved,
        )  # fmt: skip
        bound = {torch.float32: 1e-6, torch.float16: 4e-3}[self.dtype]
        if self.angles[0] is not None:
            assert torch.allclose(self.q_out.double(), q.double(), atol=bound)
        got, wanted = (arena.view(self.dtype).float() for arena in (self.arena, wanted))
        assert (got.isnan() == wanted.isnan()).all(), "a place that is nobody's, or a hole"
        assert torch.allclose(got, wanted, atol=bound, equal_nan=True)


CASES: dict[str, dict[str, Any]] = {
    "halves": {"layer": LayerGeometry(3, 16, 16), "heads": 9, "half": 8},
    "interleaved": {"layer": LayerGeometry(2, 16, 8), "heads": 2, "half": 8, "interleaved": True},
    "partial": {"layer": LayerGeometry(2, 24, 10), "heads": 4, "half": 6},
    "partial, in place": {
        "layer": LayerGeometry(1, 20, 10),
        "heads": 3,
        "half": 5,
        "interleaved": True,
        "in_place": True,
    },
    "no rotary": {"layer": LayerGeometry(10, 12, 8), "heads": 10, "half": 0, "in_place": True},
    "latent": {
        "layer": LayerGeometry(1, 40, 32, v_in_k=True),
        "heads": 5,
        "half": 0,
        "in_place": True,
    },
    "float16": {"layer": LayerGeometry(2, 16, 16), "heads": 2, "half": 8, "dtype": torch.float16},
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name: str) -> None:
    case = WriteCase(**CASES[name])
    case.launch()
    case.check()


def test_a_padding_token_writes_nothing() -> None:
    case = WriteCase(LayerGeometry(2, 16, 16), 2, 8)
    nowhere = torch.full((TOKENS,), -1)
    case.batch = replace(case.batch, token_chunk=case.guards.input(nowhere))
    case.launch()
    case.guards.check()
    assert torch.equal(case.arena, case.empty)


ERRORS = {
    "off by one slot": (
        "* BLOCK_TOKENS + offset) * K_DIM",
        "* BLOCK_TOKENS + (offset ^ 1)) * K_DIM",
    ),
    "V's place in the block": ("v_row = V_START * UNIT +", "v_row = V_START * UNIT - V_DIM +"),
    "the wrong slot of the chunk": ("slot * BLOCK_UNITS", "(1 - slot) * BLOCK_UNITS"),
    "q's pairs": ("at2[None, :], y2.to(", "at2[None, :], y1.to("),
    "K's pairs": ("r1, r2 = turn(k1, k2, cos, sin)", "r2, r1 = turn(k1, k2, cos, sin)"),
    "what is not rotated": ("tl.store(k_row + rest[None, :], k, mask=in_rest)", "pass"),
    "one head too many": ("is_head = kv_head < NUM_KV_HEADS", "is_head = kv_head <= NUM_KV_HEADS"),
}


@pytest.mark.parametrize("error", ERRORS)
def test_a_planted_error_is_caught(error: str, tmp_path: Path) -> None:
    case = WriteCase(LayerGeometry(3, 24, 16), 4, 8)
    case.launch(planted(kv_write, tmp_path, *ERRORS[error]))
    with pytest.raises(AssertionError):
        case.check()


def test_shapes_that_do_not_fit_are_refused() -> None:
    case = WriteCase(LayerGeometry(2, 16, 16), 2, 8)
    case.geometry = replace(case.geometry, block_tokens=3)
    with pytest.raises(ValueError, match="power of two"):
        case.launch()
    with pytest.raises(ValueError, match="no wider"):
        WriteCase(LayerGeometry(2, 16, 16), 2, 9).launch()
