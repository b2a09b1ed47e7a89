"""The objects of a server: a folder that knows which database its objects are of.

Rows name objects, so a folder belongs to one database, by the name that the database has for itself
(registry/audit.py). Whether there are rows says whether an empty folder is a new one or not the
right one (`FolderStore.check`).
"""

from functools import cached_property

from sqlalchemy import Engine

from engine.objects.folder_store import FolderStore
from gateway.settings.settings import Settings
from registry import audit
from registry.session import reading, writing
from registry.state import batches, files, responses, uploads

ACTOR = "gateway"


class DatabaseOwner:
    """Implements `folder_store.FolderOwner`. Raises SQLAlchemyError."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def name(self) -> str:
        """See FolderOwner."""
        return self._name

    def has_objects(self) -> bool:
        """See FolderOwner."""
        with reading(self._engine) as session:
            has = files.has_any, uploads.has_parts, batches.has_segments
            return bool(responses.tenants_of(session)) or any(any_of(session) for any_of in has)

    @cached_property
    def _name(self) -> str:
        with writing(self._engine, ACTOR) as session:
            return audit.ensure_database_id(session)


def objects_of(engine: Engine, settings: Settings) -> FolderStore:
    """Of a server with this database."""
    return FolderStore(settings.objects_path(settings.data_path), DatabaseOwner(engine))
