"""Several servers at one database: which one's dispatcher is active, and which gateways live.

Revision 0020.
"""

import sqlalchemy as sa
from alembic import op

revision: str = "0020"
down_revision: str | None = "0019"
branch_labels: tuple[str, ...] | None = None
depends_on: tuple[str, ...] | None = None


def upgrade() -> None:
    """Two tables."""
    op.create_table(
        "dispatcher_leases",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("holder", sa.String(64), nullable=False),
        sa.Column("address", sa.String(255), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("until_at", sa.Double(), nullable=False),
        sa.Column("leads", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_dispatcher_leases"),
    )
    op.create_table(
        "gateway_leases",
        sa.Column("gateway_id", sa.String(64), nullable=False),
        sa.Column("renewed_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("gateway_id", name="pk_gateway_leases"),
    )


def downgrade() -> None:
    """The next upgrade begins with epochs by the clock."""
    op.drop_table("gateway_leases")
    op.drop_table("dispatcher_leases")
