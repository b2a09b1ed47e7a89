"""Random traffic over two models in a pool that is too small: nobody is lost, the oldest proceeds.

A step is played without a model, through the real pipeline: rows that sample get token 2. What must
hold is checked after every step, with the next step launched before the last is collected or not.
"""

import random
from collections.abc import Sequence

import pytest
import torch

from engine.backend.cpu import CpuBackend
from engine.errors import IllegalTransition
from engine.memory.kv_cache import KvCache
from engine.memory.kv_memory import KvMemory
from engine.memory.kv_plan import plan_kv
from engine.memory.page_pool import Owner, PagePool
from engine.protocol import SamplingParams, Submit
from engine.request import Request
from engine.running.batch import ScheduledRow, StepBatch
from engine.sampling.sampler import SampleOutput
from engine.scheduling.policy.batching import FEWEST_TOKENS
from engine.scheduling.queues import RECENT_S, ModelQueue
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step_pipeline import StepPipeline
from kernels.paged_attention import LayerGeometry

CPU = torch.device("cpu")
PAGES = 24
PAGE = 4096


class TwoTokens:
    """A runner that samples token 2 for everybody."""

    def execute(self, batch: StepBatch) -> SampleOutput:
        size = len(batch.sampling_rows)
        return SampleOutput(torch.full((size,), 2), torch.zeros(size, dtype=torch.bool))


