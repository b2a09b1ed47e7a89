"""Users by what identity providers know them as; sign-ins that were used up; how a session began.

Revision 0014. Sessions that are there began with a password.
"""

import sqlalchemy as sa
from alembic import op

revision: str = "0014"
down_revision: str | None = "0013"
branch_labels: tuple[str, ...] | None = None
depends_on: tuple[str, ...] | None = None


def upgrade() -> None:
    """Two tables and a column."""
    op.create_table(
        "user_identities",
        sa.Column("issuer", sa.String(255), nullable=False),
        sa.Column("subject", sa.String(255), nullable=False),
        sa.Column("user_id", sa.String(64), nullable=False),
        sa.Column("bound_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["user_id"],
            ["users.id"],
            name=op.f("fk_user_identities_user_id_users"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("issuer", "subject", name=op.f("pk_user_identities")),
        sa.UniqueConstraint("user_id", "issuer", name=op.f("uq_user_identities_user_id_issuer")),
    )
    op.create_table(
        "used_sign_ins",
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("used_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_used_sign_ins")),
    )
    op.create_index(op.f("ix_used_sign_ins_used_at"), "used_sign_ins", ["used_at"])
    with op.batch_alter_table("user_sessions") as table:
        table.add_column(sa.Column("issuer", sa.String(255), nullable=False, server_default=""))


def downgrade() -> None:
    """Users stay; who has no password gets one by `polyhost users passwd`."""
    with op.batch_alter_table("user_sessions") as table:
        table.drop_column("issuer")
    op.drop_index(op.f("ix_used_sign_ins_used_at"), table_name="used_sign_ins")
    op.drop_table("used_sign_ins")
    op.drop_table("user_identities")
