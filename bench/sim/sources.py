"""Where requests come from, window by window of simulated time.

Lives here: the seam of all sources, a recorded trace scaled to a rate and repeated without end, and
Poisson or Gamma arrivals that need no data. Does not: file formats (traces.py), tenants that a
trace does not name (casting.py), patterns on top (shaping.py).
"""

import math
from typing import Protocol

import numpy as np

from bench.sim.batches import Batch, Floats, Ints, fresh, join, mixed, rng, uniform
from bench.sim.casting import Cast
from bench.sim.random_lengths import LengthDistribution
from bench.sim.traces import Table

BLOCK_SPACE = 1 << 24
"""Block ids of one lap of one copy; a trace has fewer."""
GAPS_AT_ONCE = 4096
WARM_UP_GAPS = 256
MOST_COPIES = 100_000


class Source(Protocol):
    """Endless requests."""

    @property
    def rate(self) -> float:
        """Mean requests a second."""
        ...

    def between(self, start_s: float, end_s: float) -> Batch:
        """Those of start <= t < end, in order. Windows are asked for in turn, from 0."""
        ...


class Replay:
    """A table at `speed` times its pace and at `rate`, lap after lap.

    A lower rate than the trace's is thinned by conversation: whole ones stay, so that what is
    shared stays shared. A higher one is laid together of several copies, each begun elsewhere in
    the trace and thinned, so that a second of it has the gaps of many services and not one
    service's day in fast motion; only `speed` compresses. Text is shared within one lap of a copy.
    """

    def __init__(
        self,
        table: Table,
        cast: Cast,
        seed: int,
        *,
        rate: float | None = None,
        speed: float = 1.0,
        start_s: float = 0.0,
    ) -> None:
        natural = table.rate * speed
        self._rate = natural if rate is None else rate
        num_copies = max(1, math.ceil(self._rate / natural - 1e-9))
        if num_copies > MOST_COPIES:
            raise ValueError(f"a rate of {self._rate:g} needs {num_copies} copies of the trace")
        self._keep = self._rate / (natural * num_copies)
        self._table = table
        self._speed = speed
        self._seed = seed
        offsets = rng(seed, "copies").uniform(0.0, table.duration_s, num_copies)
        offsets[0] = start_s % table.duration_s
        self._offsets = offsets
        self._cast = cast
        self._num_copies = num_copies
        self._labels: dict[tuple[str, int], Ints] = {}

    @property
    def rate(self) -> float:
        """Mean requests a second."""
        return self._rate

    @property
    def lap_s(self) -> float:
        """Simulated seconds that one pass of the trace takes."""
        return self._table.duration_s / self._speed

    def between(self, start_s: float, end_s: float) -> Batch:
        """The window's requests, of all copies."""
        table, pieces = self._table, []
        for copy in range(self._num_copies):
            begin = self._offsets[copy] + start_s * self._speed
            end = self._offsets[copy] + end_s * self._speed
            for lap in range(int(begin // table.duration_s), int(end // table.duration_s) + 1):
                origin = lap * table.duration_s
                low, high = np.searchsorted(table.at_s, (begin - origin, end - origin))
                if high > low:
                    pieces.append(self._rows(copy, lap, int(low), int(high)))
        return join(pieces)

    def _rows(self, copy: int, lap: int, low: int, high: int) -> Batch:
        table, rows = self._table, slice(low, high)
        key = mixed(np.arange(low, high), self._seed, "row", copy, lap)
        elapsed = table.at_s[rows] + lap * table.duration_s - self._offsets[copy]
        batch = fresh(
            # Rounding must not move a request to before the run.
            np.maximum(0.0, elapsed / self._speed),
            table.prompt_tokens[rows],
            table.output_tokens[rows],
            key,
        )
        batch.group = mixed(table.conversation[rows], self._seed, "group", copy, lap)
        if table.blocks is not None:
            batch.blocks = table.blocks[rows]
            batch.base = np.full(high - low, (1 + copy + lap * self._num_copies) * BLOCK_SPACE)
        if table.tenant is not None:
            batch.tenant = self._places("tenant", copy, table.tenant)[table.tenant[rows]]
        if table.model is not None:
            batch.model = self._places("model", copy, table.model)[table.model[rows]]
        if self._keep < 1.0:
            return batch.take(uniform(batch.group, "keep") < self._keep)
        return batch

    def _places(self, what: str, copy: int, labels: Ints) -> Ints:
        if (what, copy) not in self._labels:
            num_labels = int(labels.max()) + 1
            self._labels[what, copy] = self._cast.cast_labels(num_labels, what, copy)
        return self._labels[what, copy]


class Renewal:
    """Arrivals with independent Gamma gaps: `cv` is their deviation over their mean, 1 is Poisson.

    Lengths come from a named distribution. Needs no data.
    """

    def __init__(self, rate: float, cv: float, lengths: LengthDistribution, seed: int) -> None:
        self._rate = rate
        self._lengths = lengths
        self._seed = seed
        self._clock = UnitGaps(seed, "renewal")
        self._shape = 1.0 / cv**2
        self._count = 0

    @property
    def rate(self) -> float:
        """Mean requests a second."""
        return self._rate

    def between(self, start_s: float, end_s: float) -> Batch:
        """The window's requests."""
        at = self._clock.pass_by((end_s - start_s) * self._rate, gamma=self._shape)
        numbers = np.arange(self._count, self._count + len(at), dtype=np.uint64)
        self._count += len(at)
        key = mixed(numbers, self._seed, "renewal")
        return fresh(start_s + at / self._rate, *self._lengths.draw(key), key)


class UnitGaps:
    """A renewal process with a mean gap of 1, in its own time, begun at a moment like any other.

    Its own time runs with the rate: at twice the rate twice as much of it passes. So rates may
    change within a gap, and neither windows nor rates leave a mark on how bursty it is.
    """

    def __init__(self, *salts: int | str) -> None:
        self._rng = rng(*salts, "gaps")
        self._shape: tuple[float, float] | None = None
        self._ahead = np.zeros(0)  # arrivals drawn and not come yet, from now on

    def pass_by(self, amount: float, *, gamma: float = 0.0, weibull: float = 0.0) -> Floats:
        """When arrivals come while `amount` passes; gaps have the one shape or the other."""
        shape = (gamma, weibull)
        if self._shape is None:
            self._ahead = np.array([self._first(shape)])
        elif shape != self._shape:
            self._ahead = self._ahead[:1]
        self._shape = shape
        while self._ahead[-1] < amount:
            number = min(GAPS_AT_ONCE, 16 + int(amount - self._ahead[-1]))
            more = self._ahead[-1] + np.cumsum(self._draw(number, shape))
            self._ahead = np.concatenate([self._ahead, more])
        num = int(np.searchsorted(self._ahead, amount))
        times, self._ahead = self._ahead[:num], self._ahead[num:] - amount
        return times

    def _first(self, shape: tuple[float, float]) -> float:
        """To the first arrival from a random moment: long gaps are met more often than short ones,
        and a bursty process is mostly met between two bursts."""
        gaps = self._draw(WARM_UP_GAPS, shape)
        ends = np.cumsum(gaps)
        moment = self._rng.uniform(0.0, ends[-1])
        return float(ends[np.searchsorted(ends, moment, side="right")] - moment)

    def _draw(self, number: int, shape: tuple[float, float]) -> Floats:
        gamma, weibull = shape
        if gamma > 0:
            return self._rng.gamma(gamma, 1.0 / gamma, number)
        scale = 1.0 / math.gamma(1.0 + 1.0 / weibull)
        return np.asarray(scale * self._rng.weibull(weibull, number))
