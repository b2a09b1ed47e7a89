"""The ways in which a prefix cache goes wrong, one by one; `test_kv_random.py` mixes them."""

import pytest
import torch

from engine.errors import IntegrityError, OutOfPages
from engine.memory.kv_cache import KvCache
from engine.memory.kv_plan import plan_kv
from engine.memory.page_pool import Owner, PagePool
from engine.memory.prefix_cache import HOLE, RequestKv
from kernels.paged_attention import LayerGeometry

CPU = torch.device("cpu")
OWNER = Owner("m", "kv")
FULL = LayerGeometry(1, 32, 32)
SLID = LayerGeometry(1, 32, 32, 6)
PROMPT = [*range(100, 122)]


def make(
    layers: list[LayerGeometry], num_pages: int = 64, caching: bool = True, max_chunk: int = 0
) -> tuple[KvCache, PagePool]:
    """Blocks of 4 tokens; 8192-byte pages."""
    pool = PagePool(num_pages, 8192)
    plan = plan_kv(layers, torch.float32, 4, 8192, num_pages)
    return KvCache(OWNER, plan, pool, CPU, caching, max_chunk), pool


def run(cache: KvCache, tokens: list[int], tenant: str = "t", good: int | None = None) -> RequestKv:
    """A request whose first `good` tokens (all) were computed well."""
    kv = cache.new_kv(tenant)
    cache.match(kv, tokens, 0.0)
    cache.reserve(kv, len(tokens))
    cache.advance(kv, tokens, len(tokens) if good is None else good, 0.0)
    return kv


def pass_fences(pool: PagePool) -> None:
    pool.begin_step(1)
    pool.retire(1)


def test_a_prefix_is_found_while_its_request_still_runs() -> None:
    cache, pool = make([FULL] * 2)
    first = run(cache, PROMPT)
    second = cache.new_kv("t")
    assert cache.match(second, PROMPT[:10], 1.0) == 8
    assert second.tables[0] == first.tables[0][:2]
    held = pool.owned(OWNER)
    cache.release(first, 1.0)
    assert pool.owned(OWNER) == held, "what the second one refers to stays"
    cache.check_integrity([second])
    cache.reserve(second, 10)
    assert second.tables[0][2] not in first.tables[0]


def test_the_last_token_of_a_prompt_is_never_a_hit() -> None:
    cache, _ = make([FULL])
    run(cache, PROMPT[:16])
    assert cache.peek("t", PROMPT[:16]) == 12
    assert cache.peek("t", PROMPT[:17]) == 16
    assert cache.peek("t", PROMPT[:1]) == 0


def test_tenants_do_not_find_each_others_blocks() -> None:
    cache, _ = make([FULL])
    run(cache, PROMPT, "a")
    assert cache.peek("b", PROMPT) == 0
    assert cache.peek("a", PROMPT) == 20


def test_only_what_is_known_to_be_good_can_be_found() -> None:
    cache, _ = make([FULL])
    kv = run(cache, PROMPT, good=7)  # 22 reserved and perhaps computed, by a step that failed
    assert cache.peek("t", PROMPT) == 4
    cache.release(kv, 0.0)
    assert cache.peek("t", PROMPT) == 4
    cache.check_integrity([])


def test_two_requests_that_compute_one_prefix_keep_their_own_blocks() -> None:
    cache, pool = make([FULL])
    one, two = cache.new_kv("t"), cache.new_kv("t")
    for kv in (one, two):
        assert cache.match(kv, PROMPT, 0.0) == 0
        cache.reserve(kv, len(PROMPT))
    for kv in (one, two):
        cache.advance(kv, PROMPT, len(PROMPT), 0.0)
    assert not set(one.tables[0]) & set(two.tables[0])
    cache.check_integrity([one, two])
    cache.release(one, 0.0)
    cache.release(two, 0.0)
    cache.check_integrity([])
    assert cache.groups[0].num_cached == 5, "the second copy is free, the first can be found"
    assert cache.peek("t", PROMPT) == 20
    assert pool.owned(OWNER) == cache.num_cached_pages


def test_a_block_that_left_the_window_is_a_hole_and_serves_shorter_prefixes() -> None:
    cache, _ = make([SLID, FULL])
    kv = run(cache, PROMPT)
    slid, full = kv.tables
    first = cache.groups[0].plan.first_needed(22)
    assert slid[:first] == [HOLE] * first
    assert HOLE not in full
    assert first == 4
    # A prompt that shares 8 tokens needs blocks 0 and 1 of the window group: still cached.
    shorter = cache.new_kv("t")
    assert cache.match(shorter, [*PROMPT[:8], 1, 2, 3], 0.0) == 8
    assert shorter.first == [0, 0]
    # One that shares all begins with a hole itself.
    longer = cache.new_kv("t")
    assert cache.match(longer, [*PROMPT[:20], 1], 0.0) == 20
    assert longer.first[0] == 3
    assert longer.tables[0][:3] == [HOLE] * 3
    cache.check_integrity([kv, shorter, longer])


