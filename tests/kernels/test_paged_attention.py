"""The torch reference against attention computed over plain, unpaged tensors.

The arena starts as NaN everywhere, so any read of memory that was not written shows.
"""

import itertools

import pytest
import torch

from kernels import paged_attention
from kernels.paged_attention import (
    BlockGeometry,
    LayerGeometry,
    PagedBatch,
    Rows,
    attend_rows_ref,
    largest_unit_bytes,
    paged_attention_ref,
    write_kv_ref,
)

BLOCK_TOKENS = 4
PAGE_BYTES = 4096
SCALE = 0.3


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    chunk: int = 0,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """One sequence, one query at a time, in float64: the definition, spelled out."""
    heads, length, _ = query.shape
    group = heads // key.shape[0]
    start = key.shape[1] - length
    out = torch.zeros(length, heads, value.shape[-1], dtype=torch.float64)
    for head, i in itertools.product(range(heads), range(length)):
        first = max(0, start + i + 1 - window) if window else 0
        if chunk:
            first = (start + i) // chunk * chunk
        keys = key[head // group, first : start + i + 1].double()
        scores = keys @ query[head, i].double() * SCALE
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        if slopes is not None:
            scores += slopes[head].double() * torch.arange(first - start - i, 1)
        if sinks is not None:
            scores = torch.cat([scores, sinks[head].double()[None]])
        weights = scores.softmax(0)[: keys.shape[0]]
        out[i, head] = weights @ value[head // group, first : start + i + 1].double()
    return out


class Paged:
    """A poisoned arena with one layer, blocks given out at scattered places."""

    def __init__(self, layer: LayerGeometry, dtype: torch.dtype, num_blocks: int) -> None:
        unit = largest_unit_bytes(layer, dtype, PAGE_BYTES)
        self.geometry = BlockGeometry(layer, BLOCK_TOKENS, dtype, unit)
        self.blocks_per_chunk = 2
        units = self.geometry.block_units * self.blocks_per_chunk
        num_chunks = num_blocks // self.blocks_per_chunk + 1
        order = torch.randperm(num_chunks, generator=torch.Generator().manual_seed(3))
        gap = 3  # units that belong to nobody between chunks
        self.chunk_table = order * (units + gap) + gap
        size = num_chunks * (units + gap) + gap
        self.arena = torch.full((size * unit,), 0xFF, dtype=torch.uint8)

    def batch(self, rows: list[tuple[list[int], int, int]]) -> PagedBatch:
        """rows: (block table, first position, tokens); leading blocks of -1 were given back."""
        chunk, slot, offset, groups = [], [], [], []
        start = 0
        for table, first, tokens in rows:
            for position in range(first, first + tokens):
                block = table[position // BLOCK_TOKENS]
                chunk.append(block // self.blocks_per_chunk)
                slot.append(block % self.blocks_per_chunk)
                offset.append(position % BLOCK_TOKENS)
            begin = sum(block < 0 for block in table)
            blocks = torch.tensor([table[begin:]])
            groups.append(
                Rows(
                    torch.arange(start, start + tokens)[None],
                    blocks // self.blocks_per_chunk,
                    blocks % self.blocks_per_chunk,
                    torch.tensor([first + tokens]),
                    torch.tensor([begin * BLOCK_TOKENS]),
                )
            )
            start += tokens
        return PagedBatch(
            self.chunk_table[None],
            torch.tensor(chunk),
            torch.tensor(slot),
            torch.tensor(offset),
            tuple(groups),
        )

    def poison(self, block: int) -> None:
        """The block belongs to somebody else now and is full of NaN."""
        units = self.geometry.block_units
        start = int(self.chunk_table[block // self.blocks_per_chunk])
        start += block % self.blocks_per_chunk * units
        size = self.geometry.unit_bytes
        self.arena[start * size : (start + units) * size] = 0xFF


@pytest.mark.parametrize(
    ("layer", "softcap", "with_sinks"),
    [
        (LayerGeometry(2, 16, 16), 0.0, False),
        (LayerGeometry(1, 24, 24), 0.0, False),
        (LayerGeometry(4, 10, 6), 0.0, False),
        (LayerGeometry(2, 16, 16, window=5), 0.0, False),
        (LayerGeometry(2, 16, 16), 8.0, False),
        (LayerGeometry(2, 16, 16, window=7), 0.0, True),
        (LayerGeometry(1, 20, 16, v_in_k=True), 0.0, False),
        (LayerGeometry(2, 20, 16, window=5, v_in_k=True), 8.0, True),
        (LayerGeometry(2, 16, 16, chunk=5), 0.0, False),
        (LayerGeometry(2, 16, 16, chunk=8), 8.0, True),
    ],
)
def test_mixed_batch_equals_plain_attention(
    layer: LayerGeometry, softcap: float, with_sinks: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    heads, lengths = 4, (13, 1, 8)
    paged = Paged(layer, torch.float32, 16)
    tables = [[9, 2, 5, 12], [0], [7, 3]]
    sinks = torch.randn(heads, generator=generator) if with_sinks else None

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    keys = [random(layer.num_kv_heads, n, layer.k_dim) for n in lengths]
    values = [random(layer.num_kv_heads, n, layer.v_dim) for n in lengths]
    if layer.v_in_k:
        values = [key[..., : layer.v_dim] for key in keys]
    queries = [random(heads, n, layer.k_dim) for n in lengths]
    expected = [
        plain_attention(q, k, v, layer.window, softcap, sinks, layer.chunk)
        for q, k, v in zip(queries, keys, values, strict=True)
    ]
    done = [0, 0, 0]
    for tokens in ([6, 1, 1], [1, 0, 7], [6, 0, 0]):  # chunked prefill beside decodes
        rows = [(tables[i], done[i], n) for i, n in enumerate(tokens) if n]
        picked = [(i, done[i], done[i] + n) for i, n in enumerate(tokens) if n]
        batch = paged.batch(rows)

        def flat(parts: list[torch.Tensor], picked: list[tuple[int, int, int]]) -> torch.Tensor:
            return torch.cat([parts[i][:, a:b] for i, a, b in picked], 1)

        key, value = flat(keys, picked).transpose(0, 1), flat(values, picked).transpose(0, 1)
        write_kv_ref(paged.arena, paged.geometry, paged.chunk_table, batch, key, value)
        out = paged_attention_ref(
            paged.arena,
            paged.geometry,
            paged.chunk_table,
            batch,
            flat(queries, picked),
            SCALE,
            softcap,
            sinks,
        )
        wanted = torch.cat([expected[i][a:b] for i, a, b in picked])
        assert torch.allclose(out.double(), wanted, atol=2e-6)
        for i, n in enumerate(tokens):
            done[i] += n


SIGHTS = [(window, 0) for window in (1, 3, 4, 5, 9)] + [(0, chunk) for chunk in (1, 4, 6, 8, 30)]


@pytest.mark.parametrize(("window", "chunk"), SIGHTS)
@pytest.mark.parametrize(("softcap", "with_sinks"), [(0.0, False), (6.0, False), (5.0, True)])
@pytest.mark.parametrize("holes_in_table", [True, False])
def test_blocks_that_left_the_window_are_never_read(
    window: int, chunk: int, softcap: float, with_sinks: bool, holes_in_table: bool
) -> None:
    """Prefill in parts, then decodes; blocks that no query sees are poisoned before each step.

    A step in flight may have been laid out before they were given back: without holes.
    """
    layer = LayerGeometry(2, 16, 8, window, chunk=chunk)
    generator = torch.Generator().manual_seed(4)
    heads, length = 4, 23
    paged = Paged(layer, torch.float32, 16)
    table = [9, 2, 5, 12, 7, 3]
    key = torch.randn(2, length, 16, generator=generator)
    value = torch.randn(2, length, 8, generator=generator)
    query = torch.randn(heads, length, 16, generator=generator)
    sinks = torch.randn(heads, generator=generator) if with_sinks else None
    expected = plain_attention(query, key, value, window, softcap, sinks, chunk)
    done = 0
    for tokens in (7, 6, 1, 1, 1, 5, 1, 1):
        gone = layer.first_seen(done) // BLOCK_TOKENS
        for block in table[:gone]:
            paged.poison(block)
        laid = [-1] * gone + table[gone:] if holes_in_table else table
        batch = paged.batch([(laid, done, tokens)])
        part = slice(done, done + tokens)
        write_kv_ref(
            paged.arena,
            paged.geometry,
            paged.chunk_table,
            batch,
            key[:, part].transpose(0, 1),
            value[:, part].transpose(0, 1),
        )
        out = paged_attention_ref(
            paged.arena,
            paged.geometry,
            paged.chunk_table,
            batch,
            query[:, part],
            SCALE,
            softcap,
            sinks,
        )
        assert torch.allclose(out.double(), expected[part], atol=2e-6)
        done += tokens


def test_a_block_with_v_in_k_holds_k_alone() -> None:
    layer = LayerGeometry(1, 576, 512, v_in_k=True)
    unit = largest_unit_bytes(layer, torch.bfloat16, 1 << 21)
    block = BlockGeometry(layer, 16, torch.bfloat16, unit)
    assert (unit, block.v_start_units, block.v_row_units) == (128, 0, 9)
    assert block.block_units * unit == 16 * 576 * 2


def test_padded_rows_of_unlike_length_attend_alone() -> None:
    layer = LayerGeometry(2, 8, 8)
    paged = Paged(layer, torch.float32, 12)
    generator = torch.Generator().manual_seed(1)
    lengths, tables = (9, 3), [[4, 8, 1], [6]]
    keys = [torch.randn(2, n, 8, generator=generator) for n in lengths]
    queries = [torch.randn(4, 1, 8, generator=generator) for _ in lengths]
    for table, key in zip(tables, keys, strict=True):
        written = paged.batch([(table, 0, key.shape[1])])
        write_kv_ref(
            paged.arena,
            paged.geometry,
            paged.chunk_table,
            written,
            key.transpose(0, 1),
            key.transpose(0, 1),
        )
    blocks = torch.tensor([tables[0], [6, 6, 6]])
    rows = Rows(
        torch.tensor([[0], [1]]),
        blocks // 2,
        blocks % 2,
        torch.tensor(lengths),
        torch.zeros(2, dtype=torch.int64),
    )
    empty = torch.empty(0)
    batch = PagedBatch(paged.chunk_table[None], empty, empty, empty, (rows,))
    out = paged_attention_ref(
        paged.arena, paged.geometry, paged.chunk_table, batch, torch.cat(queries, 1), SCALE
    )
    for i, (query, key) in enumerate(zip(queries, keys, strict=True)):
        wanted = plain_attention(query, key, key, 0, 0.0, None)
        assert torch.allclose(out[i].double(), wanted[0], atol=2e-6)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("window", "chunk"), [(0, 0), (9, 0), (0, 10)])
def test_slopes_are_added_to_scores(
    kv_heads: int, window: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces of some queries, beside a decode."""
    monkeypatch.setattr(paged_attention, "BIASED_QUERIES", 5)
    generator = torch.Generator().manual_seed(5)
    layer = LayerGeometry(kv_heads, 16, 8, window, chunk=chunk)
    paged, tables = Paged(layer, torch.float32, 16), [[9, 2, 5, 12, 7], [0, 3]]
    slopes = torch.rand(4, generator=generator)
    lengths, done, tokens = (17, 6), (3, 5), (14, 1)
    query, key, value = (
        [torch.randn(heads, n, dim, generator=generator) for n in lengths]
        for heads, dim in ((4, 16), (kv_heads, 16), (kv_heads, 8))
    )
    first = paged.batch([(tables[i], 0, done[i]) for i in range(2)])
    rest = paged.batch([(tables[i], done[i], tokens[i]) for i in range(2)])
    for batch, begin, end in ((first, (0, 0), done), (rest, done, lengths)):
        flat = [
            torch.cat([part[i][:, begin[i] : end[i]] for i in range(2)], 1)
            for part in (query, key, value)
        ]
        written = (part.transpose(0, 1) for part in flat[1:])
        write_kv_ref(paged.arena, paged.geometry, paged.chunk_table, batch, *written)
    out = paged_attention_ref(
        paged.arena, paged.geometry, paged.chunk_table, rest, flat[0], SCALE, slopes=slopes
    )
    wanted = torch.cat(
        [
            plain_attention(q, k, v, window, 0.0, None, chunk, slopes)[begin:]
            for q, k, v, begin in zip(query, key, value, done, strict=True)
        ]
    )
    assert torch.allclose(out.double(), wanted, atol=2e-6)


def test_bfloat16_stays_close_to_float32() -> None:
    layer = LayerGeometry(2, 64, 64)
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(1, 4, 1, 64, generator=generator)
    key = torch.randn(1, 2, 40, 64, generator=generator)
    value = torch.randn(1, 2, 40, 64, generator=generator)
    length, first = torch.tensor([40]), torch.tensor([0])
    exact = attend_rows_ref(query, key, value, length, first, 0.125, layer.window, 0.0, None)
    half = attend_rows_ref(
        query.bfloat16(), key.bfloat16(), value.bfloat16(), length, first, 0.125, 0, 0.0, None
    )
    assert (exact - half.float()).abs().max() < 0.03


def test_units_divide_rows_and_pages() -> None:
    assert largest_unit_bytes(LayerGeometry(2, 64, 64), torch.bfloat16, 1 << 21) == 128
    assert largest_unit_bytes(LayerGeometry(2, 80, 80), torch.bfloat16, 1 << 21) == 32
    assert largest_unit_bytes(LayerGeometry(2, 192, 128), torch.bfloat16, 1 << 21) == 128
