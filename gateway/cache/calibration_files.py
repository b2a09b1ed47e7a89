"""Calibrations in the data folder: what a server without a Redis has learnt outlives it, and its
gateway processes learn together. See calibrations.py for the seam.

A small file for each tenant and model, replaced whole, under one lock of the folder. Epochs are a
process' own here: a purge is told to every process, and each deletes the files. Files are read and
written in one thread, in order, so nothing that was learnt before a purge is written after it.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from gateway.cache.calibrations import Owner, decode, encode
from gateway.cache.store import StoreUnavailable
from gateway.cache.types import Epoch
from gateway.policy.cache_confidence import Calibration, merged

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
