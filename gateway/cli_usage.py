"""`polyhost usage export`: postings as CSV or JSON lines, streamed in order of posting.

The span is half-open, [--from, --to): exports of consecutive spans hold every posting once. The
cost stands twice: `cost_nanos`, exact and for adding up, and `cost`, the same as a decimal number
of currency units.
"""

import argparse
import csv
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from gateway import service
from gateway.cli_common import add_command, add_commands, note, open_registry, parse_instant, units
from registry.errors import InvalidValue
from registry.ledger import Posting, UsageRow

# A spreadsheet runs a cell that begins with one of these as a formula (OWASP, CSV injection).
# Names come from tenants' operators and model registrations; a leading quote makes them text.
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n")
_FAR_FUTURE = float(2**53)

COLUMNS = (
    *(field.name for field in fields(Posting)),
    "posted_time",
    "tenant_name",
    "key_name",
    "cost",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """The group's commands."""
    commands = add_commands(parser)
    export = add_command(commands, "export", "what was used, one row a request", _export)
    export.add_argument(
        "--from", dest="from_at", type=parse_instant, default=0.0, metavar="DATE", help="ISO, UTC"
    )
    export.add_argument(
        "--to",
        dest="to_at",
        type=parse_instant,
        default=_FAR_FUTURE,
        metavar="DATE",
        help="ISO, UTC; not included",
    )
    export.add_argument("--format", choices=("csv", "jsonl"), default="csv")
    export.add_argument("--output", type=Path, metavar="FILE", help="(standard output)")


def _export(options: argparse.Namespace) -> int:
    if options.from_at >= options.to_at:
        raise InvalidValue("--from must be before --to")
    write = _write_csv if options.format == "csv" else _write_jsonl
    with open_registry(options) as control, _output(options.output) as stream:
        num_rows = write(stream, service.export_usage(control, options.from_at, options.to_at))
    if options.output is not None:
        note(f"{num_rows} rows in {options.output}")
    return 0


def row_fields(row: UsageRow) -> dict[str, object]:
    """An exported row; the keys are COLUMNS."""
    posting = row.posting
    posted = datetime.fromtimestamp(posting.posted_at, UTC)
    return {
        **asdict(posting),
        "posted_time": posted.isoformat(timespec="milliseconds"),
        "tenant_name": row.tenant_name,
        "key_name": row.key_name,
        "cost": units(posting.cost_nanos),
    }


def _write_csv(stream: TextIO, rows: Iterable[UsageRow]) -> int:
    writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
    writer.writeheader()
    num_rows = 0
    for row in rows:
        writer.writerow({name: _cell(value) for name, value in row_fields(row).items()})
        num_rows += 1
    return num_rows


def _write_jsonl(stream: TextIO, rows: Iterable[UsageRow]) -> int:
    num_rows = 0
    for row in rows:
        stream.write(json.dumps(row_fields(row), ensure_ascii=False) + "\n")
        num_rows += 1
    return num_rows


def _cell(value: object) -> object:
    if isinstance(value, str) and value.startswith(_FORMULA_STARTS):
        return "'" + value
    return value


@contextmanager
def _output(path: Path | None) -> Iterator[TextIO]:
    """Standard output, or a file that appears whole or not at all."""
    if path is None:
        yield sys.stdout
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with partial.open("x", encoding="utf-8", newline="") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
