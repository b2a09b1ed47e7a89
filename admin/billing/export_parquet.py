"""Postings as Parquet: the columns of the other formats, typed; one group of rows a batch.

Money is int64 nano-units and an exact decimal, instants are doubles and timestamps in UTC. Needs
pyarrow (`pip install 'polyhost[export]'`), which nothing else of the gateway does.
"""

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np

from admin.billing.export_rows import COLUMNS, COST, POSTED_AT, Row
from registry.errors import RegistryError
from registry.money.exports import COLUMNS as POSTING_COLUMNS
from registry.money.ledger import Posting

_TYPES = {field.name: field.type for field in fields(Posting)}
_SCALE = 9


def require_pyarrow() -> tuple[ModuleType, ModuleType]:
    """pyarrow and pyarrow.parquet. Raises RegistryError where they are not installed."""
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise RegistryError(
            "Parquet needs pyarrow, which is not installed: pip install 'polyhost[export]'"
        ) from error


def write(path: Path, batches: Iterator[tuple[Sequence[Row], int]]) -> tuple[int, int]:
    """A new file. Returns how many rows it has and what they cost."""
    arrow, parquet = require_pyarrow()
    schema = _schema(arrow)
    num_rows = cost_nanos = 0
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for rows, cost in batches:
            writer.write_batch(_batch(arrow, schema, rows))
            num_rows += len(rows)
            cost_nanos += cost
    return num_rows, cost_nanos


def read(path: Path) -> Iterator[list[Row]]:
    """The rows of a file that `write` made, as they came from the ledger."""
    _, parquet = require_pyarrow()
    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(columns=list(POSTING_COLUMNS)):
            columns = [batch.column(name).to_pylist() for name in POSTING_COLUMNS]
            yield list(zip(*columns, strict=True))


def _schema(arrow: ModuleType) -> Any:
    kinds = {"int": arrow.int64(), "float": arrow.float64(), "str": arrow.string()}
    types = {int: "int", float: "float", str: "str"}
    columns = []
    for name in POSTING_COLUMNS:
        declared = _TYPES.get(name, str)
        kind = declared if isinstance(declared, str) else types[declared]
        columns.append(arrow.field(name, kinds[kind], nullable=False))
    columns.append(arrow.field("posted_time", arrow.timestamp("ms", tz="UTC"), nullable=False))
    columns.append(arrow.field("cost", arrow.decimal128(28, _SCALE), nullable=False))
    return arrow.schema(columns)


def _batch(arrow: ModuleType, schema: Any, rows: Sequence[Row]) -> Any:
    columns: list[Sequence[Any]] = list(zip(*rows, strict=True))
    columns.append([_millis(at) for at in columns[POSTED_AT]])
    arrays = [
        arrow.array(values, schema.field(name).type)
        for name, values in zip(COLUMNS[:-1], columns, strict=True)
    ]
    arrays.append(_decimals(arrow, schema.field("cost").type, columns[COST]))
    return arrow.record_batch(arrays, schema=schema)


def _millis(at: float) -> int:
    """To the millisecond, rounded down from the microsecond, as the other formats tell it."""
    whole = int(at)
    return whole * 1000 + round((at - whole) * 1e6) // 1000


def _decimals(arrow: ModuleType, kind: Any, nanos: Sequence[int]) -> Any:
    """Decimals of 128 bits in place: the number's low half, and its sign as the high one."""
    halves = np.empty((len(nanos), 2), dtype="<i8")
    halves[:, 0] = nanos
    halves[:, 1] = halves[:, 0] >> 63
    return arrow.Array.from_buffers(kind, len(nanos), [None, arrow.py_buffer(halves.tobytes())])


def digestible(rows: Sequence[Row]) -> bytes:
    """Rows as bytes that are the same however rows are parted: what `rows_sha256` is of."""
    return msgspec.json.encode([tuple(row) for row in rows])[1:-1] + b","
