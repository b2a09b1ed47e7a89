"""Blocks and extents against a model of who owns what, and the choice of the chunk size."""

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.errors import IntegrityError, OutOfPages
from engine.kv_cache import KvCache, plan_kv
from engine.page_pool import Owner, PagePool
from kernels.paged_attention import LayerGeometry

CPU = torch.device("cpu")


def test_plan_takes_whole_page_chunks_in_a_large_pool() -> None:
    layers = [LayerGeometry(2, 64, 64)] * 24  # Qwen2.5-0.5B
    page, pages = 2 << 20, 32 << 10  # 64 GiB
    plan = plan_kv(layers, torch.bfloat16, 16, page, pages)
    assert plan.chunk_bytes == page
    assert plan.pages_per_extent <= pages / 1000
    assert plan.blocks_per_chunk == page // (16 * 2 * 2 * 64 * 2)


@pytest.mark.parametrize("num_layers", [1, 4, 5, 24, 28, 36, 80])
@pytest.mark.parametrize("pages", [256, 1024, 40_000])
def test_plan_wastes_little_at_any_depth(num_layers: int, pages: int) -> None:
    layers = [LayerGeometry(4, 64, 64)] * num_layers
    page = 1 << 20
    plan = plan_kv(layers, torch.bfloat16, 16, page, pages)
    block = 16 * 4 * 2 * 64 * 2
    used = num_layers * plan.blocks_per_chunk * block / (plan.pages_per_extent * page)
    assert used >= 0.85
    assert plan.chunks_per_page * plan.chunk_bytes <= page
    assert plan.pages_per_extent * plan.chunks_per_page >= num_layers
    assert plan.pages_per_extent <= max(5, pages / 64)


def test_plan_refuses_blocks_larger_than_a_page() -> None:
    with pytest.raises(ValueError, match="larger pages"):
        plan_kv([LayerGeometry(64, 128, 128)], torch.float32, 16, 4096, 8)


def test_addresses_of_an_extent_are_apart_and_inside_its_pages() -> None:
    layers = [LayerGeometry(1, 32, 32)] * 5
    pool = PagePool(64, 8192)
    plan = plan_kv(layers, torch.float32, 4, 8192, 64)
    cache = KvCache(Owner("m", "kv"), plan, pool, CPU)
    cache.alloc(3 * plan.blocks_per_chunk)
    starts = cache.chunk_table[:, :3].flatten() * plan.unit_bytes
    assert len(set(starts.tolist())) == 15
    for start in starts.tolist():
        assert start // 8192 == (start + plan.chunk_bytes - 1) // 8192  # never across a page
    assert pool.owned(Owner("m", "kv")) == 3 * plan.pages_per_extent


def test_a_block_cannot_be_freed_twice() -> None:
    pool = PagePool(16, 8192)
    plan = plan_kv([LayerGeometry(1, 32, 32)], torch.float32, 4, 8192, 16)
    cache = KvCache(Owner("m", "kv"), plan, pool, CPU)
    first, _ = cache.alloc(2)
    cache.free([first])
    with pytest.raises(IntegrityError):
        cache.free([first])


class CacheMachine(RuleBasedStateMachine):
    """Two models of unlike geometry in one pool, with lagging fences."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(24, 4096)
        shapes = {"a": [LayerGeometry(1, 16, 16)] * 3, "b": [LayerGeometry(2, 8, 24)] * 2}
        self.caches = {
            name: KvCache(
                Owner(name, "kv"), plan_kv(layers, torch.float32, 4, 4096, 24), self.pool, CPU
            )
            for name, layers in shapes.items()
        }
        self.live: dict[str, list[int]] = {"a": [], "b": []}
        self.step = 0

    @rule(name=st.sampled_from("ab"), count=st.integers(1, 9))
    def alloc(self, name: str, count: int) -> None:
        cache = self.caches[name]
        fits = count <= cache.available_blocks()
        before = self.pool.num_free
        try:
            blocks = cache.alloc(count)
        except OutOfPages:
            assert not fits
            assert self.pool.num_free == before
        else:
            assert fits
            self.live[name].extend(blocks)

    @precondition(lambda self: self.live["a"] or self.live["b"])
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([n for n in "ab" if self.live[n]]))
        block = data.draw(st.sampled_from(self.live[name]))
        self.live[name].remove(block)
        self.caches[name].free([block])

    @rule(name=st.sampled_from("ab"))
    def drop_all(self, name: str) -> None:
        self.caches[name].drop_all()
        self.live[name] = []

    @rule(lag=st.integers(0, 2))
    def advance(self, lag: int) -> None:
        self.step += 1
        self.pool.begin_step(self.step)
        self.pool.retire(self.step - lag)

    @invariant()
    def consistent(self) -> None:
        self.pool.check_integrity()
        for name, cache in self.caches.items():
            cache.check_integrity(self.live[name])
            if not self.live[name]:
                assert self.pool.owned(cache.owner) == 0


TestCacheMachine = CacheMachine.TestCase


def test_blocks_of_a_large_half_used_cache_are_all_handed_out() -> None:
    pool = PagePool(40_000, 1 << 16)
    plan = plan_kv([LayerGeometry(2, 16, 16)] * 2, torch.float32, 4, pool.page_bytes, 40_000)
    cache = KvCache(Owner("m", "kv"), plan, pool, torch.device("cpu"))
    live = [cache.alloc(plan.blocks_per_chunk - 1) for _ in range(4000)]
    live.append(cache.alloc(30_000))
    cache.check_integrity([block for blocks in live for block in blocks])
    for blocks in live:
        cache.free(blocks)
    assert pool.num_fenced == pool.num_pages - pool.num_free
    assert cache.num_free_blocks == 0
