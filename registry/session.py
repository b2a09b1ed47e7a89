"""Engines and sessions: how the rest of the product reaches the registry.

    reading(engine)            a session for queries (a snapshot; never blocks writers)
    writing(engine, actor)     a session that commits at the end or rolls back, one writer at a time
    appending(engine, actor)   the same for the ledger's rows, which need not wait for other writers

SQLite: WAL so that readers and the one writer do not block one another; synchronous=FULL, because
a commit that returned must survive a power cut (usage is money); foreign_keys on; a writer waits
up to 5 s for another. Writers BEGIN IMMEDIATE: a transaction that reads first and writes later
would otherwise fail at once ("database is locked") when somebody wrote in between.

PostgreSQL keeps the same promises by other means:

    reading     REPEATABLE READ, READ ONLY: one snapshot for the whole block. It takes no locks and
                cannot fail for serialization.
    writing     READ COMMITTED behind one advisory lock for all writers of the registry: what an
                operation checks before it writes (names taken, sums of shares, last owners) still
                holds when it writes, versions are raised one after another, and audit entries are
                numbered in the order in which they became true. SERIALIZABLE would say the same by
                failing, and every operation would have to be repeatable; changes by operators come
                a few a minute, so waiting for one another costs nothing.
    appending   READ COMMITTED without that lock, for the ledger: rows that are whole in themselves
                and named by their key, thousands a second, from several processes. Two of them may
                deadlock over the same keys; the ledger's writer tries again.

Waiting ends: connecting, a lock, a statement and an idle transaction each have a bound, so that a
stuck database or a stopped process holds nobody up for ever. Pooled connections are tried before
use, so a database that went away and came back costs one reconnect and no request.

A URL may hold a password. It is never written anywhere: messages name `shown(url)`.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from sqlalchemy import (
    URL,
    BigInteger,
    Boolean,
    Connection,
    Double,
    Engine,
    Integer,
    NullPool,
    Table,
    create_engine,
    event,
    make_url,
)
from sqlalchemy.exc import ArgumentError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as NoConnection
from sqlalchemy.orm import Session, sessionmaker

from registry import locks
from registry.base import Base
from registry.errors import InvalidValue, RegistryAway, RegistryBusy, RegistryError

# Where `writing` keeps who is acting.
ACTOR_KEY: Final = "actor"
_BEGIN_OPTION: Final = "polyhost_begin"
_IMMEDIATE: Final = "BEGIN IMMEDIATE"
_EXCLUSIVE_OPTION: Final = "polyhost_exclusive"
UPGRADE_TIMEOUT_S: Final = 60.0

SQLITE_BUSY_TIMEOUT_MS: Final = 5000

POSTGRESQL_DRIVER: Final = "postgresql+psycopg"
POOL_SIZE: Final = 5
MAX_OVERFLOW: Final = 15
POOL_TIMEOUT_S: Final = 10
CONNECT_TIMEOUT_S: Final = 5
LOCK_TIMEOUT_S: Final = 5
STATEMENT_TIMEOUT_S: Final = 60
IDLE_TIMEOUT_S: Final = 120
DEAD_PEER_S: Final = 15
_POSTGRESQL_READING: Final = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}

# Keys of advisory locks, of this product alone in its database: "polyhost" as bytes, and a number.
_LOCKS: Final = 0x706F6C79
WRITER_LOCK: Final = 1
UPGRADE_LOCK: Final = 2
_UPGRADE_RETRY_S: Final = 0.1
_UNAVAILABLE: Final = frozenset({"55P03", "40P01", "40001"})
"""A lock that could not be had in time, a deadlock, a failed serialization."""


def make_engine(url: str, **options: Any) -> Engine:
    """An engine with this product's settings for the database. Dispose of it when done.

    Raises InvalidValue where the URL names no database that the registry can be on.
    """
    parsed = _parsed(url)
    if parsed.get_backend_name() == "postgresql":
        try:
            engine = create_engine(parsed, **_postgresql_options(**options))
        except ModuleNotFoundError as error:
            raise RegistryError(
                f"PostgreSQL needs a driver ({error.name}): pip install 'polyhost[postgres]'"
            ) from error
        event.listen(engine, "begin", _begin_postgresql)
        return engine
    engine = create_engine(parsed, **options)
    event.listen(engine, "connect", _configure_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def make_impatient_engine(url: str, timeout_s: float) -> Engine:
    """An engine for leases: one connection, on which a statement ends after `timeout_s`, and a
    server that has vanished is noticed as soon. Raises InvalidValue where it is no PostgreSQL."""
    if _parsed(url).get_backend_name() != "postgresql":
        raise InvalidValue("several servers share a PostgreSQL database: set database_url to it")
    milliseconds = round(timeout_s * 1000)
    options = _postgresql_options()
    options["connect_args"] |= {
        "connect_timeout": 2,  # the least that libpq knows
        "options": f"-c lock_timeout={milliseconds} -c statement_timeout={milliseconds}",
        "tcp_user_timeout": milliseconds,
    }
    return make_engine(url, **options | {"pool_size": 1, "max_overflow": 0, "pool_pre_ping": False})


@contextmanager
def reading(engine: Engine) -> Iterator[Session]:
    """A session on one consistent snapshot, rolled back at the end."""
    bind = engine
    if engine.dialect.name == "postgresql":
        bind = engine.execution_options(**_POSTGRESQL_READING)
    with _sessions(bind)() as session:
        yield session


@contextmanager
def writing(engine: Engine, actor: str) -> Iterator[Session]:
    """A session that commits when the block ends and rolls back when it raises.

    `actor` is who the audit log names: "cli:<OS user>", "gateway", "admin:<user>". Waits for the
    writers before it, and not for ever: see `report_busy`. Inside the block no other writer is at
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
def report_busy() -> Iterator[None]:
    """Others who took too long become RegistryBusy, for people; programs catch OperationalError and
    try again as after any other trouble with the database."""
    try:
        yield
    except OperationalError as error:
        on_sqlite = getattr(error.orig, "sqlite_errorname", "") == "SQLITE_BUSY"
        if not on_sqlite and getattr(error.orig, "sqlstate", None) not in _UNAVAILABLE:
            raise
        raise RegistryBusy(
            "another process is changing the registry, so nothing was changed: try again"
        ) from error


