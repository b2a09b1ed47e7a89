"""What operators want of workers.

Revision 0018.
"""

import sqlalchemy as sa
from alembic import op

revision: str = "0018"
down_revision: str | None = "0017"
branch_labels: tuple[str, ...] | None = None
depends_on: tuple[str, ...] | None = None


def upgrade() -> None:
    """One table."""
    op.create_table(
        "worker_orders",
        sa.Column("worker_id", sa.String(64), nullable=False),
        sa.Column("drained", sa.Boolean(), nullable=False),
        sa.Column("restart_of", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("worker_id", name="pk_worker_orders"),
    )


def downgrade() -> None:
    """Drained workers take requests again."""
    op.drop_table("worker_orders")
