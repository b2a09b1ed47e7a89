"""Split decode attention against the reference, over poison, and with errors planted."""

from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kernels import paged_decode, paged_join
from kernels.paged_attention import LayerGeometry
from kernels.paged_decode import choose_splits
from tests.kernels.guarded import planted
from tests.kernels.paged_case import SCALE, PagedCase

# A soft cap's exponential of a large score; a GPU says nothing.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")

# A tile has 64 positions: rows of less than one, of exactly one, of one and a bit, of three.
CONTEXTS = [(1, 1), (64, 1), (150, 1), (67, 1)]
FEW = [(70, 1), (3, 1)]
WINDOW = LayerGeometry(2, 16, 32, window=37)
LATENT = LayerGeometry(1, 40, 32, v_in_k=True)
ODD_LATENT = LayerGeometry(2, 27, 18, window=37, v_in_k=True)
WIDE_LATENT = LayerGeometry(1, 576, 512, v_in_k=True)
CHUNKS = LayerGeometry(2, 16, 16, chunk=70)
LONG_WINDOW = LayerGeometry(1, 16, 16, window=100)


def launch(case: PagedCase, num_splits: int, module: ModuleType = paged_decode) -> None:
    """Into `case.out`."""
    parts = None
    if num_splits > 1:
        shape = (len(case.rows), case.heads, num_splits)
        parts = (
            case.guards.output(*shape, case.layer.v_dim, dtype=torch.float32),
            case.guards.output(*shape, 2, dtype=torch.float32),
        )
    module.paged_decode(
        case.arena,
        case.geometry,
        case.chunk_table,
        case.flat,
        case.query,
        case.out,
        SCALE,
        case.softcap,
        case.sinks,
        num_splits,
        parts,
    )


CASES: dict[str, tuple[partial[PagedCase], int]] = {
    "grouped": (partial(PagedCase, LayerGeometry(2, 16, 16), CONTEXTS, 8), 1),
    "splits": (partial(PagedCase, LayerGeometry(2, 16, 16), CONTEXTS, 4), 3),
    "odd": (partial(PagedCase, LayerGeometry(1, 24, 10), FEW, 3), 2),
    "wide group": (partial(PagedCase, LayerGeometry(1, 16, 16), FEW, 70), 1),
    "window": (partial(PagedCase, WINDOW, CONTEXTS, 2, has_sinks=True), 1),
    "window, splits": (partial(PagedCase, LONG_WINDOW, CONTEXTS, 2, has_sinks=True), 2),
    "chunks": (partial(PagedCase, CHUNKS, CONTEXTS, 2, has_sinks=True), 1),
    "chunks, splits": (partial(PagedCase, CHUNKS, CONTEXTS, 2), 2),
    "cap": (partial(PagedCase, LayerGeometry(1, 16, 16), FEW, 2, softcap=3.0), 1),
    "latent": (partial(PagedCase, LATENT, CONTEXTS, 20), 1),
    "latent, splits": (partial(PagedCase, LATENT, CONTEXTS, 5), 3),
    "latent with all options": (partial(PagedCase, ODD_LATENT, CONTEXTS, 4, has_sinks=True), 1),
    "V is K": (partial(PagedCase, LayerGeometry(1, 16, 16, v_in_k=True), FEW, 3), 1),
    "wide latent": (partial(PagedCase, WIDE_LATENT, FEW, 20, block_tokens=16), 2),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name: str) -> None:
    make, num_splits = CASES[name]
    case = make()
    launch(case, num_splits)
    case.guards.check()
    assert case.difference() < 1e-5


@pytest.mark.parametrize("block_tokens", [16, 32])
def test_float16_and_larger_blocks(block_tokens: int) -> None:
    layer = LayerGeometry(1, 64, 64)
    case = PagedCase(layer, FEW, 4, dtype=torch.float16, block_tokens=block_tokens)
    launch(case, 2)
    case.guards.check()
    assert case.difference() < 2e-3


def test_a_padding_row_gives_zeros() -> None:
    case = PagedCase(LayerGeometry(1, 16, 16), [(5, 1), (5, 1)], 2)
    case.flat.context_len[1] = 0
    launch(case, 1)
    assert not case.out[1].any()
    assert case.out[0].isfinite().all()


# What is wrong, and the text of the kernel that makes it so.
ERRORS = {
    "mask: one position too many": ("seen = (place < high) &", "seen = (place <= high) &"),
    "window: one position too many": ("(high - WINDOW, 0)", "(high - WINDOW - 1, 0)"),
    "slot: the next position's": ("k_head + in_page * K_DIM", "k_head + (in_page ^ 1) * K_DIM"),
    "V of the wrong head": ("kv_head * (BLOCK_TOKENS * V_ROW)", "0 * kv_head"),
    "no rescaling of the sum": ("total = total * shrink + tl.sum(", "total = total + tl.sum("),
    "sinks left out": ("total = total * shrink + tl.exp2(sink - higher)", "total = total * shrink"),
    "cap left out": ("capped(scores, SOFTCAP)", "scores"),
    "output of the wrong head": (
        "place = (token * NUM_HEADS + head) * V_DIM",
        "place = (token * NUM_HEADS + (head ^ 1)) * V_DIM",
    ),
    "writes outside": (
        "            mask=is_head[:, None] & in_v[None, :],\n        )\n\n\n",
        "            mask=in_v[None, :],\n        )\n\n\n",
    ),
}


