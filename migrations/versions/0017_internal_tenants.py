"""Tenants that are the operator's own.

Revision 0017. Tenants that are there are customers.
"""

import sqlalchemy as sa
from alembic import op

revision: str = "0017"
down_revision: str | None = "0016"
branch_labels: tuple[str, ...] | None = None
depends_on: tuple[str, ...] | None = None


def upgrade() -> None:
    """One column."""
    op.add_column(
        "tenants",
        sa.Column("internal", sa.Boolean(), nullable=False, server_default=sa.false()),
    )


def downgrade() -> None:
    """The mark is lost; the playground asks for a key again."""
    op.drop_column("tenants", "internal")
