"""What comparisons have taught of each tenant and model: counts (cache/policy/cache_confidence.py)
that all gateways add to, and that outlive them; and the stores that add them up.

Requests read what is here, and never wait. Off their way, a calibration that is in use is exchanged
with its store every EXCHANGE_S: given what was learnt here since, it says what all of them know; so
gateways add up and do not overwrite one another. What an exchange failed to send is sent no more:
sent twice it would count twice. A process that is killed loses as much.

Counts belong to one rule (the embedder's revision, the fitted weights, the bins): another begins
anew. They belong to an epoch of their scope too, so that what an invalidation named is not used by
any gateway that has seen it; the next exchange brings back what was not forgotten.

    files   in the data folder, for a server without a Redis and its gateway processes: one for each
            tenant and model, replaced whole, under one lock of the folder. Epochs are a process'
            own here: a purge is sent to every process, and each deletes the files. All is done in
            one thread, in order: nothing learnt before a purge is written after it
    Redis   one small key for each, added to by answers.lua in one step. Like everything of that
            script it belongs to one run of Redis: one that was started anew may have come back
            without the last invalidations
"""

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
from cachetools import LRUCache

from gateway.cache.policy.cache_choice import AUDITED_SHARE, FITTED
from gateway.cache.policy.cache_confidence import (
    BIN_WIDTH,
    CLASSES,
    LOWEST_SCORE,
    MEMORY,
    NUM_BINS,
    Calibration,
    merged,
)
from gateway.cache.question_score import fitted
from gateway.cache.redis_answers import WRITE_TIMEOUT_S, quoted
from gateway.cache.redis_link import RedisLink
from gateway.cache.types import Epoch, Scope, StoreUnavailable

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
    unreported: Calibration = field(default_factory=Calibration)
    due_s: float = 0.0
    is_reported: bool = True
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
        if known.is_reported and self._clock() >= known.due_s:
            self._exchange_soon(owner, known)
        return known.total

    def add(self, scope: Scope, epoch: Epoch, embedder: str, learned: Calibration) -> None:
        """One comparison more; nothing where the epoch is over."""
        known = self._known.get(owner_of(scope, embedder))
        if known is not None and known.epoch == epoch:
            known.total = merged(known.total, learned)
            known.unreported = merged(known.unreported, learned)

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
        """At the end of the process: tell what is unreported, if that can be done soon."""
        for owner, known in self._known.items():
            if known.is_reported and known.unreported.right:
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
        known.is_reported = False
        task = asyncio.create_task(self._exchange(owner, known), name="cache-calibration")
        self._exchanges.add(task)
        task.add_done_callback(self._exchanges.discard)

    async def _exchange(self, owner: Owner, known: _Known) -> None:
        learned, known.unreported = known.unreported, Calibration()
        try:
            total = await self._store.exchange(owner, known.epoch, learned)
        except StoreUnavailable as error:
            log.debug("cache: a calibration was not exchanged: %s", error)
            return
        finally:
            known.is_reported = True
        if self._known.get(owner) is not known:
            return
        if total is None:
            del self._known[owner]
        else:
            known.total = merged(total, known.unreported)


def owner_of(scope: Scope, embedder: str) -> Owner:
    """Whose counts a comparison in that scope adds to. `embedder`: its revision."""
    around = (embedder, FITTED, fitted(), AUDITED_SHARE, CLASSES, NUM_BINS, LOWEST_SCORE, BIN_WIDTH)
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


MAX_FILES = 4096
"""At more, those go that were written longest ago."""
_SUFFIX = ".counts"
_T = TypeVar("_T")


class _Held(msgspec.Struct, array_like=True, frozen=True):
    tenant_id: str
    model_name: str
    rule: bytes
    counts: bytes


_held = msgspec.msgpack.Decoder(_Held)


def calibration_folder(data_path: Path) -> Path:
    """Where a server has them."""
    return data_path / "cache-calibrations"


class CalibrationFiles:
    """Implements CalibrationStore."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, "cache-calibration")

    async def exchange(
        self, owner: Owner, epoch: Epoch, learned: Calibration
    ) -> Calibration | None:
        """See CalibrationStore."""
        return await self._run(lambda: _exchange(self._folder, owner, learned))

    async def forget(self, tenant_id: str, model_name: str) -> None:
        """See CalibrationStore."""
        await self._run(lambda: forget_files(self._folder, tenant_id, model_name))

    async def _run(self, work: Callable[[], _T]) -> _T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except OSError as error:
            raise StoreUnavailable(str(error)) from error


def forget_files(folder: Path, tenant_id: str, model_name: str) -> None:
    """Where no server runs, too. Raises OSError."""
    if not folder.is_dir():
        return
    with _locked(folder):
        for path in folder.glob(f"*{_SUFFIX}"):
            held = _read(path)
            if held is None or (
                tenant_id in ("", held.tenant_id) and model_name in ("", held.model_name)
            ):
                path.unlink(missing_ok=True)


def _exchange(folder: Path, owner: Owner, learned: Calibration) -> Calibration:
    name = hashlib.blake2b(
        f"{owner.tenant_id}\0{owner.model_name}".encode(), digest_size=16
    ).hexdigest()
    path = folder / f"{name}{_SUFFIX}"
    folder.mkdir(mode=0o700, exist_ok=True)
    with _locked(folder):
        held = _read(path)
        known = decode(held.counts) if held and held.rule == owner.rule else Calibration()
        if not learned.right:
            return known
        known = merged(known, learned)
        if held is None:
            _make_room(folder)
        held = _Held(owner.tenant_id, owner.model_name, owner.rule, encode(known))
        fresh = path.with_suffix(".new")
        fresh.write_bytes(msgspec.msgpack.encode(held))
        fresh.replace(path)
    return known


def _make_room(folder: Path) -> None:
    paths = list(folder.glob(f"*{_SUFFIX}"))
    if len(paths) >= MAX_FILES:
        paths.sort(key=lambda path: path.stat().st_mtime_ns)
        for path in paths[: len(paths) - MAX_FILES + 1]:
            path.unlink(missing_ok=True)


def _read(path: Path) -> _Held | None:
    """None too for what a crash or another hand left in its place."""
    try:
        return _held.decode(path.read_bytes())
    except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Against the other processes of this server, and the command line."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


KEPT_S = 30 * 24 * 3600
"""From when it was last used."""


class RedisCalibrations:
    """Implements CalibrationStore."""

    def __init__(self, link: RedisLink, timeout_s: float = WRITE_TIMEOUT_S) -> None:
        """`link`: the answers', who close it."""
        self._link = link
        self._timeout_s = timeout_s

    async def exchange(
        self, owner: Owner, epoch: Epoch, learned: Calibration
    ) -> Calibration | None:
        """See CalibrationStore."""

        async def ask() -> Calibration | None:
            names = (quoted(owner.tenant_id), owner.model_name)
            asked = (epoch, owner.rule, encode(learned), int(MEMORY), KEPT_S * 1000)
            _, _, (is_current, counts) = await self._link.call("teach", *names, *asked)
            return decode(counts) if is_current else None

        return await self._link.within(self._timeout_s, ask)

    async def forget(self, tenant_id: str, model_name: str) -> None:
        """See CalibrationStore. What belongs to one of them alone has been invalidated with it."""
        if not (tenant_id and model_name):
            return

        async def ask() -> None:
            await self._link.call("unteach", quoted(tenant_id), model_name)

        await self._link.within(self._timeout_s, ask)
