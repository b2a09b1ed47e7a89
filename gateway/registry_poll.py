"""Keeps the gateway's view of the registry fresh: one cheap read every `key_cache_poll_s`.

When the registry's version has moved, keys and hosted models are read in one snapshot and put into
the Directory, a changed catalog goes on to the dispatcher, and operators' residency wishes are
taken. Prices are dated, so they change by time alone: the snapshot is also renewed every
PRICES_S. Reads run in a thread; a database that does not answer leaves the last view in place.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from gateway.directory import Directory
from gateway.service import hosted_models
from gateway.types import HostedModel
from registry import api_keys, catalog, residency_requests, tenants, version
from registry.api_keys import KeyRecord
from registry.residency_requests import ResidencyRequest
from registry.session import reading, writing

logger = logging.getLogger(__name__)

ACTOR = "gateway"
PRICES_S = 10.0


@dataclass(frozen=True, slots=True)
class View:
    """One snapshot of the registry.

    `weights`: bytes of each ready model's weights; `reserved`: what tenants have of each worker.
    """

    version: int
    keys: Sequence[KeyRecord]
    models: Sequence[HostedModel]
    weights: dict[str, int]
    wishes: Sequence[ResidencyRequest]
    reserved: dict[str, float]


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
        wall_clock: Callable[[], float] = time.time,
        on_reserved: Callable[[dict[str, float]], None] = lambda shares: None,
    ) -> None:
        self._engine = engine
        self._data_path = data_path
        self._directory = directory
        self._interval_s = interval_s
        self._on_models = on_models
        self._on_wish = on_wish
        self._wall_clock = wall_clock
        self._on_reserved = on_reserved
        self._models: Sequence[HostedModel] | None = None
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
        self._directory.replace(view.version, view.keys, view.models)
        if view.models != self._models:
            self._models = view.models
            self._on_models(view.models, view.weights)
        self._on_reserved(view.reserved)
        for wish in view.wishes:
            self._on_wish(wish)

    def _read(self, known_version: int) -> View | None:
        """In a thread. None where nothing can have changed."""
        now_at = self._wall_clock()
        with reading(self._engine) as session:
            current = version.current(session)
            moved = current != known_version
            if not moved and now_at - self._read_at < PRICES_S:
                return None
            keys = api_keys.active_keys(session)
            models = hosted_models(session, self._data_path, now_at)
            reserved = tenants.reserved_shares(session)
            weights = {m.name: m.weight_bytes for m in catalog.ready_models(session)}
        self._read_at = now_at
        wishes: Sequence[ResidencyRequest] = ()
        if moved:
            with writing(self._engine, ACTOR) as session:
                wishes = residency_requests.take(session, now_at=now_at)
        return View(current, keys, models, weights, wishes, reserved)
