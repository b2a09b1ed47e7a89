"""One gateway of several servers: says that it lives, and adopts the books of those that are lost.

A row for each gateway is renewed every RENEW_S. A gateway whose row stays the same for
`server_lost_after_s` (policy/absences.py) and that the active dispatcher does not know (`is_gone`)
is lost with its machine; one that only has lost the database serves on, and its journal has what it
posts. The open records of a lost one are closed by whoever takes them first, as after a kill
(ledger.py, `adopt`), and then its row is deleted. If it
was not lost after all, nothing is billed twice: of two postings of a request the first one counts,
and what its journal brings later changes nothing.

Workers are asked for no finish but those of the adopted records: one whose open record is still in
the lost machine's journal is that machine's to post, and another adopter's is that one's.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from gateway.cluster.policy.absences import RENEW_S, Absences
from gateway.cluster.policy.election import AWAY_S
from registry.money.ledger import OpenRecord
from registry.servers import gateway_leases
from registry.session import make_impatient_engine

logger = logging.getLogger(__name__)

ASK_EVERY_S = 1.0
"""A worker may connect later, or notice later that the lost gateway is gone."""


class GatewayLease:
    """This gateway's row, and its look at the others'. `adopt(gateway_id)` closes what that one
    left open; it may raise SQLAlchemyError, and is called again then. `is_gone(gateway_id)`: no
    active dispatcher is connected to it; False while that is not known."""

    def __init__(
        self,
        url: str,
        gateway_id: str,
        lost_after_s: float,
        adopt: Callable[[str], Awaitable[None]],
        is_gone: Callable[[str], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises InvalidValue for another database than PostgreSQL."""
        self._engine: Engine = make_impatient_engine(url, AWAY_S)
        self._gateway_id = gateway_id
        self._absences = Absences(lost_after_s)
        self._adopt = adopt
        self._is_gone = is_gone
        self._closing: dict[str, asyncio.Task[None]] = {}
        """The books of lost gateways; this one's row is renewed meanwhile."""
        self._kept: set[str] = set()
        """Silent, but not gone."""
        self._clock = clock

    async def run(self) -> None:
        """Renew and look for ever. Raises what nobody foresaw."""
        is_away = False
        try:
            while True:
                try:
                    await self._look()
                    is_away = False
                except SQLAlchemyError as error:
                    if not is_away:
                        logger.warning("cannot renew this gateway's row, trying again: %s", error)
                    is_away = True
                self._end_closed()
                await asyncio.sleep(RENEW_S)
        finally:
            for task in self._closing.values():
                task.cancel()
            await asyncio.gather(*self._closing.values(), return_exceptions=True)

    async def close(self) -> None:
        """It stops in order: what is left of its books is its next start's. Call it last."""
        try:
            await asyncio.to_thread(gateway_leases.forget, self._engine, self._gateway_id)
        except SQLAlchemyError as error:
            logger.warning("cannot delete this gateway's row: %s", error)
        self._engine.dispose()

    async def _look(self) -> None:
        asked_s = self._clock()
        rows = await asyncio.to_thread(gateway_leases.renew, self._engine, self._gateway_id)
        silent = set(self._absences.look(rows, asked_s, self._clock())) - {self._gateway_id}
        gone = {gateway_id for gateway_id in silent if self._is_gone(gateway_id)}
        for gateway_id in silent - gone - self._kept:
            logger.warning("gateway=%s has lost the database: its books stay its own", gateway_id)
        self._kept = silent - gone
        for gateway_id in gone - self._closing.keys():
            logger.warning("gateway=%s is lost with its server: closing its books", gateway_id)
            closing = self._close_books(gateway_id, rows[gateway_id])
            self._closing[gateway_id] = asyncio.create_task(closing, name=f"adopt {gateway_id}")

    async def _close_books(self, gateway_id: str, renewed_at: float) -> None:
        await self._adopt(gateway_id)
        about = (self._engine, gateway_id, renewed_at)
        await asyncio.to_thread(gateway_leases.forget, *about)

    def _end_closed(self) -> None:
        """Where the database went away meanwhile, the next look begins it again."""
        for gateway_id in [name for name, task in self._closing.items() if task.done()]:
            try:
                self._closing.pop(gateway_id).result()
            except SQLAlchemyError as error:
                logger.warning("cannot close the books of gateway=%s yet: %s", gateway_id, error)


class Adoption:
    """How one gateway closes the books of others: call it with the id of each that is lost.

    Their open records become its own, what they may still cost is held against budgets, and workers
    are asked for the finishes of just these, until the ledger closes them.
    """

    def __init__(
        self,
        take: Callable[[str], Awaitable[list[OpenRecord]]],
        carry: Callable[[Iterable[OpenRecord]], Awaitable[None]],
        ask_workers: Callable[[str, list[str]], None],
        wait_s: float,
    ) -> None:
        """`take(gateway_id)`: its open records, which are this gateway's from then on, and are
        closed after `wait_s`."""
        self._take = take
        self._carry = carry
        self._ask_workers = ask_workers
        self._wait_s = wait_s

    async def __call__(self, gateway_id: str) -> None:
        """Returns when nobody has to be asked any more. Raises SQLAlchemyError."""
        records = await self._take(gateway_id)
        if not records:
            return
        await self._carry(records)
        request_ids = [record.request_id for record in records]
        left_s = self._wait_s
        while left_s > 0:
            self._ask_workers(gateway_id, request_ids)
            await asyncio.sleep(min(ASK_EVERY_S, left_s))
            left_s -= ASK_EVERY_S
