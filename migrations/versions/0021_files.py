"""Files of tenants, uploads in parts, and what a tenant has of them.

Revision 0021.
"""

import sqlalchemy as sa
from alembic import op

revision: str = "0021"
down_revision: str | None = "0020"
branch_labels: tuple[str, ...] | None = None
depends_on: tuple[str, ...] | None = None

_STATES = "'pending', 'completed', 'cancelled', 'expired'"


def upgrade() -> None:
    """Five tables."""
    op.create_table(
        "files",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("purpose", sa.String(32), nullable=False),
        sa.Column("filename", sa.String(255), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("object_name", sa.String(200), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_files"),
    )
    op.create_index("ix_files_tenant_id_created_at_id", "files", ["tenant_id", "created_at", "id"])
    op.create_index("ix_files_expires_at", "files", ["expires_at"])
    op.create_index("ix_files_object_name", "files", ["object_name"], unique=True)
    op.create_table(
        "file_counts",
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("num_files", sa.BigInteger(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", name="pk_file_counts"),
    )
    op.create_table(
        "file_reservations",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_file_reservations"),
    )
    op.create_index("ix_file_reservations_expires_at", "file_reservations", ["expires_at"])
    op.create_table(
        "uploads",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("purpose", sa.String(32), nullable=False),
        sa.Column("filename", sa.String(255), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("num_parts", sa.BigInteger(), nullable=False),
        sa.Column("parts_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("file_expires_s", sa.Double(), nullable=True),
        sa.Column("file_id", sa.String(64), nullable=True),
        sa.CheckConstraint(f"state IN ({_STATES})", name=op.f("ck_uploads_state")),
        sa.PrimaryKeyConstraint("id", name="pk_uploads"),
    )
    op.create_index("ix_uploads_expires_at", "uploads", ["expires_at"])
    op.create_index("ix_uploads_tenant_id", "uploads", ["tenant_id"])
    op.create_table(
        "upload_parts",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("upload_id", sa.String(64), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("object_name", sa.String(200), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_upload_parts"),
    )
    op.create_index("ix_upload_parts_upload_id", "upload_parts", ["upload_id"])
    op.create_index("ix_upload_parts_object_name", "upload_parts", ["object_name"], unique=True)


def downgrade() -> None:
    """Files are lost; their objects stay until an upgrade sweeps them."""
    op.drop_table("upload_parts")
    op.drop_table("uploads")
    op.drop_table("file_reservations")
    op.drop_table("file_counts")
    op.drop_table("files")
