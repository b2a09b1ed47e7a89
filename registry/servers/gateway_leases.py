"""Which gateways of several servers live: a row for each, which it renews.

    (gateway_id, renewed_at)

`gateway_id` is as open records name it (SERVER_ID/gateway-0), `renewed_at` the database's clock.
How long a row must have stayed the same before its gateway counts as lost is the reader's to decide
(gateway/cluster/policy/absences.py). Whoever has closed what a lost one left open deletes its row;
one that comes back makes it anew.
"""

from sqlalchemy import Engine
from sqlalchemy.orm import Mapped, mapped_column

from registry.base import Base, Id, Instant
from registry.servers.dispatcher_leases import NOW, rows_of


class GatewayLeaseRow(Base):
    """See the module."""

    __tablename__ = "gateway_leases"

    gateway_id: Mapped[Id] = mapped_column(primary_key=True)
    renewed_at: Mapped[Instant]


def renew(engine: Engine, gateway_id: str) -> dict[str, float]:
    """It lives. Returns when each gateway said so last, by id, this one's as it was before."""
    made = f"INSERT INTO gateway_leases (gateway_id, renewed_at) VALUES (:gateway_id, {NOW})"
    again = f"ON CONFLICT (gateway_id) DO UPDATE SET renewed_at = {NOW}"
    statement = f"WITH mine AS ({made} {again}) SELECT gateway_id, renewed_at FROM gateway_leases"
    return {row[0]: float(row[1]) for row in rows_of(engine, statement, gateway_id=gateway_id)}


def num_live(engine: Engine, within_s: float) -> int:
    """How many have renewed their row in the last `within_s` seconds."""
    statement = f"SELECT count(*) FROM gateway_leases WHERE renewed_at > {NOW} - :within"
    return int(rows_of(engine, statement, within=within_s)[0][0])


def forget(engine: Engine, gateway_id: str, renewed_at: float | None = None) -> None:
    """It is gone for good, or stopped; nothing happens where it has renewed since `renewed_at`."""
    statement = (
        "DELETE FROM gateway_leases WHERE gateway_id = :gateway_id "
        "AND (CAST(:renewed_at AS float8) IS NULL OR renewed_at = :renewed_at) RETURNING 1"
    )
    rows_of(engine, statement, gateway_id=gateway_id, renewed_at=renewed_at)
