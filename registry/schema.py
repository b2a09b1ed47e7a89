"""All tables in one place, for migrations and for the check that a database fits this build.

Importing this module registers every table on `metadata`; nothing else here creates anything.
"""

from sqlalchemy import Connection, MetaData, inspect, text

from registry import (
    alerts,
    api_keys,
    audit,
    catalog,
    export_jobs,
    floors,
    identities,
    invoices,
    ledger,
    plans,
    prices,
    quotas,
    residency_requests,
    revisions,
    rollups,
    sign_ins,
    tenants,
    user_sessions,
    users,
    version,
)
from registry.base import Base
from registry.errors import SchemaError

TABLE_MODULES = (
    alerts,
    api_keys,
    audit,
    catalog,
    export_jobs,
    floors,
    identities,
    invoices,
    ledger,
    plans,
    prices,
    quotas,
    residency_requests,
    revisions,
    rollups,
    sign_ins,
    tenants,
    user_sessions,
    users,
    version,
)

metadata: MetaData = Base.metadata

# The newest migration. A test holds it to what migrations/versions says.
HEAD = "0015"


def revision(connection: Connection) -> str | None:
    """The migration the database is at; None where no schema was made yet."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    found = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return None if found is None else str(found)


def require(connection: Connection) -> None:
    """Raises SchemaError where the database is not at this build's migration."""
    found = revision(connection)
    if found is None:
        raise SchemaError("the database has no tables yet: run `polyhost db upgrade`")
    if found != HEAD:
        raise SchemaError(
            f"the database is at schema {found}, this build needs {HEAD}: stop the server and "
            "run `polyhost db upgrade` (a newer database needs a newer Polyhost)"
        )
