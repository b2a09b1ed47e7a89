"""Pairs are sorted by expert and cut into tiles, whatever was chosen, in room known beforehand."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from kernels import expert_tiles as module
from kernels.expert_tiles import expert_tiles_ref, most_tiles
from tests.kernels.guarded import CAUGHT, Guards, planted

CHOICES = ("random", "one", "none", "first and last", "strangers")


def choices(kind: str, tokens: int, top_k: int, experts: int) -> torch.Tensor:
    """ids [T, k]."""
    generator = torch.Generator().manual_seed(tokens)
    shape = (tokens, top_k)
    if kind == "one":
        return torch.full(shape, experts // 2)
    if kind == "none":
        return torch.full(shape, experts)
    if kind == "first and last":
        return torch.randint(2, shape, generator=generator) * (experts - 1)
    ids = torch.randint(experts, shape, generator=generator)
    if kind == "strangers":  # padding's router may say anything
        ids[::2] = torch.tensor([-1, experts, 1 << 40, -(1 << 40)])[
            torch.arange(len(ids[::2])) % 4, None
        ]
    return ids


def is_right(kernel: ModuleType, ids: torch.Tensor, experts: int, block_m: int) -> bool:
    """Equal to the definition, and nothing else is written."""
    order, tiles = expert_tiles_ref(ids, experts, block_m)
    guards = Guards()
    rest = len(order) < ids.numel()
    place = (
        guards.inout(torch.full((ids.numel(),), -7, dtype=torch.int32))
        if rest
        else (guards.output(ids.numel(), dtype=torch.int32))
    )
    out = place, guards.output(len(tiles), 3, dtype=torch.int32)
    found = kernel.expert_tiles(guards.input(ids), experts, block_m, out=out)
    guards.check()
    left = found[0][len(order) :]
    return (
        torch.equal(found[0][: len(order)], order)
        and bool((left == -7).all())
        and torch.equal(found[1], tiles)
    )


@pytest.mark.parametrize("kind", CHOICES)
@pytest.mark.parametrize("block_m", [1, 16])
def test_kernel_is_the_definition(kind: str, block_m: int) -> None:
    for tokens, top_k, experts in ((1, 1, 1), (1, 8, 3), (37, 2, 5), (5, 3, 40)):
        assert is_right(module, choices(kind, tokens, top_k, experts), experts, block_m)


def test_more_pairs_than_a_block() -> None:
    for kind in ("random", "one", "strangers"):
        ids = choices(kind, 1301, 2, 3)
        assert is_right(module, ids, 3, 1)
        assert is_right(module, ids.clamp(-1, 3).int(), 3, 16)


def test_there_is_room_for_any_choice_and_for_no_more() -> None:
    for pairs in range(1, 40):
        for experts in (1, 2, 7, 50):
            for block_m in (1, 4, 16):
                # The worst: an expert of one pair each, all others on one of them.
                hit = min(pairs, experts)
                counts = [pairs - hit + 1, *[1] * (hit - 1)]
                assert most_tiles(pairs, experts, block_m) == sum(-(-c // block_m) for c in counts)


def test_what_it_refuses() -> None:
    for bad in (torch.ones(2, 2), torch.ones(4, 4, dtype=torch.int64).T[:, :2]):
        with pytest.raises(ValueError, match="lie together"):
            module.expert_tiles(bad, 4, 16)
    order, tiles = module.expert_tiles(torch.ones(0, 2, dtype=torch.int64), 4, 16)
    assert order.numel() == tiles.numel() == 0


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(expert >= 0) & (expert < num_experts)", "(expert >= 0)"),
        ("(expert >= 0) & (expert < num_experts)", "(expert < num_experts)"),
        ("mask=pair < num_pairs", "mask=pair < num_pairs - 1"),
        ("before = number < own", "before = number <= own"),
        ("(counts + BLOCK_M - 1) // BLOCK_M, 0)", "counts // BLOCK_M, 0)"),
        ("tl.store(tiles + left * 3, -1", "tl.store(tiles + left * 3, 0"),
        ("first + place, mask", "place, mask"),
        ("first + count, mask", "first + place + BLOCK_M, mask"),
        ("tl.cumsum(mine, 0) - mine", "tl.cumsum(mine, 0)"),
        ("first += tl.sum(mine, 0)", "first += 0"),
        ("range(tile, num_tiles, BLOCK)", "range(tile + 1, num_tiles, BLOCK)"),
    ],
)
def test_planted_errors_are_caught(old: str, new: str, tmp_path: Path) -> None:
    bad = planted(module, tmp_path, old, new)
    cases = [(choices("strangers", 701, 2, 3), 3), (choices("random", 9, 2, 5), 5)]
    with pytest.raises(CAUGHT):
        assert all(is_right(bad, ids, experts, 4) for ids, experts in cases)
