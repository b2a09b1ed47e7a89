"""The share of each worker's time that loads against models in demand may take (pure)."""

from collections.abc import Iterable
from typing import NamedTuple

MIN_TIMED = 3
"""Loads that have to end on a worker before anybody is refused for what loads take there."""
UNTIMED_S = 1.0
"""A load takes at most so much out of the bucket before, the rest when it has ended."""
BURST_S = 10.0
"""Unused share is kept for so long."""


class Bucket(NamedTuple):
    """One worker's, as of `at_s`: what it holds, and what it holds at most."""

    share: float
    level_s: float
    at_s: float

    @property
    def most_s(self) -> float:
        """When it is full."""
        return self.share * BURST_S

    def level(self, now_s: float) -> float:
        """What it holds at a later time."""
        return min(self.most_s, self.level_s + self.share * max(0.0, now_s - self.at_s))

    def ready_s(self, load_s: float, now_s: float) -> float:
        """When a load that takes so long may begin, if none begins before it."""
        lacking_s = min(load_s, self.most_s) - self.level(now_s)
        # A hair of tolerance: levels are sums of many small additions.
        return now_s if lacking_s <= 1e-9 else now_s + lacking_s / self.share

    def taken(self, load_s: float, at_s: float) -> "Bucket":
        """After a load of so many seconds has begun."""
        return Bucket(self.share, self.level(at_s) - load_s, max(at_s, self.at_s))


class LoadBudget:
    """The share of a worker's time that loads against models in demand may take, by worker.

    A bucket of load seconds: it fills by `share` seconds a second, up to BURST_S of that, and a
    load takes what it is estimated to last. A load may begin when the bucket holds what it takes,
    or is full: one that takes more than the bucket holds is not shut out for ever, and leaves a
    debt that is filled up first. So within any window of T seconds the loads begun take at most

        share * T + max(share * BURST_S, the longest load)

    seconds. When a load has ended, what it really took is settled (`settle`), and one that came to
    nothing gives back what it took. A worker's first estimates are guesses, so its first loads take
    little beforehand, the rest when they have ended. A worker that comes begins with a full bucket.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._buckets: dict[str, Bucket] = {}
        self._charged: dict[tuple[str, str], float] = {}
        self._num_timed: dict[str, int] = {}

    def bucket(self, worker_id: str, now_s: float) -> Bucket:
        """As of now."""
        bucket = self._buckets.get(worker_id)
        return bucket or Bucket(self._share, self._share * BURST_S, now_s)

    def take(self, worker_id: str, model_id: str, load_s: float, now_s: float) -> None:
        """A load begins."""
        self._buckets[worker_id] = self.bucket(worker_id, now_s).taken(load_s, now_s)
        self._charged[worker_id, model_id] = load_s

    def settle(self, worker_id: str, model_id: str, took_s: float, now_s: float) -> None:
        """A load has ended: it took so long. Loads that took nothing out of the bucket are free."""
        self._num_timed[worker_id] = self._num_timed.get(worker_id, 0) + 1
        charged_s = self._charged.pop((worker_id, model_id), None)
        if charged_s is not None:
            self._buckets[worker_id] = self.bucket(worker_id, now_s).taken(
                took_s - charged_s, now_s
            )

    def call_off(self, worker_id: str, model_id: str, now_s: float) -> None:
        """A load came to nothing: what it took is given back."""
        charged_s = self._charged.pop((worker_id, model_id), None)
        if charged_s is not None:
            self._buckets[worker_id] = self.bucket(worker_id, now_s).taken(-charged_s, now_s)

    def is_sure(self, worker_id: str) -> bool:
        """Whether what loads take there has been measured: the first estimates are guesses."""
        return self._num_timed.get(worker_id, 0) >= MIN_TIMED

    def charge_s(self, worker_id: str, load_s: float) -> float:
        """What a load that is expected to last so long takes out of the bucket beforehand."""
        return load_s if self.is_sure(worker_id) else min(load_s, UNTIMED_S)

    def in_debt(self, now_s: float) -> frozenset[str]:
        """Workers where less than nothing is left."""
        return frozenset(w for w, bucket in self._buckets.items() if bucket.level(now_s) < 0)

    def forget(self, worker_ids: Iterable[str]) -> None:
        """Workers that are gone."""
        gone = set(worker_ids)
        self._buckets = {w: bucket for w, bucket in self._buckets.items() if w not in gone}
        self._num_timed = {w: num for w, num in self._num_timed.items() if w not in gone}
        self._charged = {key: s for key, s in self._charged.items() if key[0] not in gone}
