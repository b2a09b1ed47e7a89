"""What the ledger knows that the database does not: the journals of all gateways, only read.

For whoever restores counts of limits beside gateways that run: the dispatcher's process, a store
that came back empty. A gateway's own start needs none of this (`Ledger.start` brings its journal
in first). A journal is read before the database is: what moves over meanwhile is in both, and is
told apart by its id.
"""

from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import Engine, select

from gateway.ledger.journal_format import Damage, Record, RecordCodec, UnknownRecord
from gateway.ledger.ledger_writer import Batch
from gateway.ledger.owners import JOURNAL_FOLDER
from registry import ledger
from registry.ledger import OpenRecord, Posting, PostingRow
from registry.session import reading

SLICE = 500


def unwritten(engine: Engine, data_path: Path) -> list[Posting]:
    """Postings that are durable and not in the database."""
    postings = {p.request_id: p for p in _batch(data_path).postings}
    posted = _posted(engine, list(postings))
    return [posting for name, posting in postings.items() if name not in posted]


def still_open(engine: Engine, data_path: Path) -> list[OpenRecord]:
    """Requests of all gateways that were opened and have not ended, with what they may cost."""
    batch = _batch(data_path)
    with reading(engine) as session:
        records = {record.request_id: record for record in ledger.open_left(session)}
    records = {**batch.opens, **records}
    ended = {*batch.ended, *_posted(engine, list(batch.opens))}
    return [record for name, record in records.items() if name not in ended]


def _batch(data_path: Path) -> Batch:
    return Batch.of(list(_records(data_path / JOURNAL_FOLDER)), again=True)


def _records(root: Path) -> Iterator[Record]:
    """Segments that a gateway deletes meanwhile are in the database."""
    for folder in sorted(root.glob("*/")):
        for path in sorted(folder.glob("*.journal")):
            try:
                data = path.read_bytes()
                for found, _ in RecordCodec().read(data):
                    if not isinstance(found, Damage):
                        yield found
            except FileNotFoundError:
                continue
            except UnknownRecord as error:
                raise OSError(f"{path}: {error}") from error


def _posted(engine: Engine, names: list[str]) -> set[str]:
    found: set[str] = set()
    with reading(engine) as session:
        for begin in range(0, len(names), SLICE):
            some = names[begin : begin + SLICE]
            query = select(PostingRow.request_id).where(PostingRow.request_id.in_(some))
            found.update(session.scalars(query))
    return found
