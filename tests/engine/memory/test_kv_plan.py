"""The choice of the extent, and where an extent's chunks lie."""

import itertools

import pytest
import torch

from engine.memory.extent_plan import ChunkTable
from engine.memory.kv_plan import LEAST_EXTENT_TOKENS, KvPlan, plan_kv
from kernels.paged_attention import LayerGeometry

MIB = 1 << 20
CPU = torch.device("cpu")


def used_share(plan: KvPlan, page_bytes: int) -> float:
    """The least share of a group's extents that blocks can fill."""
    return min(
        len(group.layers)
        * group.blocks_per_extent
        * group.block_bytes
        / (group.pages_per_extent * page_bytes)
        for group in plan.groups
    )


@pytest.mark.parametrize("num_layers", [1, 4, 5, 13, 22, 24, 28, 30, 36, 80])
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("pages", [256, 1024, 40_000])
def test_extents_waste_little_and_stay_small(num_layers: int, kv_heads: int, pages: int) -> None:
    page = 2 * MIB
    plan = plan_kv([LayerGeometry(kv_heads, 64, 64)] * num_layers, torch.bfloat16, 16, page, pages)
    (group,) = plan.groups
    assert used_share(plan, page) >= 0.9
    assert group.pages_per_extent <= max(3, num_layers // 4)
    if group.pages_per_extent > 1:
        assert LEAST_EXTENT_TOKENS <= group.tokens_per_extent <= 512


def test_chunks_are_long_where_that_costs_nothing() -> None:
    plan = plan_kv([LayerGeometry(8, 128, 128)] * 32, torch.bfloat16, 16, 2 * MIB, 40_000)
    (group,) = plan.groups
    assert (group.num_chunks, group.blocks_per_chunk) == (1, 4)
    assert used_share(plan, 2 * MIB) == 1.0


def test_layers_that_do_not_divide_pages_share_them_in_several_chunks() -> None:
    """13 layers and 16 chunks a page would leave 3 of 16 unused with one chunk a layer."""
    plan = plan_kv([LayerGeometry(4, 256, 256)] * 13, torch.bfloat16, 16, 2 * MIB, 20_000)
    assert plan.groups[0].num_chunks > 1
    assert used_share(plan, 2 * MIB) > 0.94


def test_layers_are_grouped_by_geometry_and_window() -> None:
    full, slid = LayerGeometry(2, 64, 64), LayerGeometry(2, 64, 64, 512)
    plan = plan_kv([slid, slid, full, slid], torch.bfloat16, 16, MIB, 1000)
    assert [group.layers for group in plan.groups] == [(0, 1, 3), (2,)]
    assert plan.layer_group == {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (0, 2)}
    assert [group.window for group in plan.groups] == [512, 0]
    assert plan.bytes_per_token(MIB) >= 4 * 2 * 128 * 2


def test_blocks_larger_than_a_page_are_refused() -> None:
    with pytest.raises(ValueError, match="larger pages"):
        plan_kv([LayerGeometry(64, 128, 128)], torch.float32, 16, 4096, 8)


@pytest.mark.parametrize("window", [0, 1, 3, 4, 5, 17])
def test_the_first_needed_block_holds_the_first_position_seen(window: int) -> None:
    (group,) = plan_kv([LayerGeometry(1, 8, 8, window)], torch.float32, 4, 4096, 8).groups
    for computed in range(60):
        first_seen = max(0, computed - window + 1) if window else 0
        assert group.first_needed(computed) == first_seen // 4


@pytest.mark.parametrize("chunk", [1, 3, 4, 8, 17])
def test_a_chunk_is_needed_from_its_first_position_on(chunk: int) -> None:
    (group,) = plan_kv([LayerGeometry(1, 8, 8, 0, chunk=chunk)], torch.float32, 4, 4096, 8).groups
    assert group.window == chunk
    for computed in range(60):
        assert group.first_needed(computed) == computed // chunk * chunk // 4


@pytest.mark.parametrize("num_layers", [1, 3, 5, 13])
def test_chunks_of_extents_are_apart_and_never_cross_a_page(num_layers: int) -> None:
    page = 8192
    plan = plan_kv([LayerGeometry(1, 32, 32)] * num_layers, torch.float32, 4, page, 64)
    (group,) = plan.groups
    table = ChunkTable(group, page, CPU)
    pages = list(range(40, 40 + 3 * group.pages_per_extent))
    for extent in range(3):
        table.place(extent, pages[extent::3])
    columns = 3 * group.num_chunks
    starts = table.capture()[:, :columns].flatten() * group.block.unit_bytes
    size = group.blocks_per_chunk * group.block_bytes
    spans = sorted((start, start + size) for start in starts.tolist())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert all(start // page == (end - 1) // page for start, end in spans)
    assert {start // page for start, _ in spans} == set(pages)
    for block in range(3 * group.blocks_per_extent):
        offsets = table.block_offsets(block)
        assert len({offset // page for offset in offsets} - set(pages)) == 0


def test_a_captured_table_is_never_changed() -> None:
    (group,) = plan_kv([LayerGeometry(1, 32, 32)] * 2, torch.float32, 4, 8192, 64).groups
    table = ChunkTable(group, 8192, CPU)
    table.place(0, [5] * group.pages_per_extent)
    captured = table.capture()
    before = captured.clone()
    assert table.capture() is captured, "nothing changed: no copy is made"
    table.place(0, [9] * group.pages_per_extent)
    for extent in range(1, 100):
        table.place(extent, [extent % 60] * group.pages_per_extent)
    assert torch.equal(captured, before)
    assert not torch.equal(table.capture()[:, 0], before[:, 0])
