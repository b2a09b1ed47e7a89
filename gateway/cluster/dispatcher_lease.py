"""The lease by which one of several servers has the active dispatcher: taken, kept, given up.

When it may be taken and what a holder may do is policy/election.py's to say; the row is
registry/servers/dispatcher_leases.py's. Here are the calls to the database, in a thread of their
own, so that one that hangs holds up nothing: a call that does not come back is waited for, and no
second one is made beside it.

Comes in: the database, this server's id and address. Goes out: the epoch of a dispatcher that may
begin, and from then on whether it may grant.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from gateway.cluster.policy.absences import RENEW_S as GATEWAY_RENEW_S
from gateway.cluster.policy.election import AWAY_S, LOOK_S, RENEW_S, TTL_S, Candidacy, Tenure
from gateway.dispatch.counter_checkpoint import Leads
from registry.servers import dispatcher_leases, gateway_leases
from registry.servers.dispatcher_leases import LeaseRow
from registry.session import make_impatient_engine

logger = logging.getLogger(__name__)

T = TypeVar("T")


class DispatcherLease:
    """One server's. A context: its connection is closed at the end."""

    def __init__(
        self,
        url: str,
        server_id: str,
        address: str,
        clock: Callable[[], float] = time.monotonic,
        on_epoch: Callable[[int], None] = lambda epoch: None,
    ) -> None:
        """`server_id`, `address`: what the row names this server by, and where its dispatcher
        listens. `on_epoch`: told each epoch that is higher than all before, to be remembered: a
        database can be put back. Raises InvalidValue for another database than PostgreSQL."""
        self.engine: Engine = make_impatient_engine(url, AWAY_S)
        self._own = (server_id, address)
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, "lease")
        self._tenure = Tenure(float("-inf"))
        self._lost = asyncio.Event()
        self._on_epoch = on_epoch
        self._highest = 0
        self.epoch = 0
        self.seen: LeaseRow | None = None
        """The row, as it was read last before it was taken."""

    def __enter__(self) -> "DispatcherLease":
        return self

    def __exit__(self, *about: object) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.engine.dispose()

    def may_grant(self) -> bool:
        """Whether this is the active dispatcher, as far as can be known now."""
        return self._tenure.may_grant(self._clock())

    async def take(self, least: int, stop: asyncio.Event) -> int | None:
        """Wait until it can be had; its epoch, not below `least`. None: told to stop before."""
        candidacy = Candidacy(self._own)
        is_away = False
        while not stop.is_set():
            try:
                epoch = await self._try(candidacy, least)
            except SQLAlchemyError as error:
                if not is_away:
                    logger.warning("cannot read who dispatches, trying again: %s", error)
                is_away, epoch = True, None
            else:
                is_away = False
            if epoch is not None:
                return epoch
            await asyncio.sleep(LOOK_S)
        return None

    async def _try(self, candidacy: Candidacy, least: int) -> int | None:
        asked_s = self._clock()
        seen = self.seen = await self._call(dispatcher_leases.read, self.engine)
        if seen is not None:
            self._note(seen.epoch)
            holder, stamp = (seen.holder, seen.address), (seen.epoch, seen.until_at)
            if not candidacy.may_take(holder, stamp, asked_s, self._clock()):
                return None
        is_free = seen is not None and candidacy.is_free(holder, stamp)
        asked_s = self._clock()
        epoch = await self._call(self._take, seen, max(least, self._highest + 1), is_free)
        if epoch is not None:
            self._note(epoch)
            self.epoch, self._tenure = epoch, Tenure(asked_s)
        return epoch

    def _take(self, seen: LeaseRow | None, least: int, at_once: bool) -> int | None:
        about = (self.engine, seen, *self._own, TTL_S, least)
        return dispatcher_leases.take(*about, at_once=at_once)

    async def keep(self) -> None:
        """Renew it for as long as it is this one's; returns when it is lost. However it ends, this
        dispatcher is not the active one any more, and `lost` returns."""
        try:
            await self._keep()
        finally:
            self._tenure.is_lost = True
            self._lost.set()

    async def _keep(self) -> None:
        is_away = False
        while not self._tenure.is_lost:
            asked_s = self._clock()
            renewal = asyncio.ensure_future(self._call(self._renew))
            while not renewal.done():
                self._tenure.waits(self._clock())
                await asyncio.wait([renewal], timeout=RENEW_S)
            try:
                self._tenure.answered(asked_s, is_held=renewal.result())
                is_away = False
            except SQLAlchemyError as error:
                self._tenure.answered(asked_s, is_held=None)
                if not is_away:
                    logger.warning("cannot renew the dispatcher's lease, going on: %s", error)
                is_away = True
            await asyncio.sleep(RENEW_S)
        if not self._lost.is_set():
            logger.warning("another dispatcher has taken over after epoch=%d", self.epoch)

    def refused(self, epoch: int) -> None:
        """Somebody obeys this later epoch. If the row is this one's all the same, it has fallen:
        this dispatcher ends, and the next one takes a higher epoch than that."""
        logger.warning("this dispatcher has epoch=%d, others obey epoch=%d", self.epoch, epoch)
        self._note(epoch)
        self._tenure.is_lost = True
        self._lost.set()

    def _note(self, epoch: int) -> None:
        if epoch > self._highest:
            self._highest = epoch
            self._on_epoch(epoch)

    async def lost(self) -> None:
        """Returns when `keep` has found that it is another's."""
        await self._lost.wait()

    def _renew(self) -> bool:
        return dispatcher_leases.renew(self.engine, self._own[0], self.epoch, TTL_S)

    async def give_up(self) -> None:
        """Another one may take it at once."""
        try:
            await self._call(dispatcher_leases.give_up, self.engine, self._own[0], self.epoch)
        except SQLAlchemyError as error:
            logger.warning("cannot give up the dispatcher's lease, it runs out: %s", error)

    async def num_gateways(self) -> int:
        """Of all servers, those that live; 0 where the database does not say."""
        try:
            return await self._call(gateway_leases.num_live, self.engine, 3 * GATEWAY_RENEW_S)
        except SQLAlchemyError as error:
            logger.warning("cannot read how many gateways there are: %s", error)
            return 0

    async def _call(self, work: Callable[..., T], *about: object) -> T:
        """In its thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *about)


class RowLeads:
    """What tenants' counters are ahead by, in the row. Implements counter_checkpoint.LeadStore."""

    def __init__(self, engine: Engine, epoch: int) -> None:
        self._engine = engine
        self._epoch = epoch

    def read(self) -> Leads:
        """Raises SQLAlchemyError."""
        try:
            return dispatcher_leases.read_leads(self._engine)
        except (ValueError, TypeError) as error:
            logger.warning("cannot read who was ahead, all tenants begin equal: %s", error)
            return {}

    def write(self, leads: Leads) -> None:
        """A dispatcher that has lost its place changes nothing. Raises SQLAlchemyError."""
        if not dispatcher_leases.write_leads(self._engine, self._epoch, leads):
            logger.info("the fair-share counters are another dispatcher's to keep now")
