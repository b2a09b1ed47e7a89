"""The catalog: hosted models by public name, from registration to removal.

    registering -> ready | failed | removed        failed  -> registering | removed
    ready       -> removed                         removed -> registering

A registration is run by some process (admin/registration/registrar.py) that writes its progress
and a heartbeat here under a `registration` token; a row taken over by another registration, or
removed, no longer answers to the old token. A registering row whose process died becomes failed
("interrupted") by the hand of whoever lists next. A removed row stays as a tombstone: its name can
be added again, and nothing that was posted for it is touched.

Not here: what a running registration writes of itself (registry/models/registrations.py), folders
on disk (admin/operations/models.py), prices (registry/money/prices.py).
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Literal, TypeAlias

from sqlalchemy import (
    JSON,
    CheckConstraint,
    Double,
    String,
    Text,
    false,
    select,
    text,
)
from sqlalchemy.orm import Mapped, Session, mapped_column

from registry import audit
from registry.base import (
    MAX_NAME_LEN,
    Base,
    Count,
    Id,
    Instant,
    JsonObject,
    Name,
    OptionalInstant,
    new_id,
    random_token,
    record_of,
    values_of,
)
from registry.errors import AlreadyExists, IllegalTransition, InvalidValue, NotFound

ModelState: TypeAlias = Literal["registering", "ready", "failed", "removed"]
ModelTask: TypeAlias = Literal["generate", "embed", "classify"]

TRANSITIONS: dict[str, frozenset[str]] = {
    "registering": frozenset({"ready", "failed", "removed"}),
    "ready": frozenset({"removed"}),
    "failed": frozenset({"registering", "removed"}),
    "removed": frozenset({"registering"}),
}
INTERRUPTED = "interrupted"
CANCELLED = "cancelled"
# "NAME@next" is the row of a registration that is to become NAME's new revision (revisions.py).
NEXT = "@next"
# A registrar beats every second; a row that is silent for this long has lost its process.
HEARTBEAT_TIMEOUT_S = 30.0

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """A catalog entry. Instants in epoch seconds, sizes in bytes.

    `pack` is the pack folder's name inside `<data_dir>/packs` (its path is not stored, so that a
    data folder can be moved); `admin.operations.models.hosted_models` joins the two and adds
    prices. `reason_code` and `reason` say why a model failed. `bytes_per_s` is how fast a
    registration's present phase goes, `phase_at` when that began. `dim` is how long an embedding
    is, `labels` name a classifier's classes; `multi_label`: they do not exclude one another.
    """

    id: str
    name: str
    source: str
    requested_dtype: str
    requested_revision: str
    source_commit: str
    state: ModelState
    phase: str
    done_bytes: int
    total_bytes: int
    reason_code: str
    reason: str
    registrar_host: str
    registrar_pid: int
    heartbeat_at: float | None
    bytes_per_s: float
    phase_at: float | None
    registration: str
    revision: str
    pack: str
    family: str
    dtype: str
    weight_bytes: int
    max_context: int
    vocab_size: int
    task: ModelTask
    dim: int
    labels: list[str]
    multi_label: bool
    pinned: bool
    weight: float
    created_at: float
    ready_at: float | None
    removed_at: float | None


@dataclass(frozen=True, slots=True)
class PackFacts:
    """What a finished registration knows about its model."""

    revision: str
    pack: str
    family: str
    dtype: str
    weight_bytes: int
    max_context: int
    vocab_size: int
    task: ModelTask = "generate"
    dim: int = 0
    labels: list[str] = field(default_factory=list)
    multi_label: bool = False


class Model(Base):
    """See ModelRecord."""

    __tablename__ = "models"
    __table_args__ = (
        CheckConstraint("state IN ('registering', 'ready', 'failed', 'removed')", name="state"),
    )

    id: Mapped[Id] = mapped_column(primary_key=True)
    name: Mapped[Name] = mapped_column(unique=True)
    source: Mapped[str] = mapped_column(Text)
    requested_dtype: Mapped[str] = mapped_column(String(32))
    requested_revision: Mapped[Name] = mapped_column(default="", server_default="")
    source_commit: Mapped[str] = mapped_column(String(64), default="", server_default="")
    state: Mapped[str] = mapped_column(String(16), index=True)
    phase: Mapped[str] = mapped_column(String(32), default="")
    done_bytes: Mapped[Count] = mapped_column(default=0)
    total_bytes: Mapped[Count] = mapped_column(default=0)
    reason_code: Mapped[str] = mapped_column(String(64), default="")
    reason: Mapped[str] = mapped_column(Text, default="")
    registrar_host: Mapped[str] = mapped_column(String(255), default="")
    registrar_pid: Mapped[Count] = mapped_column(default=0)
    heartbeat_at: Mapped[OptionalInstant]
    bytes_per_s: Mapped[float] = mapped_column(Double, default=0.0, server_default=text("0"))
    phase_at: Mapped[OptionalInstant]
    registration: Mapped[str] = mapped_column(String(32))
    revision: Mapped[Name] = mapped_column(default="")
    pack: Mapped[str] = mapped_column(String(255), default="")
    family: Mapped[Name] = mapped_column(default="")
    dtype: Mapped[str] = mapped_column(String(32), default="")
    weight_bytes: Mapped[Count] = mapped_column(default=0)
    max_context: Mapped[Count] = mapped_column(default=0)
    vocab_size: Mapped[Count] = mapped_column(default=0)
    task: Mapped[str] = mapped_column(String(16), default="generate", server_default="generate")
    dim: Mapped[Count] = mapped_column(default=0, server_default=text("0"))
    labels: Mapped[list[str]] = mapped_column(JSON, default=list, server_default=text("'[]'"))
    multi_label: Mapped[bool] = mapped_column(default=False, server_default=false())
    pinned: Mapped[bool]
    weight: Mapped[float] = mapped_column(Double)
    created_at: Mapped[Instant]
    ready_at: Mapped[OptionalInstant]
    removed_at: Mapped[OptionalInstant]


def row_to_register(session: Session, name: str) -> Model | None:
    """The row that a registration under this name starts from; None: it needs a new one. Raises
    InvalidValue for a name that no model can have, AlreadyExists for one that is taken."""
    if not _NAME.fullmatch(name.removesuffix(NEXT)) or len(name) > MAX_NAME_LEN:
        raise InvalidValue(
            "a model name must begin with a letter or digit and have at most 128 characters of "
            f"A-Z a-z 0-9 . _ : / -, got {name!r}"
        )
    row = session.scalar(select(Model).where(Model.name == name))
    if row is not None and "registering" not in TRANSITIONS[row.state]:
        raise AlreadyExists(
            f"model {name!r} already exists ({row.state}): choose another name, "
            f"`polyhost models rm {name}` first, or bring a new revision of a ready model with "
            f"`polyhost models update {name}`"
        )
    return row


def add_model(
    session: Session,
    name: str,
    source: str,
    *,
    now_at: float,
    dtype: str = "auto",
    requested_revision: str = "",
    source_commit: str = "",
    pinned: bool = False,
    weight: float = 1.0,
    registrar_host: str = "",
    registrar_pid: int = 0,
) -> ModelRecord:
    """Begin a registration. A failed or removed name starts anew; another raises AlreadyExists."""
    if not math.isfinite(weight) or weight <= 0:
        raise InvalidValue(f"weight must be greater than 0, got {weight}")
    row = row_to_register(session, name)
    before = None if row is None else _public(row)
    if row is None:
        row = Model(id=new_id("mdl"), name=name)
        session.add(row)
    row.source, row.requested_dtype = source, dtype
    row.requested_revision, row.source_commit = requested_revision, source_commit
    row.pinned, row.weight = pinned, weight
    row.state, row.registration = "registering", random_token(15)
    row.phase, row.done_bytes, row.total_bytes = "start", 0, 0
    row.reason_code, row.reason, row.revision, row.pack = "", "", "", ""
    row.registrar_host, row.registrar_pid = registrar_host, registrar_pid
    row.heartbeat_at = row.created_at = row.phase_at = now_at
    row.bytes_per_s = 0.0
    row.ready_at, row.removed_at = None, None
    session.flush()
    audit.record(session, now_at, "model.add", name, before, _public(row))
    return _record(row)


def finish(session: Session, registration: str, facts: PackFacts, *, now_at: float) -> bool:
    """The registration is done: the model is ready. False if the row is no longer this one's."""
    row = _registering(session, registration)
    if row is None:
        return False
    before = _public(row)
    for fact in fields(PackFacts):
        setattr(row, fact.name, getattr(facts, fact.name))
    row.state, row.phase, row.ready_at = "ready", "done", now_at
    session.flush()
    audit.record(session, now_at, "model.ready", row.name, before, _public(row))
    return True


