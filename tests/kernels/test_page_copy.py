"""Copies inside the arena: any moves give what doing them one after the other gives."""

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import page_copy
from kernels.page_copy import Move, joined, page_copy_ref, waves
from tests.kernels.guarded import Guards, planted

PIECE = page_copy.PIECE_BYTES


def arena(size: int) -> torch.Tensor:
    """Bytes that are all different from their neighbours'."""
    return (torch.arange(size) * 37 % 251).to(torch.uint8)


@pytest.mark.parametrize(
    "moves",
    [
        [(0, 4096, 4096)],
        [(4096, 0, 4096), (8192, 4096, 4096), (12288, 8192, 4096)],  # neighbours slide down
        [(0, 2 * PIECE, PIECE + 4096)],  # more than a piece
        [(16, 4096, 24), (100, 200, 4), (7, 301, 5)],  # any alignment
        [(4096, 0, 3 * PIECE)],  # a slide, shorter steps than a program copies
        [(2 * PIECE, 48, PIECE), (3 * PIECE, PIECE + 48, 4080)],  # a slide in two
        [(PIECE + 4096, 0, 3 * PIECE - 4096), (0, 3 * PIECE, 4096)],  # a long way, then beside it
        [(19, 8, 61), (100, 99, 17)],  # slides of any alignment
        [(0, 64, 0)],
        [],
    ],
    ids=[
        "page",
        "neighbours",
        "pieces",
        "odd",
        "slide",
        "joined",
        "far",
        "odd slides",
        "empty",
        "none",
    ],
)
def test_equals_one_after_the_other(moves: list[Move]) -> None:
    before = arena(4 * PIECE)
    wanted = before.clone()
    page_copy_ref(wanted, moves)
    guards = Guards()
    got = guards.inout(before)
    page_copy.page_copy(got, moves)
    guards.check()
    assert torch.equal(got, wanted)


move = st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(1, 6)).filter(
    lambda move: move[0] > move[1] or move[1] - move[0] >= move[2]
)


@given(st.lists(move, max_size=12), st.randoms(use_true_random=False))
@settings(max_examples=150)
def test_moves_of_a_wave_may_run_in_any_order(moves: list[Move], order: random.Random) -> None:
    wanted, got = arena(50), arena(50)
    page_copy_ref(wanted, moves)
    for run in waves(list(joined(moves))):
        order.shuffle(run)
        page_copy_ref(got, run)
    assert torch.equal(got, wanted)


def test_moves_that_do_not_meet_are_one_launch() -> None:
    moves = [(2 * i * 64, (2 * i + 1) * 64, 64) for i in range(50)]
    assert len(list(waves(moves))) == 1
    assert len(list(waves([(0, 8, 8), (8, 16, 8)]))) == 2
    assert len(list(waves([(0, 8, 8), (16, 8, 8)]))) == 2
    assert len(list(waves([(0, 8, 8), (0, 16, 8)]))) == 1


def test_a_model_that_slides_is_one_launch_and_its_list_is_short() -> None:
    """33 segments of 8B by one page of 2 MiB; and what a program reads, by programs."""
    page = 2 << 20
    moves = [((232 * i + 1) * page, 232 * i * page, 232 * page) for i in range(33)]
    (run,) = waves(list(joined(moves)))
    table, owners = page_copy._tables(run, 16, 8)
    assert table.tolist() == [[page // 16, 0, 33 * 232 * page // 16, page // 16, 1024, 0]]
    assert owners.tolist() == [0] * 128


ERRORS = {
    "target off by one": ("tl.load(move + 1) * UNIT", "(tl.load(move + 1) + 1) * UNIT"),
    "the end left out": ("start + lane < end", "start + lane < end - 1"),
    "the end passed": ("start + lane < end", "start + lane < end + 1"),
    "pieces not told apart": ("(tl.program_id(0) - tl.load(move + 5)) * piece", "0 * piece"),
    "moves not told apart": ("tl.load(owners_ptr + tl.program_id(0))", "tl.load(owners_ptr)"),
    "one step of a slide": ("range(0, words, step)", "range(0, step, step)"),
}


@pytest.mark.parametrize("error", ERRORS)
def test_a_planted_error_is_caught(error: str, tmp_path: Path) -> None:
    before = arena(4 * PIECE)
    wanted = before.clone()
    moves = [(0, 1024, 272), (512, 2048, 48), (6144, 4096, 8192), (PIECE, 2 * PIECE, PIECE + 64)]
    page_copy_ref(wanted, moves)
    planted(page_copy, tmp_path, *ERRORS[error]).page_copy(before, moves)
    assert not torch.equal(before, wanted)


def test_waves_in_order_are_needed(tmp_path: Path) -> None:
    """All at once is wrong where neighbours slide: waves that are left out show."""
    moves = [(8, 0, 8), (16, 8, 8), (0, 24, 8)]
    wanted, got = arena(64), arena(64)
    page_copy_ref(wanted, moves)
    bad = planted(page_copy, tmp_path, "for run in waves(moves):", "for run in [moves[::-1]]:")
    bad.page_copy(got, moves)
    assert not torch.equal(got, wanted)
