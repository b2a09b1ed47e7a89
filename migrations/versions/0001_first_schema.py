"""The first schema: tenants, keys, limits, prices, models, ledger, audit log.

Revision 0001, after nothing. Postings and the audit log are append-only by trigger: a bug, or a
hand in the database, cannot rewrite a bill unnoticed.
"""

import sqlalchemy as sa
from alembic import op

revision: str = "0001"
down_revision: str | None = None
branch_labels: tuple[str, ...] | None = None
depends_on: tuple[str, ...] | None = None

APPEND_ONLY = ("postings", "audit_log")


def upgrade() -> None:
    """Make all tables, the version's one row and the append-only triggers."""
    op.create_table(
        "audit_log",
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("actor", sa.String(length=128), nullable=False),
        sa.Column("action", sa.String(length=64), nullable=False),
        sa.Column("target", sa.String(length=128), nullable=False),
        sa.Column("before", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("after", sa.JSON(none_as_null=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit_log")),
    )
    op.create_table(
        "models",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("requested_dtype", sa.String(length=32), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("phase", sa.String(length=32), nullable=False),
        sa.Column("done_bytes", sa.BigInteger(), nullable=False),
        sa.Column("total_bytes", sa.BigInteger(), nullable=False),
        sa.Column("reason_code", sa.String(length=64), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("registrar_host", sa.String(length=255), nullable=False),
        sa.Column("registrar_pid", sa.BigInteger(), nullable=False),
        sa.Column("heartbeat_at", sa.Double(), nullable=True),
        sa.Column("registration", sa.String(length=32), nullable=False),
        sa.Column("revision", sa.String(length=128), nullable=False),
        sa.Column("pack", sa.String(length=255), nullable=False),
        sa.Column("family", sa.String(length=128), nullable=False),
        sa.Column("dtype", sa.String(length=32), nullable=False),
        sa.Column("weight_bytes", sa.BigInteger(), nullable=False),
        sa.Column("max_context", sa.BigInteger(), nullable=False),
        sa.Column("vocab_size", sa.BigInteger(), nullable=False),
        sa.Column("pinned", sa.Boolean(), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("ready_at", sa.Double(), nullable=True),
        sa.Column("removed_at", sa.Double(), nullable=True),
        sa.CheckConstraint(
            "state IN ('registering', 'ready', 'failed', 'removed')", name=op.f("ck_models_state")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_models")),
        sa.UniqueConstraint("name", name=op.f("uq_models_name")),
    )
    op.create_index(op.f("ix_models_state"), "models", ["state"], unique=False)
    op.create_table(
        "open_records",
        sa.Column("request_id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("key_id", sa.String(length=64), nullable=False),
        sa.Column("model", sa.String(length=128), nullable=False),
        sa.Column("revision", sa.String(length=128), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("opened_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_open_records")),
    )
    op.create_table(
        "postings",
        sa.Column("request_id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("tenant_name", sa.String(length=128), nullable=False),
        sa.Column("key_id", sa.String(length=64), nullable=False),
        sa.Column("key_name", sa.String(length=128), nullable=False),
        sa.Column("model", sa.String(length=128), nullable=False),
        sa.Column("revision", sa.String(length=128), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("outcome", sa.String(length=32), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cost_nanos", sa.BigInteger(), nullable=False),
        sa.Column("service_s", sa.Double(), nullable=False),
        sa.Column("queue_s", sa.Double(), nullable=False),
        sa.Column("ttft_s", sa.Double(), nullable=False),
        sa.Column("duration_s", sa.Double(), nullable=False),
        sa.Column("posted_at", sa.Double(), nullable=False),
        sa.CheckConstraint(
            "outcome <> 'failed' OR cost_nanos = 0", name=op.f("ck_postings_failed_is_free")
        ),
        sa.CheckConstraint(
            "outcome IN ('finished', 'disconnected', 'failed', 'cache_hit')",
            name=op.f("ck_postings_outcome"),
        ),
        sa.CheckConstraint(
            "prompt_tokens >= 0 AND cached_tokens >= 0 AND completion_tokens >= 0"
            " AND cost_nanos >= 0",
            name=op.f("ck_postings_not_negative"),
        ),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_postings")),
    )
    op.create_index(
        op.f("ix_postings_posted_at_request_id"),
        "postings",
        ["posted_at", "request_id"],
        unique=False,
    )
    op.create_index(
        op.f("ix_postings_tenant_id_posted_at"),
        "postings",
        ["tenant_id", "posted_at"],
        unique=False,
    )
    op.create_table(
        "prices",
        sa.Column("model", sa.String(length=128), nullable=False),
        sa.Column("valid_from", sa.Double(), nullable=False),
        sa.Column("prompt_nanos", sa.BigInteger(), nullable=False),
        sa.Column("cached_nanos", sa.BigInteger(), nullable=False),
        sa.Column("completion_nanos", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("model", "valid_from", name=op.f("pk_prices")),
    )
    op.create_table(
        "registry_version",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_registry_version")),
    )
    op.create_table(
        "residency_requests",
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("model", sa.String(length=128), nullable=False),
        sa.Column("action", sa.String(length=16), nullable=False),
        sa.Column("requested_at", sa.Double(), nullable=False),
        sa.CheckConstraint(
            "action IN ('load', 'unload')", name=op.f("ck_residency_requests_action")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_residency_requests")),
    )
    op.create_table(
        "tenants",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("disabled", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenants")),
        sa.UniqueConstraint("name", name=op.f("uq_tenants_name")),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("public_id", sa.String(length=16), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("cache_mode", sa.String(length=16), nullable=False),
        sa.Column("allowed_models", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.Column("salt", sa.LargeBinary(), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("previous_salt", sa.LargeBinary(), nullable=True),
        sa.Column("previous_digest", sa.LargeBinary(), nullable=True),
        sa.Column("previous_until_at", sa.Double(), nullable=True),
        sa.CheckConstraint("cache_mode IN ('off', 'exact')", name=op.f("ck_api_keys_cache_mode")),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_api_keys_tenant_id_tenants")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("public_id", name=op.f("uq_api_keys_public_id")),
    )
    op.create_index(op.f("ix_api_keys_tenant_id"), "api_keys", ["tenant_id"], unique=False)
    op.create_table(
        "quotas",
        sa.Column("key_id", sa.String(length=64), nullable=False),
        sa.Column("requests_per_minute", sa.BigInteger(), nullable=False),
        sa.Column("tokens_per_minute", sa.BigInteger(), nullable=False),
        sa.Column("max_concurrency", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["key_id"], ["api_keys.id"], name=op.f("fk_quotas_key_id_api_keys"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("key_id", name=op.f("pk_quotas")),
    )
    op.execute("INSERT INTO registry_version (id, version) VALUES (1, 0)")
    _forbid_changes()


def downgrade() -> None:
    """Drop everything, triggers with their tables."""
    op.drop_table("quotas")
    op.drop_index(op.f("ix_api_keys_tenant_id"), table_name="api_keys")
    op.drop_table("api_keys")
    op.drop_table("tenants")
    op.drop_table("residency_requests")
    op.drop_table("registry_version")
    op.drop_table("prices")
    op.drop_index(op.f("ix_postings_tenant_id_posted_at"), table_name="postings")
    op.drop_index(op.f("ix_postings_posted_at_request_id"), table_name="postings")
    op.drop_table("postings")
    op.drop_table("open_records")
    op.drop_index(op.f("ix_models_state"), table_name="models")
    op.drop_table("models")
    op.drop_table("audit_log")
    if op.get_context().dialect.name == "postgresql":
        op.execute("DROP FUNCTION polyhost_append_only()")


def _forbid_changes() -> None:
    postgres = op.get_context().dialect.name == "postgresql"
    if postgres:
        op.execute(
            "CREATE FUNCTION polyhost_append_only() RETURNS trigger LANGUAGE plpgsql AS $$ "
            "BEGIN RAISE EXCEPTION USING MESSAGE = TG_TABLE_NAME || ' is append-only'; END $$"
        )
    for table in APPEND_ONLY:
        for action in ("UPDATE", "DELETE"):
            head = f"CREATE TRIGGER {table}_no_{action.lower()} BEFORE {action} ON {table}"
            if postgres:
                op.execute(f"{head} FOR EACH ROW EXECUTE FUNCTION polyhost_append_only()")
            else:
                op.execute(f"{head} BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END")
