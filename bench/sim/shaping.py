"""Patterns on top of a workload: one tenant's flood, a spray of cold models, days and nights.

Lives here: the patterns and what they do to a window's batch. Does not: text forms (spec.py), where
the requests beneath come from (sources.py).

A flood and a spray are Poisson arrivals of one tenant within a span of time. Their rate is given in
times what the average tenant sends (the workload's mean rate over the number of tenants). Their
lengths are those of requests of the same moment; their text is their own.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bench.sim.batches import Batch, Floats, fresh, mixed, rng, uniform
from bench.sim.casting import Cast
from bench.sim.random_lengths import DISTRIBUTIONS

HOURS = 24
SUMS = 1024


@dataclass(frozen=True, slots=True)
class Burst:
    """One tenant sends `times` the average tenant's rate from start to end, on top of the rest.

    flood   for the models that it always asks for
    spray   for one after another of the less popular half of all models
    """

    kind: Literal["flood", "spray"]
    tenant: int
    start_s: float
    end_s: float
    times: float


@dataclass(frozen=True, slots=True)
class Diurnal:
    """The rate over a day of `period_s`: a sine that starts in the middle and rises, or 24 hours.

    swing   0 to 1: the sine goes from 1 - swing to 1 + swing times the mean
    hours   means of the hours; where given, they count and not the sine
    """

    period_s: float
    swing: float = 0.0
    hours: tuple[float, ...] = ()

    @property
    def peak(self) -> float:
        """Largest rate over the mean."""
        return max(self.hours) * len(self.hours) / sum(self.hours) if self.hours else 1 + self.swing

    def level(self, at_s: Floats) -> Floats:
        """Rate over the mean at these times."""
        phase = at_s / self.period_s % 1.0
        if not self.hours:
            return np.asarray(1.0 + self.swing * np.sin(2.0 * math.pi * phase))
        levels = np.array(self.hours) * len(self.hours) / sum(self.hours)
        return levels[np.minimum((phase * len(levels)).astype(np.int64), len(levels) - 1)]

    def mean(self, span_s: float) -> float:
        """Mean level from 0 to `span_s`; 1 over whole days."""
        return float(self.level((np.arange(SUMS) + 0.5) * span_s / SUMS).mean())


def thinned(batch: Batch, diurnal: Diurnal) -> Batch:
    """What is left of a batch drawn at the peak's rate; conversations end as the rate falls."""
    return batch.take(uniform(batch.group, "diurnal") < diurnal.level(batch.at_s) / diurnal.peak)


class Bursts:
    """The floods and sprays of a workload, drawn window by window."""

    def __init__(self, bursts: tuple[Burst, ...], cast: Cast, rate: float, seed: int) -> None:
        num_tenants = len(cast.tenant_shares)
        for burst in bursts:
            if not 0 <= burst.tenant < num_tenants:
                raise ValueError(
                    f"{burst.kind}: there is no tenant{burst.tenant}; the last is "
                    f"tenant{num_tenants - 1}"
                )
        self._bursts = bursts
        self._cast = cast
        self._rate = rate / num_tenants
        self._seed = seed
        self._counts = [0] * len(bursts)
        self._rngs = [rng(seed, "burst", number) for number in range(len(bursts))]

    @property
    def most_rate(self) -> float:
        """All together at once; for the size of a window."""
        return self._rate * sum(burst.times for burst in self._bursts)

    def between(self, start_s: float, end_s: float, beneath: Batch) -> list[Batch]:
        """The window's requests of each burst; lengths are drawn among those of `beneath`."""
        found = []
        for number, burst in enumerate(self._bursts):
            low, high = max(start_s, burst.start_s), min(end_s, burst.end_s)
            if high > low:
                found.append(self._arrivals(number, burst, low, high, beneath))
        return found

    def _arrivals(
        self, number: int, burst: Burst, low: float, high: float, beneath: Batch
    ) -> Batch:
        mean = (high - low) * self._rate * burst.times
        at_s = np.sort(self._rngs[number].uniform(low, high, self._rngs[number].poisson(mean)))
        first = self._counts[number]
        self._counts[number] += len(at_s)
        numbers = np.arange(first, first + len(at_s), dtype=np.uint64)
        key = mixed(numbers, self._seed, "burst", number)
        if len(beneath):
            rows = (uniform(key, "like") * len(beneath)).astype(np.int64)
            prompt, output = beneath.prompt_tokens[rows], beneath.output_tokens[rows]
        else:
            prompt, output = DISTRIBUTIONS["chat"].draw(key)
        batch = fresh(at_s, prompt, output, key)
        batch.tenant = np.full(len(at_s), burst.tenant, np.int64)
        if burst.kind == "spray":
            cold = self._cast.unpopular_models()
            batch.model = cold[numbers.astype(np.int64) % len(cold)]
        else:
            batch.model = self._cast.models_for(burst.tenant, key)
        return batch
