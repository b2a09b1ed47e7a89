"""Stored responses and conversations, how many each tenant has, keys of idempotent requests, and a
tenant's own retention.

Revision 0019.
"""

import sqlalchemy as sa
from alembic import op

revision: str = "0019"
down_revision: str | None = "0018"
branch_labels: tuple[str, ...] | None = None
depends_on: tuple[str, ...] | None = None

_STATES = "'queued', 'in_progress', 'completed', 'incomplete', 'failed', 'cancelled'"


def upgrade() -> None:
    """Four tables and a column."""
    op.create_table(
        "responses",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("parent_id", sa.String(64), nullable=True),
        sa.Column("model", sa.String(128), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("depth", sa.BigInteger(), nullable=False),
        sa.Column("object_name", sa.String(200), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("items_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("owner", sa.String(200), nullable=False),
        sa.Column("heartbeat_at", sa.Double(), nullable=True),
        sa.Column("error_code", sa.String(64), nullable=False),
        sa.Column("error_message", sa.Text(), nullable=False),
        sa.Column("conversation_id", sa.String(64), nullable=True),
        sa.CheckConstraint(f"state IN ({_STATES})", name="ck_responses_state"),
        sa.PrimaryKeyConstraint("id", name="pk_responses"),
    )
    op.create_index("ix_responses_tenant_id_created_at", "responses", ["tenant_id", "created_at"])
    op.create_index("ix_responses_heartbeat_at", "responses", ["heartbeat_at"])
    op.create_index("ix_responses_object_name", "responses", ["object_name"], unique=True)
    op.create_table(
        "conversations",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("models", sa.JSON(), nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.Column("object_name", sa.String(200), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("items_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_conversations"),
    )
    op.create_index(
        "ix_conversations_tenant_id_updated_at", "conversations", ["tenant_id", "updated_at"]
    )
    op.create_index("ix_conversations_object_name", "conversations", ["object_name"], unique=True)
    op.create_table(
        "response_counts",
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("num_responses", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", name="pk_response_counts"),
    )
    op.create_table(
        "idempotency_keys",
        sa.Column("id", sa.String(130), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("key_sha256", sa.String(64), nullable=False),
        sa.Column("body_sha256", sa.String(64), nullable=False),
        sa.Column("response_id", sa.String(64), nullable=False),
        sa.Column("is_kept", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_idempotency_keys"),
    )
    op.create_index("ix_idempotency_keys_created_at", "idempotency_keys", ["created_at"])
    op.create_index("ix_idempotency_keys_response_id", "idempotency_keys", ["response_id"])
    op.add_column("tenants", sa.Column("response_retention_days", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    """Stored responses are lost; their objects stay until an upgrade sweeps them."""
    op.drop_column("tenants", "response_retention_days")
    op.drop_table("idempotency_keys")
    op.drop_table("response_counts")
    op.drop_table("conversations")
    op.drop_table("responses")
