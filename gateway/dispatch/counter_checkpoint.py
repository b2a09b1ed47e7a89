"""What tenants' counters are ahead of the floor, kept over restarts: in a small file, or where
several servers have one dispatcher in a row of their database (cluster/dispatcher_lease.py).

Without it a restart would forgive whoever had just taken more than its share. Written every
WRITE_EVERY_S while it changes, and at the stop; a dispatcher that is killed loses what was charged
since, and predictions of what ran. The file is replaced as a whole, so that a reader finds the old
one or the new one; one that cannot be read is as none, and is said in the log. Tenants that no
longer come fall out as others pass them.
"""

import asyncio
import json
import logging
import math
import os
from pathlib import Path
from typing import Protocol, TypeAlias

from sqlalchemy.exc import SQLAlchemyError

from gateway.dispatch.policy.fair_share import FairShare

logger = logging.getLogger(__name__)

NAME = "fair_share.json"
VERSION = 1
LIVE, BATCH = "leads", "batch_leads"
"""The two fair orders, as the file names what tenants are ahead in them."""
WRITE_EVERY_S = 5.0
MAX_BYTES = 4 << 20

Leads: TypeAlias = dict[str, dict[str, float]]
"""By order, by tenant: seconds ahead of the floor."""


class LeadStore(Protocol):
    """Where they are kept. Both calls block."""

    def read(self) -> Leads:
        """Empty where nobody wrote any. Raises SQLAlchemyError."""

    def write(self, leads: Leads) -> None:
        """In the place of those before. Raises OSError, SQLAlchemyError."""


class LeadFile:
    """A file of the data folder. Implements LeadStore."""

    def __init__(self, data_path: Path) -> None:
        self._path = data_path / NAME

    def read(self) -> Leads:
        """See LeadStore."""
        return read_leads(self._path)

    def write(self, leads: Leads) -> None:
        """See LeadStore."""
        write_leads(self._path, leads)


class CounterCheckpoint:
    """Used on the event loop; reads and writes in a thread."""

    def __init__(self, store: LeadStore, share: FairShare, batch_share: FairShare) -> None:
        """`batch_share`: that of class batch (lanes.py)."""
        self._store = store
        self._shares = {LIVE: share, BATCH: batch_share}
        self._written: Leads = {LIVE: {}, BATCH: {}}
        self._lock = asyncio.Lock()

    async def load(self) -> None:
        """Restore what there is; call it before anybody waits. Raises SQLAlchemyError."""
        leads = await asyncio.to_thread(self._store.read)
        for name, share in self._shares.items():
            share.restore_leads(leads.get(name, {}))

    async def run(self) -> None:
        """Write for ever."""
        while True:
            await asyncio.sleep(WRITE_EVERY_S)
            await self.write()

    async def write(self) -> None:
        """Now, where something has changed. A disk or database that fails is logged and tried
        again."""
        async with self._lock:
            leads = {name: share.leads() for name, share in self._shares.items()}
            if leads == self._written:
                return
            try:
                await asyncio.to_thread(self._store.write, leads)
            except (OSError, SQLAlchemyError) as error:
                logger.warning("cannot write the fair-share counters: %s", error)
            else:
                self._written = leads


def read_leads(path: Path) -> Leads:
    """By order and tenant; empty where there is no file, or none that makes sense."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError("it is too large")
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["version"] != VERSION:
            raise ValueError(f"it is of version {found['version']!r}")
        read = {
            order: {str(name): float(lead) for name, lead in found.get(order, {}).items()}
            for order in (LIVE, BATCH)
        }
        if not all(math.isfinite(lead) for leads in read.values() for lead in leads.values()):
            raise ValueError("a counter is no number")
    except FileNotFoundError:
        return {}
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RecursionError,
        OverflowError,
    ) as error:
        logger.warning(
            "cannot read %s, all tenants start with equal counters: %s", path.name, error
        )
        return {}
    return read


def write_leads(path: Path, leads: Leads) -> None:
    """Atomically. Raises OSError."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"version": VERSION, **leads}), encoding="utf-8")
    os.replace(new, path)
