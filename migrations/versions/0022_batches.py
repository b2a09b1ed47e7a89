"""Batches of tenants, and the segments in which their answers are written.

Revision 0022.
"""

import sqlalchemy as sa
from alembic import op

revision: str = "0022"
down_revision: str | None = "0021"
branch_labels: tuple[str, ...] | None = None
depends_on: tuple[str, ...] | None = None

_STATES = (
    "'validating', 'in_progress', 'finalizing', 'cancelling', 'completed', 'failed', 'expired', "
    "'cancelled'"
)


def upgrade() -> None:
    """Two tables."""
    op.create_table(
        "batches",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("key_id", sa.String(64), nullable=False),
        sa.Column("endpoint", sa.String(64), nullable=False),
        sa.Column("model", sa.String(128), nullable=False),
        sa.Column("input_file_id", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("output_expires_s", sa.Double(), nullable=True),
        sa.Column("ends_as", sa.String(16), nullable=False),
        sa.Column("num_lines", sa.BigInteger(), nullable=False),
        sa.Column("num_completed", sa.BigInteger(), nullable=False),
        sa.Column("num_failed", sa.BigInteger(), nullable=False),
        sa.Column("answered", sa.LargeBinary(), nullable=False),
        sa.Column("error_lines", sa.JSON(), nullable=False),
        sa.Column("output_file_id", sa.String(64), nullable=True),
        sa.Column("error_file_id", sa.String(64), nullable=True),
        sa.Column("in_progress_at", sa.Double(), nullable=True),
        sa.Column("finalizing_at", sa.Double(), nullable=True),
        sa.Column("cancelling_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("token", sa.String(64), nullable=False),
        sa.Column("heartbeat_at", sa.Double(), nullable=True),
        sa.CheckConstraint(f"state IN ({_STATES})", name=op.f("ck_batches_state")),
        sa.PrimaryKeyConstraint("id", name="pk_batches"),
    )
    op.create_index(
        "ix_batches_tenant_id_created_at_id", "batches", ["tenant_id", "created_at", "id"]
    )
    op.create_index("ix_batches_state", "batches", ["state"])
    op.create_table(
        "batch_segments",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("batch_id", sa.String(64), nullable=False),
        sa.Column("has_errors", sa.Boolean(), nullable=False),
        sa.Column("object_name", sa.String(200), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_batch_segments"),
    )
    op.create_index("ix_batch_segments_batch_id", "batch_segments", ["batch_id"])
    op.create_index("ix_batch_segments_object_name", "batch_segments", ["object_name"], unique=True)


def downgrade() -> None:
    """Batches are lost; their output files stay."""
    op.drop_table("batch_segments")
    op.drop_table("batches")
