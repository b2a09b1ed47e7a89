"""Pairs of a token and one of its experts, sorted by expert on the device and cut into tiles.

    ids    [T, k]   int32 or int64; the expert of each pair, on the device; outside of [0, E): none
    order  [P]      int32, P = T k: numbers of pairs (token k + choice), those of expert 0 first,
                    then of expert 1...; of one expert in rising order. Pairs of no expert are not
                    in it, and what is behind the last one is not written
    tiles  [n, 3]   int32: expert, first place in `order`, the place behind the last of its expert;
                    -1, 0, 0 for tiles that are not needed

A tile is `block_m` places of one expert, the last of each expert less. `most_tiles` says how many
there can be for any choice, so the launch follows from shapes alone, and a graph can record it: no
value comes to the host.

One launch, a program an expert: each counts all pairs by expert (a histogram; whole numbers, so
the order of the additions does not matter), which gives it the place of its own, and then reads
them again to write its own. One program more marks the tiles that are left. Bytes moved: 8 P an
expert, from the cache.
"""

import torch

from kernels.triton_api import Declared, check_out, jit, next_power_of_2, tl

BLOCK = 1024
SMALL_BLOCK = 256
# Of the histogram: as many as a warp has lanes, at least.
LEAST_BINS = 32


def most_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Tiles at most, however `num_pairs` are spread: one an expert that is hit, and one more for
    every `block_m` pairs beyond."""
    hit = min(num_pairs, num_experts)
    return hit + (num_pairs - hit) // block_m


def expert_tiles_ref(
    ids: torch.Tensor, num_experts: int, block_m: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition: order, of the pairs of experts only, and tiles. Waits for the device."""
    flat = ids.flatten().tolist()
    order: list[int] = []
    tiles: list[tuple[int, int, int]] = []
    for expert in range(num_experts):
        first = len(order)
        order += [pair for pair, chosen in enumerate(flat) if chosen == expert]
        tiles += [(expert, start, len(order)) for start in range(first, len(order), block_m)]
    tiles += [(-1, 0, 0)] * (most_tiles(len(flat), num_experts, block_m) - len(tiles))
    return (
        torch.tensor(order, dtype=torch.int32, device=ids.device),
        torch.tensor(tiles, dtype=torch.int32, device=ids.device).view(-1, 3),
    )


@jit
def _experts_of(
    ids: tl.tensor, pair: tl.tensor, num_pairs: tl.tensor, num_experts: tl.tensor
) -> tl.tensor:
    """Of some pairs; `num_experts` for those of none, and for what is no pair."""
    expert = tl.load(ids + pair, mask=pair < num_pairs, other=-1)
    known = (expert >= 0) & (expert < num_experts)
    return tl.where(known, expert, num_experts).to(tl.int32)


@jit
def _expert_tiles_kernel(
    ids: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    num_pairs: tl.tensor,
    num_experts: tl.tensor,
    num_tiles: tl.tensor,
    BLOCK_M: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program e: what is of expert e; the last one: the tiles that are left."""
    own = tl.program_id(0)
    step = tl.arange(0, BLOCK)
    number = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for start in range(0, num_pairs, BLOCK):
        counts += tl.histogram(_experts_of(ids, start + step, num_pairs, num_experts), BINS)
    before = number < own
    first = tl.sum(tl.where(before, counts, 0), 0)
    tile = tl.sum(tl.where(before, (counts + BLOCK_M - 1) // BLOCK_M, 0), 0)
    count = tl.sum(tl.where(number == own, counts, 0), 0)
    if own == num_experts:
        for start in range(tile, num_tiles, BLOCK):
            left = start + step
            tl.store(tiles + left * 3, -1, mask=left < num_tiles)
            tl.store(tiles + left * 3 + 1, 0, mask=left < num_tiles)
            tl.store(tiles + left * 3 + 2, 0, mask=left < num_tiles)
    elif count > 0:
        for start in range(0, (count + BLOCK_M - 1) // BLOCK_M, BLOCK):
            place = (start + step) * BLOCK_M
            target = tiles + (tile + start + step) * 3
            tl.store(target, own, mask=place < count)
            tl.store(target + 1, first + place, mask=place < count)
            tl.store(target + 2, first + count, mask=place < count)
        for start in range(0, num_pairs, BLOCK):
            pair = start + step
            mine = (_experts_of(ids, pair, num_pairs, num_experts) == own).to(tl.int32)
            rank = tl.cumsum(mine, 0) - mine
            tl.store(order + first + rank, pair, mask=mine != 0)
            first += tl.sum(mine, 0)


def expert_tiles(
    ids: torch.Tensor,
    num_experts: int,
    block_m: int,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`expert_tiles_ref` by the kernel: order [P], of which the end may be left unwritten, and
    tiles [most_tiles, 3]. Raises ValueError for ids that do not lie together or are no integers."""
    if ids.dtype not in (torch.int32, torch.int64) or not ids.is_contiguous():
        raise ValueError("experts are int32 or int64, and lie together")
    num_pairs = ids.numel()
    num_tiles = most_tiles(num_pairs, num_experts, block_m)
    order, tiles = out or (
        torch.empty(num_pairs, dtype=torch.int32, device=ids.device),
        torch.empty(num_tiles, 3, dtype=torch.int32, device=ids.device),
    )
    check_out(order, tiles)
    if num_pairs:
        _expert_tiles_kernel[(num_experts + 1,)](
            ids,
            order,
            tiles,
            num_pairs,
            num_experts,
            num_tiles,
            BLOCK_M=block_m,
            BINS=max(LEAST_BINS, next_power_of_2(num_experts + 1)),
            BLOCK=BLOCK if num_pairs > SMALL_BLOCK else SMALL_BLOCK,
            num_warps=4,
        )
    return order, tiles


DECLARED = (
    Declared(
        "expert_tiles/128",
        _expert_tiles_kernel,
        {"ids": "*i64:16", "order": "*i32:16", "tiles": "*i32:16"}
        | dict.fromkeys(("num_pairs", "num_experts", "num_tiles"), "i32"),
        {"BLOCK_M": 16, "BINS": 256, "BLOCK": BLOCK},
    ),
)