class World:
    """A scheduler over real caches; `lag` steps pass before freed pages can be used again."""

    def __init__(
        self,
        lag: int = 0,
        max_num_seqs: int = 8,
        max_batch_tokens: int = 24,
        ahead: int = 0,
        share: float = 1.0,
        caching: bool = True,
        layers: Sequence[LayerGeometry] = (LayerGeometry(1, 16, 16),) * 2,
    ) -> None:
        """`layers`: of model "a"; "b" has three of one kind."""
        self.pool = PagePool(PAGES, PAGE)
        self.backend = CpuBackend(PAGES * PAGE, lag)
        self.kv = KvMemory(self.pool, self.backend, 0, PAGES // 20)
        self.scheduler = Scheduler(max_num_seqs, max_batch_tokens, 3, self.kv, share)
        self.pipeline = StepPipeline(self.backend, self.pool)
        self.runner = TwoTokens()
        self.ahead = ahead
        self.now_s = 0.0
        for name, own in (("a", layers), ("b", (LayerGeometry(1, 16, 16),) * 3)):
            plan = plan_kv(own, torch.float32, 4, PAGE, PAGES)
            cache = KvCache(
                Owner(name, "kv"), plan, self.pool, CPU, caching, max_chunk=max_batch_tokens
            )
            self.kv.register(name, cache)
            self.scheduler.bind(self.scheduler.queue(name), cache)
        self.finished: list[Request] = []

    def add(
        self, name: str, model: str, prompt: int, new: int, tenant: str = "t", token: int = 1
    ) -> Request:
        submit = Submit(name, 1, tenant, model, [token] * prompt, new, SamplingParams(0.0), [])
        request = Request.of(submit, 0.0)
        self.scheduler.add(request)
        return request

    def preempt_all(self, instance_id: str) -> None:
        """As an eviction does it, but the model comes back at once."""
        queue = self.scheduler.queue(instance_id)
        cache = queue.cache
        assert cache is not None
        self.scheduler.unbind(queue, self.now_s)
        self.scheduler.bind(queue, cache)

    def play(self) -> tuple[ModelQueue, list[ScheduledRow]] | None:
        """One step of the engine."""
        self.now_s += 0.01
        self.kv.reclaim()
        planned = self.scheduler.schedule(self.now_s)
        self.scheduler.check_integrity()
        if planned is not None:
            queue, rows = planned
            assert queue.cache is not None
            for row in rows:
                assert row.kv.num_blocks * 4 >= row.end
                assert row.num_scheduled_tokens > 0
                assert row.request.num_tokens <= row.request.max_total_tokens
            assert self.pipeline.launch(queue, self.runner, queue.cache, rows) is None
        elif self.pipeline.num_in_flight == 0:
            self.pipeline.pass_fence()
        while self.pipeline.num_in_flight > (self.ahead if planned else 0):
            self.collect()
        self.scheduler.check_integrity()
        self.pool.check_integrity()
        return planned

    def collect(self) -> None:
        ended = self.pipeline.collect()
        for item, token in zip(ended.rows, ended.tokens, strict=True):
            request = item.row.request
            if item.still_runs:
                assert ended.queue.cache is not None
                assert request.kv is not None
                ended.queue.cache.advance(request.kv, request.token_ids, item.row.end, self.now_s)
            if token is not None and request.state != "finished":
                request.token_ids.append(token.token)
                if request.num_generated >= request.submit.max_tokens:
                    self.scheduler.finish(request, "length", self.now_s)
                    self.finished.append(request)

    def end_of(self, request: Request) -> None:
        while request.state != "finished":
            self.play()

    def settle(self) -> None:
        while self.pipeline.num_in_flight:
            self.collect()

    def end(self) -> None:
        """Everything ends and every page comes back."""
        for _ in range(20_000):
            if not self.scheduler.num_unfinished:
                break
            self.play()
        assert not self.scheduler.num_unfinished
        self.settle()
        self.kv.evict(PAGES)
        for _ in range(5):
            self.pipeline.pass_fence()
            self.kv.reclaim()
        assert self.pool.num_free == PAGES


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_all_finishes_and_every_page_comes_back(seed: int, ahead: int) -> None:
    rng = random.Random(seed)
    world = World(lag=seed % 3, ahead=ahead, share=rng.choice([1.0, 0.5]), caching=seed % 4 > 0)
    added = 0
    for _ in range(3000):
        if added < 40 and rng.random() < 0.3:
            added += 1
            world.add(
                *(str(added), rng.choice("ab"), rng.randint(1, 60), rng.randint(1, 40)),
                tenant=rng.choice("tuv"),
                token=rng.randint(1, 3),
            )
        if rng.random() < 0.02:
            queue = world.scheduler.queue(rng.choice("ab"))
            victims = list(queue.requests())
            if victims:
                victim = rng.choice(victims)
                world.scheduler.finish(victim, "abort", world.now_s)
                world.finished.append(victim)
        if rng.random() < 0.01:
            world.settle()
            world.preempt_all(rng.choice("ab"))
        world.play()
        if added == 40 and not world.scheduler.num_unfinished:
            break
    world.end()
    assert len(world.finished) == 40
    assert all(r.num_generated <= r.submit.max_tokens for r in world.finished)


@pytest.mark.parametrize("ahead", [0, 1])
def test_youngest_is_preempted_and_the_oldest_never_is(ahead: int) -> None:
    world = World(ahead=ahead)
    oldest = world.add("0", "a", 40, 80, token=3)
    for i in range(1, 6):
        world.add(str(i), "ab"[i % 2], 30, 60, token=3 + i)
    world.end()
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
        order.append(planned[0].instance_id)
    assert order == ["a"] * 3 + ["b"] * 3 + ["a"] * 3 + ["b"] * 3


def test_a_turn_is_cut_short_for_a_first_token_of_who_has_little_here() -> None:
    world = World()
    for number in range(3):
        world.add(f"x{number}", "a", 4, 50, tenant="heavy")

    world.play()
    world.add("y", "b", 4, 50, tenant="lone")
    order = []
    for _ in range(6):
        planned = world.play()
        assert planned is not None
        planned[0].tag += 1.0
        order.append(planned[0].instance_id)
    assert order == ["a"] + ["b"] * 3 + ["a"] * 2, "a stops when it has had more, not after three"


def test_prompts_of_light_tenants_are_computed_before_those_of_heavy_ones() -> None:
    world = World(max_batch_tokens=24)
    heavy = [world.add(f"x{n}", "a", 40, 5, tenant="heavy") for n in range(2)]
    world.play()
    lone = world.add("y", "a", 20, 5, tenant="lone")
    world.play()
    assert lone.num_generated == 1
    assert [request.num_generated for request in heavy] == [0, 0]


def test_who_has_next_to_nothing_here_does_not_wait_for_a_row() -> None:
    world = World(max_num_seqs=4, max_batch_tokens=64)
    heavy = [world.add(f"x{n}", "a", 4, 12, tenant="heavy") for n in range(4)]
    world.play()
    waiting = world.add("later", "a", 4, 12, tenant="heavy")
    world.add("lone", "a", 4, 3, tenant="lone")
    second = world.add("second", "a", 4, 3, tenant="other")
    planned = world.play()
    assert planned is not None
    names = [row.request.submit.request_id for row in planned[1]]
    assert names == ["x0", "x1", "x2", "lone"], "the heavy tenant's youngest sits out"
    assert heavy[3].state == "running"
    assert heavy[3].num_preemptions == 0
    assert (waiting.state, second.state) == ("waiting", "waiting"), "one beyond four rows"
    world.end()
    assert len(world.finished) == 7


def test_no_memory_is_no_row_and_nobody_passes_who_waits_for_it() -> None:
    world = World(max_num_seqs=8)
    running = world.add("running", "a", 200, 60, tenant="heavy")
    while not running.num_generated:
        world.play()
    large = [world.add(f"l{n}", "a", 200, 8, tenant="heavy", token=9 + n) for n in range(6)]
    world.play()
    lone = world.add("lone", "b", 4, 4, tenant="lone")
    world.scheduler.queue("b").tag = -1.0
    world.play()
    assert [request.state for request in large] == ["waiting"] * 6
    assert lone.state == "waiting"
    world.end()


@pytest.mark.parametrize("gone", [False, True])
def test_prompts_of_heavy_tenants_come_in_pieces_while_others_ask_or_lately_did(gone: bool) -> None:
    world = World(max_num_seqs=4, max_batch_tokens=200)
    pace = world.scheduler.queue("a").pace
    pace.observe(0.2, 200, 200)  # a millisecond a token
    if gone:
        lone = world.add("lone", "a", 4, 1, tenant="lone")
        world.end_of(lone)
    else:
        world.add("lone", "b", 4, 30, tenant="lone")
        world.scheduler.queue("b").tag = 9.0
    world.add("x0", "a", 90, 2, tenant="heavy")
    world.add("x1", "a", 60, 2, tenant="heavy")
    planned = world.play()
    assert planned is not None
    assert [row.num_scheduled_tokens for row in planned[1]] == [FEWEST_TOKENS]
    world.now_s += RECENT_S + 1
    planned = world.play()
    assert planned is not None
    assert sum(row.num_scheduled_tokens for row in planned[1]) == (118 if gone else FEWEST_TOKENS)
    world.end()


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
    world.scheduler.finish(request, "abort", 0.0)
    with pytest.raises(IllegalTransition):
        request.on("admit")
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
        chosen.append(planned[0].instance_id)
    assert 6 <= chosen[4:].count("a") <= 10


def test_waiting_for_a_load_or_for_memory_earns_no_credit() -> None:
    world = World()
    away = world.scheduler.queue("away")
    cache = world.scheduler.queue("b").cache
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
    large = world.add("large", "a", 200, 8, token=9)
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


def test_no_younger_request_takes_the_row_an_older_one_waits_for() -> None:
    world = World(max_num_seqs=2)
    for i in range(2):
        world.add(f"running {i}", "a", 4, 10)
    world.play()
    older = world.add("older", "b", 4, 4)
    younger = [world.add(f"younger {i}", "a", 4, 40) for i in range(6)]
    world.scheduler.queue("b").tag = -1.0
    for _ in range(40):
        planned = world.play()
        assert planned is not None
        planned[0].tag += 1.0
        if older.state == "running":
            break
        assert all(request.state == "waiting" for request in younger)
    assert older.state in ("running", "finished")
    world.end()


def test_a_tenant_above_its_share_does_not_start_more_while_others_have_work() -> None:
    world = World(share=0.5, max_batch_tokens=64)
    for i in range(4):
        world.add(f"much {i}", "a", 60, 30, tenant="much", token=3 + i)
    world.play()
    assert len(world.scheduler.queue("a").running) == 4  # alone: no bound
    more = world.add("more", "a", 60, 30, tenant="much", token=9)
    little = world.add("little", "a", 8, 4, tenant="little")
    world.play()
    # The first of the queue is over its tenant's share; whoever is behind it is not held up.
    assert more.state == "waiting"
    assert little.state == "running"
    world.end_of(little)
    world.play()
    assert more in world.scheduler.queue("a").running
    world.end()


def test_one_request_of_a_tenant_always_may_run() -> None:
    world = World(share=0.1)
    large = world.add("large", "a", 100, 20, tenant="one")
    world.add("other", "b", 4, 60, tenant="two")
    world.play()
    world.play()
    assert large.state == "running"
    world.end()
    assert large.num_preemptions == 0


def test_a_request_beyond_all_memory_waits_and_does_not_come_and_go() -> None:
    world = World()
    request = world.add("huge", "a", 100, 10_000)
    for _ in range(2_000):
        world.play()
    held = request.num_generated
    preemptions = request.num_preemptions
    assert preemptions <= 1
    for _ in range(50):
        world.play()
    assert (request.num_generated, request.num_preemptions) == (held, preemptions)
    assert request.state == "waiting"
    assert world.scheduler.oldest_waiting() is request


def test_a_prefix_is_found_at_admission_and_reported_once() -> None:
    world = World()
    first = world.add("first", "a", 41, 3)
    world.end_of(first)
    again = world.add("again", "a", 41, 3)
    world.play()
    assert again.cached_tokens == 40
    assert again.num_computed == 41
    other = world.add("other", "a", 41, 3, tenant="somebody else")
    world.play()
    assert other.cached_tokens == 0
    world.preempt_all("a")
    world.play()
    assert again.cached_tokens == 40
    assert other.cached_tokens == 0  # what it finds of its own now is not reported
    world.end()


def test_younger_requests_do_not_pass_one_that_its_tenants_share_holds_back() -> None:
    world = World(share=0.3, caching=False)
    world.add("other", "b", 4, 300, tenant="two")
    first = world.add("first", "a", 40, 40, tenant="one")
    world.play()
    large = world.add("large", "a", 200, 4, tenant="one")
    small: list[Request] = []
    for _ in range(400):
        if sum(request.state != "finished" for request in small) < 3:
            small.append(world.add(str(len(small)), "ab"[len(small) % 2], 4, 30, tenant="one"))
        world.play()
        if large.state == "finished":
            break
        # Nothing of the tenant but what ran before the large one came.
        passed = [request for request in small if request.state != "waiting"]
        assert large.state == "running" or not passed
    assert first.state == large.state == "finished"


def test_a_prompt_that_many_requests_share_puts_no_tenant_above_its_share() -> None:
    world = World(share=0.6, max_batch_tokens=64)
    world.end_of(world.add("first", "a", 81, 1, tenant="many", token=3))
    many = [world.add(f"many {i}", "a", 81, 40, tenant="many", token=3) for i in range(4)]
    world.play()
    other = world.add("other", "a", 100, 120, tenant="other", token=5)
    world.play()
    assert all(request.state == "running" for request in (*many, other))
    cache = world.scheduler.queue("a").cache
    assert cache is not None
    share = world.scheduler._admission.share()
    assert sum(cache.live_pages_of(r.kv) for r in many if r.kv is not None) > share.num_pages
    assert cache.live_pages_of_tenant("many") < share.num_pages
    _, victim = world.scheduler._victim()
    assert victim is other, "the youngest of all: nobody is above its share"
    world.end()
