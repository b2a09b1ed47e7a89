"""Exports as jobs, how fast registrations go, and roll-ups by week and by four weeks.

Revision 0013, after 0012. The new roll-ups are made of those by day that are there.
"""

import sqlalchemy as sa
from alembic import op

revision: str = "0013"
down_revision: str | None = "0012"
branch_labels: tuple[str, ...] | None = None
depends_on: tuple[str, ...] | None = None

DAY_S = 86_400
LONG_SPANS_S = (7 * DAY_S, 28 * DAY_S)
OWNERS = "tenant_id, key_id, model, revision, kind, outcome"
SUMS = (
    *("num_postings", "prompt_tokens", "cached_tokens", "completion_tokens", "cost_nanos"),
    *("input_nanos", "cached_nanos", "output_nanos", "service_nanos", "load_nanos", "list_nanos"),
    *("service_us", "prefill_us", "decode_us", "load_us", "queue_us", "ttft_us", "duration_us"),
)
STATES = "'waiting', 'running', 'done', 'failed', 'cancelled'"


def upgrade() -> None:
    """A table, two columns, sums of days."""
    op.create_table(
        "export_jobs",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("format", sa.String(length=16), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("tenant_name", sa.String(length=128), nullable=False),
        sa.Column("asked", sa.JSON(), nullable=False),
        sa.Column("file_name", sa.String(length=255), nullable=False),
        sa.Column("asked_by", sa.String(length=128), nullable=False),
        sa.Column("total_rows", sa.BigInteger(), nullable=False),
        sa.Column("num_rows", sa.BigInteger(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("cost_nanos", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("done_share", sa.Double(), nullable=False),
        sa.Column("share_per_s", sa.Double(), nullable=False),
        sa.Column("reason_code", sa.String(length=64), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("attempt", sa.String(length=32), nullable=False),
        sa.Column("runner_host", sa.String(length=255), nullable=False),
        sa.Column("runner_pid", sa.BigInteger(), nullable=False),
        sa.Column("heartbeat_at", sa.Double(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.CheckConstraint(f"state IN ({STATES})", name=op.f("ck_export_jobs_state")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_export_jobs")),
    )
    op.create_index(op.f("ix_export_jobs_created_at"), "export_jobs", ["created_at"], unique=False)
    op.add_column(
        "models", sa.Column("bytes_per_s", sa.Double(), nullable=False, server_default=sa.text("0"))
    )
    op.add_column("models", sa.Column("phase_at", sa.Double(), nullable=True))
    names, sums = "max(tenant_name), max(key_name)", ", ".join(f"sum({name})" for name in SUMS)
    for span_s in LONG_SPANS_S:
        began_at = f"began_at / {span_s} * {span_s}"
        op.execute(
            f"INSERT INTO usage_rollups (span_s, began_at, {OWNERS}, tenant_name, key_name, "
            f"{', '.join(SUMS)}) SELECT {span_s}, {began_at}, {OWNERS}, {names}, {sums} "
            f"FROM usage_rollups WHERE span_s = {DAY_S} GROUP BY {began_at}, {OWNERS}"
        )


def downgrade() -> None:
    """What was exported stays in its folder, and nobody finds it any more."""
    op.execute(f"DELETE FROM usage_rollups WHERE span_s > {DAY_S}")
    for name in ("phase_at", "bytes_per_s"):
        op.drop_column("models", name)
    op.drop_index(op.f("ix_export_jobs_created_at"), table_name="export_jobs")
    op.drop_table("export_jobs")