def test_without_the_windows_blocks_a_hit_is_shorter() -> None:
    cache, _ = make([SLID, FULL])
    kv = run(cache, PROMPT)
    cache.release(kv, 0.0)
    slid = cache.groups[0]
    lost = slid.index.find(kv.hashes[4])
    assert lost is not None
    extent = lost // slid.plan.blocks_per_extent
    slid.evict(extent)
    hit = cache.peek("t", [*PROMPT, 1, 2, 3, 4])
    expected = max(
        (
            n
            for n in range(6)
            if all(
                slid.index.find(kv.hashes[i]) is not None
                for i in range(slid.plan.first_needed(4 * n), n)
            )
        ),
        default=0,
    )
    assert hit == 4 * expected < 20


def test_reserve_that_fails_changes_nothing_and_the_hit_can_be_given_back() -> None:
    cache, pool = make([FULL] * 2, num_pages=4)
    first = run(cache, PROMPT)
    second = cache.new_kv("t")
    hit = cache.match(second, PROMPT, 0.0)
    before = [list(table) for table in second.tables]
    too_many = 4 * 8192
    assert not cache.fits(cache.demand(second, too_many))
    with pytest.raises(OutOfPages):
        cache.reserve(second, too_many)
    assert second.tables == before
    cache.check_integrity([first, second])
    cache.release(second, 0.0)
    assert second.is_empty
    assert len(second.hashes) >= hit // 4, "what was hashed need not be hashed again"
    assert cache.match(second, PROMPT, 0.0) == hit
    cache.check_integrity([first, second])
    pool.check_integrity()


def test_references_cannot_be_given_back_twice() -> None:
    cache, _ = make([FULL])
    kv = run(cache, PROMPT)
    tables, first = [list(table) for table in kv.tables], list(kv.first)
    cache.release(kv, 0.0)
    kv.tables, kv.first, kv.num_blocks = tables, first, len(tables[0])
    with pytest.raises(IntegrityError, match="given back twice"):
        cache.release(kv, 0.0)
    with pytest.raises(IntegrityError):
        cache.check_integrity([kv])
    with pytest.raises(IntegrityError, match="holds blocks"):
        cache.match(kv, PROMPT, 0.0)


def test_what_was_given_back_cannot_be_told_as_computed() -> None:
    cache, _ = make([FULL])
    kv = run(cache, PROMPT)
    cache.release(kv, 0.0)
    with pytest.raises(IntegrityError, match="more is computed"):
        cache.advance(kv, PROMPT, 22, 0.0)


def test_after_a_failure_nothing_old_is_found_and_requests_go_on() -> None:
    cache, pool = make([FULL])
    cache.release(run(cache, PROMPT), 0.0)
    kv = run(cache, [*PROMPT, 5, 6, 7], good=22)
    cache.drop_cached()
    assert cache.peek("t", PROMPT) == 0
    cache.check_integrity([kv])
    cache.advance(kv, [*PROMPT, 5, 6, 7], 25, 1.0)
    assert cache.peek("t", [*PROMPT, 5, 6, 7]) == 0, "it was computed from what may be broken"
    cache.release(kv, 1.0)
    assert pool.owned(OWNER) == 0
    assert cache.peek("t", PROMPT) == 0
    again = run(cache, PROMPT)
    assert cache.peek("t", PROMPT) == 20
    cache.check_integrity([again])


def test_without_caching_nothing_stays() -> None:
    cache, pool = make([SLID, FULL], caching=False)
    kv = run(cache, PROMPT)
    assert kv.first[0] == 4, "windows are freed all the same"
    assert cache.peek("t", PROMPT) == 0
    cache.release(kv, 0.0)
    assert pool.owned(OWNER) == 0
    assert not kv.hashes


def test_pages_first_then_cached_blocks_oldest_sequence_end_first() -> None:
    cache, pool = make([FULL] * 2, num_pages=8)
    cache.release(run(cache, PROMPT), 0.0)
    other = cache.new_kv("t")
    while pool.num_free:
        cache.reserve(other, (other.num_blocks + 1) * 4)
    assert cache.peek("t", PROMPT) == 20, "nothing is overwritten while there are pages"
    group = cache.groups[0]
    room = group.num_open_room + (group.num_free - group.num_open_free)
    cache.reserve(other, (other.num_blocks + room) * 4)
    assert cache.peek("t", PROMPT) == 20, "the free slots beside them come first"
    cache.reserve(other, (other.num_blocks + 1) * 4)
    assert cache.peek("t", PROMPT) == 16, "the end of the prefix went first"
    cache.check_integrity([other])


