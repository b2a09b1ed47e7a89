"""What is remembered of models: how much each is asked for, and which ones crash workers (pure).

`Popularity` keeps rates, `Prefetcher` decides by them what is fetched ahead of need, `Quarantine`
keeps models that take workers down from being served for a while.
"""

import math
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from gateway.dispatch.policy.fleet_view import Demand, WorkerView, load_seconds

FAST_HALF_LIFE_S = 15.0
SLOW_HALF_LIFE_S = 120.0
MIN_EXPECTED_ASKS = 0.5
"""Asks expected within SLOW_HALF_LIFE_S that a prefetch is worth."""
KV_RESERVE_SHARE = 0.25
"""Of a worker's arena: free pages that a prefetch leaves to KV."""
PREFETCH_PAUSE_S = 60.0
"""A worker is told to fetch the same model ahead of need at most so often."""
MAX_MODELS = 20_000
"""Models with a rate of their own; whose was not asked for the longest is forgotten."""


@dataclass(slots=True)
class _Rates:
    """Decayed sums as of `at_s`."""

    at_s: float
    fast_asks: float = 0.0
    slow_asks: float = 0.0
    slow_service_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Bring `model_id` to `tier` of the worker; nobody waits for it yet."""

    model_id: str
    worker_id: str
    tier: Literal["device", "host"]
    asks_s: float
    load_s: float


class Popularity:
    """Rates by model.

    Demand is an exponentially decayed rate at two half-lives: the fast one sees a burst at once and
    forgets it, the slow one keeps what is asked for all day. Only tickets count, so answers from
    the cache never do. Two rates are kept: asks a second say how soon somebody will want the model
    (a swap is wasted by one ask, however small); predicted service a second says what having it is
    worth, so that a thousand one-token pings are not what is loaded ahead of need.
    """

    def __init__(
        self, fast_half_life_s: float = FAST_HALF_LIFE_S, slow_half_life_s: float = SLOW_HALF_LIFE_S
    ) -> None:
        self._fast_per_s = math.log(2) / fast_half_life_s
        self._slow_per_s = math.log(2) / slow_half_life_s
        self._rates: dict[str, _Rates] = {}

    def asked(self, model_id: str, service_s: float, now_s: float) -> None:
        """A ticket has come that is expected to take so much service."""
        rates = self._rates.pop(model_id, None) or _Rates(now_s)
        if len(self._rates) >= MAX_MODELS:
            del self._rates[next(iter(self._rates))]
        self._rates[model_id] = rates  # the latest asked is last
        fast, slow = self._fading(rates, now_s)
        rates.at_s = max(now_s, rates.at_s)
        rates.fast_asks = rates.fast_asks * fast + 1.0
        rates.slow_asks = rates.slow_asks * slow + 1.0
        rates.slow_service_s = rates.slow_service_s * slow + service_s

    def asks_s(self, model_id: str, now_s: float) -> float:
        """Asks a second: the higher of the two rates."""
        rates = self._rates.get(model_id)
        if rates is None:
            return 0.0
        fast, slow = self._fading(rates, now_s)
        return max(
            rates.fast_asks * fast * self._fast_per_s, rates.slow_asks * slow * self._slow_per_s
        )

    def service_rate(self, model_id: str, now_s: float) -> float:
        """Predicted device seconds a second, over the slow half-life."""
        rates = self._rates.get(model_id)
        if rates is None:
            return 0.0
        return rates.slow_service_s * self._fading(rates, now_s)[1] * self._slow_per_s

    def keep_models(self, model_ids: Collection[str]) -> None:
        """Forget models that are not hosted any more."""
        self._rates = {name: kept for name, kept in self._rates.items() if name in model_ids}

    def forget(self, model_id: str) -> None:
        """It counts as never asked for."""
        self._rates.pop(model_id, None)

    def known(self) -> Collection[str]:
        """Models that have been asked for."""
        return self._rates.keys()

    def _fading(self, rates: _Rates, now_s: float) -> tuple[float, float]:
        passed_s = max(0.0, now_s - rates.at_s)
        return math.exp(-passed_s * self._fast_per_s), math.exp(-passed_s * self._slow_per_s)


class Prefetcher:
    """What to fetch ahead of need; remembers what it has asked for.

    Prefetching takes what nobody needs: free pages beyond a reserve for KV, and room in the host
    tier. One model a worker at a time, and none anywhere while somebody waits for a load.
    """

    def __init__(self) -> None:
        self._asked_s: dict[tuple[str, str, str], float] = {}

    def decide(
        self,
        now_s: float,
        popularity: Popularity,
        candidates: Sequence[Demand],
        workers: Sequence[WorkerView],
    ) -> list[Prefetch]:
        """One model a worker and tier at most. Call it only while nobody waits for a load.

        `candidates`: hosted models that have been asked for, with their sizes. A model goes to the
        device of one worker only, and nowhere where it is resident or coming.
        """
        self._asked_s = {
            key: at_s for key, at_s in self._asked_s.items() if now_s - at_s < PREFETCH_PAUSE_S
        }
        least_s = MIN_EXPECTED_ASKS / SLOW_HALF_LIFE_S
        likely = [
            (popularity.service_rate(c.model_id, now_s) / max(1, c.weight_bytes), c)
            for c in candidates
            if popularity.asks_s(c.model_id, now_s) >= least_s
        ]
        likely.sort(key=lambda entry: (-entry[0], entry[1].model_id))
        on_device = {
            name
            for worker in workers
            for name, model in worker.models.items()
            if model.state in ("resident", "loading")
        }
        found: list[Prefetch] = []
        for worker in workers:
            if worker.is_moving:
                continue
            found += self._for_worker(now_s, popularity, worker, [c for _, c in likely], on_device)
        return found

    def _for_worker(
        self,
        now_s: float,
        popularity: Popularity,
        worker: WorkerView,
        likely: Sequence[Demand],
        on_device: set[str],
    ) -> list[Prefetch]:
        spare_bytes = worker.free_bytes - KV_RESERVE_SHARE * worker.arena_bytes
        found: dict[str, Prefetch] = {}
        for demand in likely:
            model = worker.model(demand)
            tier: Literal["device", "host"]
            if demand.model_id in on_device or model.state not in ("cold", "warm"):
                continue
            if demand.weight_bytes <= spare_bytes and "device" not in found:
                tier = "device"
            elif model.state == "cold" and "host" not in found:
                tier = "host"
            else:
                continue
            key = (worker.worker_id, demand.model_id, tier)
            if key in self._asked_s:
                continue
            self._asked_s[key] = now_s
            if tier == "device":
                on_device.add(demand.model_id)
            asks_s = popularity.asks_s(demand.model_id, now_s)
            found[tier] = Prefetch(
                demand.model_id, worker.worker_id, tier, asks_s, load_seconds(model)
            )
            if len(found) == 2:
                break
        return list(found.values())


STRIKES = 2
FIRST_TERM_S = 60.0
LONGEST_TERM_S = 3600.0
MOMENT_S = 3.0
"""Deaths on one machine within this time have one cause, unless a request of the model was there
both times."""

Key = tuple[str, str]
"""Model name and revision."""


@dataclass(slots=True)
class _Record:
    strikes: int = 0
    num_terms: int = 0
    until_s: float = 0.0
    reason: str = ""
    last_worker: str = ""
    last_s: float = -math.inf

    def is_same_death(self, worker_id: str, now_s: float) -> bool:
        """Whether another worker of that machine had died just before."""
        return (
            worker_id != self.last_worker
            and machine_of(worker_id) == machine_of(self.last_worker)
            and now_s - self.last_s < MOMENT_S
        )


def machine_of(worker_id: str) -> str:
    """Of a worker called MACHINE/SLOT; workers without one are all of this machine."""
    return worker_id.rpartition("/")[0]


class Quarantine:
    """What is held against models, by (model, revision).

    A worker process that ends by itself with requests of a model in its hands is a strike against
    that model; a request of it that ends by itself clears everything held against it. Two deaths in
    a row, with nothing served between, and the model is quarantined: for FIRST_TERM_S, then on
    trial, where one more death is enough and the term is twice the last. A worker that is silent,
    or was told to end, is no strike. Workers of one machine that die within MOMENT_S of each other
    are one strike together: what ends several processes at once is seldom a model. But where a
    request that had lost a worker before was on the next one, that death counts by itself: a
    request that kills is sent on at once, to a worker of the same machine as a rule. A worker that
    is killed from outside may so cost a model a minute; a model that kills every worker it touches
    is kept from them ever longer.
    A new revision, or an operator who loads it, ends a term at once.
    """

    def __init__(self) -> None:
        self._records: dict[Key, _Record] = {}

    def worker_died(
        self,
        models: Iterable[Key],
        reason: str,
        worker_id: str,
        now_s: float,
        again: Container[Key] = (),
    ) -> list[str]:
        """`models` had requests there, those `again` one that had lost a worker before. Returns the
        names that are quarantined from now on."""
        newly = []
        for key in sorted(set(models)):
            record = self._records.setdefault(key, _Record())
            if key not in again and record.is_same_death(worker_id, now_s):
                continue
            record.last_worker, record.last_s = worker_id, now_s
            record.strikes += 1
            if record.strikes >= STRIKES and now_s >= record.until_s:
                term_s = min(LONGEST_TERM_S, FIRST_TERM_S * 2**record.num_terms)
                record.num_terms += 1
                record.until_s = now_s + term_s
                record.reason = (
                    f"quarantined: {record.strikes} workers in a row crashed while running its "
                    f"requests (last: {reason}); next try {term_s:.0f} s after the last crash"
                )
                newly.append(key[0])
        return newly

    def served(self, model: str, revision: str) -> None:
        """A request of the model ended by itself."""
        self._records.pop((model, revision), None)

    def reason(self, model: str, revision: str, now_s: float) -> str | None:
        """Why the model is not served; None if it is."""
        record = self._records.get((model, revision))
        return record.reason if record is not None and now_s < record.until_s else None

    def reasons(self, now_s: float) -> Mapping[str, str]:
        """Model name -> why."""
        return {
            model: record.reason
            for (model, _), record in self._records.items()
            if now_s < record.until_s
        }

    def clear(self, model: str) -> bool:
        """An operator wants it tried again. True: something was held against it."""
        before = len(self._records)
        self._records = {key: one for key, one in self._records.items() if key[0] != model}
        return len(self._records) < before

    def keep(self, models: Iterable[Key]) -> None:
        """Forget (model, revision) pairs that are not hosted any more."""
        kept = set(models)
        self._records = {key: one for key, one in self._records.items() if key in kept}
