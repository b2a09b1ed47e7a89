"""Requests that come, grow and end in the production page pool, without any model.

Lives here: the discrete loop that `kv_memory.py` samples. In a round every running request gets
`stride` tokens further, and prompts that are let in are computed, chunk by chunk. Blocks are
reserved before and registered after; pages given back are free a step later. Does not: choose
models or lengths, print.

    light   every model has one request at a time; the next one comes as it ends
    heavy   more requests wait than fit; they are let in in turn over the models as long as they fit

Prompts differ from their first token on, so that no request shares another's blocks.
"""

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from bench.kv_minimum import Model
from bench.lengths import Length
from engine.errors import OutOfPages
from engine.memory.kv_cache import KvCache
from engine.memory.kv_memory import KvMemory
from engine.memory.page_pool import PagePool
from engine.memory.request_kv import RequestKv

Load = Literal["light", "heavy"]
ROUND_S = 0.02  # what a round counts for on the caches' clock
TENANT = "bench"


@dataclass(frozen=True, slots=True)
class Sample:
    """Bytes in one round. `held`: pages of extents with live blocks, `cached`: of the others."""

    held: int
    cached: int
    minimum: int
    num_running: int


@dataclass(frozen=True, slots=True)
class Pace:
    """Tokens of an answer in a round, tokens of a prompt at once, share of the pool for growth."""

    stride: int = 4
    chunk: int = 512
    headroom: float = 0.01


@dataclass(slots=True, eq=False)
class Job:
    """A request. It waits, or its first `num_computed` tokens are in `kv`."""

    order: int
    total_tokens: int
    token_ids: list[int]
    kv: RequestKv | None = None
    num_computed: int = 0


@dataclass(slots=True, eq=False)
class Unit:
    """A resident model with its cache and its requests."""

    model: Model
    cache: KvCache
    lengths: Iterator[Length]
    running: list[Job] = field(default_factory=list)
    waiting: deque[Job] = field(default_factory=deque)


class Traffic:
    """All units over one pool."""

    def __init__(
        self, units: Sequence[Unit], pool: PagePool, memory: KvMemory, load: Load, pace: Pace
    ) -> None:
        self._units = units
        self._pool = pool
        self._memory = memory
        self._load = load
        self._pace = pace
        self._headroom = int(pool.num_pages * pace.headroom)
        self._round = 0
        self._step = 0
        self._order = 0
        self._turn = 0
        self._ages = random.Random(0)
        self.num_finished = 0
        self.num_preempted = 0
        self.num_stalls = 0  # a request had to wait a step for memory on its way back

    def round(self) -> Sample:
        """Some tokens more of every request."""
        self._round += 1
        self._pass_step()
        self._memory.keep_watermark()
        self._admit()
        for unit, job in self._by_age():
            # Whoever was preempted for an older one's sake has lost its KV meanwhile.
            if job.kv is not None:
                self._compute(
                    unit, job, min(job.num_computed + self._pace.stride, job.total_tokens)
                )
        sample = self._sample()
        for unit, job in self._by_age():
            if job.num_computed == job.total_tokens:
                self._release(unit, job)
                self.num_finished += 1
        return sample

    def check_integrity(self) -> None:
        """Raises IntegrityError unless pool, caches and requests agree."""
        self._pool.check_integrity()
        for unit in self._units:
            unit.cache.check_integrity([job.kv for job in unit.running if job.kv is not None])

    def _pass_step(self) -> None:
        """What was given back so far is free: the steps that could touch it have ended."""
        self._step += 1
        self._pool.begin_step(self._step)
        self._pool.retire(self._step - 1)

    @property
    def _now(self) -> float:
        return self._round * ROUND_S

    def _by_age(self) -> list[tuple[Unit, Job]]:
        pairs = [(unit, job) for unit in self._units for job in unit.running]
        return sorted(pairs, key=lambda pair: pair[1].order)

    def _admit(self) -> None:
        if self._load == "light":
            for unit in self._units:
                if not unit.running:
                    self._start(unit)
            return
        # Who does not fit now is the first to be asked again: nobody is let in before it.
        while self._start(self._units[self._turn]):
            self._turn = (self._turn + 1) % len(self._units)

    def _start(self, unit: Unit) -> bool:
        """Let the unit's next request in if its prompt and one token more fit."""
        if not unit.waiting:
            unit.waiting.append(self._new_job(unit))
        job = unit.waiting[0]
        kv = unit.cache.new_kv(TENANT)
        hit = unit.cache.match(kv, job.token_ids, self._now)
        demand = unit.cache.demand(kv, min(len(job.token_ids) + 1, job.total_tokens))
        if not unit.cache.fits(demand, self._headroom):
            unit.cache.release(kv, self._now)
            return False
        unit.waiting.popleft()
        unit.running.append(job)
        job.kv, job.num_computed = kv, hit
        while job.num_computed < len(job.token_ids):
            end = min(job.num_computed + self._pace.chunk, len(job.token_ids))
            if not self._compute(unit, job, end):
                if job.kv is not None:
                    self._preempt(unit, job)
                return False
        return True

    def _new_job(self, unit: Unit) -> Job:
        length = next(unit.lengths).cut(unit.model.max_context)
        self._order += 1
        prompt, total = length.prompt_tokens, length.prompt_tokens + length.output_tokens - 1
        if self._round == 1:
            # The first ones are somewhere in the middle of their answers, as in a running service.
            prompt += self._ages.randrange(length.output_tokens)
        # The token an answer ends with is never computed.
        total = max(total, prompt)
        return Job(self._order, total, [self._order, *range(1, prompt)])

    def _compute(self, unit: Unit, job: Job, end: int) -> bool:
        """The request's first `end` tokens; False: not in this round."""
        if not self._reserve(unit, job, end):
            return False
        assert job.kv is not None
        job.num_computed = end
        job.token_ids += range(len(job.token_ids), end)
        unit.cache.advance(job.kv, job.token_ids, end, self._now)
        return True

    def _reserve(self, unit: Unit, job: Job, num_tokens: int) -> bool:
        assert job.kv is not None
        while True:
            try:
                unit.cache.reserve(job.kv, num_tokens)
            except OutOfPages:
                wanted = unit.cache.pages_of(unit.cache.demand(job.kv, num_tokens))
                if (
                    self._pool.num_fenced
                    or self._memory.evict(wanted)
                    or self._memory.compact(wanted)
                ):
                    # A round is some steps long: the memory is there for the next of them.
                    self.num_stalls += 1
                    self._pass_step()
                    continue
                victim_unit, victim = self._by_age()[-1]
                self._preempt(victim_unit, victim)
                self.num_preempted += 1
                if victim is job:
                    return False
            else:
                return True

    def _release(self, unit: Unit, job: Job) -> None:
        assert job.kv is not None
        unit.cache.release(job.kv, self._now)
        job.kv = None
        unit.running.remove(job)

    def _preempt(self, unit: Unit, job: Job) -> None:
        self._release(unit, job)
        job.num_computed = 0
        unit.waiting.appendleft(job)

    def _sample(self) -> Sample:
        held = cached = minimum = num_running = 0
        for unit in self._units:
            held += unit.cache.num_live_pages
            cached += unit.cache.num_cached_pages
            minimum += sum(unit.model.minimum_bytes(job.num_computed) for job in unit.running)
            num_running += len(unit.running)
        page = self._pool.page_bytes
        return Sample(held * page, cached * page, minimum, num_running)
