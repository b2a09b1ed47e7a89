"""Who waits costs nothing and moves nobody; who is alone is let in if there is any way."""

import pytest

from engine.memory.kv_cache import KvCache
from engine.memory.page_pool import Owner
from engine.memory.prefix_cache import PrefixIndex
from kernels.paged_attention import LayerGeometry
from tests.engine.scheduling.test_scheduler import World

BLOCK = 4


def cache_of(world: World, instance_id: str) -> KvCache:
    cache = world.scheduler.queue(instance_id).cache
    assert cache is not None
    return cache


def uses(cache: KvCache) -> list[tuple[int, float]]:
    """Hits and last use of all extents without live blocks."""
    return [(e.num_hits, e.last_used_s) for g in cache.groups for e in g._files.dead.values()]


@pytest.fixture
def num_finds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often blocks were looked for, in one number."""
    count, find = [0], PrefixIndex.find

    def counted(index: PrefixIndex, name: bytes) -> int | None:
        count[0] += 1
        return find(index, name)

    monkeypatch.setattr(PrefixIndex, "find", counted)
    return count


def test_waiting_for_memory_costs_no_look_and_counts_as_no_use(num_finds: list[int]) -> None:
    world = World()
    world.end_of(world.add("first", "a", 61, 1, token=3))
    other = world.add("other", "a", 200, 60, token=5)
    while not other.num_generated:
        world.play()
    waiting = world.add("waiting", "a", 230, 4, token=3)
    world.play()
    cache = cache_of(world, "a")
    before, looked = uses(cache), num_finds[0]
    assert before
    assert looked >= 60 // BLOCK
    for attempt in range(1, 31):
        world.play()
        assert waiting.state == "waiting"
        # One name each time: that of the first block that was not there.
        assert num_finds[0] <= looked + attempt
    assert uses(cache) == before
    world.end()
    assert waiting.state == "finished"
    assert waiting.cached_tokens == 60


def test_who_waits_starts_when_another_has_computed_what_it_lacked() -> None:
    world = World(max_batch_tokens=16)
    first = world.add("first", "a", 201, 30, token=3)
    world.play()
    second = world.add("second", "a", 201, 30, token=3)
    world.play()
    assert second.state == "waiting"  # the two prompts do not fit side by side
    while second.state == "waiting":
        assert first.state == "running"
        world.play()
    assert second.cached_tokens
    world.end()


def test_a_hit_that_keeps_more_than_it_saves_is_left_when_nobody_runs() -> None:
    """Three blocks of a prompt lie in three extents of each group, where two would hold all."""
    layers = [LayerGeometry(1, 16, 16)] * 2 + [LayerGeometry(4, 16, 16)] * 2
    world = World(layers=layers, max_batch_tokens=64)
    cache = cache_of(world, "a")
    slots = [group.plan.blocks_per_extent for group in cache.groups]
    assert slots == [8, 2]
    tokens = [3] * (3 * BLOCK)
    scattered = cache.new_kv("t")
    fillers = []
    for number in range(1, 4):
        cache.reserve(scattered, number * BLOCK)
        if number < 3:
            fillers.append(cache.new_kv("t"))
            cache.reserve(fillers[-1], 7 * BLOCK)
    cache.advance(scattered, tokens, len(tokens), 0.0)
    for kv in (scattered, *fillers):
        cache.release(kv, 0.0)
    world.pipeline.pass_fence()
    world.kv.reclaim()
    assert cache.num_cached_pages == 12
    weights = Owner("w", "weights")
    pages = world.pool.alloc_pages(weights, 3)  # 21 are left: 20 for it alone, 22 with the hit
    lone = world.add("lone", "a", 63, 1, token=3)
    for _ in range(20):
        world.play()
    assert lone.state == "finished"
    assert lone.cached_tokens == 0
    again = world.add("again", "a", 13, 1, token=3)
    world.end_of(again)
    assert again.cached_tokens == 12
    world.pool.release(weights, pages)
    world.end()


def test_nobody_waits_for_a_request_that_has_gone() -> None:
    world = World()
    running = world.add("running", "a", 200, 60)
    while not running.num_generated:
        world.play()
    large = world.add("large", "a", 250, 8, token=9)
    small = world.add("small", "b", 4, 4)
    world.play()
    assert world.scheduler.queue("a").short is not None
    world.scheduler.finish(large, "abort", 0.0)
    assert world.scheduler.queue("a").short is None
    world.scheduler.queue("b").tag = -1.0
    world.play()
    assert small.state == "running"
    world.end_of(small)
    world.scheduler.check_integrity()
    world.finished.append(large)
    world.end()
