"""Engines, sessions and schema upgrades: how the rest of the product reaches the registry.

    reading(engine)            a session for queries (a snapshot; never blocks writers)
    writing(engine, actor)     a session that commits at the end or rolls back, one writer at a time
    appending(engine, actor)   the same for the ledger's rows, which need not wait for other writers
    upgrade(url)               brings the schema to this build's migration, made from nothing too

SQLite: WAL so that readers and the one writer do not block one another; synchronous=FULL, because
a commit that returned must survive a power cut (usage is money); foreign_keys on; a writer waits
up to 5 s for another. Writers BEGIN IMMEDIATE: a transaction that reads first and writes later
would otherwise fail at once ("database is locked") when somebody wrote in between.
PostgreSQL keeps the same promises by other means: postgresql.py.

A URL may hold a password. It is never written anywhere: messages name `shown(url)`.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as NoConnection
from sqlalchemy.orm import Session, sessionmaker

import migrations
from registry import locks, postgresql, schema
from registry.audit import ACTOR_KEY
from registry.errors import (
    InvalidValue,
    RegistryAway,
    RegistryBusy,
    RegistryError,
    SchemaError,
)

BUSY_TIMEOUT_MS = 5000
UPGRADE_TIMEOUT_S = 60.0
_BEGIN_OPTION = "polyhost_begin"
_IMMEDIATE = "BEGIN IMMEDIATE"
_EXCLUSIVE_OPTION = "polyhost_exclusive"


def make_engine(url: str, **options: Any) -> Engine:
    """An engine with this product's settings for the database. Dispose of it when done.

    Raises InvalidValue where the URL names no database that the registry can be on.
    """
    parsed = _parsed(url)
    if parsed.get_backend_name() == "postgresql":
        try:
            engine = create_engine(parsed, **postgresql.engine_options(**options))
        except ModuleNotFoundError as error:
            raise RegistryError(
                f"PostgreSQL needs a driver ({error.name}): pip install 'polyhost[postgres]'"
            ) from error
        postgresql.serialize_writers(engine, _EXCLUSIVE_OPTION)
        return engine
    engine = create_engine(parsed, **options)
    event.listen(engine, "connect", _configure_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


@contextmanager
def reading(engine: Engine) -> Iterator[Session]:
    """A session on one consistent snapshot, rolled back at the end."""
    bind = engine
    if engine.dialect.name == "postgresql":
        bind = engine.execution_options(**postgresql.READING_OPTIONS)
    with _sessions(bind)() as session:
        yield session


@contextmanager
def writing(engine: Engine, actor: str) -> Iterator[Session]:
    """A session that commits when the block ends and rolls back when it raises.

    `actor` is who the audit log names: "cli:<OS user>", "gateway", "admin:<user>". Waits for the
    writers before it, and not for ever: see `busy_is_told`. Inside the block no other writer is at
    work, so a clock read there is not behind what was committed before.
    """
    options = {_BEGIN_OPTION: _IMMEDIATE, _EXCLUSIVE_OPTION: True}
    sessions = _sessions(engine.execution_options(**options))
    with sessions(info={ACTOR_KEY: actor}) as session, session.begin():
        session.connection()  # begins now, not with the first statement
        yield session


@contextmanager
def appending(engine: Engine, actor: str) -> Iterator[Session]:
    """As `writing`, for rows named by their key that nobody else changes: the ledger's.

    Several processes append at the same time, and whoever writes by `writing` does not wait for
    them. What such a transaction reads first may have changed when it writes.
    """
    options = {_BEGIN_OPTION: _IMMEDIATE}
    sessions = _sessions(engine.execution_options(**options))
    with sessions(info={ACTOR_KEY: actor}) as session, session.begin():
        yield session


@contextmanager
def busy_is_told() -> Iterator[None]:
    """Others who took too long become RegistryBusy, for people; programs catch OperationalError and
    try again as after any other trouble with the database."""
    try:
        yield
    except OperationalError as error:
        sqlite_name = getattr(error.orig, "sqlite_errorname", "")
        if sqlite_name != "SQLITE_BUSY" and not postgresql.is_busy(error):
            raise
        raise RegistryBusy(
            "somebody else is changing the registry, nothing was changed: try again"
        ) from error


@contextmanager
def away_is_told() -> Iterator[None]:
    """A database that does not answer becomes RegistryAway, for people."""
    try:
        yield
    except (OperationalError, InterfaceError, NoConnection) as error:
        raise RegistryAway("the database does not answer: try again in a moment") from error


def upgrade(url: str, revision: str = "head") -> None:
    """Bring the schema to `revision`. Safe to call from several processes at once.

    SQLite: a lock file beside the database makes the others wait. PostgreSQL: an advisory lock
    does. The upgrade is one transaction, but for a step that needs
    Alembic's autocommit_block. Raises SchemaError where the database was made by a newer build.
    """
    with _schema_connection(url) as connection:
        if revision == "head" and schema.revision(connection) == schema.HEAD:
            return
        connection.rollback()
        try:
            command.upgrade(alembic_config(connection), revision)
        except CommandError as error:
            raise SchemaError(f"the schema cannot be upgraded: {error}") from error


def downgrade(url: str, revision: str) -> None:
    """Take the schema back to `revision` ("base": no tables). Data in what goes is lost."""
    with _schema_connection(url) as connection:
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
    path = _sqlite_path(_parsed(url))
    return path is None or path.exists()


def shown(url: str) -> str:
    """A URL for people and logs: without its password."""
    return _parsed(url).render_as_string(hide_password=True)


@contextmanager
def _schema_connection(url: str) -> Iterator[Connection]:
    """A connection for Alembic to begin and commit on, while nobody else changes the schema."""
    parsed = _parsed(url)
    with ExitStack() as stack:
        engine = make_engine(url, poolclass=NullPool)
        stack.callback(engine.dispose)
        path = _sqlite_path(parsed)
        if path is not None:
            lock = path.with_name(path.name + ".upgrade.lock")
            stack.enter_context(locks.hold(lock, timeout_s=UPGRADE_TIMEOUT_S))
        if engine.dialect.name == "postgresql":
            stack.enter_context(busy_is_told())
            stack.enter_context(postgresql.upgrade_lock(engine, UPGRADE_TIMEOUT_S))
        options = {_BEGIN_OPTION: _IMMEDIATE}
        connection = stack.enter_context(engine.execution_options(**options).connect())
        if engine.dialect.name == "postgresql":  # a big table takes as long as it takes
            connection.exec_driver_sql("SET statement_timeout = 0")
            connection.commit()
        yield connection


def _sessions(bind: Engine) -> sessionmaker[Session]:
    return sessionmaker(bind, expire_on_commit=False)


def _parsed(url: str) -> URL:
    try:
        parsed = postgresql.with_driver(make_url(url))
    except (ArgumentError, ValueError):  # a port that is no number
        parsed = None
    if parsed is None or parsed.drivername not in ("sqlite", postgresql.DRIVER):
        raise InvalidValue(
            "database_url must be sqlite:///FILE or postgresql+psycopg://USER:PASSWORD@HOST/NAME"
        )
    return parsed


def _sqlite_path(parsed: URL) -> Path | None:
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
