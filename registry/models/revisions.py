"""Revisions of a hosted model: a new one takes over when it is ready, an old one can come back.

A revision is a pack (content and dtype) with where it came from; it never changes. The model's own
row (`catalog.py`) is the one that is served; this table remembers the others, and the current one
too once there are others. While a new revision is registered it has a row of its own in the
catalog, named NAME@next, with the states and the progress of any registration: what is served is
not touched until `finish` puts the new facts into NAME's row and deletes that one, in one
transaction. If it fails, NAME@next stays as `failed` with its reason.

At most `keep` revisions of a model are remembered, the oldest go first and the current one never;
packs of revisions that are remembered are in use. Gateways see a switch as they see every change
of the registry: by its version.
"""

from dataclasses import asdict, dataclass, fields

from sqlalchemy import JSON, ForeignKey, String, Text, UniqueConstraint, delete, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from registry import audit
from registry.base import Base, Id, Instant, JsonObject, Name, Serial, record_of, values_of
from registry.errors import AlreadyExists, IllegalTransition, InvalidValue, NotFound
from registry.models import catalog
from registry.models.catalog import NEXT, Model, ModelRecord, PackFacts

_ORIGIN = ("source", "requested_dtype", "requested_revision", "source_commit")
_FACTS = tuple(field.name for field in fields(PackFacts))


@dataclass(frozen=True, slots=True)
class RevisionRecord:
    """One revision, the oldest registered first in lists."""

    model: str
    revision: str
    pack: str
    source: str
    requested_revision: str
    source_commit: str
    dtype: str
    weight_bytes: int
    registered_at: float
    current: bool


class ModelRevision(Base):
    """See RevisionRecord; `facts` are PackFacts."""

    __tablename__ = "model_revisions"
    __table_args__ = (UniqueConstraint("model_id", "revision"),)

    id: Mapped[Serial] = mapped_column(primary_key=True)
    model_id: Mapped[Id] = mapped_column(ForeignKey("models.id"))
    revision: Mapped[Name]
    pack: Mapped[str] = mapped_column(String(255))
    source: Mapped[str] = mapped_column(Text)
    requested_dtype: Mapped[str] = mapped_column(String(32))
    requested_revision: Mapped[Name]
    source_commit: Mapped[str] = mapped_column(String(64))
    facts: Mapped[JsonObject] = mapped_column(JSON)
    registered_at: Mapped[Instant]


def begin_update(
    session: Session,
    name: str,
    source: str,
    *,
    dtype: str,
    requested_revision: str = "",
    registrar_host: str = "",
    registrar_pid: int = 0,
    now_at: float,
) -> ModelRecord:
    """Begin the registration of a ready model's new revision; the row is NAME@next."""
    model = catalog.get_model(session, name)
    if model.state != "ready":
        raise IllegalTransition(f"model {name!r} is {model.state}: only a ready one can be updated")
    try:
        return catalog.add_model(
            session,
            name + NEXT,
            source,
            dtype=dtype,
            requested_revision=requested_revision,
            registrar_host=registrar_host,
            registrar_pid=registrar_pid,
            now_at=now_at,
        )
    except AlreadyExists as error:
        raise AlreadyExists(
            f"an update of {name!r} is already running: `polyhost models cancel {name}` stops it"
        ) from error


def finish(
    session: Session, registration: str, facts: PackFacts, *, keep: int, now_at: float
) -> bool:
    """The registration is done: its model is ready, or has its new revision.

    False if the row is no longer this one's, or if the model to be updated is gone.
    """
    row = session.scalar(
        select(Model).where(Model.registration == registration, Model.state == "registering")
    )
    if row is None or not row.name.endswith(NEXT):
        return catalog.finish(session, registration, facts, now_at=now_at)
    name = row.name.removesuffix(NEXT)
    target = session.scalar(select(Model).where(Model.name == name, Model.state == "ready"))
    if target is None:
        reason = f"model {name!r} was removed in the meantime"
        catalog.fail(session, registration, "no_model", reason, now_at=now_at)
        return False
    _remember(session, target)
    origin = values_of(row, *_ORIGIN)
    session.delete(row)
    session.flush()
    before = {"revision": target.revision}
    _put(target, origin, asdict(facts), now_at)
    target.registration = registration
    # Content that was here before is the latest again, with where it came from this time.
    known = ModelRevision.revision == facts.revision
    session.execute(delete(ModelRevision).where(ModelRevision.model_id == target.id, known))
    _remember(session, target)
    _forget_oldest(session, target, keep)
    audit.record(session, now_at, "model.update", name, before, {"revision": facts.revision})
    return True


