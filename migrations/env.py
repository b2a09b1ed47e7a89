"""Alembic's entry: runs the migrations on the connection that `registry.session` hands over.

Everything runs in the caller's one transaction, so a schema is either wholly upgraded or untouched.
Offline (`alembic upgrade --sql`) the statements are written out instead, for operators whose
database administrators apply them.
"""

from alembic import context
from sqlalchemy import Connection

from registry import schema


def run_online(connection: Connection) -> None:
    """Migrate over an open connection; the caller commits."""
    context.configure(
        connection=connection,
        target_metadata=schema.metadata,
        compare_type=True,
        render_as_batch=True,
        transactional_ddl=True,
    )
    with context.begin_transaction():
        context.run_migrations()


def run_offline(dialect: str) -> None:
    """Write the statements for a dialect to the configured buffer."""
    context.configure(dialect_name=dialect, target_metadata=schema.metadata, transactional_ddl=True)
    with context.begin_transaction():
        context.run_migrations()


if context.is_offline_mode():
    run_offline(context.config.attributes["dialect"])
else:
    run_online(context.config.attributes["connection"])
