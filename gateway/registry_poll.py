"""Keeps the gateway's view of the registry fresh: one cheap read every `key_cache_poll_s`.

When the registry's version has moved, keys and hosted models are read in one snapshot and put into
the Directory, a changed catalog goes on to the dispatcher, and operators' residency wishes are
taken. Prices are dated, so they change by time alone: models are also read every PRICES_S, keys are
not (there may be many). Reads run in a thread; a database that does not answer leaves the last view
in place.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from gateway import limit_history
from gateway.directory import Directory
from gateway.limit_history import SLOT_S
from gateway.limits import RATES, budget_name, count_name
from gateway.periods import PERIOD_KINDS, period_of
from gateway.policy.rate_limit import DAY_S, Used
from gateway.service import hosted_models
from gateway.store.memory import MemoryStore
from gateway.types import HostedModel
from registry import (
    api_keys,
    catalog,
    ledger,
    quotas,
    residency_requests,
    tenants,
    version,
)
from registry.api_keys import KeyRecord
from registry.ledger import Posting
from registry.quotas import Limits
from registry.residency_requests import ResidencyRequest
from registry.session import reading, writing

logger = logging.getLogger(__name__)

ACTOR = "gateway"
PRICES_S = 10.0


@dataclass(frozen=True, slots=True)
class History:
    """What counts begin with that were not limited before.

    counted  names of all counts by the day and of budgets
    amounts  what was used: (since when, amount)
    spent    of budgets: (period, nano-units)
    """

    counted: frozenset[str]
    amounts: dict[str, list[tuple[float, int]]]
    spent: dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class View:
    """One snapshot of the registry.

    weights   bytes of each ready model's weights
    reserved  what tenants have of each worker
    history   what counts of limits that are new here begin with
    """

    version: int
    keys: Sequence[KeyRecord]
    models: Sequence[HostedModel]
    limits: Limits
    weights: dict[str, int]
    wishes: Sequence[ResidencyRequest]
    reserved: dict[str, float]
    history: History


class RegistryPoll:
    """Calls `on_models(models, weights)` when the catalog changed, `on_wish` for each wish, and
    `on_reserved(shares by tenant id)` with every view."""

    def __init__(
        self,
        engine: Engine,
        data_path: Path,
        directory: Directory,
        interval_s: float,
        on_models: Callable[[Sequence[HostedModel], dict[str, int]], None],
        on_wish: Callable[[ResidencyRequest], None],
        limit_store: MemoryStore,
        wall_clock: Callable[[], float] = time.time,
        on_reserved: Callable[[dict[str, float]], None] = lambda shares: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._data_path = data_path
        self._directory = directory
        self._interval_s = interval_s
        self._on_models = on_models
        self._on_wish = on_wish
        self._limit_store = limit_store
        self._wall_clock = wall_clock
        self._on_reserved = on_reserved
        self._clock = clock
        self._counted: frozenset[str] = frozenset()
        self._models: Sequence[HostedModel] | None = None
        self._view: View | None = None
        self._read_at = 0.0
        self.num_errors = 0

    async def load(self) -> None:
        """The first view. Raises SQLAlchemyError."""
        await self.poll()

    async def run(self) -> None:
        """Poll for ever."""
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self.poll()
            except SQLAlchemyError as error:
                self.num_errors += 1
                logger.warning("registry poll failed, the last view stays: %s", error)

    async def poll(self) -> None:
        """Look once. Raises SQLAlchemyError, changing nothing."""
        view = await asyncio.to_thread(self._read, self._directory.version)
        if view is None:
            return
        self._restore(view)
        self._directory.replace(view.version, view.keys, view.models, view.limits)
        self._view = view
        if view.models != self._models:
            self._models = view.models
            self._on_models(view.models, view.weights)
        self._on_reserved(view.reserved)
        for wish in view.wishes:
            self._on_wish(wish)

    def _restore(self, view: View) -> None:
        """Counts by the day and budgets that are new here begin with what the ledger knows."""
        now_s, now_at = self._clock(), self._wall_clock()
        for name, used in view.history.amounts.items():
            # As if all of a slot had come at its end: this process cuts its slots elsewhere.
            aged = [(max(0.0, now_at - began_at - SLOT_S), amount) for began_at, amount in used]
            self._limit_store.restore(name, DAY_S, aged, now_s)
        for name, (period, nanos) in view.history.spent.items():
            self._limit_store.restore_spend(name, period, nanos)
        self._counted = view.history.counted

    def count_posting(self, posting: Posting) -> None:
        """A request of an earlier server was posted: nobody here has reserved for it, and limits by
        the day and budgets were restored without it."""
        if posting.outcome == "failed":
            return
        now_s = self._clock()
        used = Used(posting.prompt_tokens, posting.completion_tokens, posting.cost_nanos)
        for scope, owner in limit_history.owners_of(posting):
            for rate in RATES:
                name = count_name(scope, owner, rate)
                if rate.window_s == DAY_S and name in self._counted:
                    self._limit_store.add(name, DAY_S, used.of(rate.meter), now_s)
            for kind in PERIOD_KINDS:
                name = budget_name(scope, owner, kind)
                if name in self._counted:
                    period = period_of(kind, posting.posted_at).number
                    self._limit_store.add_spend(name, period, used.cost_nanos)

    def _read(self, known_version: int) -> View | None:
        """In a thread. None where nothing can have changed."""
        now_at = self._wall_clock()
        with reading(self._engine) as session:
            current = version.current(session)
            moved = current != known_version
            if not moved and now_at - self._read_at < PRICES_S:
                return None
            models = hosted_models(session, self._data_path, now_at)
            if not moved and self._view is not None:
                self._read_at = now_at
                return replace(self._view, models=models, wishes=(), history=self._nothing_new())
            keys = api_keys.active_keys(session)
            reserved = tenants.reserved_shares(session)
            limits = quotas.get_limits(session, "gateway")
            weights = {m.name: m.weight_bytes for m in catalog.ready_models(session)}
            history = self._history(session, now_at, keys, models, limits)
        self._read_at = now_at
        wishes: Sequence[ResidencyRequest] = ()
        if moved:
            with writing(self._engine, ACTOR) as session:
                wishes = residency_requests.take(session, now_at=now_at)
        return View(current, keys, models, limits, weights, wishes, reserved, history)

    def _nothing_new(self) -> History:
        return History(self._counted, {}, {})

    def _history(
        self,
        session: Session,
        now_at: float,
        keys: Sequence[KeyRecord],
        models: Sequence[HostedModel],
        limits: Limits,
    ) -> History:
        days = limit_history.day_counts(keys, models, limits)
        budgets = limit_history.budgets(keys, models, limits)
        new_days = {name: c for name, c in days.items() if name not in self._counted}
        new_budgets = {name: b for name, b in budgets.items() if name not in self._counted}
        amounts: dict[str, list[tuple[float, int]]] = {}
        if new_days:
            since_at = now_at - DAY_S - SLOT_S
            usage = ledger.usage_by_slot(session, since_at, SLOT_S)
            amounts = limit_history.amounts(new_days, usage)
        periods = {b.kind: period_of(b.kind, now_at) for b in new_budgets.values()}
        spending = {k: ledger.spend_since(session, p.began_at) for k, p in periods.items()}
        spent = {
            name: (periods[new_budgets[name].kind].number, nanos)
            for name, nanos in limit_history.spent(new_budgets, spending).items()
        }
        return History(frozenset({*days, *budgets}), amounts, spent)
