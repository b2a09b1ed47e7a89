"""Exports as files: whole or not there, gone on with after an interruption, proved from the ledger.

    FILE              appears when it is whole
    FILE.proof.json   what was asked, the ledger's state, how many rows and what they cost together,
                      size and SHA-256: with it, and the ledger, the same bytes can be made again
    FILE.part, FILE.part.json   an export under way, or interrupted, and its order

Going on: the part is cut behind its last whole row (FOCUS: before its last hour), read once for its
checksum and sums, and the rest is written behind it: what comes out is what an uninterrupted export
would have been, byte for byte. Parquet files have their index at the end and begin anew.
"""

import csv
import fcntl
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeAlias

from sqlalchemy.orm import Session

from admin.billing import export_parquet, focus, usage_export
from admin.billing.export_rows import COLUMNS
from admin.billing.usage_export import Chunk, ExportOrder, order_from_json
from gateway.pricing.policy.pricing import PriceBook
from registry.errors import InvalidValue, RegistryError

Watch: TypeAlias = Callable[[int, int, str], None]
"""Called after each chunk: how many rows there are, what they cost, and where one would go on; it
raises to give the export up."""

PROOF_SUFFIX = ".proof.json"
PART_SUFFIX = ".part"
_READ_BYTES = 1 << 20


class Digest(Protocol):
    """What hashlib makes."""

    def update(self, data: bytes, /) -> None:
        """More of it."""

    def hexdigest(self) -> str:
        """So far."""


@dataclass(slots=True)
class Tally:
    """What has been written so far."""

    digest: Digest = field(default_factory=hashlib.sha256)
    size_bytes: int = 0
    num_rows: int = 0
    cost_nanos: int = 0

    def add(self, data: bytes, num_rows: int = 0, cost_nanos: int = 0) -> None:
        """Count some bytes."""
        self.digest.update(data)
        self.size_bytes += len(data)
        self.num_rows += num_rows
        self.cost_nanos += cost_nanos


@dataclass(frozen=True, slots=True)
class Proof:
    """What stands beside a file. `sha256` is of the file; of Parquet also `rows_sha256`, of its
    rows, for its own bytes depend on who wrote them."""

    order: ExportOrder
    num_rows: int
    cost_nanos: int
    size_bytes: int
    sha256: str
    rows_sha256: str = ""

    def to_json(self) -> dict[str, object]:
        """As it is written."""
        content: dict[str, object] = {**self.order.to_json(), "num_rows": self.num_rows}
        content |= {"cost_nanos": self.cost_nanos, "size_bytes": self.size_bytes}
        return content | {"sha256": self.sha256, "rows_sha256": self.rows_sha256}


def write_stream(
    stream: BinaryIO, session: Session, order: ExportOrder, book: PriceBook, after: str = ""
) -> tuple[Proof, str]:
    """Text formats, to a stream, without a header where it goes on behind `after`. Returns also
    where to go on."""
    tally, token = Tally(), after
    if not after:
        _put(stream, tally, usage_export.header(order))
    for chunk in usage_export.chunks(session, order, book, after):
        _put(stream, tally, chunk.data, chunk.num_rows, chunk.cost_nanos)
        token = chunk.token
    return _proof(order, tally), token


def write_file(
    path: Path,
    session: Session,
    order: ExportOrder,
    book: PriceBook,
    watch: Watch = lambda num_rows, cost_nanos, token: None,
) -> Proof:
    """A whole file and its proof; an interrupted one of the same order is gone on with."""
    part = _part_of(path)
    with alone(part):
        if order.format == "parquet":
            proof = _write_parquet(part, session, order, watch)
        else:
            proof = _write_text(part, session, order, book, watch)
        _write_json(_beside(path, PROOF_SUFFIX), proof.to_json())
        part.replace(path)
        _order_of(part).unlink(missing_ok=True)
    return proof


@contextmanager
def alone(part: Path) -> Iterator[None]:
    """One writer of a part at a time; the lock goes with its process, however that ends."""
    with part.open("ab") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RegistryError(f"another export is writing {part.name}") from error
        yield


