"""The look-up: is there an answer to this request, or to one that means the same?

    exact key -> embedding -> the scope's nearest -> cache_choice.choose -> hit, or miss

Comes in: a request's place in the cache and its plan. Goes out: a Hit, or a Miss, which holds what
is needed to keep the answer later. Nothing here decides: eligibility is
cache/policy/cache_rule.py's, likeness cache/policy/cache_choice.py's, memory the store's. Whatever
fails on the way (store out of reach, no vector in time) is a miss, and never an error.

Questions are compared word by word, by what the embedding model makes of each word. That of kept
entries is remembered from when they were asked for; what another gateway has kept, or this one has
forgotten, is embedded again in one go. What is remembered goes by the entry, which is its tenant's:
what others have asked changes no look-up's time.

What a miss leaves behind is worked through off the request's way (`landed`): its answer is compared
with those of the neighbours that might have been served, the entries learn from it, and it is kept,
unless what it belongs to was invalidated since it was looked up.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
from cachetools import LRUCache

from gateway.cache import question_score
from gateway.cache.cache_request import CachePlace
from gateway.cache.calibrations import (
    CalibrationFiles,
    Calibrations,
    CalibrationStore,
    RedisCalibrations,
    calibration_folder,
)
from gateway.cache.embedder import Embedder, Meaning
from gateway.cache.memory_store import MemoryAnswers
from gateway.cache.policy import cache_choice
from gateway.cache.policy.cache_choice import KeptCandidate, Verdict
from gateway.cache.policy.cache_confidence import Calibration, Confidence
from gateway.cache.policy.cache_rule import CachePlan
from gateway.cache.question_score import PROBE, QuestionReading
from gateway.cache.redis_answers import RedisAnswers
from gateway.cache.types import (
    AnswerStore,
    CachedAnswer,
    Entry,
    Epoch,
    Neighbour,
    StoreUnavailable,
)
from gateway.metrics.cache_metrics import CacheMetrics, CacheSize
from gateway.settings.settings import Settings

WORD_PAIRS_AT_A_TIME = 4096
"""Compared before others have their turn: half a millisecond."""


class ReadingCache:
    """Questions of kept entries as they are compared, so that they are not embedded again. One
    object per gateway process. On the event loop. `max_bytes`: 0 remembers nothing."""

    def __init__(self, max_bytes: int) -> None:
        self._kept: LRUCache[str, QuestionReading] = LRUCache(
            max_bytes, getsizeof=lambda reading: reading.num_bytes
        )
        self.num_forgotten = 0
        """How often all of it was."""

    @property
    def num_bytes(self) -> int:
        """Of what is remembered."""
        return int(self._kept.currsize)

    def of(self, entry: Entry) -> QuestionReading | None:
        """The question is looked at: an id stands for one as far as a store is to be trusted."""
        reading = self._kept.get(entry.entry_id)
        return reading if reading is not None and reading.text == entry.question else None

    def keep(self, entry_id: str, reading: QuestionReading, since: int) -> None:
        """`since`: `num_forgotten` before the store was asked for it: where something was forgotten
        meanwhile, it may be what was dropped, and is not remembered."""
        if since == self.num_forgotten and reading.num_bytes <= self._kept.maxsize:
            self._kept[entry_id] = reading

    def forget(self) -> None:
        """All of it: something was dropped, and its words shall not stay."""
        self.num_forgotten += 1
        self._kept.clear()


log = logging.getLogger(__name__)

LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Hit:
    """An answer to serve, and the request it came from. `entry` None: that one is just ending."""

    answer: CachedAnswer
    entry_id: str
    entry: Entry | None = None


class Miss(msgspec.Struct, frozen=True):
    """Nothing to serve. `epoch` None: the store could not be asked, so nothing is kept either.
    `embedder`: the revision that the verdict rests on; `meaning`: its question's; `candidates`: the
    neighbours as the verdict saw them; `num_forgotten`: the readings' then."""

    epoch: Epoch | None = None
    meaning: Meaning | None = None
    neighbours: tuple[Neighbour, ...] = ()
    candidates: tuple[KeptCandidate, ...] = ()
    verdict: Verdict | None = None
    embedder: str = ""
    num_forgotten: int = 0


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
        settings: Settings,
        now_at: Callable[[], float],
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.store = store
        self.calibrations = calibrations
        self.embedder = embedder
        self._metrics = metrics
        self._settings = settings
        self._readings = ReadingCache(settings.cache_readings_max_bytes)
        self._known: dict[str, bool] = {}
        self._now_at = now_at
        self._draw = draw
        self._num_purges = 0
        self._look_at = 0.0
        self.size = CacheSize()
        """As of the last look."""

    async def exact(self, place: CachePlace, plan: CachePlan) -> Hit | Miss:
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

    async def alike(self, place: CachePlace, plan: CachePlan, miss: Miss) -> Hit | Miss:
        """The answer to a question that means the same, after `exact` has missed."""
        epoch = miss.epoch
        if plan.mode == "exact" or not plan.reads or epoch is None:
            return miss
        embedder = self.embedder.revision
        meaning = await self._meaning(place.question, embedder)
        if meaning is None:
            self._metrics.embed_failures.inc()
            return miss
        num_forgotten = self._readings.num_forgotten
        miss = msgspec.structs.replace(
            miss, meaning=meaning, embedder=embedder, num_forgotten=num_forgotten
        )
        try:
            with self._metrics.look_time.labels("nearest").time():
                near = await self.store.nearest(
                    place.scope, meaning.vector, cache_choice.CANDIDATES
                )
        except StoreUnavailable as error:
            self._out("nearest", error)
            return miss
        near = [n for n in near if self._fresh(n.entry, plan)]
        candidates = await self._candidates(meaning.reading, near, num_forgotten)
        if candidates is None:
            self._metrics.embed_failures.inc()
            return miss
        calibration = self.calibrations.of(place.scope, epoch, embedder)
        verdict = cache_choice.choose(
            meaning.reading.numbers,
            candidates,
            calibration,
            self._budget(plan),
            self._draw(),
            may_start=self._known.get(embedder, False),
        )
        if verdict.hit is not None and not verdict.shadow and plan.mode == "semantic":
            entry = near[verdict.hit].entry
            return Hit(entry.answer, entry.entry_id, entry)
        return msgspec.structs.replace(
            miss, neighbours=tuple(near), candidates=tuple(candidates), verdict=verdict
        )

    async def _meaning(self, question: str, embedder: str) -> Meaning | None:
        """Once for each revision, what it makes of the probe is looked at, too."""
        is_new = embedder not in self._known
        with self._metrics.embed_time.time():
            found = await self.embedder.read([question, PROBE] if is_new else [question])
        if found is None:
            return None
        if is_new:
            self._known = {embedder: question_score.fitted().know(found[1].vector)}
        return found[0]

    async def _candidates(
        self, asked: QuestionReading, near: Sequence[Neighbour], since: int
    ) -> list[KeptCandidate] | None:
        """What each neighbour says of the question; None where that is not to be had in time."""
        readings = {one.entry.entry_id: self._readings.of(one.entry) for one in near}
        unknown = [one.entry for one in near if readings[one.entry.entry_id] is None]
        found = await self.embedder.read([entry.question for entry in unknown]) if unknown else []
        if found is None:
            return None
        for entry, meaning in zip(unknown, found, strict=True):
            readings[entry.entry_id] = meaning.reading
            self._readings.keep(entry.entry_id, meaning.reading, since)
        candidates = []
        num_pairs = 0
        for one in near:
            reading = readings[one.entry.entry_id]
            assert reading is not None, "it was just read"
            if num_pairs > WORD_PAIRS_AT_A_TIME:
                await asyncio.sleep(0)
                num_pairs = 0
            num_pairs += len(asked.words) * len(reading.words)
            entry = one.entry
            pair = question_score.view(asked, reading, one.similarity)
            candidates.append(KeptCandidate(entry.entry_id, one.similarity, entry.confidence, pair))
        return candidates

    async def landed(self, place: CachePlace, plan: CachePlan, miss: Miss, made: Made) -> None:
        """A miss was answered by the model: compare, learn, keep."""
        if miss.epoch is None or not _is_of_use(plan, made):
            return
        num_purges = self._num_purges
        meaning, compared = miss.meaning, _Compared()
        is_compared = made.is_text and plan.mode in ("semantic", "shadow")
        if is_compared and meaning is None:
            found = await self.embedder.read([place.question])
            meaning = None if found is None else found[0]
        if is_compared and miss.verdict is not None:
            compared = await self._compare(place, miss, miss.verdict, made)
        now_at = self._now_at()
        entry = Entry(
            entry_id=made.request_id,
            key_id=made.key_id,
            scope=place.scope,
            exact_key=place.exact_key,
            question=place.question,
            vector=meaning.vector if meaning is not None and made.is_text else None,
            answer=made.answer,
            cost_nanos=made.cost_nanos,
            made_at=now_at,
            expires_at=now_at + self._settings.cache_ttl_s,
            epoch=miss.epoch,
            confidence=compared.confidence,
        )
        try:
            await self._learn(miss, compared)
            if plan.keeps and num_purges == self._num_purges:
                await self.store.keep(entry)
                if meaning is not None:
                    self._readings.keep(entry.entry_id, meaning.reading, miss.num_forgotten)
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
        is_shared = self.store.kind != "memory"
        self.size = CacheSize(size.num_entries, size.num_bytes, is_shared)

    def purged(self) -> None:
        """Something is about to be dropped, or was: what is under way now might be of its kind and
        is not kept."""
        self._num_purges += 1
        self._readings.forget()

    async def _compare(
        self, place: CachePlace, miss: Miss, verdict: Verdict, made: Made
    ) -> _Compared:
        """What the model said now against what would, or might, have been served."""
        if not verdict.compare:
            return _Compared()
        others = [miss.neighbours[index].entry.answer.text for index in verdict.compare]
        found = await self.embedder.read([made.answer.text, *others])
        agreed = []
        for number, other in enumerate(others, 1):
            is_same = made.answer.text.lower().split() == other.lower().split()
            if not is_same and found is not None:
                one, two = found[0], found[number]
                like = float(np.dot(one.vector, two.vector))
                is_same = question_score.agrees(one.reading, two.reading, like)
            agreed.append(is_same)
            await asyncio.sleep(0)  # Two long texts were compared: others have their turn.
        outcome = cache_choice.compared(
            made.request_id,
            verdict,
            miss.candidates,
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
        return self._settings.cache_false_hit_budget if own is None else own

    def _fresh(self, entry: Entry, plan: CachePlan) -> bool:
        age_s = self._now_at() - entry.made_at
        return plan.max_age_s is None or age_s < plan.max_age_s

    def _out(self, what: str, error: Exception) -> None:
        self._metrics.store_failures.labels(what).inc()
        self.size = replace(self.size, is_degraded=True)
        log.info("the cache's store: %s: %s", what, error)


def open_stores(
    settings: Settings,
    now_at: Callable[[], float],
    on_unreported: Callable[[], None] = lambda: None,
) -> tuple[AnswerStore, CalibrationStore]:
    """Where answers are kept, and what is learnt of them: the Redis that gateways share, or this
    process and its data folder. Used on one event loop; `close` the first at the end.
    `on_unreported`: something that was to be kept or counted could not be written in time."""
    tenant_max_bytes, max_bytes = settings.cache_tenant_max_bytes, settings.cache_max_bytes
    if settings.redis_url:
        answers = RedisAnswers(
            settings.redis_url,
            settings.redis_prefix,
            tenant_max_bytes,
            mirror_max_bytes=max_bytes,
            clock=now_at,
            on_unreported=on_unreported,
        )
        return answers, RedisCalibrations(answers.link)
    files = CalibrationFiles(calibration_folder(settings.data_path))
    return MemoryAnswers(max_bytes, tenant_max_bytes, now_at), files


def _is_of_use(plan: CachePlan, made: Made) -> bool:
    """Whether there is anything to do: an answer that nobody may keep still teaches."""
    return plan.keeps or (made.is_text and plan.mode in ("semantic", "shadow"))
