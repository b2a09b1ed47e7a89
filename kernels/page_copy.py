"""Copies inside the arena: pages, runs of weights and blocks of KV that move to other places.

`moves` are (source offset, target offset, bytes), to be carried out one after the other: a later
one may write what an earlier one has read, or read what it has written. None overlaps itself.

On a GPU many are carried out at once. `waves` cuts the list into runs of moves none of which
touches what another of the run writes; each run is one launch. Compaction's moves are usually one
run, a sliding of neighbours is several.

Bytes moved: each byte once in, once out. A program copies a piece of PIECE_BYTES, 16 bytes a thread
and turn where all offsets allow it; 64 KiB a piece makes 16 GB 250,000 programs and a page of 2 MiB
32. No arithmetic: the loop's loads are independent, so several turns are under way at once.
"""

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence

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
        arena[target : target + size] = arena[source : source + size]


def waves(moves: Sequence[Move]) -> Iterator[list[Move]]:
    """The moves in order, cut where one touches what an earlier one of its run reads or writes.

    Reads of the same bytes may meet; a target may meet nothing.
    """
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
    pieces_ptr: tl.tensor,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
) -> None:
    """Program p: piece p, [source, target, size] in units of UNIT words.

    UNIT as a factor tells the compiler that loads of two words at a time are aligned.
    """
    piece = pieces_ptr + tl.program_id(0).to(tl.int64) * 3
    source = tl.load(piece) * UNIT
    target = tl.load(piece + 1) * UNIT
    words = tl.load(piece + 2) * UNIT
    lane = tl.arange(0, BLOCK * UNROLL)
    for start in range(0, words, BLOCK * UNROLL):
        mask = start + lane < words
        value = tl.load(arena_ptr + source + start + lane, mask=mask, other=0)
        tl.store(arena_ptr + target + start + lane, value, mask=mask)


def page_copy(arena: torch.Tensor, moves: Sequence[Move]) -> None:
    """Carry the moves out, in as few launches as their order allows."""
    moves = [move for move in moves if move[2]]
    if not moves:
        return
    unit_bytes = math.gcd(16, *itertools.chain.from_iterable(moves))
    words = arena.view(WORDS[min(8, unit_bytes)])
    for run in waves(moves):
        pieces = [
            [
                (source + start) // unit_bytes,
                (target + start) // unit_bytes,
                min(PIECE_BYTES, size - start) // unit_bytes,
            ]
            for source, target, size in run
            for start in range(0, size, PIECE_BYTES)
        ]
        table = _on_device(torch.tensor(pieces, dtype=torch.int64), arena.device)
        _copy_kernel[(len(pieces),)](
            words,
            table,
            UNIT=unit_bytes // words.dtype.itemsize,
            BLOCK=BLOCK,
            UNROLL=UNROLL,
            num_warps=NUM_WARPS,
        )


def _on_device(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """From pinned memory, so that nobody waits until the device has come to it."""
    if device.type == "cpu":
        return table
    return table.pin_memory().to(device, non_blocking=True)


DECLARED = (
    Declared(
        "page_copy/16 bytes",
        _copy_kernel,
        {"arena_ptr": "*i64:16", "pieces_ptr": "*i64:16"},
        {"UNIT": 2, "BLOCK": BLOCK, "UNROLL": UNROLL},
        NUM_WARPS,
    ),
)
