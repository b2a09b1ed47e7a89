"""Where the weights of a model that has to come in would go, and what must be moved for that.

Pure: a picture of the pages in, a plan out; nothing here changes the pool. The cheapest way wins,
in this order:

    home      the runs it had last, if they are free or only KV stands in them: captured graphs
              hold addresses
    windows   for each segment the run with the least KV in the way, the lowest among equals, so
              that a free hole comes first
    slides    a stretch of pages in which the weights of others slide down and leave one hole at
              the end, for the segments that found no window

A slide of the whole arena is the last resort and always works: where nothing stands still, a plan
is found whenever there is memory enough in total, however it is cut up.

KV in the way of a plan is evicted or moved page by page by whoever owns it; it never needs to be
contiguous, so it only counts what it costs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from engine.memory import PagePool, PageRun

# What clearing or moving a page is worth, in pages copied. Live KV and weights are copied, cached
# KV is perhaps computed again; weights cost the graphs that were captured over them as well.
EVICTABLE_COST = 1
LIVE_COST = 2
MOVED_COST = 8
_NEVER = 1 << 40  # above any sum of costs

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class WeightRun:
    """One segment of a resident model, which may be moved."""

    instance_id: str
    segment: int
    run: PageRun


@dataclass(frozen=True, slots=True)
class Move:
    """A segment's way: always down, over pages that are its own or that were cleared before."""

    instance_id: str
    segment: int
    source: PageRun
    target: PageRun


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A run for each segment of the incoming model, and what comes first.

    kv_pages  KV to be evicted or moved out of the runs and out of the targets of the moves
    moves     in the order in which they must be carried out: a later one may write what an
              earlier one has read
    """

    runs: tuple[PageRun, ...]
    kv_pages: tuple[int, ...] = ()
    moves: tuple[Move, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """The pages as they are: `kinds` as the pool tells them, one code a page.

    evictable  KV without live blocks
    fixed      pages that must stay as they are whatever they hold (weights not in `movable` do so
               anyway)
    """

    kinds: bytes
    evictable: Mask
    movable: Sequence[WeightRun] = ()
    fixed: Mask | None = None


def plan_runs(
    picture: Picture, lengths: Sequence[int], home: Sequence[PageRun] = ()
) -> RunPlan | None:
    """Runs of `lengths` pages. None: too little memory, or what stands still is in the way.

    Live KV and other models' weights keep their memory; only cached KV gives it up.
    """
    ground = _Ground(picture)
    if sum(lengths) > ground.num_spare or min(lengths, default=1) < 1:
        return None
    if [run.num_pages for run in home] == list(lengths) and ground.is_open(home):
        return ground.plan(list(home))
    runs: list[PageRun | None] = _place_in_windows(ground, lengths)
    rest = [number for number, run in enumerate(runs) if run is None]
    if rest and not _place_by_slides(ground, lengths, rest, runs):
        ground = _Ground(picture)
        if not _pack(ground, lengths, runs):
            return None
    return ground.plan([run for run in runs if run is not None])


class _Ground:
    """What may be built on: a price for each page, `_NEVER` for what stays."""

    def __init__(self, picture: Picture) -> None:
        kinds = np.frombuffer(picture.kinds, dtype=np.uint8)
        self.is_kv: Mask = kinds == PagePool.KV
        self.is_weights: Mask = kinds == PagePool.WEIGHTS
        self.movable = sorted(picture.movable, key=lambda item: item.run.first)
        self.price: Ints = np.zeros(len(kinds), dtype=np.int64)
        self.price[self.is_kv] = LIVE_COST
        self.price[self.is_kv & picture.evictable] = EVICTABLE_COST
        # A slide may pass over movable weights; a window may not stand on them.
        self.slides: Mask = np.zeros(len(kinds), dtype=np.bool_)
        for item in self.movable:
            self.slides[item.run.first : item.run.first + item.run.num_pages] = True
        stays = self.is_weights.copy()
        if picture.fixed is not None:
            stays |= picture.fixed
            self.slides &= ~picture.fixed
        self.price[stays] = _NEVER
        self.num_spare = int(np.count_nonzero(self.price < LIVE_COST))
        self._moves: list[Move] = []
        self._built: list[PageRun] = []

    def is_open(self, runs: Iterable[PageRun]) -> bool:
        """Whether nothing but KV stands in these runs."""
        return all(
            run.first + run.num_pages <= len(self.price)
            and int(self.price[run.first : run.first + run.num_pages].max()) < _NEVER
            for run in runs
        )

    def build(self, run: PageRun) -> None:
        """The run is taken: neither a window nor a slide may touch it any more."""
        self.price[run.first : run.first + run.num_pages] = _NEVER
        self.slides[run.first : run.first + run.num_pages] = False

    def slide(self, stretch: PageRun, lengths: Sequence[int]) -> list[PageRun]:
        """Weights of the stretch go to its beginning, runs of `lengths` to its end."""
        first, end = stretch.first, stretch.first + stretch.num_pages
        for item in self.movable:
            if not first <= item.run.first < end:
                continue
            target = PageRun(first, item.run.num_pages)
            self._moves.append(Move(item.instance_id, item.segment, item.run, target))
            first += item.run.num_pages
        self.movable = [i for i in self.movable if not stretch.first <= i.run.first < end]
        runs = []
        for length in lengths:
            runs.append(PageRun(first, length))
            first += length
        self.build(stretch)
        self._built.append(stretch)
        return runs

    def plan(self, runs: list[PageRun]) -> RunPlan:
        """What was found, with the KV in its way."""
        cleared: Mask = np.zeros(len(self.price), dtype=np.bool_)
        for run in (*runs, *self._built):
            cleared[run.first : run.first + run.num_pages] = True
        pages = np.flatnonzero(cleared & self.is_kv)
        return RunPlan(tuple(runs), tuple(pages.tolist()), tuple(self._moves))


def _longest_first(lengths: Sequence[int], numbers: Iterable[int]) -> list[int]:
    return sorted(numbers, key=lambda number: -lengths[number])


def _sums(values: npt.NDArray[np.int64] | Mask) -> Ints:
    """sums[b] - sums[a] is the sum of values[a:b]."""
    sums: Ints = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(values, out=sums[1:])
    return sums


def _place_in_windows(ground: _Ground, lengths: Sequence[int]) -> list[PageRun | None]:
    """The cheapest window for each segment, longest first; None where there is none."""
    runs: list[PageRun | None] = [None] * len(lengths)
    prices: Ints = np.empty(0, dtype=np.int64)
    previous = 0
    for number in _longest_first(lengths, range(len(lengths))):
        length = lengths[number]
        if length != previous:
            sums = _sums(ground.price)
            prices = sums[length:] - sums[:-length]
            previous = length
        first = int(prices.argmin()) if len(prices) else 0
        if not len(prices) or prices[first] >= _NEVER:
            continue
        runs[number] = run = PageRun(first, length)
        ground.build(run)
        # Windows that overlap it are gone, all others cost what they did.
        prices[max(0, first - length + 1) : first + length] = _NEVER
    return runs


def _place_by_slides(
    ground: _Ground, lengths: Sequence[int], rest: Iterable[int], runs: list[PageRun | None]
) -> bool:
    """A stretch for each segment that is left, each as cheap as can be. False: one found none."""
    stretches = _Stretches(ground, 1, 0, 0)
    for number in _longest_first(lengths, rest):
        if lengths[number] != stretches.num_pages:
            stretches = _Stretches(ground, lengths[number], 0, len(ground.price))
        stretch = stretches.take_cheapest()
        if stretch is None:
            return False
        (runs[number],) = ground.slide(stretch, [lengths[number]])
    return True


def _pack(ground: _Ground, lengths: Sequence[int], runs: list[PageRun | None]) -> bool:
    """All segments anew, several to a stretch, between the pages that stay.

    Cannot fail where none stays: then there is one stretch, and it holds them all.
    """
    stays = np.flatnonzero((ground.price >= _NEVER) & ~ground.slides)
    borders = [-1, *stays.tolist(), len(ground.price)]
    gaps = [(a + 1, b) for a, b in pairwise(borders) if b > a + 1]
    open_pages = _sums(ground.price < _NEVER)
    spare = [int(open_pages[end] - open_pages[first]) for first, end in gaps]
    chosen: list[list[int]] = [[] for _ in gaps]
    for number in _longest_first(lengths, range(len(lengths))):
        place = next((i for i, space in enumerate(spare) if space >= lengths[number]), None)
        if place is None:
            return False
        spare[place] -= lengths[number]
        chosen[place].append(number)
    for (first, end), numbers in zip(gaps, chosen, strict=True):
        if numbers:
            wanted = [lengths[number] for number in numbers]
            stretch = _Stretches(ground, sum(wanted), first, end).take_cheapest()
            assert stretch is not None  # the gap has that many pages
            for number, run in zip(numbers, ground.slide(stretch, wanted), strict=True):
                runs[number] = run
    return True


class _Stretches:
    """Neighbouring pages with `num_pages` that may be built on, and else only what may slide.

    Each begins and ends with a page that may be built on, so it cuts no run of weights in two.
    """

    def __init__(self, ground: _Ground, num_pages: int, first: int, end: int) -> None:
        self.num_pages = num_pages
        price, slides = ground.price[first:end], ground.slides[first:end]
        places = np.flatnonzero(price < _NEVER)
        num = max(0, len(places) - num_pages + 1)
        sums = _sums(np.where(slides, MOVED_COST, price))
        self._starts = places[:num] + first
        self._ends = places[num_pages - 1 :] + first + 1
        self._prices = sums[self._ends - first] - sums[self._starts - first]

    def take_cheapest(self) -> PageRun | None:
        """The cheapest, the lowest among equals; those that overlap it are gone then."""
        best = int(self._prices.argmin()) if len(self._prices) else 0
        if not len(self._prices) or self._prices[best] >= _NEVER:
            return None
        start, end = int(self._starts[best]), int(self._ends[best])
        self._prices[max(0, best - self.num_pages + 1) : best + self.num_pages] = _NEVER
        return PageRun(start, end - start)
