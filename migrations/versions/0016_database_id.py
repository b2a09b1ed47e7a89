"""What a database calls itself, so that data folders can tell it from another.

Revision 0016. A database gets its name at the first start of a server on it.
"""

import sqlalchemy as sa
from alembic import op

revision: str = "0016"
down_revision: str | None = "0015"
branch_labels: tuple[str, ...] | None = None
depends_on: tuple[str, ...] | None = None


def upgrade() -> None:
    """One column."""
    with op.batch_alter_table("registry_version") as table:
        table.add_column(sa.Column("database_id", sa.String(64), nullable=False, server_default=""))


def downgrade() -> None:
    """Its data folders have to be adopted again (`polyhost db adopt`)."""
    with op.batch_alter_table("registry_version") as table:
        table.drop_column("database_id")
