"""Engines, sessions and schema upgrades: how the rest of the product reaches the registry.

    reading(engine)          a session for queries (a snapshot; never blocks writers)
    writing(engine, actor)   a session that commits at the end or rolls back, one writer at a time
    upgrade(url)             brings the schema to this build's migration, made from nothing too

SQLite: WAL so that readers and the one writer do not block one another; synchronous=FULL, because
a commit that returned must survive a power cut (usage is money); foreign_keys on; a writer waits
up to 5 s for another. Writers BEGIN IMMEDIATE: a transaction that reads first and writes later
would otherwise fail at once ("database is locked") when somebody wrote in between.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, NullPool, create_engine, event, make_url
from sqlalchemy.orm import Session, sessionmaker

import migrations
from registry import locks, schema
from registry.audit import ACTOR_KEY
from registry.errors import SchemaError

BUSY_TIMEOUT_MS = 5000
UPGRADE_TIMEOUT_S = 60.0
_BEGIN_OPTION = "polyhost_begin"
_IMMEDIATE = "BEGIN IMMEDIATE"


def make_engine(url: str, **options: Any) -> Engine:
    """An engine with this product's settings for the database. Dispose of it when done."""
    engine = create_engine(url, **options)
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _configure_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def session_factory(engine: Engine, *, read_only: bool = False) -> sessionmaker[Session]:
    """Sessions that write (BEGIN IMMEDIATE on SQLite) or, with `read_only`, only read."""
    bind = engine if read_only else engine.execution_options(**{_BEGIN_OPTION: _IMMEDIATE})
    return sessionmaker(bind, expire_on_commit=False)


@contextmanager
def reading(engine: Engine) -> Iterator[Session]:
    """A session on one consistent snapshot, rolled back at the end."""
    with session_factory(engine, read_only=True)() as session:
        yield session


@contextmanager
def writing(engine: Engine, actor: str) -> Iterator[Session]:
    """A session that commits when the block ends and rolls back when it raises.

    `actor` is who the audit log names: "cli:<OS user>", "gateway", "admin:<user>".
    """
    with session_factory(engine)(info={ACTOR_KEY: actor}) as session, session.begin():
        yield session


def upgrade(url: str, revision: str = "head") -> None:
    """Bring the schema to `revision`. Safe to call from several processes at once.

    SQLite: a lock file beside the database makes the others wait, and the whole upgrade is one
    transaction. PostgreSQL: DDL is transactional, and whoever comes second fails and may retry.
    Raises SchemaError where the database was made by a newer build.
    """
    with ExitStack() as stack:
        path = _sqlite_path(url)
        if path is not None:
            lock = path.with_name(path.name + ".upgrade.lock")
            stack.enter_context(locks.hold(lock, timeout_s=UPGRADE_TIMEOUT_S))
        connection = stack.enter_context(_upgrade_connection(url))
        if revision == "head" and schema.revision(connection) == schema.HEAD:
            return
        try:
            command.upgrade(alembic_config(connection), revision)
        except CommandError as error:
            raise SchemaError(f"the schema cannot be upgraded: {error}") from error


def downgrade(url: str, revision: str) -> None:
    """Take the schema back to `revision` ("base": no tables). Data in what goes is lost."""
    with _upgrade_connection(url) as connection:
        command.downgrade(alembic_config(connection), revision)


def alembic_config(connection: Connection | None = None) -> Config:
    """Alembic's configuration for the installed `migrations` package; no ini file."""
    config = Config()
    location = str(Path(migrations.__file__ or "").parent)
    config.set_main_option("script_location", location.replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def database_exists(url: str) -> bool:
    """False only for a SQLite file that is not there; opening it would create it."""
    path = _sqlite_path(url)
    return path is None or path.exists()


@contextmanager
def _upgrade_connection(url: str) -> Iterator[Connection]:
    engine = make_engine(url, poolclass=NullPool)
    try:
        with engine.execution_options(**{_BEGIN_OPTION: _IMMEDIATE}).begin() as connection:
            yield connection
    finally:
        engine.dispose()


def _sqlite_path(url: str) -> Path | None:
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite" or not parsed.database:
        return None
    return Path(parsed.database)


def _configure_sqlite(dbapi_connection: Any, _record: Any) -> None:
    # With isolation_level None the driver never begins by itself; `_begin_sqlite` does.
    dbapi_connection.isolation_level = None
    cursor = dbapi_connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get(_BEGIN_OPTION, "BEGIN"))