def interrupted_order(path: Path) -> ExportOrder | None:
    """The order of the export to `path` that was interrupted, if there is one."""
    beside = _order_of(_part_of(path))
    if not beside.exists() or not _part_of(path).exists():
        return None
    return order_from_json(_read_json(beside))


def read_proof(path: Path) -> Proof:
    """Of an exported file. Raises RegistryError where there is none."""
    beside = _beside(path, PROOF_SUFFIX)
    if not beside.exists():
        raise RegistryError(
            f"{beside.name} is missing: put the proof that was made with the export beside it"
        )
    content = _read_json(beside)
    names = ("num_rows", "cost_nanos", "size_bytes", "sha256", "rows_sha256")
    try:
        return Proof(order_from_json(content), **{name: content[name] for name in names})
    except KeyError as error:
        raise InvalidValue(f"{beside.name} is not a proof of an export: {error}") from error


def verify(path: Path, session: Session, book: PriceBook) -> Proof:
    """Raises RegistryError unless the file is as it was exported, and as the ledger would have it
    exported again."""
    proof = read_proof(path)
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != proof.sha256:
        raise RegistryError(
            f"{path.name} was changed after the export: its SHA-256 is now {digest}"
        )
    if proof.order.format == "parquet":
        again = _rows_of_ledger(session, proof.order)
        same = again.digest.hexdigest() == _rows_of_parquet(path).digest.hexdigest()
    else:
        again = Tally()
        again.add(usage_export.header(proof.order))
        for chunk in usage_export.chunks(session, proof.order, book):
            again.add(chunk.data, chunk.num_rows, chunk.cost_nanos)
        same = again.digest.hexdigest() == digest
    if not same or (again.num_rows, again.cost_nanos) != (proof.num_rows, proof.cost_nanos):
        raise RegistryError(
            f"{path.name} differs from the ledger: {again.num_rows} rows for "
            f"{again.cost_nanos} nano-units there, {proof.num_rows} for {proof.cost_nanos} in the "
            "proof; postings may also have been deleted since (`polyhost usage keep`)"
        )
    return proof


def _write_text(
    part: Path, session: Session, order: ExportOrder, book: PriceBook, watch: Watch
) -> Proof:
    tally, after = Tally(), ""
    if part.exists() and interrupted_order(part.with_name(_whole_name(part))) == order:
        tally, after = _go_on(part, order, watch)
    else:
        part.write_bytes(b"")
        _write_json(_order_of(part), order.to_json())
    with part.open("ab") as stream:
        if not tally.size_bytes:
            _put(stream, tally, usage_export.header(order))
        for chunk in usage_export.chunks(session, order, book, after):
            _put(stream, tally, chunk.data, chunk.num_rows, chunk.cost_nanos)
            watch(tally.num_rows, tally.cost_nanos, chunk.token)
        stream.flush()
        os.fsync(stream.fileno())
    return _proof(order, tally)


def _write_parquet(part: Path, session: Session, order: ExportOrder, watch: Watch) -> Proof:
    rows, so_far = hashlib.sha256(), Tally()

    def noted() -> Iterator[tuple[Any, int]]:
        for batch, cost in usage_export.posting_batches(session, order):
            rows.update(export_parquet.digestible(batch))
            yield batch, cost
            so_far.add(b"", len(batch), cost)
            watch(so_far.num_rows, so_far.cost_nanos, usage_export.token_of(batch[-1]))

    num_rows, cost_nanos = export_parquet.write(part, noted())
    with part.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        os.fsync(stream.fileno())
    size = part.stat().st_size
    return Proof(order, num_rows, cost_nanos, size, digest, rows.hexdigest())


def _rows_of_ledger(session: Session, order: ExportOrder) -> Tally:
    tally = Tally()
    for batch, cost in usage_export.posting_batches(session, order):
        tally.add(export_parquet.digestible(batch), len(batch), cost)
    return tally


