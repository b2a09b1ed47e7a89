"""Who gives way: watermarks, values, moves, compaction."""

from collections.abc import Mapping, Sequence

import pytest
import torch

from engine.errors import IntegrityError
from engine.memory.kv_cache import KvCache
from engine.memory.kv_memory import COMPACT_EXTENTS, KvMemory, Renames
from engine.memory.kv_plan import plan_kv
from engine.memory.page_pool import Owner, PagePool
from engine.memory.prefix_cache import RequestKv
from engine.memory.state_slots import Move
from kernels.paged_attention import LayerGeometry

PAGE = 8192
NUM_PAGES = 64
SHAPES = {"small": [LayerGeometry(1, 32, 32)] * 2, "large": [LayerGeometry(1, 32, 32)] * 6}


class Rig:
    """Two models; copies are noted."""

    def __init__(self, low: int = 0, high: int = 0, small_cost: float = 1.0) -> None:
        self.pool = PagePool(NUM_PAGES, PAGE)
        self.moves: list[Move] = []
        self.memory = KvMemory(self.pool, self, low, high)
        self.caches: dict[str, KvCache] = {}
        for name, layers in SHAPES.items():
            plan = plan_kv(layers, torch.float32, 4, PAGE, NUM_PAGES)
            owner = Owner(name, "kv")
            self.caches[name] = KvCache(owner, plan, self.pool, torch.device("cpu"))
            self.memory.register(name, self.caches[name], small_cost if name == "small" else 1.0)
        self.live: list[tuple[str, RequestKv]] = []

    def last_done(self) -> int:
        return 0

    def copy_within(self, moves: Sequence[Move]) -> None:
        self.moves += moves
        for source, _, _ in moves:
            assert self.pool.owner_of(source // PAGE) is not None, "given back before it was read"

    def run(self, name: str, seed: int, tokens: int, now_s: float) -> RequestKv:
        cache, ids = self.caches[name], list(range(seed, seed + tokens))
        kv = cache.new_kv("t")
        cache.match(kv, ids, now_s)
        cache.reserve(kv, tokens)
        cache.advance(kv, ids, tokens, now_s)
        self.live.append((name, kv))
        return kv

    def cached(self, name: str, seed: int, tokens: int, now_s: float) -> None:
        self.end(self.run(name, seed, tokens, now_s), now_s)

    def end(self, kv: RequestKv, now_s: float) -> None:
        ((name, _),) = [entry for entry in self.live if entry[1] is kv]
        self.caches[name].release(kv, now_s)
        self.live = [entry for entry in self.live if entry[1] is not kv]

    def has(self, name: str, seed: int, tokens: int) -> bool:
        ids = list(range(seed, seed + tokens + 1))
        return self.caches[name].peek("t", ids) == tokens

    def extent_tokens(self, name: str) -> int:
        return self.caches[name].plan.groups[0].tokens_per_extent

    def check(self) -> None:
        self.pool.check_integrity()
        self.memory.check_integrity()
        for name, cache in self.caches.items():
            cache.check_integrity([kv for instance, kv in self.live if instance == name])


def test_the_least_valuable_extent_of_all_models_goes_first() -> None:
    rig = Rig()
    size = rig.extent_tokens("small")
    rig.cached("small", 0, size, 0.0)
    rig.cached("large", 1000, rig.extent_tokens("large"), 50.0)
    rig.cached("small", 2000, size, 100.0)
    rig.cached("small", 0, size + 1, 150.0)  # asked for again
    held = rig.pool.num_pages - rig.pool.num_free - rig.pool.num_fenced
    assert rig.memory.num_evictable() == held
    assert rig.memory.evict(1) >= 1
    assert not rig.has("large", 1000, rig.extent_tokens("large"))
    assert rig.has("small", 0, size)
    rig.memory.evict(1)
    assert not rig.has("small", 2000, size)
    assert rig.has("small", 0, size)
    rig.check()
    assert rig.memory.evict(1000) > 0
    assert rig.memory.evict(1) == 0
    assert rig.memory.num_evicted_pages == held


def test_a_model_that_is_dear_to_compute_keeps_its_blocks_longer() -> None:
    rig = Rig(small_cost=1e6)
    rig.cached("small", 0, rig.extent_tokens("small"), 0.0)
    rig.cached("large", 1000, rig.extent_tokens("large"), 60.0)
    rig.memory.evict(1)
    assert rig.has("small", 0, rig.extent_tokens("small"))
    assert not rig.has("large", 1000, rig.extent_tokens("large"))


def test_the_end_of_a_long_prefix_goes_before_its_beginning() -> None:
    rig = Rig()
    size = rig.extent_tokens("small")
    rig.cached("small", 0, 4 * size, 0.0)
    for left in (3, 2, 1):
        rig.memory.evict(1)
        ids = list(range(4 * size + 1))
        assert rig.caches["small"].peek("t", ids) == left * size


def test_free_pages_are_kept_between_the_marks() -> None:
    rig = Rig(low=8, high=12)
    seed = 0
    while rig.pool.num_free + rig.pool.num_fenced >= 8:
        assert rig.memory.keep_watermark() == 0
        seed += 1000
        rig.cached("small", seed, rig.extent_tokens("small"), 0.0)
    assert rig.memory.keep_watermark() > 0
    assert rig.pool.num_free + rig.pool.num_fenced >= 12
    assert rig.memory.keep_watermark() == 0
    rig.check()


def test_live_blocks_are_never_evicted() -> None:
    rig = Rig()
    kv = rig.run("small", 0, 40, 0.0)
    tables = [list(table) for table in kv.tables]
    rig.memory.evict(NUM_PAGES)
    assert kv.tables == tables
    assert rig.has("small", 0, 40)
    rig.check()


def test_pages_are_cleared_by_moving_what_is_live_and_dropping_what_is_not() -> None:
    rig = Rig(low=60, high=60)  # no page to spare: nothing that is only cached is moved
    kv = rig.run("large", 0, 40, 0.0)
    rig.cached("small", 5000, 40, 0.0)
    tables = [list(table) for table in kv.tables]
    captured = rig.caches["large"].groups[0].table
    before = captured.clone()
    num_live = rig.caches["large"].num_live_pages
    pages = list(range(NUM_PAGES // 2, NUM_PAGES))
    assert rig.memory.clear(pages)
    assert all(rig.pool.owner_of(page) is None for page in pages)
    assert kv.tables == tables, "block ids stay"
    assert torch.equal(captured, before), "a step in flight keeps its addresses"
    assert len(rig.moves) == num_live == rig.memory.num_moved_pages
    assert all(target < NUM_PAGES // 2 * PAGE <= source for source, target, _ in rig.moves)
    assert not rig.has("small", 5000, 40)
    rig.check()


def test_with_pages_to_spare_cached_blocks_move_too() -> None:
    rig = Rig()
    rig.cached("small", 5000, 40, 0.0)
    assert rig.memory.clear(range(NUM_PAGES // 2, NUM_PAGES))
    assert rig.has("small", 5000, 40)
    assert rig.memory.num_evicted_pages == 0
    rig.check()


def test_what_cannot_be_moved_is_left_as_it_was() -> None:
    rig = Rig()
    kv = rig.run("large", 0, 40, 0.0)
    weights = Owner("w", "weights")
    rig.pool.alloc_pages(weights, rig.pool.num_free)
    kinds = rig.pool.kinds()
    assert not rig.memory.clear(range(NUM_PAGES))
    assert rig.pool.kinds() == kinds
    assert not rig.moves
    assert kv.num_blocks == 10
    rig.check()


def test_nothing_is_moved_into_the_pages_that_are_wanted() -> None:
    rig = Rig()
    rig.run("small", 0, 8, 0.0)
    rig.run("large", 0, 8, 0.0)
    wanted = set(range(4, NUM_PAGES))
    live = sum(cache.num_live_pages for cache in rig.caches.values())
    assert rig.memory.clear(wanted) == (live <= 4)
    for _, target, _ in rig.moves:
        assert target // PAGE not in wanted
    rig.check()


def sparse(rig: Rig, number: int) -> list[RequestKv]:
    """So many extents of "small" with one live block each."""
    size = rig.extent_tokens("small")
    # Short ones between long ones: when the long ones end, every extent holds a little.
    short, long = [], []
    for i in range(number):
        short.append(rig.run("small", 1000 * i, 4, 0.0))
        long.append(rig.run("small", 1000 * i + 500, size - 4, 0.0))
    for kv in long:
        rig.end(kv, 0.0)
    rig.memory.evict(NUM_PAGES)
    return short


def test_almost_empty_extents_are_copied_together() -> None:
    rig = Rig()
    cache = rig.caches["small"]
    group = cache.groups[0]
    short = sparse(rig, 6)
    open_before, blocks = cache.num_live_pages, [kv.tables[0][0] for kv in short]
    assert open_before == 6 * group.plan.pages_per_extent
    freed = rig.memory.compact(NUM_PAGES)
    assert freed == 5 * group.plan.pages_per_extent == open_before - cache.num_live_pages
    assert [kv.tables[0][0] for kv in short] != blocks
    assert len(rig.moves) == 5 * len(group.plan.layers)
    assert all(size == group.plan.block_bytes for _, _, size in rig.moves)
    rig.check()
    assert all(rig.has("small", 1000 * i, 4) for i in range(6)), "names moved with the blocks"
    assert rig.memory.compact(NUM_PAGES) == 0


def test_compaction_ahead_of_need_takes_a_few_extents_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(low=NUM_PAGES, high=NUM_PAGES)
    cache, short = rig.caches["small"], sparse(rig, COMPACT_EXTENTS + 5)
    rewritten: list[int] = []
    rewrite = cache.rewrite

    def counted(group: int, moved: Mapping[int, int]) -> None:
        rewritten.append(len(moved))
        rewrite(group, moved)

    monkeypatch.setattr(cache, "rewrite", counted)
    before = {id(kv): kv.array(0).tolist() for kv in short}
    rig.memory.keep_watermark()
    assert rig.memory.num_compactions == COMPACT_EXTENTS
    assert rewritten == [COMPACT_EXTENTS], "tables are rewritten once, not once an extent"
    assert sum(kv.tables[0] != before[id(kv)] for kv in short) == COMPACT_EXTENTS
    assert all(kv.array(0).tolist() == kv.tables[0] for kv in short)
    rig.check()
    rig.memory.keep_watermark()
    assert rig.memory.num_compactions > COMPACT_EXTENTS
    rig.check()
    assert all(rig.has("small", 1000 * i, 4) for i in range(len(short)))


def test_what_is_moved_twice_has_one_new_name() -> None:
    renames = Renames()
    renames.add({1: 11, 2: 12})
    renames.add({11: 21, 3: 13})
    renames.add({21: 31, 12: 11})
    assert renames.final == {1: 31, 2: 11, 3: 13}


def test_full_extents_are_not_copied() -> None:
    rig = Rig()
    rig.run("small", 0, rig.extent_tokens("small") * 3, 0.0)
    assert rig.memory.compact(NUM_PAGES) == 0
    assert not rig.moves


def test_pages_of_a_model_that_is_not_known_are_a_fault() -> None:
    rig = Rig()
    rig.run("small", 0, 8, 0.0)
    rig.memory.forget("small")
    with pytest.raises(IntegrityError, match="not known"):
        rig.memory.check_integrity()
    rig.memory.forget("small")


def test_marks_are_in_order() -> None:
    with pytest.raises(ValueError, match="watermarks"):
        KvMemory(PagePool(8, PAGE), Rig(), 5, 4)
