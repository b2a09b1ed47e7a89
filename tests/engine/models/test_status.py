"""What is offered is what the pool can really hold."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.memory.kv_plan import KvPlan, plan_kv
from engine.models.status import blocks_in, pages_still_needed
from engine.protocol import ModelSpec
from kernels.paged_attention import LayerGeometry
from tests.engine.scheduling.test_scheduler import World
from tests.engine.test_engine import Driver, Models, weight_pages
from tests.engine.tiny_models import TinyModel

GEOMETRIES = st.lists(
    st.builds(
        LayerGeometry,
        num_kv_heads=st.integers(1, 4),
        k_dim=st.sampled_from([8, 16, 24]),
        v_dim=st.sampled_from([8, 16]),
        window=st.sampled_from([0, 0, 32]),
    ),
    min_size=1,
    max_size=20,
)


def pages_for_blocks(plan: KvPlan, blocks: int) -> int:
    return sum(group.extents_for(blocks) * group.pages_per_extent for group in plan.groups)


@given(GEOMETRIES, st.integers(0, 3000))
def test_blocks_are_as_many_as_fit_in_whole_extents(
    layers: list[LayerGeometry], num_pages: int
) -> None:
    plan = plan_kv(layers, torch.float32, 4, 8192, 1000)
    blocks = blocks_in(plan, num_pages)
    assert pages_for_blocks(plan, blocks) <= num_pages
    smallest = min(group.blocks_per_extent for group in plan.groups)
    assert pages_for_blocks(plan, blocks + smallest) > num_pages


def test_requests_are_counted_at_their_worst_case_in_whole_blocks() -> None:
    world = World()
    queue = world.scheduler.queue("a")
    assert queue.cache is not None
    for i in range(3):
        world.add(str(i), "a", 5, 4, token=3 + i)  # 9 positions: 3 blocks of 4
    cache = queue.cache
    whole = cache.pages_of(cache.demand(None, 3 * 12))
    assert pages_still_needed(queue) == whole
    world.play()
    held = world.pool.num_pages - world.pool.num_free - world.pool.num_fenced
    assert pages_still_needed(queue) + held >= whole
    world.end()


def lease_of(driver: Driver, model_id: str) -> tuple[int, int]:
    status = driver.engine.status(driver.now_s)
    lease = next(lease for lease in status.leases if lease.model_id == model_id)
    return lease.kv_tokens, status.free_kv_bytes


def test_cached_kv_is_on_offer_and_pending_requests_are_not(tiny_models: Models) -> None:
    model = tiny_models["llama"]
    driver = Driver({"llama": model}, weight_pages(model) + 60)
    driver.make_resident("llama")
    at_first = lease_of(driver, "llama")
    driver.submit("x", "llama", [3] * 60, 60)
    asked = lease_of(driver, "llama")
    assert asked[0] <= at_first[0] - 120
    driver.run(lambda: "x" in driver.finishes)
    driver.step()
    pages = driver.engine.status(driver.now_s).pages
    assert pages["llama/kv_cached"] > 0
    assert lease_of(driver, "llama") == at_first
    driver.empty()


def test_class_batch_takes_nothing_of_what_is_offered(tiny_models: Models) -> None:
    model = tiny_models["llama"]
    driver = Driver({"llama": model}, weight_pages(model) + 60)
    driver.make_resident("llama")
    at_first, before = lease_of(driver, "llama"), driver.engine.status(driver.now_s)
    driver.submit("x", "llama", [3] * 60, 60, is_batch=True)
    for _ in range(4):
        assert lease_of(driver, "llama") == at_first
        status = driver.engine.status(driver.now_s)
        assert (status.free_requests, status.batch_requests) == (before.free_requests, 1)
        assert status.batch_kv_bytes >= 110 * status.leases[0].kv_bytes_per_token
        assert [row.num_batch for row in status.models] == [1]
        driver.step()
    driver.run(lambda: "x" in driver.finishes)
    status = driver.engine.status(driver.now_s)
    assert (status.batch_requests, status.batch_kv_bytes) == (0, 0)
    driver.empty()


def test_a_pinned_name_is_not_unloaded_by_another(tiny_models: Models) -> None:
    pack = str(tiny_models["qwen3"].pack_dir)
    driver = Driver({}, 400)
    specs = [ModelSpec("one", pack), ModelSpec("two", pack, pinned=True)]
    driver.engine.set_catalog(specs, 0.0)
    driver.make_resident("one")
    driver.engine.unload("one", driver.now_s)
    for _ in range(5):
        driver.step()
    assert driver.state("one") == driver.state("two") == "resident"
    driver.engine.set_catalog(specs[:1], driver.now_s)
    driver.empty()


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma"])
def test_an_empty_device_offers_what_one_request_may_take(tiny_models: Models, name: str) -> None:
    model: TinyModel = tiny_models[name]
    driver = Driver({name: model}, weight_pages(model) + 50)
    driver.make_resident(name)
    tokens, free_bytes = lease_of(driver, name)
    cache = driver.runner(name).cache
    assert cache.pages_for(tokens) * driver.engine.pool.page_bytes <= free_bytes
    assert tokens >= 0.8 * next(n for n in itertools.count() if cache.pages_for(n + 1) > 50)
    driver.empty()
