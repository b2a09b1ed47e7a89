"""What registry/session.py needs to know of PostgreSQL: options, isolation, advisory locks.

    reading     REPEATABLE READ, READ ONLY: one snapshot for the whole block, as on SQLite. It takes
                no locks and cannot fail for serialization.
    writing     READ COMMITTED behind one advisory lock for all writers of the registry, again as
                on SQLite: what a verb checks before it writes (names taken, sums of shares, last
                owners) still holds when it writes, versions are raised one after another, and
                audit entries are numbered in the order in which they became true. SERIALIZABLE
                would say the same by failing, and every verb would have to be repeatable; changes
                by operators come a few a minute, so waiting for one another costs nothing.
    appending   READ COMMITTED without that lock, for the ledger: rows that are whole in themselves
                and named by their key, thousands a second, from several processes. Two of them may
                deadlock over the same keys; the ledger's writer tries again.

Waiting ends: connecting, a lock, a statement and an idle transaction each have a bound, so that a
stuck database or a stopped process holds nobody up for ever. Pooled connections are tried before
use, so a database that went away and came back costs one reconnect and no request.
"""

import contextlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from sqlalchemy import URL, Connection, Engine, event
from sqlalchemy.exc import OperationalError

from registry.errors import RegistryBusy

DRIVER: Final = "postgresql+psycopg"
POOL_SIZE: Final = 5
MAX_OVERFLOW: Final = 15
POOL_TIMEOUT_S: Final = 10
CONNECT_TIMEOUT_S: Final = 5
LOCK_TIMEOUT_S: Final = 5
STATEMENT_TIMEOUT_S: Final = 60
IDLE_TIMEOUT_S: Final = 120
DEAD_PEER_S: Final = 15

# Keys of advisory locks, of this product alone in its database: "polyhost" as bytes, and a number.
_LOCKS: Final = 0x706F6C79
WRITER_LOCK: Final = 1
UPGRADE_LOCK: Final = 2
_UPGRADE_RETRY_S: Final = 0.1
_UNAVAILABLE: Final = frozenset({"55P03", "40P01", "40001"})


def engine_options(**options: Any) -> dict[str, Any]:
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


def serialize_writers(engine: Engine, option: str) -> None:
    """Transactions whose execution options have `option` begin by taking the writers' lock."""

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        if connection.get_execution_options().get(option):
            connection.exec_driver_sql(
                f"SELECT pg_advisory_xact_lock({_LOCKS}, {WRITER_LOCK})"
            ).close()


READING_OPTIONS: Final = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}


def is_busy(error: OperationalError) -> bool:
    """A lock that could not be had in time, a deadlock, or a failed serialization."""
    return getattr(error.orig, "sqlstate", None) in _UNAVAILABLE


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


def with_driver(url: URL) -> URL:
    """`postgresql://` and `postgres://` mean the driver that Polyhost uses."""
    plain = url.drivername in ("postgresql", "postgres")
    return url.set(drivername=DRIVER) if plain else url
