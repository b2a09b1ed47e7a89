"""Thousands of rows in one statement, by what each driver is quickest at.

SQLite: the driver's own loop over tuples. PostgreSQL: an array a column, taken apart by the server,
so that a batch is one statement however long it is. Through the ORM the same rows cost several
times the CPU, and the gateway that writes them serves requests meanwhile.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import BigInteger, Double, Integer, Table
from sqlalchemy.orm import Session

from registry.base import Base


def insert_new(
    session: Session,
    table: type[Base],
    key: str,
    names: Sequence[str],
    rows: Sequence[tuple[Any, ...]],
) -> int:
    """Insert rows, values in the order of `names`, passing over those whose unique column `key` is
    there. Returns how many were inserted."""
    if not rows:
        return 0
    columns = ", ".join(names)
    head = f"INSERT INTO {table.__tablename__} ({columns})"
    tail = f"ON CONFLICT ({key}) DO NOTHING"
    connection = session.connection()
    if connection.dialect.name == "sqlite":
        values = ", ".join("?" for _ in names)
        done = connection.exec_driver_sql(f"{head} VALUES ({values}) {tail}", list(rows))
        return int(done.rowcount)
    arrays = ", ".join(f"%s::{_array(table, name)}" for name in names)
    by_column = tuple(list(column) for column in zip(*rows, strict=True))
    done = connection.exec_driver_sql(f"{head} SELECT * FROM unnest({arrays}) {tail}", by_column)
    return int(done.rowcount)


def delete_keys(session: Session, table: type[Base], key: str, keys: Sequence[str]) -> None:
    """Delete the rows whose column `key` is one of these."""
    if not keys:
        return
    connection = session.connection()
    head = f"DELETE FROM {table.__tablename__} WHERE {key} ="
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql(f"{head} ?", [(each,) for each in keys])
    else:
        connection.exec_driver_sql(f"{head} ANY(%s::varchar[])", (list(keys),))


def _array(table: type[Base], name: str) -> str:
    described = table.__table__
    assert isinstance(described, Table)
    kind = described.c[name].type
    if isinstance(kind, Double):
        return "float8[]"
    return "bigint[]" if isinstance(kind, BigInteger | Integer) else "varchar[]"
