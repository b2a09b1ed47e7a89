"""Attention over chosen positions against attention over everything with a mask."""

import pytest
import torch

from kernels import sparse_attention
from kernels.paged_attention import BlockGeometry, LayerGeometry, Rows, gather_kv_ref
from kernels.sparse_attention import attend_chosen_ref, pieces

BLOCK, BLOCKS = 4, 12
LATENT = LayerGeometry(1, 20, 16, v_in_k=True)
HEADS = LayerGeometry(2, 8, 12)


def arena_of(layer: LayerGeometry, seed: int) -> tuple[torch.Tensor, BlockGeometry, torch.Tensor]:
    """Random K and V in blocks that lie in a random order, a chunk each; NaN between them."""
    geometry = BlockGeometry(layer, BLOCK, torch.float32, 16)
    block_bytes = geometry.block_units * 16
    arena = torch.full((3 * BLOCKS * block_bytes,), 0xFF, dtype=torch.uint8)
    random = torch.Generator().manual_seed(seed)
    order = torch.randperm(2 * BLOCKS, generator=random)
    for block in order.tolist():
        values = torch.randn(block_bytes // 4, generator=random)
        start = block * block_bytes
        arena[start : start + block_bytes] = values.view(torch.uint8)
    return arena, geometry, order * geometry.block_units


def rows_of(contexts: list[int], q_len: int) -> Rows:
    """Rows whose blocks are chunks from different places on."""
    chunk = torch.tensor(
        [[(7 * r + b) % (2 * BLOCKS) for b in range(BLOCKS)] for r in range(len(contexts))]
    )
    index = torch.arange(len(contexts) * q_len).view(len(contexts), q_len)
    first = torch.zeros(len(contexts), dtype=torch.int64)
    return Rows(index, chunk, torch.zeros_like(chunk), torch.tensor(contexts), first)


def choose(rows: Rows, heads: int, k: int, seed: int) -> torch.Tensor:
    """At most k positions up to each query's own, which is among them, -1 behind them."""
    random = torch.Generator().manual_seed(seed)
    num_rows, q_len = rows.token_index.shape
    out = torch.full((num_rows, heads, q_len, k), -1, dtype=torch.int32)
    for r in range(num_rows):
        for h in range(heads):
            for q in range(q_len):
                last = int(rows.context_len[r]) - q_len + q
                found = torch.randperm(last, generator=random)[: k - 1]
                out[r, h, q, : len(found)] = found
                out[r, h, q, len(found)] = last
    return out


def by_mask(
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    query: torch.Tensor,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The same by scores of all positions."""
    heads, kv_heads = query.shape[1], key.shape[1]
    allowed = torch.zeros(*positions.shape[:3], key.shape[2] + 1, dtype=torch.bool)
    allowed.scatter_(3, positions.long() % allowed.shape[3], True)
    allowed = allowed[..., :-1].expand(-1, kv_heads, -1, -1)
    allowed = allowed.repeat_interleave(heads // kv_heads, 1)
    key, value = (t.repeat_interleave(heads // kv_heads, 1) for t in (key, value))
    scores = query @ key.transpose(2, 3) * 0.3
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~allowed, float("-inf"))
    if sinks is not None:
        sink = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ value
    return scores.softmax(-1) @ value


@pytest.mark.parametrize("piece_bytes", [1, 3000, 64 << 20])
@pytest.mark.parametrize(("softcap", "with_sinks"), [(0.0, False), (5.0, True)])
@pytest.mark.parametrize(("contexts", "q_len"), [([9, 41, 1], 1), ([37], 11)])
@pytest.mark.parametrize(("layer", "own"), [(LATENT, 1), (HEADS, 1), (HEADS, 2)])
def test_it_is_attention_with_a_mask(
    layer: LayerGeometry,
    own: int,
    contexts: list[int],
    q_len: int,
    softcap: float,
    with_sinks: bool,
    piece_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sparse_attention, "PIECE_BYTES", piece_bytes)
    arena, geometry, table = arena_of(layer, 1)
    rows = rows_of(contexts, q_len)
    positions = choose(rows, own, 6, 2)
    query = torch.randn(len(contexts), 4, q_len, layer.k_dim)
    sinks = torch.randn(4) if with_sinks else None
    out = attend_chosen_ref(arena, geometry, table, rows, positions, query, 0.3, softcap, sinks)
    assert out.shape == (len(contexts), 4, q_len, layer.v_dim)
    key, value = gather_kv_ref(arena, geometry, table, rows)
    wanted = by_mask(key, value, positions, query, softcap, sinks)[..., : layer.v_dim]
    assert torch.allclose(out, wanted, atol=1e-5)


def test_nothing_that_is_not_chosen_is_read() -> None:
    """Everything else is NaN, but for the first position, which stands for what is not chosen."""
    arena, geometry, table = arena_of(LATENT, 3)
    rows = rows_of([30], 1)
    positions = torch.tensor([[[[29, 3, 17, -1, -1]]]], dtype=torch.int32)
    kept = arena.view(torch.float32).clone()
    sound = torch.zeros_like(kept, dtype=torch.bool)
    for position in (0, 3, 17, 29):
        unit = table[rows.chunk[0, position // BLOCK]] + position % BLOCK * geometry.k_row_units
        start = int(unit) * geometry.unit_elements
        sound[start : start + LATENT.k_dim] = True
    poisoned = kept.masked_fill(~sound, float("nan")).view(torch.uint8)
    query = torch.randn(1, 4, 1, LATENT.k_dim)
    outs = [
        attend_chosen_ref(each, geometry, table, rows, positions, query, 0.3)
        for each in (arena, poisoned)
    ]
    assert torch.equal(*outs)
    assert bool(outs[0].isfinite().all())


@pytest.mark.parametrize(("num_rows", "q_len"), [(1, 7), (5, 1), (3, 4)])
@pytest.mark.parametrize("query_bytes", [1 << 30, 30 << 20, 9 << 20, 1])
def test_pieces_are_all_queries_once_and_none_is_too_large(
    num_rows: int, q_len: int, query_bytes: int
) -> None:
    times = torch.zeros(num_rows, q_len, dtype=torch.int64)
    for row, part in pieces(num_rows, q_len, query_bytes):
        times[row, part] += 1
        size = times[row, part].numel() * query_bytes
        assert size <= max(sparse_attention.PIECE_BYTES, query_bytes)
    assert bool((times == 1).all())
