"""Keeps the gateway's view of the registry fresh: one cheap read every `key_cache_poll_s`.

When the registry's version has moved, what has changed is read in one snapshot (directory.py)
and put into the Directory, a changed catalog goes on to the dispatcher, and operators' requests to
load and unload are taken. Limits that are new hold from then on: requests wait until it is known
what was used of them (limit_restore.py). Prices are dated, and all dates to come are in the view:
nothing changes by time alone. Reads run in a thread; a database that does not answer leaves the
last view in place.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from gateway.auth.directory import Catalog, Directory, View, read_view
from gateway.limits.limit_restore import LimitRestore, Owned
from gateway.limits.policy.rate_limit import Reservation
from gateway.limits.store import LimitStore
from gateway.types import HostedModel
from registry.models import residency_requests
from registry.models.residency_requests import ResidencyRequest
from registry.models.worker_orders import WorkerOrder
from registry.money.ledger import OpenRecord, Posting
from registry.session import reading, writing

logger = logging.getLogger(__name__)

ACTOR = "gateway"
MAX_CLOCK_BEHIND_S = 60.0
CLOCK_BEHIND = (
    "this server's clock is %.0f s behind the registry's last change: prices, budgets and postings "
    "go by it; set the clock that is wrong"
)
MIN_PAUSE_S = 0.02
"""Between two looks, however often somebody says that there is something to see."""


class RegistryPoll:
    """Calls `on_models(models, weights)` when the catalog changed, `on_request` for each request of
    an operator, and `on_reserved(shares by tenant id)` and `on_orders(what is wanted of workers)`
    with every catalog. `gateway_id`: of a
    process with a ledger of its own, whose earlier life may have left requests open."""

    def __init__(
        self,
        engine: Engine,
        data_path: Path,
        directory: Directory,
        interval_s: float,
        on_models: Callable[[Sequence[HostedModel], dict[str, int]], None],
        on_request: Callable[[ResidencyRequest], None],
        limit_store: LimitStore,
        wall_clock: Callable[[], float] = time.time,
        on_reserved: Callable[[dict[str, float]], None] = lambda shares: None,
        on_orders: Callable[[dict[str, WorkerOrder]], None] = lambda orders: None,
        clock: Callable[[], float] = time.monotonic,
        *,
        takes_requests: bool = True,
        gateway_id: str = "",
    ) -> None:
        """`takes_requests`: a request is taken once, by the process that can fulfil it."""
        self._takes_requests = takes_requests
        self._engine = engine
        self._data_path = data_path
        self._directory = directory
        self._interval_s = interval_s
        self._on_models = on_models
        self._on_residency_request = on_request
        self._wall_clock = wall_clock
        self._on_reserved = on_reserved
        self._on_orders = on_orders
        self._restore = LimitRestore(
            engine, limit_store, directory.unread, gateway_id, wall_clock, clock
        )
        self._models: Sequence[HostedModel] | None = None
        self._upto = 0
        self._may_take = False
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
                logger.warning(
                    "cannot read the registry database, using the last known state: %s", error
                )

    def poke(self) -> None:
        """Look now: something has changed."""
        self._poked.set()

    async def poll(self, *, again: bool = False) -> None:
        """Look once; `again`: even if nothing has changed, and at what counts begin with too.
        Raises SQLAlchemyError, changing nothing."""
        known = -1 if again else self._directory.version
        view = await asyncio.to_thread(self._read, known)
        if view is None:
            await self._pass_requests_on()
            return
        if again or self._models is None:
            await self._restore.begin(_all_owned(view))
        self._upto = view.upto
        behind_s = view.changed_at - self._wall_clock()
        if behind_s > MAX_CLOCK_BEHIND_S:
            logger.warning(CLOCK_BEHIND, behind_s)
        self._apply(view)
        await self._pass_requests_on()

    async def settled(self) -> None:
        """Returns when the past of every limit that is known of is known."""
        await self._restore.settled()

    async def carry(self, records: Iterable[OpenRecord]) -> None:
        """Requests of a gateway that is lost are closed here: see limit_restore.py."""
        await self._restore.carry(records)

    async def read_open(self) -> list[tuple[str, Reservation]]:
        """What all gateways have open may cost so much: see limit_restore.py."""
        return await self._restore.read_open()

    def count_posting(self, posting: Posting) -> None:
        """A request of an earlier server was posted: see limit_restore.py."""
        self._restore.count_posting(posting)

    def _apply(self, view: View) -> None:
        for owned in _all_owned(view):
            self._restore.watch(owned)
        alive = {key.tenant_id for key in view.keys}
        for tenant_id in view.tenants - alive:  # nobody is left to draw on its limits
            self._restore.drop(("tenant", tenant_id))
        for key_id in view.gone:
            self._restore.drop(("key", key_id))
        if view.catalog is not None:
            self._apply_catalog(view.catalog)
        if view.is_whole:
            directory = self._directory
            directory.replace(view.version, view.keys, directory.models(), directory.limits)
        else:
            self._directory.update(view.version, view.keys, view.gone)

    def _apply_catalog(self, found: Catalog) -> None:
        self._directory.update_models(found.models, found.limits, found.book)
        self._may_take = self._takes_requests
        if found.models != self._models:
            self._models = found.models
            self._on_models(found.models, found.weights)
        self._on_reserved(found.reserved)
        self._on_orders(found.orders)

    async def _pass_requests_on(self) -> None:
        """Wishes come with a change of the catalog; where they could not be taken, later."""
        if not self._may_take:
            return
        for request in await asyncio.to_thread(self._take_requests):
            self._on_residency_request(request)
        self._may_take = False

    def _read(self, known_version: int) -> View | None:
        """In a thread."""
        with reading(self._engine) as session:
            return read_view(session, self._data_path, known_version, self._upto)

    def _take_requests(self) -> Sequence[ResidencyRequest]:
        with writing(self._engine, ACTOR) as session:
            return residency_requests.take(session, now_at=self._wall_clock())


def _all_owned(view: View) -> Iterator[Owned]:
    if view.catalog is not None:
        yield Owned("gateway", "", view.catalog.limits)
        for model in view.catalog.models:
            yield Owned("model", model.name, model.limits)
    for key in view.keys:
        yield Owned("key", key.id, key.limits, key.tenant_id)
        yield Owned("tenant", key.tenant_id, key.tenant_limits, key.tenant_id)
