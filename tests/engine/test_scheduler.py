"""Random traffic over two models in a pool that is too small: nobody is lost, the oldest proceeds.

A step is played without a model: scheduled tokens count as computed, and rows that sample get a
token. What must hold is checked after every step.
"""

import random

import pytest
import torch

from engine.batch import ScheduledRow, build_batch
from engine.errors import IllegalTransition
from engine.kv_cache import KvCache, plan_kv
from engine.page_pool import Owner, PagePool
from engine.protocol import SamplingParams, Submit
from engine.request import Request
from engine.scheduler import ModelQueue, Scheduler
from kernels.paged_attention import LayerGeometry

CPU = torch.device("cpu")
PAGES = 24


class World:
    """A scheduler over real caches; `lag` steps pass before freed pages can be used again."""

    def __init__(self, lag: int = 0, max_num_seqs: int = 8, max_batch_tokens: int = 24) -> None:
        self.pool = PagePool(PAGES, 4096)
        self.lag = lag
        self.step = 0
        self.scheduler = Scheduler(max_num_seqs, max_batch_tokens, 3, self.reclaim)
        for name, layers in (("a", 2), ("b", 3)):
            plan = plan_kv([LayerGeometry(1, 16, 16)] * layers, torch.float32, 4, 4096, PAGES)
            cache = KvCache(Owner(name, "kv"), plan, self.pool, CPU)
            self.scheduler.queue(name).cache = cache
        self.finished: list[Request] = []

    def reclaim(self) -> tuple[int, int]:
        freed = self.pool.retire(self.step - self.lag)
        return len(freed), self.pool.num_fenced

    def add(self, name: str, model: str, prompt: int, new: int) -> Request:
        submit = Submit(name, 1, "t", model, [1] * prompt, new, SamplingParams(0.0), [])
        request = Request.of(submit, 0.0)
        self.scheduler.add(request)
        return request

    def play(self) -> tuple[ModelQueue, list[ScheduledRow]] | None:
        self.reclaim()
        planned = self.scheduler.schedule()
        self.step += 1
        self.pool.begin_step(self.step)
        self.scheduler.check_integrity()
        if planned is None:
            return None
        queue, rows = planned
        assert queue.cache is not None
        for row in rows:
            reached = row.request.num_computed + row.num_tokens
            assert len(row.request.block_table) * 4 >= reached
        build_batch(rows, queue.cache.plan, CPU)
        for row in rows:
            samples = row.samples
            row.request.num_computed += row.num_tokens
            if samples:
                row.request.token_ids.append(2)
                if row.request.num_generated >= row.request.submit.max_tokens:
                    self.scheduler.finish(row.request, "length")
                    self.finished.append(row.request)
        self.scheduler.check_integrity()
        self.pool.check_integrity()
        return planned


@pytest.mark.parametrize("seed", range(12))
def test_random_traffic_all_finishes_and_every_page_comes_back(seed: int) -> None:
    rng = random.Random(seed)
    world = World(lag=seed % 3)
    added = 0
    for _ in range(3000):
        if added < 60 and rng.random() < 0.3:
            added += 1
            world.add(str(added), rng.choice("ab"), rng.randint(1, 60), rng.randint(1, 40))
        if rng.random() < 0.02:
            queue = world.scheduler.queue(rng.choice("ab"))
            victims = list(queue.requests())
            if victims:
                victim = rng.choice(victims)
                world.scheduler.finish(victim, "abort")
                world.finished.append(victim)
        if rng.random() < 0.01:
            world.scheduler.preempt_all(world.scheduler.queue(rng.choice("ab")))
        world.play()
        if added == 60 and not world.scheduler.num_unfinished:
            break
    assert len(world.finished) == 60
    world.step += 3
    world.reclaim()
    assert world.pool.num_free == PAGES


def test_youngest_is_preempted_and_the_oldest_never_is() -> None:
    world = World()
    oldest = world.add("0", "a", 40, 80)
    for i in range(1, 6):
        world.add(str(i), "ab"[i % 2], 30, 60)
    while world.scheduler.num_unfinished:
        world.play()
    assert world.scheduler.num_preemptions > 0
    assert oldest.num_preemptions == 0
    assert len(world.finished) == 6


def test_minimum_run_then_the_model_with_less_service() -> None:
    world = World()
    world.add("x", "a", 4, 50)
    world.add("y", "b", 4, 50)
    order = []
    for _ in range(12):
        planned = world.play()
        assert planned is not None
        planned[0].tag += 1.0
        order.append(planned[0].model_id)
    assert order == ["a"] * 3 + ["b"] * 3 + ["a"] * 3 + ["b"] * 3


def test_decodes_go_on_while_a_long_prompt_is_computed_in_chunks() -> None:
    world = World()
    stream = world.add("s", "a", 2, 30)
    world.play()
    world.add("long", "a", 90, 1)
    for _ in range(4):
        before = stream.num_generated
        world.play()
        assert stream.num_generated == before + 1


def test_finished_requests_do_not_move() -> None:
    world = World()
    request = world.add("x", "a", 4, 5)
    world.scheduler.finish(request, "abort")
    with pytest.raises(IllegalTransition):
        request.move("running")
    assert request.state == "finished"


def test_a_model_that_ran_alone_for_long_is_not_locked_out_by_a_new_one() -> None:
    world = World()
    world.add("x", "a", 4, 3)
    chosen = []
    for step in range(20):
        if step == 3:
            assert world.finished
            world.add("new", "b", 4, 40)
        elif step == 4:
            world.add("back", "a", 4, 40)
        planned = world.play()
        assert planned is not None
        planned[0].tag += 1000.0 if step < 3 else 1.0
        chosen.append(planned[0].model_id)
    assert 6 <= chosen[4:].count("a") <= 10


def test_waiting_for_a_load_or_for_memory_earns_no_credit() -> None:
    world = World()
    away = world.scheduler.queue("away")
    cache, away.cache = world.scheduler.queue("b").cache, None
    world.add("x", "a", 4, 40)
    world.add("y", "away", 4, 40)
    queue = world.scheduler.queue("a")
    world.play()
    queue.tag = 50.0
    world.add("z", "b", 4, 1)
    assert world.scheduler.queue("b").tag == 50.0  # not that of a model that cannot run
    assert cache is not None
    world.scheduler.bind(away, cache)
    assert away.tag == 50.0


def test_no_younger_request_overtakes_one_that_waits_for_memory() -> None:
    world = World()
    first = world.add("first", "a", 200, 30)
    while not first.num_generated:
        world.play()
    large = world.add("large", "a", 200, 8)
    small = world.add("small", "b", 4, 4)
    world.play()  # the turn of "a": `large` is found to wait for memory
    world.scheduler.queue("b").tag = -1.0  # from now on it would go first
    assert large.state == "waiting"
    while large.state == "waiting":
        assert small.state == "waiting"
        world.play()
    while world.scheduler.num_unfinished:
        world.play()
    assert len(world.finished) == 3