def _rows_of_parquet(path: Path) -> Tally:
    tally = Tally()
    for batch in export_parquet.read(path):
        tally.add(export_parquet.digestible(batch))
    return tally


def _go_on(part: Path, order: ExportOrder, watch: Watch) -> tuple[Tally, str]:
    """Cut the part behind what is whole; what is in it, and where to go on."""
    tally, after = Tally(), ""
    keep = _whole_bytes(part, order)
    with part.open("r+b") as stream:
        stream.truncate(keep)
        head = stream.read(len(usage_export.header(order)))
        tally.add(head)
        for chunk in _chunks_of(stream, order):
            tally.add(chunk.data, chunk.num_rows, chunk.cost_nanos)
            after = chunk.token
            watch(tally.num_rows, tally.cost_nanos, after)
    return tally, after


def _whole_bytes(part: Path, order: ExportOrder) -> int:
    """How much of the part is whole rows; of FOCUS, whole hours but the last."""
    head = usage_export.header(order)
    with part.open("rb") as stream:
        if stream.read(len(head)) != head:
            return 0
        end = cut = len(head)
        hour = None
        column = _hour_column() if order.format == "focus" else 0
        for line in stream:
            if not line.endswith(b"\n"):
                break
            if order.format == "focus":
                began = next(csv.reader([line.decode()]))[column]
                if began != hour:
                    hour, cut = began, end
            end += len(line)
    return cut if order.format == "focus" else end


def _chunks_of(stream: BinaryIO, order: ExportOrder) -> Iterator[Chunk]:
    """The rows of a part, read back."""
    while lines := stream.readlines(_READ_BYTES):
        data = b"".join(lines)
        cost, last = 0, ""
        for cells in _parsed(lines, order):
            cost += cells[0]
            last = cells[1]
        yield Chunk(data, len(lines), cost, last)


def _parsed(lines: list[bytes], order: ExportOrder) -> Iterator[tuple[int, str]]:
    """What each row costs, and its token."""
    if order.format == "jsonl":
        for row in map(json.loads, lines):
            yield row["cost_nanos"], f"{row['posted_at']!r}:{row['request_id']}"
        return
    reader = csv.reader(io.StringIO(b"".join(lines).decode(), newline=""))
    if order.format == "csv":
        cost, posted, name = map(COLUMNS.index, ("cost_nanos", "posted_at", "request_id"))
        for cells in reader:
            yield int(cells[cost]), f"{cells[posted]}:{cells[name]}"
        return
    billed, ended = focus.columns().index("BilledCost"), _hour_column() - 1
    for cells in reader:
        at = int(datetime.fromisoformat(cells[ended]).timestamp())
        yield int(Decimal(cells[billed]).scaleb(9)), f"hour:{at}"


def _hour_column() -> int:
    return focus.columns().index("ChargePeriodStart")


def _put(
    stream: BinaryIO, tally: Tally, data: bytes, num_rows: int = 0, cost_nanos: int = 0
) -> None:
    stream.write(data)
    tally.add(data, num_rows, cost_nanos)


def _proof(order: ExportOrder, tally: Tally) -> Proof:
    return Proof(
        order, tally.num_rows, tally.cost_nanos, tally.size_bytes, tally.digest.hexdigest()
    )


def _part_of(path: Path) -> Path:
    return _beside(path, PART_SUFFIX)


def _beside(path: Path, suffix: str) -> Path:
    """Raises InvalidValue where the path is no file's, before anything is written."""
    if not path.name or path.is_dir():
        raise InvalidValue(f"{str(path)!r} is a folder: give a file name")
    return path.with_name(path.name + suffix)


def _whole_name(part: Path) -> str:
    return part.name.removesuffix(PART_SUFFIX)


def _order_of(part: Path) -> Path:
    return part.with_name(part.name + ".json")


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidValue(f"{path.name} is not a proof of an export: {error}") from error
    if not isinstance(content, dict):
        raise InvalidValue(f"{path.name} is not a proof of an export")
    return content