@contextmanager
def report_away() -> Iterator[None]:
    """A database that does not answer becomes RegistryAway, for people."""
    try:
        yield
    except (OperationalError, InterfaceError, NoConnection) as error:
        raise RegistryAway("the database does not answer: try again in a moment") from error


def insert_new(
    session: Session,
    table: type[Base],
    key: str,
    names: Sequence[str],
    rows: Sequence[tuple[Any, ...]],
) -> int:
    """Insert rows, values in the order of `names`, passing over those whose unique column `key` is
    there. Returns how many were inserted.

    SQLite: the driver's own loop over tuples. PostgreSQL: an array a column, taken apart by the
    server, so that a batch is one statement however long it is. Through the ORM the same rows cost
    several times the CPU, and the gateway that writes them serves requests at the same time.
    """
    if not rows:
        return 0
    columns = ", ".join(names)
    head = f"INSERT INTO {table.__tablename__} ({columns})"
    tail = f"ON CONFLICT ({key}) DO NOTHING"
    connection = session.connection()
    if connection.dialect.name == "sqlite":
        values = ", ".join("?" for _ in names)
        done = connection.exec_driver_sql(f"{head} VALUES ({values}) {tail}", list(rows))
        return int(done.rowcount)
    arrays = ", ".join(f"%s::{_array(table, name)}" for name in names)
    by_column = tuple(list(column) for column in zip(*rows, strict=True))
    done = connection.exec_driver_sql(f"{head} SELECT * FROM unnest({arrays}) {tail}", by_column)
    return int(done.rowcount)


def delete_keys(session: Session, table: type[Base], key: str, keys: Sequence[str]) -> None:
    """Delete the rows whose column `key` is one of these."""
    if not keys:
        return
    connection = session.connection()
    head = f"DELETE FROM {table.__tablename__} WHERE {key} ="
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql(f"{head} ?", [(each,) for each in keys])
    else:
        connection.exec_driver_sql(f"{head} ANY(%s::varchar[])", (list(keys),))


def _array(table: type[Base], name: str) -> str:
    described = table.__table__
    assert isinstance(described, Table)
    kind = described.c[name].type
    if isinstance(kind, Double):
        return "float8[]"
    if isinstance(kind, Boolean):
        return "boolean[]"
    return "bigint[]" if isinstance(kind, BigInteger | Integer) else "varchar[]"


def database_exists(url: str) -> bool:
    """False only for a SQLite file that is not there, which opening would create, or empty."""
    path = sqlite_path(url)
    return path is None or (path.exists() and path.stat().st_size > 0)


def shown(url: str) -> str:
    """A URL for people and logs: without its password."""
    return _parsed(url).render_as_string(hide_password=True)