def fail(session: Session, registration: str, code: str, reason: str, *, now_at: float) -> bool:
    """The registration ended badly. False if the row is no longer this one's."""
    row = _registering(session, registration)
    if row is None:
        return False
    before = _public(row)
    row.state, row.reason_code, row.reason = "failed", code[:64], reason
    session.flush()
    audit.record(session, now_at, "model.failed", row.name, before, _public(row))
    return True


def fail_interrupted(
    session: Session, is_alive: Callable[[str, int], bool], *, now_at: float
) -> list[str]:
    """Fail registrations whose process is gone; `is_alive(host, pid)` is the caller's to know.

    Returns their names. Call it within a writing session before listing.
    """
    rows = session.scalars(select(Model).where(Model.state == "registering")).all()
    lost = [
        row
        for row in rows
        if now_at - (row.heartbeat_at or 0.0) > HEARTBEAT_TIMEOUT_S
        or not is_alive(row.registrar_host, row.registrar_pid)
    ]
    for row in lost:
        fail(
            session,
            row.registration,
            INTERRUPTED,
            "the registration process stopped before it was done: `polyhost models retry "
            f"{row.name.removesuffix(NEXT)}` continues with what was downloaded",
            now_at=now_at,
        )
    return [row.name for row in lost]


def list_models(session: Session, *, with_removed: bool = False) -> list[ModelRecord]:
    """Catalog entries by name."""
    query = select(Model).order_by(Model.name)
    if not with_removed:
        query = query.where(Model.state != "removed")
    return [_record(row) for row in session.scalars(query)]


