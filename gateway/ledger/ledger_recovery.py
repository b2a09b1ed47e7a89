"""What earlier processes left: whose journals there are, and what is posted for open requests.

    data/journal/server-id     made once: which data folder this is, whoever shares its database
    data/journal/GATEWAY_ID/   a gateway's journal

Every server has a `gateway-0`. Several servers may share one database, and each must close only
what it left open itself, so an open record names its data folder too (`owner_of`). A copy of a data
folder is another server's only without that file.

`adopt`, before a start: a server with fewer gateway processes than the one before has ids that
nobody bears any more. Their journals go into the database, and what is open there becomes another
gateway's, which closes it at its start like its own (`Ledger.recover`). For the process that holds
the data folder's lock, before any gateway starts; after a kill, doing it again changes nothing.
What the database does not take in time stays where it is, for the next start.

A server whose machine is gone for good closes nothing itself. Where several servers share a
database, another one does it while it runs (`Ledger.adopt`, cluster/gateway_lease.py).

`closing`: what is posted for a request that an earlier process left open. No clock, no database:

    a Finish of a worker        posted as `disconnected`, billed by its usage: the connection ended,
                                up to there it was served; and by the last checkpoint, where that
                                has more tokens
    a Finish that is a failure  posted as `failed` at no cost; where its time was up and its client
                                had been sent some of it, as `disconnected`
    none, but a checkpoint      the worker is lost too: `disconnected`, billed for what the client
                                had been sent at the last checkpoint, at most
                                ledger_checkpoint_tokens less than it got
    nothing                     `failed` at no cost: a doubt costs the client nothing

They are billed at the prices of when they were opened.
"""

import contextlib
import logging
import os
import secrets
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec
from sqlalchemy import Engine

from engine.protocol import Finish, Usage
from gateway.ledger.journal import Journal
from gateway.ledger.journal_segments import JournalLimits
from gateway.ledger.ledger_writer import ACTOR, LedgerWriter
from gateway.pricing.bill import bill
from gateway.pricing.policy.pricing import Rates
from gateway.settings.settings import JOURNAL_FOLDER, Settings
from gateway.types import Outcome
from gateway.workers.choices import summed_usage
from registry import locks
from registry.money import ledger as tables
from registry.money.ledger import OpenRecord, Posting
from registry.session import appending, make_engine

RECOVERED_KIND = "recovered"


def is_unserved(finish: Finish) -> bool:
    """It is our failure, or nothing was done for it: the client pays nothing."""
    if finish.reason == "refused":  # after tokens that is the client's own form of answer
        return not finish.usage.generated_tokens
    return finish.reason in ("error", "timeout")


def together(finishes: Sequence[Finish]) -> Finish | None:
    """The finishes of a request's choices as one; None where there are none."""
    if not finishes:
        return None
    usage = summed_usage([finish.usage for finish in finishes])
    unserved = {finish.reason for finish in finishes if is_unserved(finish)}
    if unserved:
        return Finish("timeout" if unserved == {"timeout"} else "error", usage)
    return Finish(finishes[0].reason, usage)


def closing(record: OpenRecord, finish: Finish | None, rates: Rates, posted_at: float) -> Posting:
    """See the module. An encoder's answer goes out whole, behind its posting: where there is none,
    neither went."""
    usage = _checkpointed(record) if finish is None else finish.usage
    if usage.generated_tokens < record.streamed_tokens:  # earlier attempts have made the rest
        usage = msgspec.structs.replace(usage, generated_tokens=record.streamed_tokens)
    is_late = finish is not None and finish.reason == "timeout" and record.streamed_tokens > 0
    failed = finish is not None and is_unserved(finish) and not is_late
    served = not failed and usage.generated_tokens > 0
    outcome: Outcome = "disconnected" if served else "failed"
    return bill(
        record,
        rates,
        outcome,
        usage,
        usage.generated_tokens,
        kind=RECOVERED_KIND,
        posted_at=posted_at,
    )


def _checkpointed(record: OpenRecord) -> Usage:
    """Nobody is left who knows what of its prompt was cached: all of it counts as cached."""
    cached = record.prompt_tokens if record.streamed_tokens else 0
    return Usage(record.prompt_tokens, cached, record.streamed_tokens, 0.0)


SERVER_ID = "server-id"


def owner_of(data_path: Path, gateway_id: str) -> str:
    """What the gateway's open records name (OpenRecord.gateway_id). Raises OSError."""
    return f"{_server_id(data_path / JOURNAL_FOLDER)}/{gateway_id}"


def _server_id(folder: Path) -> str:
    """Several processes may come first at a time: one of them makes it, whole, for all."""
    path = folder / SERVER_ID
    with contextlib.suppress(FileNotFoundError):
        return path.read_text("ascii")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = folder / f"{SERVER_ID}.{secrets.token_hex(8)}"
    try:
        with made.open("x") as stream:
            stream.write(secrets.token_hex(8))
            stream.flush()
            os.fsync(stream.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(made, path)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    finally:
        made.unlink(missing_ok=True)
    return path.read_text("ascii")


logger = logging.getLogger(__name__)

WRITE_WAIT_S = 60.0
LOCK_WAIT_S = 5.0


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
                logger.error(
                    "cannot take over the journal of gateway=%s, it is kept: %s", folder.name, error
                )
    finally:
        engine.dispose()


def _adopt(engine: Engine, settings: Settings, folder: Path, by: str) -> None:
    if any(folder.glob("*.journal")) and not _bring_in(engine, settings, folder):
        logger.error(
            "the journal of gateway=%s is kept: the database did not accept all of it", folder.name
        )
        return
    left, taker = (owner_of(settings.data_path, name) for name in (folder.name, by))
    with appending(engine, ACTOR) as session:
        num_open = len(tables.adopt(session, left, taker))
    if num_open:
        logger.warning("gateway=%s closes open records=%d of %s", by, num_open, folder.name)


def _bring_in(engine: Engine, settings: Settings, folder: Path) -> bool:
    """All of it into the database; then it is gone. False: some of it is still only there."""
    journal = Journal(folder, JournalLimits.of(settings), lambda tags, error: None)
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
        journal.segments.discard()
    return durable and written
