"""Sessions of users say when and from where they were used last; sign-ins that failed are counted.

Revision 0011, after 0010.
"""

import sqlalchemy as sa
from alembic import op

revision: str = "0011"
down_revision: str | None = "0010"
branch_labels: tuple[str, ...] | None = None
depends_on: tuple[str, ...] | None = None


def upgrade() -> None:
    """Columns of sessions, which are all past their idle time afterwards; a table."""
    with op.batch_alter_table("user_sessions") as table:
        table.add_column(sa.Column("seen_at", sa.Double(), nullable=False, server_default="0"))
        table.add_column(
            sa.Column("address", sa.String(length=64), nullable=False, server_default="")
        )
        table.add_column(
            sa.Column("agent", sa.String(length=256), nullable=False, server_default="")
        )
    op.create_table(
        "sign_in_failures",
        sa.Column("subject", sa.String(length=400), nullable=False),
        sa.Column("num_failed", sa.BigInteger(), nullable=False),
        sa.Column("failed_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("subject", name=op.f("pk_sign_in_failures")),
    )


def downgrade() -> None:
    """Counts and the new columns are lost; sessions go on."""
    op.drop_table("sign_in_failures")
    with op.batch_alter_table("user_sessions") as table:
        table.drop_column("agent")
        table.drop_column("address")
        table.drop_column("seen_at")
