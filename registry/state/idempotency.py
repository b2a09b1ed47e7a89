"""Requests that are made once however often they are sent: the header `Idempotency-Key`.

    (nothing) --claim--> claimed --keep--> kept          its response is stored
    any       --release--> (nothing)                     its request came to nothing

A row is a tenant's key (its digest), the digest of the body it came with, and the id of the
response that it led to. It holds for KEEP_S. A claim whose request can no longer be running, since
its process died, is given to the next who asks.
"""

from dataclasses import dataclass
from typing import Final

from sqlalchemy import Boolean, Index, String, delete, select, update
from sqlalchemy.orm import Mapped, Session, mapped_column

from registry.base import Base, Id, Instant, record_of
from registry.session import insert_new

KEEP_S: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class IdempotencyRecord:
    """What a key stands for. `is_kept`: its response is stored."""

    tenant_id: str
    key_sha256: str
    body_sha256: str
    response_id: str
    is_kept: bool
    created_at: float


class IdempotencyKey(Base):
    """See IdempotencyRecord. `id`: the tenant and the key's digest, one column that names it."""

    __tablename__ = "idempotency_keys"
    __table_args__ = (Index(None, "created_at"), Index(None, "response_id"))

    id: Mapped[str] = mapped_column(String(130), primary_key=True)
    tenant_id: Mapped[Id]
    key_sha256: Mapped[str] = mapped_column(String(64))
    body_sha256: Mapped[str] = mapped_column(String(64))
    response_id: Mapped[Id]
    is_kept: Mapped[bool] = mapped_column(Boolean)
    created_at: Mapped[Instant]


_table = IdempotencyKey
_NAMES = ("id", "tenant_id", "key_sha256", "body_sha256", "response_id", "is_kept", "created_at")


def claim(
    session: Session, wanted: IdempotencyRecord, *, claim_s: float
) -> IdempotencyRecord | None:
    """The key becomes this request's: None. Otherwise what it stands for already. `claim_s`: the
    longest that a request may run. `wanted.created_at` is now."""
    own_id = f"{wanted.tenant_id}/{wanted.key_sha256}"
    now_at = wanted.created_at
    over = delete(_table).where(
        _table.id == own_id,
        (_table.created_at < now_at - KEEP_S)
        | (_table.is_kept.is_(False) & (_table.created_at < now_at - claim_s)),
    )
    session.execute(over)
    values = (own_id, *(getattr(wanted, name) for name in _NAMES[1:]))
    if insert_new(session, _table, "id", _NAMES, [values]):
        return None
    row = session.execute(select(_table).where(_table.id == own_id)).scalar_one()
    return record_of(IdempotencyRecord, row)


def keep(session: Session, tenant_id: str, response_id: str) -> None:
    """The response of a claim is stored, in this transaction."""
    mine = update(_table).where(_table.tenant_id == tenant_id, _table.response_id == response_id)
    session.execute(mine.values(is_kept=True))


def release(session: Session, tenant_id: str, response_id: str) -> None:
    """The request of a claim came to nothing: the key is free."""
    session.execute(
        delete(_table).where(
            _table.tenant_id == tenant_id,
            _table.response_id == response_id,
        )
    )


def remove_before(session: Session, before_at: float) -> int:
    """Delete rows that were made before then. Returns how many."""
    old = delete(_table).where(_table.created_at < before_at).returning(_table.id)
    return len(list(session.execute(old).scalars()))
