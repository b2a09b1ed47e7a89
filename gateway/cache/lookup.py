"""The look-up: is there an answer to this request, or to one that means the same?

    exact key -> embedding -> the scope's nearest -> cache_choice.choose -> hit, or miss

Comes in: a request's place in the cache and its plan. Goes out: a Hit, or a Miss, which holds what
is needed to keep the answer later. Nothing here decides: eligibility is policy/cache_rule.py's,
likeness policy/cache_choice.py's, memory the store's. Whatever fails on the way (store out of
reach, no vector in time) is a miss, and never an error.

What a miss leaves behind is worked through off the request's way (`landed`): its answer is compared
with those of the neighbours that might have been served, the entries learn from it, and it is kept,
unless what it belongs to was invalidated since it was looked up.
"""

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from gateway.cache.calibrations import Calibrations
from gateway.cache.embedder import Embedder
from gateway.cache.readings import Readings, candidate_of
from gateway.cache.scope import Place
from gateway.cache.store import AnswerStore, StoreUnavailable
from gateway.cache.types import CachedAnswer, Entry, Epoch, Neighbour, Vector
from gateway.metrics.cache_metrics import CacheMetrics, CacheSize
from gateway.policy import cache_agree, cache_choice
from gateway.policy.cache_choice import Verdict
from gateway.policy.cache_confidence import Calibration, Confidence
from gateway.policy.cache_rule import CachePlan

log = logging.getLogger(__name__)

LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Hit:
    """An answer to serve, and the request it came from. `entry` None: that one is just ending."""

    answer: CachedAnswer
    entry_id: str
    entry: Entry | None = None


@dataclass(frozen=True, slots=True)
class Miss:
    """Nothing to serve. `epoch` None: the store could not be asked, so nothing is kept either.
    `embedder`: the revision that the verdict rests on."""

    epoch: Epoch | None = None
    vector: Vector | None = None
    neighbours: tuple[Neighbour, ...] = ()
    verdict: Verdict | None = None
    embedder: str = ""


@dataclass(frozen=True, slots=True)
class Made:
    """What a request that was looked up and missed came to.

    `is_text`: the answer says something to the user; one that calls tools is for the very same
    request only. `cost_nanos`: what it cost.
    """

    answer: CachedAnswer
    is_text: bool
    request_id: str
    key_id: str
    cost_nanos: int


@dataclass(frozen=True, slots=True)
class CacheBounds:
    """How long an answer is kept; the share of hits that may be false where a key does not say;
    how much is remembered of what was read."""

    ttl_s: float
    false_hit_budget: float
    readings_max_bytes: int


@dataclass(slots=True)
class _Compared:
    confidence: Confidence = field(default_factory=Confidence)
    learned: tuple[tuple[str, Confidence], ...] = ()


