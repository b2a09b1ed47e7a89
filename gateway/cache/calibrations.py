"""What comparisons have taught of each tenant and model: counts (policy/cache_confidence.py) that
all gateways add to, and that outlive them.

Requests read what is here, and never wait. Off their way, a calibration that is in use is exchanged
with its store every EXCHANGE_S: told what was learnt here since, it says what all of them know; so
gateways add up and do not overwrite one another. What an exchange failed to tell is told no more:
told twice it would count twice. A process that is killed loses as much.

Counts belong to one rule (the embedder's revision, the fitted weights, the bins): another begins
anew. They belong to an epoch of their scope too, so that what an invalidation named is not used by
any gateway that has seen it; the next exchange brings back what was not forgotten.
"""

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from cachetools import LRUCache

from gateway.cache.store import StoreUnavailable
from gateway.cache.types import Epoch, Scope
from gateway.policy.cache_choice import AUDITED_SHARE
from gateway.policy.cache_confidence import (
    BIN_WIDTH,
    CLASSES,
    LOWEST_SCORE,
    NUM_BINS,
    Calibration,
    merged,
)
from gateway.policy.cache_weights import FITTED

log = logging.getLogger(__name__)

EXCHANGE_S = 10.0
MAX_CALIBRATIONS = 4096
"""Pairs of tenant and model whose comparisons are remembered by a process."""
MAX_EXCHANGES = 64
"""At a time; what is due beyond them is due again at the next request."""
CLOSE_S = 2.0
RULE_BYTES = 16

_decoder = msgspec.msgpack.Decoder(tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]])


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose counts they are. `rule`: a digest of what else they depend on."""

    tenant_id: str
    model_name: str
    rule: bytes


class CalibrationStore(Protocol):
    """Where counts are added up. Both raise StoreUnavailable."""

    async def exchange(
        self, owner: Owner, epoch: Epoch, learned: Calibration
    ) -> Calibration | None:
        """Add what was learnt in that epoch, which may be nothing; what all know then. None: the
        epoch is over, and nothing was added."""

    async def forget(self, tenant_id: str, model_name: str) -> None:
        """All counts of a tenant, of a model (the other is ""), or of both together."""


@dataclass(slots=True)
class _Known:
    epoch: Epoch
    total: Calibration = field(default_factory=Calibration)
    untold: Calibration = field(default_factory=Calibration)
    due_s: float = 0.0
    is_told: bool = True
    """No exchange is under way."""


class Calibrations:
    """One object per gateway process. On the event loop."""

    def __init__(
        self, store: CalibrationStore, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._clock = clock
        self._known: LRUCache[Owner, _Known] = LRUCache(MAX_CALIBRATIONS)
        self._exchanges: set[asyncio.Task[None]] = set()

    def of(self, scope: Scope, epoch: Epoch, embedder: str) -> Calibration:
        """What is known here. `embedder`: its revision."""
        owner = owner_of(scope, embedder)
        known = self._known.get(owner)
        if known is None or known.epoch != epoch:
            known = self._known[owner] = _Known(epoch, due_s=self._clock())
        if known.is_told and self._clock() >= known.due_s:
            self._exchange_soon(owner, known)
        return known.total

    def add(self, scope: Scope, epoch: Epoch, embedder: str, learned: Calibration) -> None:
        """One comparison more; nothing where the epoch is over."""
        known = self._known.get(owner_of(scope, embedder))
        if known is not None and known.epoch == epoch:
            known.total = merged(known.total, learned)
            known.untold = merged(known.untold, learned)

    async def forget(self, tenant_id: str, model_name: str) -> None:
        """Here and in the store. Raises StoreUnavailable."""
        await self._store.forget(tenant_id, model_name)
        for owner in list(self._known):
            if tenant_id in ("", owner.tenant_id) and model_name in ("", owner.model_name):
                del self._known[owner]

    async def settle(self) -> None:
        """Until no exchange is under way."""
        while self._exchanges:
            await asyncio.wait(self._exchanges)

    async def close(self) -> None:
        """At the end of the process: tell what is untold, if that can be done soon."""
        for owner, known in self._known.items():
            if known.is_told and known.untold.right:
                self._begin(owner, known)
        if self._exchanges:
            await asyncio.wait(self._exchanges, timeout=CLOSE_S)
        for task in list(self._exchanges):
            task.cancel()

    def _exchange_soon(self, owner: Owner, known: _Known) -> None:
        if len(self._exchanges) < MAX_EXCHANGES:
            known.due_s = self._clock() + EXCHANGE_S
            self._begin(owner, known)

    def _begin(self, owner: Owner, known: _Known) -> None:
        known.is_told = False
        task = asyncio.create_task(self._exchange(owner, known), name="cache-calibration")
        self._exchanges.add(task)
        task.add_done_callback(self._exchanges.discard)

    async def _exchange(self, owner: Owner, known: _Known) -> None:
        learned, known.untold = known.untold, Calibration()
        try:
            total = await self._store.exchange(owner, known.epoch, learned)
        except StoreUnavailable as error:
            log.debug("cache: a calibration was not exchanged: %s", error)
            return
        finally:
            known.is_told = True
        if self._known.get(owner) is not known:
            return
        if total is None:
            del self._known[owner]
        else:
            known.total = merged(total, known.untold)


def owner_of(scope: Scope, embedder: str) -> Owner:
    """Whose counts a comparison in that scope adds to. `embedder`: its revision."""
    around = (embedder, FITTED, AUDITED_SHARE, CLASSES, NUM_BINS, LOWEST_SCORE, BIN_WIDTH)
    rule = hashlib.blake2b(msgspec.msgpack.encode(around), digest_size=RULE_BYTES).digest()
    return Owner(scope.tenant_id, scope.model_name, rule)


def encode(calibration: Calibration) -> bytes:
    """As stores keep it: three arrays in MessagePack; nothing for nothing."""
    if not calibration.right:
        return b""
    return msgspec.msgpack.encode((calibration.right, calibration.wrong, calibration.seen))


def decode(raw: bytes) -> Calibration:
    """What is none is nothing: what was learnt can be learnt again."""
    try:
        counts = _decoder.decode(raw) if raw else ()
    except msgspec.MsgspecError:
        return Calibration()
    size = NUM_BINS * len(CLASSES)
    if not all(len(row) == size and all(0 <= n < math.inf for n in row) for row in counts):
        return Calibration()
    return Calibration(*counts)
