"""A cache that meets a stream of questions, for `bench.cache` and `bench.cache_fit`.

The store is a matrix of what was missed so far; the model is the stream's own answers, which agree
or do not. What decides is the product's rule, or a plain threshold. Nothing else of the gateway
runs here.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.cache_data import Stream
from gateway.cache.policy.cache_choice import (
    CANDIDATES,
    FITTED,
    KeptCandidate,
    ScoreWeights,
    Verdict,
    choose,
    compared,
)
from gateway.cache.policy.cache_confidence import Calibration, Confidence

NUM_FIRST = 1000


@dataclass(frozen=True, slots=True)
class Served:
    """What a stream's requests got: counts."""

    num_requests: int
    num_right: int
    num_wrong: int
    num_audits: int = 0
    num_first_right: int = 0
    """Right ones among the first thousand requests."""

    @property
    def true_hit_rate(self) -> float:
        """Requests that got the right answer from the cache, of all."""
        return self.num_right / self.num_requests

    @property
    def false_share(self) -> float:
        """Wrong ones, of the answers that the cache gave."""
        return self.num_wrong / max(1, self.num_right + self.num_wrong)

    @property
    def false_rate(self) -> float:
        """Wrong answers, of all requests."""
        return self.num_wrong / self.num_requests


@dataclass(slots=True)
class Step:
    """One request: the verdict, which neighbours have the right answer, what was known so far."""

    verdict: Verdict
    rights: list[bool]
    calibration: Calibration


def by_rule(stream: Stream, seed: int, budget: float, weights: ScoreWeights = FITTED) -> Served:
    """The product's rule, from nothing learnt."""
    right = wrong = audits = total = first = 0
    for step in steps(stream, seed, budget, weights):
        total += 1
        audits += step.verdict.shadow
        if step.verdict.hit is not None:
            is_right = step.rights[step.verdict.hit]
            right += is_right
            wrong += not is_right
        first = right if total <= NUM_FIRST else first
    return Served(total, right, wrong, audits, first)


def steps(
    stream: Stream,
    seed: int,
    budget: float,
    weights: ScoreWeights = FITTED,
    *,
    shadow: bool = False,
) -> Iterator[Step]:
    """The stream in the seed's order, a request after the other. `shadow`: no request is answered
    from the cache."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(stream.texts))
    similar, readings = stream.similar, stream.readings
    kept: list[int] = []
    records: dict[str, Confidence] = {}
    calibration = Calibration()
    for i in order.tolist():
        near = _nearest(similar[i], kept)
        candidates = [
            KeptCandidate(
                str(j),
                float(similar[i, j]),
                records[str(j)],
                stream.pair(i, j),
            )
            for j in near
        ]
        draw = float(rng.random())
        verdict = choose(readings[i].numbers, candidates, calibration, budget, draw, weights)
        rights = [bool(stream.answers[j] == stream.answers[i]) for j in near]
        yield Step(verdict, rights, calibration)
        if verdict.hit is not None and not shadow:
            continue
        agreed = [rights[j] for j in verdict.compare]
        outcome = compared(str(i), verdict, candidates, agreed, calibration)
        calibration = outcome.calibration
        records.update(outcome.learned)
        records[str(i)] = outcome.new
        kept.append(i)


def by_threshold(stream: Stream, seed: int, threshold: float) -> Served:
    """The nearest entry's answer wherever its cosine is at least this."""
    order = np.random.default_rng(seed).permutation(len(stream.texts))
    similar = stream.similar
    kept: list[int] = []
    right = wrong = 0
    for i in order.tolist():
        near = _nearest(similar[i], kept)
        if near and similar[i, near[0]] >= threshold:
            right += bool(stream.answers[near[0]] == stream.answers[i])
            wrong += bool(stream.answers[near[0]] != stream.answers[i])
        else:
            kept.append(i)
    return Served(len(order), right, wrong)


def _nearest(similar: NDArray[np.float32], kept: list[int]) -> list[int]:
    if not kept:
        return []
    likes = similar[kept]
    count = min(CANDIDATES, len(kept))
    top = np.argpartition(-likes, count - 1)[:count]
    return [kept[j] for j in top[np.argsort(-likes[top], kind="stable")]]
