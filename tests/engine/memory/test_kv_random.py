"""Random requests over models of unlike geometry in one pool, every byte of KV accounted for.

What is checked after every operation: pool, caches and references agree; what can be found is what
an oracle says, exactly; each step reads what was written for its own tokens, whatever was moved,
evicted, compacted, shared or failed meanwhile (`kv_world.py`).
"""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.errors import OutOfPages
from engine.memory.page_pool import Owner
from tests.engine.kv_world import BLOCK_TOKENS, MAX_CHUNK, UNITS, Job, Step, World

MAX_JOBS = 8
MAX_TOKENS = 60
WEIGHTS = Owner("loaded", "weights")


class KvMachine(RuleBasedStateMachine):
    """Requests come, run in steps, fail, end; weights come and go; pages are moved under them."""

    @initialize(
        num_pages=st.integers(8, 48),
        instances=st.sets(st.sampled_from(sorted(UNITS)), min_size=1, max_size=3),
        marks=st.sampled_from([(0, 0), (3, 6), (6, 6)]),
    )
    def begin(self, num_pages: int, instances: set[str], marks: tuple[int, int]) -> None:
        self.world = World(num_pages, sorted(instances), *marks)
        self.weights: list[int] = []

    @rule(seed=st.integers(0, 1 << 16), rounds=st.integers(1, 6))
    def traffic(self, seed: int, rounds: int) -> None:
        """Requests arrive, run a step here and there, end; the device lags behind."""
        rng = random.Random(seed)
        for _ in range(rounds):
            while len(self.world.jobs) < MAX_JOBS and rng.random() < 0.6:
                self._arrive(rng)
            for instance in self.world.caches:
                self._step(rng, instance)
            self.run_device(rng.randint(0, 4))
            for job in list(self.world.jobs):
                if len(job.token_ids) >= MAX_TOKENS or rng.random() < 0.05:
                    self._end(job)
            self.world.check()

    @rule(seed=st.integers(0, 1 << 16))
    def arrive(self, seed: int) -> None:
        if len(self.world.jobs) < MAX_JOBS:
            self._arrive(random.Random(seed))

    def _arrive(self, rng: random.Random) -> None:
        """A prompt that shares its beginning with others of its family."""
        world = self.world
        instance, tenant = rng.choice(sorted(world.caches)), rng.choice("aab")
        length, family = rng.randint(1, 40), rng.randrange(3)
        common = rng.randint(0, length)
        own = [100 + rng.randrange(1000) for _ in range(length - common)]
        tokens = [family * 7 + i % 5 for i in range(common)] + own
        job = Job(instance, tenant, tokens, world.caches[instance].new_kv(tenant))
        world.jobs.append(job)
        self._match(job)

    def _match(self, job: Job) -> None:
        world, cache = self.world, self.world.caches[job.instance]
        expected = world.expected_hit(job)
        assert cache.peek(job.tenant, job.token_ids) == expected
        self._look(job)
        assert cache.match(job.kv, job.token_ids, world.now_s) == expected
        job.num_good = job.num_launched = expected
        job.is_doubtful = False

    def _look(self, job: Job) -> None:
        """What is foretold of a match is what it then does, and foretelling does nothing."""
        cache, kv = self.world.caches[job.instance], job.kv
        others = [(e.num_hits, e.last_used_s) for g in cache.groups for e in g._extents.values()]
        hit = cache.look(kv, job.token_ids)
        told = [(e.num_hits, e.last_used_s) for g in cache.groups for e in g._extents.values()]
        assert told == others
        assert kv.is_empty
        num_tokens = len(job.token_ids) + 1
        demand = cache.demand(None, num_tokens, hit.num_tokens)
        spare = self.world.memory.num_evictable() - hit.num_pages
        pages, rooms = cache.pages_of(demand, hit), [group.num_open_room for group in cache.groups]
        assert cache.match(kv, job.token_ids, self.world.now_s, hit) == hit.num_tokens
        assert cache.demand(kv, num_tokens) == demand
        assert self.world.memory.num_evictable() == spare
        assert cache.pages_of(demand) == pages
        for group, before, more in zip(cache.groups, rooms, hit.room, strict=True):
            assert group.num_open_room == before + more
        assert not hit.num_tokens or cache.may_hit_more(hit)
        cache.release(kv, self.world.now_s)

    @rule(seed=st.integers(0, 1 << 16))
    def step(self, seed: int) -> None:
        rng = random.Random(seed)
        self._step(rng, rng.choice(sorted(self.world.caches)))

    def _step(self, rng: random.Random, instance: str) -> None:
        """Reserve and launch rows of one model, at most one step ahead of what is known."""
        world = self.world
        rows: list[tuple[Job, int]] = []
        for job in [job for job in world.jobs if job.instance == instance and self._startable(job)]:
            tokens = min(rng.randint(1, MAX_CHUNK), len(job.token_ids) - job.num_launched)
            if self._reserve(job, job.num_launched + tokens):
                rows.append((job, tokens))
        if rows:
            world.launch(instance, rows, rng.random() < 0.04)
        world.now_s += 0.25

    def _startable(self, job: Job) -> bool:
        in_flight = sum(any(row[0] is job for row in step.rows) for step in self.world.steps)
        return in_flight < 2 and job.num_launched < len(job.token_ids)

    def _reserve(self, job: Job, num_tokens: int) -> bool:
        world, cache = self.world, self.world.caches[job.instance]
        demand = cache.demand(job.kv, num_tokens)
        missing = -(-num_tokens // BLOCK_TOKENS) - job.kv.num_blocks
        assert all(blocks <= max(0, missing) for blocks in demand.blocks)
        before = [list(table) for table in job.kv.tables]
        state = (world.pool.num_free, world.pool.num_fenced, cache.num_cached_pages)
        fits = cache.fits(demand)
        try:
            cache.reserve(job.kv, num_tokens)
        except OutOfPages:
            assert job.kv.tables == before
            assert state == (world.pool.num_free, world.pool.num_fenced, cache.num_cached_pages)
            if fits:
                self._reserve_after_eviction(job, num_tokens)
            return False
        finally:
            world.forget_lost()
        assert all(
            len(table) == max(len(old), -(-num_tokens // BLOCK_TOKENS))
            for table, old in zip(job.kv.tables, before, strict=True)
        )
        return True

    def _reserve_after_eviction(self, job: Job, num_tokens: int) -> None:
        """`fits` had promised it: once evicted pages have come back, it is there."""
        world, cache = self.world, self.world.caches[job.instance]
        wanted = cache.pages_of(cache.demand(job.kv, num_tokens))
        assert world.memory.evict(wanted - world.pool.num_free)
        world.pass_step()
        world.run_device(len(world.queue))
        cache.reserve(job.kv, num_tokens)

    @rule(operations=st.integers(1, 3))
    def run_device(self, operations: int) -> None:
        self.world.run_device(operations)
        self._collect()

    def _collect(self) -> None:
        """Steps that have ended are told, in order; what failed takes its requests along."""
        world = self.world
        while world.steps and world.steps[0].done:
            step = world.steps.popleft()
            if step.fails:
                self._fail(step)
                continue
            for job, first, end in step.rows:
                if job not in world.jobs or job.num_good != first:
                    continue  # it ended, was preempted or rolled back meanwhile
                assert job not in step.wrong, f"{job} read what is not its own"
                job.num_good = end
                cache = world.caches[job.instance]
                world.learn(job, first)
                cache.advance(job.kv, job.token_ids, end, world.now_s)
                if end == len(job.token_ids) and len(job.token_ids) < MAX_TOKENS:
                    job.token_ids.append(world.num_steps % 3)

    def _fail(self, step: Step) -> None:
        """Its requests end; a later step of the same request must not count either."""
        world = self.world
        for job, _, _ in step.rows:
            if job in world.jobs:
                self._end(job)
        world.caches[step.instance].drop_cached()
        for names in world.known[step.instance]:
            names.clear()
        # Rows of steps launched meanwhile are run again from what is known to be good.
        for job in world.jobs:
            if job.instance == step.instance:
                job.num_launched = job.num_good
                job.is_doubtful = not job.kv.is_empty
                for later in world.steps:
                    later.rows = [row for row in later.rows if row[0] is not job]

    def _end(self, job: Job) -> None:
        world = self.world
        world.caches[job.instance].release(job.kv, world.now_s)
        world.jobs.remove(job)
        assert job.kv.is_empty

    @precondition(lambda self: self.world.jobs)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """Done or aborted, perhaps with a step in flight."""
        self._end(data.draw(st.sampled_from(self.world.jobs)))

    @precondition(lambda self: self.world.jobs)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """Its KV is given back and looked for again: what it computed may still be there."""
        job = data.draw(st.sampled_from(self.world.jobs))
        for step in self.world.steps:
            step.rows = [row for row in step.rows if row[0] is not job]
        self.world.caches[job.instance].release(job.kv, self.world.now_s)
        self._match(job)

    @rule(num_pages=st.integers(1, 8))
    def evict(self, num_pages: int) -> None:
        world = self.world
        evictable, fenced = world.memory.num_evictable(), world.pool.num_fenced
        evicted = world.memory.evict(num_pages)
        assert evicted >= min(num_pages, evictable)
        assert world.pool.num_fenced == fenced + evicted
        world.forget_lost()

    @rule()
    def keep_watermark(self) -> None:
        self.world.memory.keep_watermark()
        self.world.forget_lost()

    @rule(num_pages=st.integers(1, 20))
    def compact(self, num_pages: int) -> None:
        """Whatever is freed by copying, no live block is lost."""
        fenced = self.world.pool.num_fenced
        freed = self.world.memory.compact(num_pages)
        assert self.world.pool.num_fenced == fenced + freed
        self.world.forget_lost()

    @precondition(lambda self: not self.weights)
    @rule(first=st.integers(0, 47), length=st.integers(1, 12))
    def load_weights(self, first: int, length: int) -> None:
        """Somebody wants a run: KV goes or moves out of its way, then a loader writes there."""
        world = self.world
        pages = list(range(first, min(first + length, world.pool.num_pages)))
        live = sum(cache.num_live_pages for cache in world.caches.values())
        free = world.pool.num_free
        cleared = world.memory.clear(pages)
        world.forget_lost()
        assert live == sum(cache.num_live_pages for cache in world.caches.values())
        if not cleared:
            assert free == world.pool.num_free
            return
        assert all(world.pool.owner_of(page) is None for page in pages)
        if pages:
            world.pool.claim(WEIGHTS, pages)
            self.weights = pages

    @precondition(lambda self: self.weights)
    @rule()
    def unload_weights(self) -> None:
        self.world.pool.release(WEIGHTS, self.weights)
        self.weights = []

    @rule()
    def pass_step(self) -> None:
        self.world.pass_step()

    @rule(data=st.data())
    def drop_model(self, data: st.DataObject) -> None:
        """The model leaves the device in the middle of everything, and comes back empty."""
        world = self.world
        instance = data.draw(st.sampled_from(sorted(world.caches)))
        if data.draw(st.integers(0, 5)):
            return
        world.run_device(len(world.queue))
        self._collect()
        world.caches[instance].drop_all()
        world.jobs = [job for job in world.jobs if job.instance != instance]
        for names in world.known[instance]:
            names.clear()

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        """Everything comes back."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.run_device(len(world.queue))
        self._collect()
        for job in list(world.jobs):
            self._end(job)
        world.memory.evict(world.pool.num_pages)
        if self.weights:
            world.pool.release(WEIGHTS, self.weights)
        world.pass_step()
        world.run_device(len(world.queue))
        assert world.pool.num_free == world.pool.num_pages


TestKv = KvMachine.TestCase
TestKv.settings = settings(max_examples=40, stateful_step_count=30)


class LongKvMachine(KvMachine):
    """The same for long."""


TestKvLong = pytest.mark.soak(LongKvMachine.TestCase)
TestKvLong.settings = settings(max_examples=2000, stateful_step_count=100)