@contextmanager
def schema_connection(url: str) -> Iterator[Connection]:
    """A connection for Alembic to begin and commit on, while nobody else changes the schema."""
    with ExitStack() as stack:
        engine = make_engine(url, poolclass=NullPool)
        stack.callback(engine.dispose)
        path = sqlite_path(url)
        if path is not None:
            lock = path.with_name(path.name + ".upgrade.lock")
            stack.enter_context(locks.hold(lock, timeout_s=UPGRADE_TIMEOUT_S))
            # This user's alone; SQLite gives the files beside it the same rights.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        if engine.dialect.name == "postgresql":
            stack.enter_context(report_busy())
            stack.enter_context(upgrade_lock(engine, UPGRADE_TIMEOUT_S))
        options = {_BEGIN_OPTION: _IMMEDIATE}
        connection = stack.enter_context(engine.execution_options(**options).connect())
        if engine.dialect.name == "postgresql":  # a big table takes as long as it takes
            connection.exec_driver_sql("SET statement_timeout = 0")
            connection.commit()
        yield connection


@contextmanager
def upgrade_lock(engine: Engine, timeout_s: float) -> Iterator[None]:
    """Held on a connection of its own, so that what migrates may commit in between.

    Raises RegistryBusy after `timeout_s`. A process that dies gives the lock back with its
    connection.
    """
    deadline_s = time.monotonic() + timeout_s
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("SET idle_in_transaction_session_timeout = 0")
        lock = f"({_LOCKS}, {UPGRADE_LOCK})"
        while not connection.exec_driver_sql(f"SELECT pg_try_advisory_lock{lock}").scalar():
            if time.monotonic() > deadline_s:
                raise RegistryBusy("another process is changing the schema: try again later")
            time.sleep(_UPGRADE_RETRY_S)
        try:
            yield
        finally:
            with contextlib.suppress(OperationalError):  # the server has gone, and the lock too
                connection.exec_driver_sql(f"SELECT pg_advisory_unlock{lock}")


def _sessions(bind: Engine) -> sessionmaker[Session]:
    return sessionmaker(bind, expire_on_commit=False)


def _parsed(url: str) -> URL:
    try:
        parsed = make_url(url)
        if parsed.drivername in ("postgresql", "postgres"):
            parsed = parsed.set(drivername=POSTGRESQL_DRIVER)
    except (ArgumentError, ValueError):  # a port that is no number
        parsed = None
    if parsed is None or parsed.drivername not in ("sqlite", POSTGRESQL_DRIVER):
        raise InvalidValue(
            "database_url must be sqlite:///FILE or postgresql+psycopg://USER:PASSWORD@HOST/NAME"
        )
    return parsed


def sqlite_path(url: str) -> Path | None:
    """The file of a SQLite database; None for another kind."""
    parsed = _parsed(url)
    if parsed.get_backend_name() != "sqlite" or not parsed.database:
        return None
    return Path(parsed.database)


def _configure_sqlite(dbapi_connection: Any, _record: Any) -> None:
    # With isolation_level None the driver never begins by itself; `_begin_sqlite` does.
    dbapi_connection.isolation_level = None
    cursor = dbapi_connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {SQLITE_BUSY_TIMEOUT_MS}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get(_BEGIN_OPTION, "BEGIN"))


def _postgresql_options(**options: Any) -> dict[str, Any]:
    """For `create_engine`; `options` win."""
    milliseconds = {
        "lock_timeout": LOCK_TIMEOUT_S * 1000,
        "statement_timeout": STATEMENT_TIMEOUT_S * 1000,
        "idle_in_transaction_session_timeout": IDLE_TIMEOUT_S * 1000,
    }
    pooled = {
        "pool_size": POOL_SIZE,
        "max_overflow": MAX_OVERFLOW,
        "pool_timeout": POOL_TIMEOUT_S,
        "pool_use_lifo": True,
    }
    return {
        **({} if "poolclass" in options else pooled),
        "pool_pre_ping": True,
        "isolation_level": "READ COMMITTED",
        "connect_args": {
            "connect_timeout": CONNECT_TIMEOUT_S,
            "application_name": "polyhost",
            "options": " ".join(f"-c {name}={value}" for name, value in milliseconds.items()),
            "keepalives_idle": DEAD_PEER_S,
            "keepalives_interval": 5,
            "keepalives_count": 2,
            "tcp_user_timeout": DEAD_PEER_S * 1000,
        },
        **options,
    }


def _begin_postgresql(connection: Connection) -> None:
    """Writers begin by taking their lock."""
    if connection.get_execution_options().get(_EXCLUSIVE_OPTION):
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCKS}, {WRITER_LOCK})").close()
