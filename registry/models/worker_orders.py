"""What operators want of workers: that one takes no requests (`drain`), or begins anew (`restart`).

A row a worker, kept until the order is taken back (`resume`): a drained worker is drained after
a restart of the server too. The dispatcher reads the rows with the catalog and does the rest. A
restart names the process that is to be replaced, by when it began: an order that is read twice, or
by another dispatcher, restarts nothing twice, and no clock decides whether it has been carried out.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from sqlalchemy import String, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from registry import audit
from registry.base import Base, Instant

WorkerAction: TypeAlias = Literal["drain", "resume", "restart"]
MAX_NAME_LEN = 64


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """`drained`: it takes no requests. `restart_of`: when the process began that is to be replaced,
    as it says itself; 0: none is."""

    drained: bool = False
    restart_of: float = 0.0


NO_ORDER = WorkerOrder()


class WorkerOrderRow(Base):
    """See WorkerOrder."""

    __tablename__ = "worker_orders"

    worker_id: Mapped[str] = mapped_column(String(MAX_NAME_LEN), primary_key=True)
    drained: Mapped[bool]
    restart_of: Mapped[Instant]


def order(
    session: Session,
    worker_id: str,
    action: WorkerAction,
    *,
    now_at: float,
    started_at: float = 0.0,
) -> WorkerOrder:
    """What holds from now on. A restart, of the process that began at `started_at`, leaves a
    drained worker drained."""
    row = session.get(WorkerOrderRow, worker_id)
    if row is None:
        row = WorkerOrderRow(worker_id=worker_id, drained=False, restart_of=0.0)
        session.add(row)
    before = {"drained": row.drained}
    if action == "restart":
        row.restart_of = started_at
    else:
        row.drained = action == "drain"
    session.flush()
    audit.record(session, now_at, f"worker.{action}", worker_id, before, {"drained": row.drained})
    return WorkerOrder(row.drained, row.restart_of)


def all_orders(session: Session) -> dict[str, WorkerOrder]:
    """By worker; those that nothing was ever wanted of are not there."""
    rows = session.scalars(select(WorkerOrderRow)).all()
    return {row.worker_id: WorkerOrder(row.drained, row.restart_of) for row in rows}
