"""All tables in one place, for migrations; and the schema's version: checked, upgraded, downgraded.

Importing this module registers every table on `metadata`; only `upgrade` creates any.
"""

from importlib.util import find_spec
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import Connection, MetaData, inspect, text

from registry import audit
from registry.accounts import api_keys, identities, quotas, tenants, user_sessions, users
from registry.base import Base
from registry.errors import RegistryError, SchemaError
from registry.models import catalog, floors, residency_requests, revisions, worker_orders
from registry.money import alerts, export_jobs, invoices, ledger, plans, prices, rollups
from registry.servers import dispatcher_leases, gateway_leases
from registry.session import schema_connection
from registry.state import (
    batches,
    conversations,
    file_quota,
    files,
    idempotency,
    responses,
    uploads,
)

TABLE_MODULES = (
    alerts,
    api_keys,
    audit,
    batches,
    catalog,
    conversations,
    dispatcher_leases,
    export_jobs,
    file_quota,
    files,
    floors,
    gateway_leases,
    idempotency,
    identities,
    invoices,
    ledger,
    plans,
    prices,
    quotas,
    residency_requests,
    responses,
    revisions,
    rollups,
    tenants,
    uploads,
    user_sessions,
    users,
    worker_orders,
)

metadata: MetaData = Base.metadata

# The newest migration. A test holds it to what migrations/versions says.
HEAD = "0022"


def applied(connection: Connection) -> str | None:
    """The migration the database is at; None where no schema was made yet."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    found = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return None if found is None else str(found)


def require(connection: Connection) -> None:
    """Raises SchemaError where the database is not at this build's migration."""
    found = applied(connection)
    if found is None:
        raise SchemaError("the database has no tables yet: run `polyhost db upgrade`")
    if found != HEAD:
        raise SchemaError(
            f"the database is at schema {found}, this build needs {HEAD}: stop the server and "
            "run `polyhost db upgrade` (a newer database needs a newer Polyhost)"
        )


def upgrade(url: str, revision: str = "head") -> None:
    """Bring the schema to `revision`. Safe to call from several processes at once.

    SQLite: a lock file beside the database makes the others wait. PostgreSQL: an advisory lock
    does. The upgrade is one transaction, but for a step that needs
    Alembic's autocommit_block. Raises SchemaError where the database was made by a newer build.
    """
    with schema_connection(url) as connection:
        if revision == "head" and applied(connection) == HEAD:
            return
        connection.rollback()
        try:
            command.upgrade(alembic_config(connection), revision)
        except CommandError as error:
            raise SchemaError(f"the schema cannot be upgraded: {error}") from error


def downgrade(url: str, revision: str) -> None:
    """Take the schema back to `revision` ("base": no tables). Data in what goes is lost."""
    with schema_connection(url) as connection:
        command.downgrade(alembic_config(connection), revision)


def alembic_config(connection: Connection | None = None) -> Config:
    """Alembic's configuration for the installed `migrations` package; no ini file."""
    config = Config()
    found = find_spec("migrations")
    if found is None or found.origin is None:
        raise RegistryError("the package `migrations` is not installed: install Polyhost again")
    location = str(Path(found.origin).parent)
    config.set_main_option("script_location", location.replace("%", "%%"))
    config.attributes["connection"] = connection
    return config
