"""The registry's version: one number that every change to it raises in the same transaction.

Gateways poll it (one indexed read) and reload keys, catalog, limits and prices when it moved.
Usage postings and registration progress do not raise it: they change nothing a gateway caches.
"""

from sqlalchemy import select, update
from sqlalchemy.orm import Mapped, Session, mapped_column

from registry.base import Base, Count

ONLY_ROW = 1


class RegistryVersion(Base):
    """A table of exactly one row, made by the first migration."""

    __tablename__ = "registry_version"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    version: Mapped[Count]


def current(session: Session) -> int:
    """The version as of this session's transaction."""
    return session.scalars(
        select(RegistryVersion.version).where(RegistryVersion.id == ONLY_ROW)
    ).one()


def bump(session: Session) -> None:
    """Raise the version; takes effect with the caller's commit."""
    session.execute(
        update(RegistryVersion)
        .where(RegistryVersion.id == ONLY_ROW)
        .values(version=RegistryVersion.version + 1)
    )