def test_an_extents_columns_are_reused_only_in_a_new_table() -> None:
    cache, pool = make([FULL] * 2)
    kv = run(cache, PROMPT)
    table = cache.groups[0].table
    before = table.clone()
    cache.release(kv, 0.0)
    cache.drop_cached()
    assert pool.owned(OWNER) == 0
    pool.alloc_pages(Owner("x", "weights"), 1)
    run(cache, [1, 2, 3])
    assert torch.equal(table, before)
    assert not torch.equal(cache.groups[0].table, before)


def test_windows_bound_what_a_long_sequence_needs() -> None:
    cache, _ = make([SLID], num_pages=64, max_chunk=8)
    assert cache.demand(None, 10_000).blocks == ((6 + 16 + 3) // 4 + 1,)
    assert cache.pages_for(10_000) == cache.pages_for(100_000) < 8
    hybrid, _ = make([SLID, FULL], num_pages=64, max_chunk=8)
    assert hybrid.demand(None, 400).blocks[1] == 100
    assert hybrid.demand(None, 400, hit=200).blocks[1] == 50
    kv = hybrid.new_kv("t")
    tokens = list(range(160))
    for done in range(0, 160, 8):
        hybrid.reserve(kv, done + 8)
        hybrid.advance(kv, tokens, done + 8, 0.0)
        assert len(kv.tables[0]) - kv.first[0] <= 3
    hybrid.check_integrity([kv])


def test_blocks_before_a_chunk_are_given_back_and_hits_begin_with_holes() -> None:
    cache, _ = make([LayerGeometry(1, 32, 32, chunk=8), FULL], max_chunk=8)
    kv, most = cache.new_kv("t"), 0
    tokens = list(range(162))
    for done in range(0, 160, 4):
        cache.reserve(kv, done + 4)
        cache.advance(kv, tokens, done + 4, 0.0)
        most = max(most, len(kv.tables[0]) - kv.first[0])
        assert kv.first[0] == (done + 4) // 8 * 2
    assert most <= 2
    later = cache.new_kv("t")
    assert cache.match(later, tokens, 1.0) == 160
    assert later.first == [40, 0], "a query at 160 sees nothing before it"
    cache.check_integrity([kv, later])


def test_a_tenants_share_counts_shared_blocks_once() -> None:
    cache, _ = make([FULL])
    one = run(cache, PROMPT, "a")
    alone = cache.live_pages_of_tenant("a")
    assert alone == pytest.approx(cache.live_pages_of(one))
    two = cache.new_kv("a")
    cache.match(two, PROMPT, 0.0)
    assert cache.live_pages_of_tenant("a") == alone
    other = run(cache, PROMPT, "b")
    assert cache.live_pages_of_tenant("b") == alone
    for kv in (one, two):
        cache.release(kv, 0.0)
    assert cache.live_pages_of_tenant("a") == 0
    cache.check_integrity([other])


def test_tables_as_arrays_follow_appends_and_renames() -> None:
    cache, _ = make([FULL])
    kv = cache.new_kv("t")
    for tokens in (3, 9, 200, 201, 240):
        cache.reserve(kv, tokens)
        assert kv.array(0).tolist() == kv.tables[0]
    cache.groups[0].index.clear()
    renamed = {kv.tables[0][1]: 9999}
    cache.rewrite(0, renamed)
    assert kv.array(0)[1] == 9999


def test_a_large_half_used_cache_is_filled_extent_by_extent() -> None:
    pool = PagePool(40_000, 1 << 16)
    plan = plan_kv([LayerGeometry(2, 16, 16)] * 2, torch.float32, 4, pool.page_bytes, 40_000)
    cache = KvCache(OWNER, plan, pool, CPU, caching=False)
    size = plan.groups[0].tokens_per_extent
    kvs = [cache.new_kv("t") for _ in range(3000)]
    for kv in kvs:
        cache.reserve(kv, size - 4)
    assert cache.num_live_pages <= (3000 + 1) * plan.groups[0].pages_per_extent
    cache.check_integrity(kvs)
    for kv in kvs:
        cache.release(kv, 0.0)
    assert pool.num_fenced == pool.num_pages - pool.num_free
    pass_fences(pool)
    assert pool.num_free == pool.num_pages
