"""What gateways that never start again have left in this data folder (stage 10, before a start).

A journal belongs to a gateway's id, and a server with fewer gateway processes than the one before
has ids that nobody bears any more. Their journals go into the database, and what is open there
becomes another gateway's, which closes it at its start like its own (`Ledger.recover`). For whoever
holds the data folder's lock, before any gateway starts; after a kill, doing it again changes
nothing. What the database does not take in time stays where it is, for the next start.
"""

import logging
from collections.abc import Collection
from pathlib import Path

from sqlalchemy import Engine

from gateway.ledger.journal import Journal
from gateway.ledger.ledger import LOCK_WAIT_S, journal_limits
from gateway.ledger.ledger_writer import ACTOR, LedgerWriter
from gateway.ledger.owners import JOURNAL_FOLDER, owner_of
from gateway.settings import Settings
from registry import ledger, locks
from registry.session import appending, make_engine

logger = logging.getLogger(__name__)

WRITE_WAIT_S = 60.0


def adopt(settings: Settings, gateway_ids: Collection[str], by: str) -> None:
    """Of all ids but these, which start now; `by`: the one of them that closes what was open.
    Blocks. Raises SQLAlchemyError."""
    root = settings.data_path / JOURNAL_FOLDER
    folders = [path for path in sorted(root.glob("*")) if path.is_dir()]
    lost = [path for path in folders if path.name not in gateway_ids]
    if not lost:
        return
    engine = make_engine(settings.registry_url)
    try:
        for folder in lost:
            try:
                with locks.hold(folder / "lock", timeout_s=LOCK_WAIT_S):
                    _adopt(engine, settings, folder, by)
            except (locks.LockBusy, OSError) as error:
                logger.error("the journal of gateway=%s stays: %s", folder.name, error)
    finally:
        engine.dispose()


def _adopt(engine: Engine, settings: Settings, folder: Path, by: str) -> None:
    if any(folder.glob("*.journal")) and not _bring_in(engine, settings, folder):
        logger.error("the journal of gateway=%s stays: the database did not take it", folder.name)
        return
    left, taker = (owner_of(settings.data_path, name) for name in (folder.name, by))
    with appending(engine, ACTOR) as session:
        num_open = ledger.adopt(session, left, taker)
    if num_open:
        logger.warning("gateway=%s closes records=%d of %s", by, num_open, folder.name)


def _bring_in(engine: Engine, settings: Settings, folder: Path) -> bool:
    """All of it into the database; then it is gone. False: some of it is still only there."""
    journal = Journal(folder, journal_limits(settings), lambda tags, error: None)
    writer = LedgerWriter(
        engine,
        journal,
        folder / "refused",
        max_batch=settings.ledger_max_batch,
        interval_s=settings.ledger_write_interval_s,
        rollup_interval_s=0.0,
    )
    writer.start(journal.start())
    durable = journal.stop(WRITE_WAIT_S)
    written = writer.stop(WRITE_WAIT_S)
    if durable and written:
        journal.discard()
    return durable and written
