"""Keeps the gateway's view of the registry fresh: one cheap read every `key_cache_poll_s`.

When the registry's version has moved, what has changed is read in one snapshot (registry_view.py)
and put into the Directory, a changed catalog goes on to the dispatcher, and operators' residency
wishes are taken. Limits that are new hold as soon as it is known what was used of them
(limit_restore.py). Prices are dated, and all dates to come are in the view: nothing changes by time
alone. Reads run in a thread; a database that does not answer leaves the last view in place.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from gateway import registry_view
from gateway.directory import Directory
from gateway.limits.limit_restore import LimitRestore, Owned, Owner
from gateway.registry_view import Catalog, View
from gateway.store.base import LimitStore
from gateway.types import HostedModel
from registry import residency_requests
from registry.api_keys import KeyRecord
from registry.ledger import Posting
from registry.residency_requests import ResidencyRequest
from registry.session import reading, writing

logger = logging.getLogger(__name__)

ACTOR = "gateway"
MIN_PAUSE_S = 0.02
"""Between two looks, however often somebody says that there is something to see."""


class RegistryPoll:
    """Calls `on_models(models, weights)` when the catalog changed, `on_wish` for each wish, and
    `on_reserved(shares by tenant id)` with every catalog. `gateway_id`: of a process with a ledger
    of its own, whose earlier life may have left requests open."""

    def __init__(
        self,
        engine: Engine,
        data_path: Path,
        directory: Directory,
        interval_s: float,
        on_models: Callable[[Sequence[HostedModel], dict[str, int]], None],
        on_wish: Callable[[ResidencyRequest], None],
        limit_store: LimitStore,
        wall_clock: Callable[[], float] = time.time,
        on_reserved: Callable[[dict[str, float]], None] = lambda shares: None,
        clock: Callable[[], float] = time.monotonic,
        *,
        takes_wishes: bool = True,
        gateway_id: str = "",
    ) -> None:
        """`takes_wishes`: a wish is taken once, by the process that can fulfil it."""
        self._takes_wishes = takes_wishes
        self._engine = engine
        self._data_path = data_path
        self._directory = directory
        self._interval_s = interval_s
        self._on_models = on_models
        self._on_wish = on_wish
        self._wall_clock = wall_clock
        self._on_reserved = on_reserved
        self._restore = LimitRestore(
            engine, limit_store, self._on_begun, gateway_id, wall_clock, clock
        )
        self._models: Sequence[HostedModel] | None = None
        self._upto = 0
        self._may_wish = False
        self._again: frozenset[Owner] = frozenset()
        self._poked = asyncio.Event()
        self.num_errors = 0

    async def load(self) -> None:
        """The first view, with all that counts begin with. Raises SQLAlchemyError."""
        await self.poll()
        await self._restore.carry_left()

    async def run(self) -> None:
        """Poll for ever."""
        while True:
            await asyncio.sleep(MIN_PAUSE_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._interval_s - MIN_PAUSE_S)):
                    await self._poked.wait()
            self._poked.clear()
            try:
                await self.poll()
                await self._restore.restore_loss()
            except SQLAlchemyError as error:
                self.num_errors += 1
                logger.warning("registry poll failed, the last view stays: %s", error)

    def poke(self) -> None:
        """Look now: something has changed."""
        self._poked.set()

    async def poll(self, *, again: bool = False) -> None:
        """Look once; `again`: even if nothing has changed, and at what counts begin with too.
        Raises SQLAlchemyError, changing nothing."""
        known = -1 if again else self._directory.version
        owners = self._again
        view = await asyncio.to_thread(self._read, known, owners)
        if view is None:
            await self._fulfil_wishes()
            return
        if again or self._models is None:
            self._restore.forget()
            await self._restore.begin(_all_owned(view))
        self._again -= owners
        self._upto = view.upto
        self._apply(view)
        await self._fulfil_wishes()

    async def settled(self) -> None:
        """Returns when every limit that is known of holds."""
        while True:
            await self._restore.settled()
            if not self._again:
                return
            await self.poll()

    def count_posting(self, posting: Posting) -> None:
        """A request of an earlier server was posted: see limit_restore.py."""
        self._restore.count_posting(posting)

    def _apply(self, view: View) -> None:
        keys = [self._begun(key) for key in view.keys]
        alive = {key.tenant_id for key in view.keys}
        for tenant_id in view.tenants - alive:  # nobody is left to draw on its limits
            self._restore.drop(("tenant", tenant_id))
        for key_id in view.gone:
            self._restore.drop(("key", key_id))
        if view.catalog is not None:
            self._apply_catalog(view.catalog)
        if view.is_whole:
            directory = self._directory
            directory.replace(view.version, keys, directory.models(), directory.limits)
        else:
            self._directory.update(view.version, keys, view.gone)

    def _apply_catalog(self, found: Catalog) -> None:
        models = [
            replace(model, limits=self._restore.begun(Owned("model", model.name, model.limits)))
            for model in found.models
        ]
        limits = self._restore.begun(Owned("gateway", "", found.limits))
        self._directory.update_models(models, limits, found.book)
        self._may_wish = self._takes_wishes
        if models != self._models:
            self._models = models
            self._on_models(models, found.weights)
        self._on_reserved(found.reserved)

    async def _fulfil_wishes(self) -> None:
        """Wishes come with a change of the catalog; where they could not be taken, later."""
        if not self._may_wish:
            return
        for wish in await asyncio.to_thread(self._take_wishes):
            self._on_wish(wish)
        self._may_wish = False

    def _begun(self, key: KeyRecord) -> KeyRecord:
        """The key with the limits that hold."""
        own = self._restore.begun(Owned("key", key.id, key.limits))
        shared = self._restore.begun(Owned("tenant", key.tenant_id, key.tenant_limits))
        if own is key.limits and shared is key.tenant_limits:
            return key
        return replace(key, limits=own, tenant_limits=shared)

    def _on_begun(self, owners: frozenset[Owner]) -> None:
        self._again |= owners
        self.poke()

    def _read(self, known_version: int, owners: frozenset[Owner]) -> View | None:
        """In a thread."""
        with reading(self._engine) as session:
            return registry_view.read(session, self._data_path, known_version, self._upto, owners)

    def _take_wishes(self) -> Sequence[ResidencyRequest]:
        with writing(self._engine, ACTOR) as session:
            return residency_requests.take(session, now_at=self._wall_clock())


def _all_owned(view: View) -> Iterator[Owned]:
    if view.catalog is not None:
        yield Owned("gateway", "", view.catalog.limits)
        for model in view.catalog.models:
            yield Owned("model", model.name, model.limits)
    for key in view.keys:
        yield Owned("key", key.id, key.limits)
        yield Owned("tenant", key.tenant_id, key.tenant_limits)
