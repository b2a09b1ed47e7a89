"""Prefill attention against the reference, over poison, and with errors planted."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kernels import paged_prefill
from kernels.paged_attention import LayerGeometry
from kernels.paged_prefill import tiles_of
from kernels.paged_rows import wide_attention_ref
from kernels.prefill_shape import HOPPER, launch_shape
from tests.kernels.guarded import planted
from tests.kernels.paged_case import SCALE, PagedCase

# A soft cap's exponential of a large score, and a planted query of NaN; a GPU says nothing.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"),
]

# A program takes 128 pairs of query and head, a tile of KV 128 positions of such narrow heads.
LATENT = LayerGeometry(1, 40, 32, v_in_k=True)
ODD_LATENT = LayerGeometry(2, 27, 18, window=37, v_in_k=True)
WIDE_LATENT = LayerGeometry(1, 576, 512, v_in_k=True)
MIXED = [(1, 1), (90, 90), (140, 5), (65, 1)]  # a first token, a whole prompt, a chunk, a decode


def launch(case: PagedCase, module: ModuleType = paged_prefill) -> None:
    """Into `case.out`."""
    group = case.heads // case.layer.num_kv_heads
    module.paged_prefill(
        case.arena,
        case.geometry,
        case.chunk_table,
        case.flat,
        case.guards.input(tiles_of(case.flat, group, launch_shape(case.layer, HOPPER).block_m)),
        case.query,
        case.out,
        SCALE,
        case.softcap,
        case.sinks,
    )


CASES: dict[str, partial[PagedCase]] = {
    "mixed": partial(PagedCase, LayerGeometry(2, 16, 16), MIXED, 8),
    "group of 3, odd dims": partial(PagedCase, LayerGeometry(1, 24, 10), MIXED, 3),
    "wide group": partial(PagedCase, LayerGeometry(1, 16, 16), [(70, 3)], 130),
    "short window": partial(
        PagedCase, LayerGeometry(1, 16, 16, window=9), [(150, 80), (70, 1)], 2, has_sinks=True
    ),
    "long window": partial(
        PagedCase, LayerGeometry(1, 16, 32, window=300), [(420, 20)], 4, has_sinks=True
    ),
    "chunks": partial(
        PagedCase, LayerGeometry(1, 16, 16, chunk=70), [(150, 80), (70, 1), (300, 300)], 2
    ),
    "long chunks": partial(
        PagedCase, LayerGeometry(1, 16, 32, chunk=256), [(420, 20), (530, 280)], 4, has_sinks=True
    ),
    "cap": partial(PagedCase, LayerGeometry(2, 16, 16), [(70, 66)], 4, softcap=3.0),
    "latent": partial(PagedCase, LATENT, MIXED, 10),
    "latent with a window": partial(PagedCase, ODD_LATENT, [(150, 80), (70, 1)], 4, has_sinks=True),
    "wide latent": partial(PagedCase, WIDE_LATENT, [(70, 9)], 20, block_tokens=16),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name: str) -> None:
    case = CASES[name]()
    launch(case)
    case.guards.check()
    assert case.difference() < 1e-5


def test_float16_in_blocks_of_16() -> None:
    layer = LayerGeometry(1, 64, 64)
    case = PagedCase(layer, [(150, 40)], 4, dtype=torch.float16, block_tokens=16)
    launch(case)
    case.guards.check()
    assert case.difference() < 2e-3


def test_padding_rows_give_zeros() -> None:
    """Also where they are longer than a tile of positions."""
    case = PagedCase(LayerGeometry(1, 16, 16), [(5, 2), (300, 300), (7, 1)], 2)
    case.flat.context_len[1:] = 0
    launch(case)
    assert not case.out[2:].any()
    assert case.out[:2].isfinite().all()


@pytest.mark.parametrize(("window", "size"), [(0, 0), (9, 0), (0, 30)])
def test_padding_tiles_read_and_write_nothing(window: int, size: int) -> None:
    """Those of a recorded step: behind a padding row's last query. Lengths are the device's."""
    layer = LayerGeometry(2, 16, 16, window=window, chunk=size)
    case = PagedCase(layer, [(90, 90), (140, 5), (7, 3)], 8, has_sinks=True)
    chunk, context_len = case.flat.chunk.clone(), case.flat.context_len.clone()
    chunk[2], context_len[2] = 1 << 30, 0
    rows = replace(
        case.flat,
        chunk=case.guards.input(chunk, row_gap=2),
        context_len=case.guards.input(context_len),
        q_lens=(),
        contexts=(),
    )
    tiles = torch.cat([tiles_of(case.flat, 4), torch.tensor([[2, 3]] * 40)]).int()
    paged_prefill.paged_prefill(
        case.arena,
        case.geometry,
        case.chunk_table,
        rows,
        case.guards.input(tiles),
        case.query,
        case.out,
        SCALE,
        case.softcap,
        case.sinks,
    )
    assert case.guards.are_whole()
    assert not case.out[95:].any()
    wanted = replace(case.batch, rows=case.batch.rows[:2])
    expected = wide_attention_ref(
        case.arena, case.geometry, case.chunk_table, wanted, case.query, SCALE, 0.0, case.sinks
    )
    assert (case.out[:95].double() - expected[:95]).abs().max() < 1e-5


ERRORS = {
    "mask: the next token": ("place[None, :] <= q_place", "place[None, :] <= 1 + q_place"),
    "mask: left out at the diagonal": (
        "full_end = tl.maximum((q_first + 1)",
        "full_end = tl.maximum((q_last + BLOCK_N)",
    ),
    "window: one position too many": (
        "q_low = q_place - WINDOW + 1",
        "q_low = q_place - WINDOW",
    ),
    "window's edge left out": (
        "low // BLOCK_N, full_begin, scale",
        "full_begin, full_begin, scale",
    ),
    "slot: the next position's": ("v_head + in_page * V_ROW", "v_head + (in_page ^ 1) * V_ROW"),
    "K of the wrong head": ("kv_head * (BLOCK_TOKENS * K_DIM)", "0 * kv_head"),
    "no rescaling": ("acc = acc * shrink[:, None]\n        acc = tl.dot", "acc = tl.dot"),
    "sinks left out": ("total = total * shrink + tl.exp2(sink - higher)", "total = total * shrink"),
    "cap left out": ("capped(scores, SOFTCAP)", "scores"),
    "query of the wrong token": (
        "((token + query) * q_stride_t",
        "((token + (query ^ 1)) * q_stride_t",
    ),
    "position of the query": (
        "q_place = high - q_len + query",
        "q_place = high - q_len + query - 1",
    ),
    "writes outside": ("(query < q_len) & (lane", "(query < q_len + 1) & (lane"),
}


@pytest.mark.parametrize("error", ERRORS)
def test_a_planted_error_is_caught(error: str, tmp_path: Path) -> None:
    # A tile at the window's edge, one that all queries see, and one at the diagonal.
    layer = LayerGeometry(2, 16, 16, window=300)
    case = PagedCase(layer, [(400, 7)], 4, softcap=4.0, has_sinks=True)
    launch(case, planted(paged_prefill, tmp_path, *ERRORS[error]))
    assert not case.is_right()


LATENT_ERRORS = {
    "scores without the latent": ("tl.trans(v), scores, input", "tl.trans(v) * 0, scores, input"),
    "scores without the rest": ("K_FIRST: tl.constexpr = V_DIM if", "K_FIRST: tl.constexpr = 1 if"),
    "V as if it had rows of its own": ("K_DIM if V_IN_K else V_DIM", "V_DIM"),
}


@pytest.mark.parametrize("error", LATENT_ERRORS)
def test_an_error_with_latents_is_caught(error: str, tmp_path: Path) -> None:
    case = PagedCase(LATENT, [(150, 20)], 4)
    launch(case, planted(paged_prefill, tmp_path, *LATENT_ERRORS[error]))


CHUNK_ERRORS = {
    "a query's chunk": (
        "q_low = (q_place + first) // -WINDOW",
        "q_low = (q_first + first) // -WINDOW",
    ),
    "tiles that not all queries see": ("tl.maximum(last_low, 0)", "tl.maximum(low, 0)"),
    "the edge left out": ("low // BLOCK_N, full_begin, scale", "full_begin, full_begin, scale"),
    "place for position": (
        "(q_place + first) // -WINDOW * -WINDOW - first",
        "q_place // -WINDOW * -WINDOW",
    ),
}


@pytest.mark.parametrize("error", CHUNK_ERRORS)
def test_a_planted_error_in_chunks_is_caught(error: str, tmp_path: Path) -> None:
    # A chunk begins inside of a block; queries of one tile are in two chunks, a tile of keys apart.
    case = PagedCase(LayerGeometry(2, 16, 16, chunk=301), [(620, 60)], 4)
    launch(case)
    assert case.is_right()
    launch(case, planted(paged_prefill, tmp_path, *CHUNK_ERRORS[error]))
    assert not case.is_right()


def test_tiles_are_every_query_once_longest_first() -> None:
    case = PagedCase(LayerGeometry(1, 16, 16), MIXED, 3)
    tiles = tiles_of(case.flat, 3).tolist()
    step = 128 // 3
    covered = [(row, start + i) for row, start in tiles for i in range(step)]
    wanted = {(row, i) for row, (_, length) in enumerate(MIXED) for i in range(length)}
    assert len(set(covered)) == len(covered)
    assert wanted <= set(covered)
    assert all(start < MIXED[row][1] for row, start in tiles)
    assert tiles[0][0] == 2


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="do not divide"):
        launch(PagedCase(LayerGeometry(2, 16, 16), [(5, 2)], 3))
    case = PagedCase(LayerGeometry(2, 16, 16), [(90, 90)], 4)
    tiles = tiles_of(case.flat, 2, 64)
    with pytest.raises(ValueError, match="not laid out"):
        paged_prefill.paged_prefill(
            case.arena, case.geometry, case.chunk_table, case.flat, tiles, case.query, case.out, 1.0
        )
