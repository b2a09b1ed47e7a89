"""Copies inside the arena: pages, runs of weights and blocks of KV that move to other places.

`moves` are (source offset, target offset, bytes), to be carried out one after the other: a later
one may write what an earlier one has read, or read what it has written. One may overlap itself
towards lower offsets (a slide); its bytes arrive as they were.

On a GPU many are carried out at once. Moves that go on where the one before has ended are joined;
`waves` cuts the rest into runs of moves none of which touches what another of the run writes, and
each run is one launch. Compaction's moves are usually one run, a slide of neighbours is one move.

A slide by d bytes is d chains: what lies d apart moves one after the other, and chains know nothing
of one another. So a program has a piece of the first d bytes and follows it in steps of d; the same
thread reads a place and, a step later, writes it, so nobody waits for anybody.

Bytes moved: each byte once in, once out. A program copies a piece of PIECE_BYTES, 16 bytes a thread
and turn where all offsets allow it; 64 KiB a piece makes 16 GB 250,000 programs and a page of 2 MiB
32. A program of a slide has one turn (16 KiB), so that a slide by a page keeps 128 busy. The host
tells each program the number of its move, and nothing is listed by hand. No arithmetic: the loop's
loads are independent, so several turns are under way at once.
"""

import bisect
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from kernels.triton_api import Declared, jit, tl

PIECE_BYTES = 64 << 10
NUM_WARPS = 8
# Elements of a turn: 16 bytes a thread at 8-byte words.
BLOCK = 512
UNROLL = 4
# What bytes are moved as, by what all offsets and sizes are multiples of.
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}

Move = tuple[int, int, int]


def page_copy_ref(arena: torch.Tensor, moves: Sequence[Move]) -> None:
    """One after the other."""
    for source, target, size in moves:
        arena[target : target + size] = arena[source : source + size].clone()


def joined(moves: Sequence[Move]) -> Iterator[Move]:
    """The same with fewer: slides down that go on where the one before has ended are one."""
    last: Move | None = None
    for move in moves:
        source, target, size = move
        if last is not None:
            first, at, before = last
            if target < source == first + before and target == at + before:
                last = first, at, before + size
                continue
            yield last
        last = move
    if last is not None:
        yield last


def waves(moves: Sequence[Move]) -> Iterator[list[Move]]:
    """The moves in order, cut where one touches what an earlier one of its run reads or writes.

    Reads of the same bytes may meet; a target may meet nothing but its own source.
    """
    if _all_apart(np.array(moves, dtype=np.int64).reshape(-1, 3)):
        yield list(moves)
        return
    run: list[Move] = []
    read, written = _Ranges(), _Ranges()
    for source, target, size in moves:
        meets = read.touch(target, size) or written.touch(target, size)
        if meets or written.touch(source, size):
            yield run
            run, read, written = [], _Ranges(), _Ranges()
        run.append((source, target, size))
        read.add(source, size)
        written.add(target, size)
    if run:
        yield run


def _all_apart(moves: Any) -> bool:
    """Whether no target meets a source or another target. False also where this is not clear."""
    begin = np.concatenate((moves[:, 1], moves[:, 0]))
    end = begin + np.tile(moves[:, 2], 2)
    order = np.argsort(begin, kind="stable")
    starts, ends, is_target = begin[order], end[order], order < len(moves)
    meets = starts[1:] < np.maximum.accumulate(ends)[:-1]
    written = np.maximum.accumulate(np.where(is_target, ends, 0))[:-1]
    return not bool((meets & is_target[1:]).any() or (starts[1:] < written).any())


class _Ranges:
    """A set of bytes as sorted ranges that do not touch: thousands of moves are looked up."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def touch(self, start: int, size: int) -> bool:
        """Whether any of those bytes is in the set."""
        low, high = self._between(start, start + size)
        return low < high

    def add(self, start: int, size: int) -> None:
        """Put those bytes in."""
        end = start + size
        low, high = self._between(start, end)
        if low < high:
            start, end = min(start, self._starts[low]), max(end, self._ends[high - 1])
        self._starts[low:high] = [start]
        self._ends[low:high] = [end]

    def _between(self, start: int, end: int) -> tuple[int, int]:
        """The ranges low to high - 1 have bytes in common with it."""
        return bisect.bisect_right(self._ends, start), bisect.bisect_left(self._starts, end)


@jit
def _copy_kernel(
    arena_ptr: tl.tensor,
    moves_ptr: tl.tensor,
    owners_ptr: tl.tensor,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
) -> None:
    """Program p: a piece of move owners[p] of `_tables`.

    UNIT as a factor tells the compiler that loads of two words at a time are aligned.
    """
    move = moves_ptr + tl.load(owners_ptr + tl.program_id(0)).to(tl.int64) * 6
    source = tl.load(move) * UNIT
    target = tl.load(move + 1) * UNIT
    words = tl.load(move + 2) * UNIT
    step = tl.load(move + 3) * UNIT
    piece = tl.load(move + 4) * UNIT
    first = (tl.program_id(0) - tl.load(move + 5)) * piece
    lane = tl.arange(0, BLOCK * UNROLL)
    for lap in range(0, words, step):
        end = tl.minimum(tl.minimum(first + piece, step), words - lap)
        for start in range(first, end, BLOCK * UNROLL):
            mask = start + lane < end
            value = tl.load(arena_ptr + source + lap + start + lane, mask=mask, other=0)
            tl.store(arena_ptr + target + lap + start + lane, value, mask=mask)


def page_copy(arena: torch.Tensor, moves: Sequence[Move]) -> None:
    """Carry the moves out, in as few launches as their order allows."""
    moves = list(joined([move for move in moves if move[2]]))
    if not moves:
        return
    unit_bytes = math.gcd(16, int(np.gcd.reduce(np.array(moves), axis=None)))
    words = arena.view(WORDS[min(8, unit_bytes)])
    for run in waves(moves):
        table, owners = _tables(run, unit_bytes, words.dtype.itemsize)
        _copy_kernel[(len(owners),)](
            words,
            _on_device(torch.from_numpy(table), arena.device),
            _on_device(torch.from_numpy(owners), arena.device),
            UNIT=unit_bytes // words.dtype.itemsize,
            BLOCK=BLOCK,
            UNROLL=UNROLL,
            num_warps=NUM_WARPS,
        )


def _tables(run: Sequence[Move], unit_bytes: int, word_bytes: int) -> tuple[Any, Any]:
    """What programs read: int64 [moves, 6] and the number of its move for each, int32 [programs].

    A move: source, target and size, by how much it slides (its size where it does not meet itself),
    the bytes of a program, all in units; and the number of its first program.
    """
    source, target, size = np.array(run, dtype=np.int64).T
    slides = (source > target) & (source < target + size)
    step = np.where(slides, source - target, size)
    piece = np.where(slides, BLOCK * UNROLL * word_bytes, PIECE_BYTES)
    counts = -(-step // piece)
    table = np.stack((source, target, size, step, piece), -1) // unit_bytes
    firsts = np.cumsum(counts) - counts
    owners = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    return np.concatenate((table, firsts[:, None]), -1), owners


def _on_device(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """From pinned memory, so that nobody waits until the device has come to it."""
    if device.type == "cpu":
        return table
    return table.pin_memory().to(device, non_blocking=True)


DECLARED = (
    Declared(
        "page_copy/16 bytes",
        _copy_kernel,
        {"arena_ptr": "*i64:16", "moves_ptr": "*i64:16", "owners_ptr": "*i32:16"},
        {"UNIT": 2, "BLOCK": BLOCK, "UNROLL": UNROLL},
        NUM_WARPS,
    ),
)
