"""How much of a worker a tenant's models keep.

Revision 0015. Nobody has a floor before one is set.
"""

import sqlalchemy as sa
from alembic import op

revision: str = "0015"
down_revision: str | None = "0014"
branch_labels: tuple[str, ...] | None = None
depends_on: tuple[str, ...] | None = None


def upgrade() -> None:
    """One table."""
    op.create_table(
        "model_floors",
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("models", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_model_floors_tenant_id_tenants")
        ),
        sa.PrimaryKeyConstraint("tenant_id", name=op.f("pk_model_floors")),
    )


def downgrade() -> None:
    """Drop it."""
    op.drop_table("model_floors")
