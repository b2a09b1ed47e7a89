"""Where a model came from (revision asked for, commit), and the revisions it had before.

Revision 0003, after 0002. Models that are there came from folders; the revision they are served
from gets its row when a second one comes (registry/models/revisions.py).
"""

import sqlalchemy as sa
from alembic import op

revision: str = "0003"
down_revision: str | None = "0002"
branch_labels: tuple[str, ...] | None = None
depends_on: tuple[str, ...] | None = None


def upgrade() -> None:
    """Add two columns and the table."""
    for name, length in (("requested_revision", 128), ("source_commit", 64)):
        op.add_column(
            "models", sa.Column(name, sa.String(length=length), server_default="", nullable=False)
        )
    op.create_table(
        "model_revisions",
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("model_id", sa.String(length=64), nullable=False),
        sa.Column("revision", sa.String(length=128), nullable=False),
        sa.Column("pack", sa.String(length=255), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("requested_dtype", sa.String(length=32), nullable=False),
        sa.Column("requested_revision", sa.String(length=128), nullable=False),
        sa.Column("source_commit", sa.String(length=64), nullable=False),
        sa.Column("facts", sa.JSON(), nullable=False),
        sa.Column("registered_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["model_id"], ["models.id"], name=op.f("fk_model_revisions_model_id_models")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_model_revisions")),
        sa.UniqueConstraint(
            "model_id", "revision", name=op.f("uq_model_revisions_model_id_revision")
        ),
    )


def downgrade() -> None:
    """Drop the earlier revisions (what is served stays) and registrations of new ones."""
    op.drop_table("model_revisions")
    op.execute("DELETE FROM models WHERE name LIKE '%@next'")
    for name in ("source_commit", "requested_revision"):
        op.drop_column("models", name)