def ready_models(session: Session) -> list[ModelRecord]:
    """What gateways may serve, by name."""
    query = select(Model).where(Model.state == "ready").order_by(Model.name)
    return [_record(row) for row in session.scalars(query)]


def find_model(session: Session, name: str) -> ModelRecord | None:
    """The entry of that name, a removed one too."""
    row = session.scalar(select(Model).where(Model.name == name))
    return None if row is None else _record(row)


def get_model(session: Session, name: str) -> ModelRecord:
    """Raises NotFound, also for a removed model."""
    return _record(_row(session, name))


def remove(session: Session, name: str, *, now_at: float) -> ModelRecord:
    """Take the model out of service. Its postings and prices stay. Raises NotFound."""
    row = _row(session, name)
    if "removed" not in TRANSITIONS[row.state]:
        raise IllegalTransition(f"model {name!r} is {row.state} and cannot be removed")
    before = _public(row)
    row.state, row.removed_at = "removed", now_at
    session.flush()
    audit.record(session, now_at, "model.remove", name, before, None)
    return _record(row)


def set_pinned(session: Session, name: str, pinned: bool, *, now_at: float) -> ModelRecord:
    """A pinned model is never evicted. Raises NotFound."""
    row = _row(session, name)
    before = _public(row)
    row.pinned = pinned
    session.flush()
    audit.record(
        session, now_at, "model.pin" if pinned else "model.unpin", name, before, _public(row)
    )
    return _record(row)


def packs_in_use(session: Session) -> set[str]:
    """Pack folders that some ready model is served from."""
    return set(session.scalars(select(Model.pack).where(Model.state == "ready")))


def _registering(session: Session, registration: str) -> Model | None:
    return session.scalar(
        select(Model).where(Model.registration == registration, Model.state == "registering")
    )


def _row(session: Session, name: str) -> Model:
    row = session.scalar(select(Model).where(Model.name == name, Model.state != "removed"))
    if row is None:
        raise NotFound(f"unknown model {name!r}: see `polyhost models list`")
    return row


def _record(row: Model) -> ModelRecord:
    return record_of(ModelRecord, row)


def _public(row: Model) -> JsonObject:
    names = ("state", "source", "revision", "pinned", "weight", "reason")
    return values_of(row, *names) | {"dtype": row.dtype or row.requested_dtype}
