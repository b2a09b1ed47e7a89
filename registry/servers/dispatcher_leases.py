"""The lease of the active dispatcher: one row, by which several servers elect one of theirs.

    (name, holder, address, epoch, until_at, leads)

Each function is one statement, and the clock is the database's. `epoch` rises with every holder and
never falls; the clock's seconds are the least that it may be, for workers remember it and a
database can be put back from a backup. Who may take the row when is the caller's to decide
(gateway/cluster/policy/election.py): `take` takes it only as the caller has seen it last, so of
several callers one gets it. `leads` is what tenants' counters are ahead by; only the holder of the
present epoch writes it. For PostgreSQL: servers on several machines have no SQLite in common.
"""

import json
from typing import Any, NamedTuple

from sqlalchemy import Engine, String, Text, text
from sqlalchemy.orm import Mapped, mapped_column

from registry.base import Base, Count, Id, Instant

NAME = "dispatcher"
MAX_ADDRESS_LEN = 255
NOW = "extract(epoch FROM clock_timestamp())::float8"
"""PostgreSQL's, not that of the transaction's begin."""
_OURS = "name = :name AND holder = :holder AND epoch = :epoch"


class DispatcherLeaseRow(Base):
    """See the module."""

    __tablename__ = "dispatcher_leases"

    name: Mapped[Id] = mapped_column(primary_key=True)
    holder: Mapped[Id]
    address: Mapped[str] = mapped_column(String(MAX_ADDRESS_LEN))
    epoch: Mapped[Count]
    until_at: Mapped[Instant]
    leads: Mapped[str] = mapped_column(Text)


class LeaseRow(NamedTuple):
    """As it was read. `holder`: the server's id; `address`: where its dispatcher listens;
    `until_at`: by the database's clock, in epoch seconds, 0 where it was given up."""

    holder: str
    address: str
    epoch: int
    until_at: float


def read(engine: Engine) -> LeaseRow | None:
    """The row; None where no dispatcher ever took it."""
    found = rows_of(
        engine,
        "SELECT holder, address, epoch, until_at FROM dispatcher_leases WHERE name = :name",
    )
    return LeaseRow(*found[0]) if found else None


def take(
    engine: Engine,
    seen: LeaseRow | None,
    holder: str,
    address: str,
    ttl_s: float,
    least: int,
    *,
    at_once: bool,
) -> int | None:
    """The epoch of the new holder, which is not below `least`; None where the row has changed since
    it was `seen`, or has not run out. `at_once`: it need not run out. A row that seems to hold for
    much longer than any is made for was made by a clock that was set back since."""
    values = {"holder": holder, "address": address, "ttl": ttl_s, "least": least}
    rises = f"GREATEST(:least, floor({NOW})::bigint"
    if seen is None:
        names = "(name, holder, address, epoch, until_at, leads)"
        made = f"VALUES (:name, :holder, :address, {rises}), {NOW} + :ttl, '{{}}')"
        end = "ON CONFLICT (name) DO NOTHING RETURNING epoch"
        found = rows_of(engine, f"INSERT INTO dispatcher_leases {names} {made} {end}", **values)
    else:
        ran_out = f"until_at <= {NOW} OR until_at > {NOW} + 2 * :ttl"
        found = rows_of(
            engine,
            "UPDATE dispatcher_leases SET holder = :holder, address = :address, "
            f"epoch = {rises}, epoch + 1), until_at = {NOW} + :ttl "
            "WHERE name = :name AND epoch = :seen_epoch AND until_at = :seen_until "
            f"AND (:at_once OR {ran_out}) RETURNING epoch",
            **values,
            seen_epoch=seen.epoch,
            seen_until=seen.until_at,
            at_once=at_once,
        )
    return int(found[0][0]) if found else None


def renew(engine: Engine, holder: str, epoch: int, ttl_s: float) -> bool:
    """False: it is another's."""
    statement = f"UPDATE dispatcher_leases SET until_at = {NOW} + :ttl WHERE {_OURS} RETURNING 1"
    return bool(rows_of(engine, statement, holder=holder, epoch=epoch, ttl=ttl_s))


def give_up(engine: Engine, holder: str, epoch: int) -> None:
    """Whoever wants it may take it now. It changes nothing where it is another's."""
    statement = f"UPDATE dispatcher_leases SET until_at = 0 WHERE {_OURS} RETURNING 1"
    rows_of(engine, statement, holder=holder, epoch=epoch)


def read_leads(engine: Engine) -> dict[str, float]:
    """By tenant, in seconds; none where nobody wrote any."""
    found = rows_of(engine, "SELECT leads FROM dispatcher_leases WHERE name = :name")
    return dict(json.loads(found[0][0])) if found else {}


def write_leads(engine: Engine, epoch: int, leads: dict[str, float]) -> bool:
    """False: another dispatcher has followed the one of this epoch, and writes its own."""
    statement = (
        "UPDATE dispatcher_leases SET leads = :leads "
        "WHERE name = :name AND epoch = :epoch RETURNING 1"
    )
    return bool(rows_of(engine, statement, epoch=epoch, leads=json.dumps(leads)))


def rows_of(engine: Engine, statement: str, **values: object) -> list[tuple[Any, ...]]:
    """The rows of one statement, which is its own transaction; `:name` in it is NAME. Raises
    SQLAlchemyError."""
    bind = engine.execution_options(isolation_level="AUTOCOMMIT")
    with bind.connect() as connection:
        return [tuple(row) for row in connection.execute(text(statement), {"name": NAME, **values})]