def roll_back(session: Session, name: str, to: str = "", *, now_at: float) -> ModelRecord:
    """Serve an earlier revision again: the one registered before the current one, or `to`.

    `to` is a revision or the commit it came from, or the beginning of either. Nothing is fetched
    or converted, so it holds with this transaction. Raises NotFound, InvalidValue.
    """
    model = catalog.get_model(session, name)
    rows = _rows(session, model.id)
    if to:
        chosen = [r for r in rows if r.revision.startswith(to) or r.source_commit.startswith(to)]
    else:
        known = [row.revision for row in rows]
        place = known.index(model.revision) if model.revision in known else 0
        chosen = list(rows[place - 1 : place]) if place else []
    if len(chosen) != 1:
        what = (
            f"{len(chosen)} revisions begin with {to!r}" if to else "there is no earlier revision"
        )
        raise NotFound(f"{name}: {what}; see `polyhost models revisions {name}`")
    if model.state != "ready":
        raise InvalidValue(f"model {name!r} is {model.state}: only a ready one can be rolled back")
    target = session.get_one(Model, model.id)
    before = {"revision": target.revision}
    row = chosen[0]
    _put(target, values_of(row, *_ORIGIN), row.facts, now_at)
    session.flush()
    audit.record(session, now_at, "model.rollback", name, before, {"revision": row.revision})
    return catalog.get_model(session, name)


def list_revisions(session: Session, name: str) -> list[RevisionRecord]:
    """What is known of a model's revisions, the oldest first. Raises NotFound."""
    model = catalog.get_model(session, name)
    found = [
        record_of(
            RevisionRecord,
            row,
            model=name,
            dtype=row.facts["dtype"],
            weight_bytes=row.facts["weight_bytes"],
            current=row.revision == model.revision,
        )
        for row in _rows(session, model.id)
    ]
    if found or model.state != "ready":
        return found
    since = model.ready_at or model.created_at
    return [record_of(RevisionRecord, model, model=name, registered_at=since, current=True)]


def remove(session: Session, name: str, *, now_at: float) -> ModelRecord:
    """Take the model out of service, with its revisions and an update that is going on.

    Its packs go with the next sweep. Raises NotFound.
    """
    model = catalog.remove(session, name, now_at=now_at)
    session.execute(delete(ModelRevision).where(ModelRevision.model_id == model.id))
    following = catalog.find_model(session, name + NEXT)
    if following is not None and following.state != "removed":
        catalog.remove(session, following.name, now_at=now_at)
    return model


def packs_in_use(session: Session) -> set[str]:
    """Pack folders that some ready model is served from, or could be rolled back to."""
    older = (
        select(ModelRevision.pack)
        .join(Model, Model.id == ModelRevision.model_id)
        .where(Model.state == "ready")
    )
    return catalog.packs_in_use(session) | set(session.scalars(older))


def _rows(session: Session, model_id: str) -> list[ModelRevision]:
    query = select(ModelRevision).where(ModelRevision.model_id == model_id)
    return list(session.scalars(query.order_by(ModelRevision.id)))


def _remember(session: Session, model: Model) -> None:
    """A row for what the model is now, unless there is one."""
    if any(row.revision == model.revision for row in _rows(session, model.id)):
        return
    session.add(
        ModelRevision(
            model_id=model.id,
            pack=model.pack,
            revision=model.revision,
            **values_of(model, *_ORIGIN),
            facts=values_of(model, *_FACTS),
            registered_at=model.ready_at or model.created_at,
        )
    )
    session.flush()


def _put(model: Model, origin: JsonObject, facts: JsonObject, now_at: float) -> None:
    for name, value in {**origin, **facts}.items():
        setattr(model, name, value)
    model.ready_at = now_at


def _forget_oldest(session: Session, model: Model, keep: int) -> None:
    others = [row for row in _rows(session, model.id) if row.revision != model.revision]
    for row in others[: max(0, len(others) + 1 - keep)]:
        session.delete(row)