class AnswerCache:
    """One object per gateway process. On the event loop."""

    def __init__(
        self,
        store: AnswerStore,
        calibrations: Calibrations,
        embedder: Embedder,
        metrics: CacheMetrics,
        bounds: CacheBounds,
        now_at: Callable[[], float],
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.store = store
        self.calibrations = calibrations
        self.embedder = embedder
        self._metrics = metrics
        self._bounds = bounds
        self._readings = Readings(bounds.readings_max_bytes)
        self._now_at = now_at
        self._draw = draw
        self._num_purges = 0
        self._look_at = 0.0
        self.size = CacheSize()
        """As of the last look."""

    async def exact(self, place: Place, plan: CachePlan) -> Hit | Miss:
        """The answer to this very request, not older than the plan says."""
        try:
            with self._metrics.look_time.labels("exact").time():
                found = await self.store.exact(place.scope, place.exact_key)
        except StoreUnavailable as error:
            self._out("exact", error)
            return Miss()
        if self.size.is_degraded:
            self.size = replace(self.size, is_degraded=False)
        entry = found.entry
        if entry is None or not plan.reads or plan.mode == "shadow" or not self._fresh(entry, plan):
            return Miss(found.epoch)
        return Hit(entry.answer, entry.entry_id, entry)

    async def alike(self, place: Place, plan: CachePlan, miss: Miss) -> Hit | Miss:
        """The answer to a question that means the same, after `exact` has missed."""
        if plan.mode == "exact" or not plan.reads or miss.epoch is None:
            return miss
        embedder = self.embedder.revision
        with self._metrics.embed_time.time():
            vectors = await self.embedder.embed([place.question])
        if vectors is None:
            self._metrics.embed_failures.inc()
            return miss
        num_forgotten = self._readings.num_forgotten
        try:
            with self._metrics.look_time.labels("nearest").time():
                near = await self.store.nearest(place.scope, vectors[0], cache_choice.CANDIDATES)
        except StoreUnavailable as error:
            self._out("nearest", error)
            return Miss(miss.epoch, vectors[0])
        near = [n for n in near if self._fresh(n.entry, plan)]
        asked, candidates = await self._readings.of(place.question, near, num_forgotten)
        verdict = cache_choice.choose(
            place.question,
            candidates,
            self.calibrations.of(place.scope, miss.epoch, embedder),
            self._budget(plan),
            self._draw(),
            reading=asked,
        )
        if verdict.hit is not None and not verdict.shadow and plan.mode == "semantic":
            entry = near[verdict.hit].entry
            return Hit(entry.answer, entry.entry_id, entry)
        return Miss(miss.epoch, vectors[0], tuple(near), verdict, embedder)

    async def landed(self, place: Place, plan: CachePlan, miss: Miss, made: Made) -> None:
        """A miss was answered by the model: compare, learn, keep."""
        if miss.epoch is None or not _is_of_use(plan, made):
            return
        num_purges = self._num_purges
        vector, compared = miss.vector, _Compared()
        is_compared = made.is_text and plan.mode in ("semantic", "shadow")
        if is_compared and vector is None:
            vectors = await self.embedder.embed([place.question])
            vector = None if vectors is None else vectors[0]
        if is_compared and miss.verdict is not None:
            compared = await self._compare(place, miss, miss.verdict, made)
        now_at = self._now_at()
        entry = Entry(
            entry_id=made.request_id,
            key_id=made.key_id,
            scope=place.scope,
            exact_key=place.exact_key,
            question=place.question,
            vector=vector if made.is_text else None,
            answer=made.answer,
            cost_nanos=made.cost_nanos,
            made_at=now_at,
            expires_at=now_at + self._bounds.ttl_s,
            epoch=miss.epoch,
            confidence=compared.confidence,
        )
        try:
            await self._learn(miss, compared)
            if plan.keeps and num_purges == self._num_purges:
                await self.store.keep(entry)
                await self._look()
        except StoreUnavailable as error:
            self._out("keep", error)

    async def used(self, entry: Entry, saved_nanos: int) -> None:
        """A hit was served. Where prices are 0, tokens count: what is asked for most stays."""
        self._metrics.saved_nanos.inc(saved_nanos)
        try:
            await self.store.used(entry, max(saved_nanos, entry.answer.completion_tokens))
        except StoreUnavailable as error:
            self._out("used", error)

    async def _learn(self, miss: Miss, compared: _Compared) -> None:
        """Where another gateway has taught an entry meanwhile, this comparison is left out: there
        will be others."""
        entries = {n.entry.entry_id: n.entry for n in miss.neighbours}
        for entry_id, confidence in compared.learned:
            if entry_id in entries:
                await self.store.learn(entries[entry_id], confidence)

    async def _look(self) -> None:
        """How much is kept, for metrics; now and then."""
        now_at = self._now_at()
        if now_at < self._look_at:
            return
        self._look_at = now_at + LOOK_S
        size = await self.store.size()
        self.size = CacheSize(size.num_entries, size.num_bytes)

    def purged(self) -> None:
        """Something is about to be dropped, or was: what is under way now might be of its kind and
        is not kept."""
        self._num_purges += 1
        self._readings.forget()

    async def _compare(self, place: Place, miss: Miss, verdict: Verdict, made: Made) -> _Compared:
        """What the model said now against what would, or might, have been served."""
        if not verdict.compare:
            return _Compared()
        others = [miss.neighbours[index].entry.answer.text for index in verdict.compare]
        vectors = await self.embedder.embed([made.answer.text, *others])
        agreed = []
        for number, other in enumerate(others, 1):
            like = None if vectors is None else float(np.dot(vectors[0], vectors[number]))
            agreed.append(cache_agree.agrees(made.answer.text, other, like))
            await asyncio.sleep(0)  # Two long texts were read: others have their turn.
        outcome = cache_choice.compared(
            made.request_id,
            verdict,
            [candidate_of(n) for n in miss.neighbours],
            agreed,
            Calibration(),
        )
        if miss.epoch is not None and outcome.calibration.right:
            self.calibrations.add(place.scope, miss.epoch, miss.embedder, outcome.calibration)
        if verdict.shadow or verdict.hit is not None:  # It would have been served.
            self._metrics.checks.labels("agreed" if agreed[0] else "differed").inc()
        return _Compared(outcome.new, tuple(outcome.learned))

    def _budget(self, plan: CachePlan) -> float:
        own = plan.false_hit_budget
        return self._bounds.false_hit_budget if own is None else own

    def _fresh(self, entry: Entry, plan: CachePlan) -> bool:
        age_s = self._now_at() - entry.made_at
        return plan.max_age_s is None or age_s < plan.max_age_s

    def _out(self, what: str, error: Exception) -> None:
        self._metrics.store_failures.labels(what).inc()
        self.size = replace(self.size, is_degraded=True)
        log.info("the cache's store: %s: %s", what, error)


def _is_of_use(plan: CachePlan, made: Made) -> bool:
    """Whether there is anything to do: an answer that nobody may keep still teaches."""
    return plan.keeps or (made.is_text and plan.mode in ("semantic", "shadow"))