@pytest.mark.parametrize("error", ERRORS)
def test_a_planted_error_is_caught(error: str, tmp_path: Path) -> None:
    # The window begins inside of a block, and the row has three tiles.
    layer = LayerGeometry(2, 16, 16, window=139)
    case = PagedCase(layer, [(150, 1)], 4, softcap=4.0, has_sinks=True)
    bad = planted(paged_decode, tmp_path, *ERRORS[error])
    launch(case, 1, bad)
    assert not case.is_right()


LATENT_ERRORS = {
    "scores without the latent": ("tl.trans(v), scores, input", "tl.trans(v) * 0, scores, input"),
    "scores without the rest": ("(V_DIM if V_IN_K else 0)", "K_DIM"),
    "V as if it had rows of its own": ("K_DIM if V_IN_K else V_DIM", "V_DIM"),
}


@pytest.mark.parametrize("error", LATENT_ERRORS)
def test_an_error_with_latents_is_caught(error: str, tmp_path: Path) -> None:
    case = PagedCase(LATENT, [(150, 1)], 4)
    launch(case, 1, planted(paged_decode, tmp_path, *LATENT_ERRORS[error]))


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("(context - 1) // -WINDOW", "context // -WINDOW"),
        ("* -WINDOW - first", "* -WINDOW - 1 - first"),
    ],
)
def test_a_planted_error_in_chunks_is_caught(right: str, wrong: str, tmp_path: Path) -> None:
    # The second row is a chunk's last position, the first one's chunk begins inside of a block.
    layer = LayerGeometry(2, 16, 16, chunk=75)
    case = PagedCase(layer, [(140, 1), (150, 1)], 4)
    launch(case, 1)
    assert case.is_right()
    launch(case, 1, planted(paged_decode, tmp_path, wrong, right))
    assert not case.is_right()


def join_splits_ref(
    parts: torch.Tensor,
    stats: torch.Tensor,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """The definition: float64 [rows, heads, v_dim]."""
    maxima, sums = stats.double().unbind(-1)
    sink = sinks.double() / torch.log(torch.tensor(2.0, dtype=torch.float64))
    highest = torch.maximum(maxima.max(-1).values, sink)
    weights = torch.exp2(maxima - highest[..., None])
    total = (weights * sums).sum(-1)
    total = total + torch.exp2(sink - highest)
    return (weights[..., None] * parts.double()).sum(-2) / total[..., None]


JOIN_ERRORS = {
    "parts not weighed": ("tl.sum(weights[:, None] * part, 0)", "tl.sum(part, 0)"),
    "sums not weighed": ("tl.sum(weights * sums, 0)", "tl.sum(sums, 0)"),
    "last part left out": ("there = split < num_splits", "there = split < num_splits - 1"),
    "sink left out": ("total = total + 1.0", "pass"),
}


@pytest.mark.parametrize("error", [None, *JOIN_ERRORS])
def test_join_alone(error: str | None, tmp_path: Path) -> None:
    """Against its reference; 18 parts are more than it joins at a time, one of them empty."""
    module = planted(paged_join, tmp_path, *JOIN_ERRORS[error]) if error else paged_join
    case = PagedCase(LayerGeometry(2, 16, 16), [(5, 1)], 4, has_sinks=True)
    parts, stats = case.normal(1, 4, 18, 16), case.normal(1, 4, 18, 2).abs() + 0.5
    parts[:, :, 7], stats[:, :, 7] = 0.0, torch.tensor([-1e30, 0.0])
    assert case.sinks is not None
    module.join_splits(
        case.guards.input(parts),
        case.guards.input(stats),
        case.flat.q_start,
        case.out,
        case.sinks,
        {"NUM_HEADS": 4, "V_DIM": 16, "HAS_SINKS": True, "V_PAD": 16},
    )
    wanted = join_splits_ref(parts, stats, case.sinks)
    case.guards.check()
    close = torch.allclose(case.out.double(), wanted, atol=1e-5)
    assert close == (error is None)


def test_splits_fill_the_device() -> None:
    assert choose_splits(256, 8192, 132) == 1  # batch 32, 8 KV heads: nearly one wave already
    assert choose_splits(8, 16, 132) == 1  # nothing to cut
    alone = choose_splits(8, 32768, 132)
    assert 200 <= 8 * alone <= 264
    for programs in (1, 8, 40, 130, 300):
        for context in (100, 1000, 20000):
            splits = choose_splits(programs, context, 132)
            assert 1 <= splits <= paged_decode.MAX_SPLITS
            tiles = -(-context // paged_decode.BLOCK_N)
            assert splits == 1 or tiles / splits >= paged_decode.LEAST_SPLIT_TILES


def test_shapes_that_do_not_fit_are_refused() -> None:
    case = PagedCase(LayerGeometry(2, 16, 16), [(5, 2)], 4)
    with pytest.raises(ValueError, match="one token"):
        launch(case, 1)
    case = PagedCase(LayerGeometry(2, 16, 16), [(5, 1)], 4)
    room = torch.empty(2, 4, 2, 16), torch.empty(2, 4, 2, 2)  # of a row too many
    with pytest.raises(ValueError, match="parts of"):
        paged_decode.paged_decode(
            case.arena, case.geometry, case.chunk_table, case.flat, case.query, case.out, SCALE,
            num_splits=2, partial=room,
        )  # fmt: skip
    odd = PagedCase(LayerGeometry(2, 16, 16), [(5, 1)], 4, block_tokens=3)
    with pytest.raises(ValueError, match="power of two"):
        launch(odd, 1)
