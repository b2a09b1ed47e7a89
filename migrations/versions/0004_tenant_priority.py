"""Tenants' priority class, and the share of a worker that is kept free for them.

Revision 0004, after 0003. Tenants that are there are standard ones and have nothing reserved.
"""

import sqlalchemy as sa
from alembic import op

revision: str = "0004"
down_revision: str | None = "0003"
branch_labels: tuple[str, ...] | None = None
depends_on: tuple[str, ...] | None = None


def upgrade() -> None:
    """Add the columns; rows that are there get their defaults."""
    op.add_column(
        "tenants",
        sa.Column("priority", sa.String(length=16), server_default="standard", nullable=False),
    )
    op.add_column(
        "tenants",
        sa.Column("reserved_share", sa.Double(), server_default=sa.text("0"), nullable=False),
    )


def downgrade() -> None:
    """Drop the columns."""
    for name in ("reserved_share", "priority"):
        op.drop_column("tenants", name)
