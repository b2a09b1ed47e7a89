"""Soft budgets and alerts: what to watch, where to send, and what was sent.

Revision 0010, after 0009.
"""

import sqlalchemy as sa
from alembic import op

revision: str = "0010"
down_revision: str | None = "0009"
branch_labels: tuple[str, ...] | None = None
depends_on: tuple[str, ...] | None = None


def upgrade() -> None:
    """Two tables of their own."""
    op.create_table(
        "alert_rules",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("scope", sa.String(length=16), nullable=False),
        sa.Column("owner", sa.String(length=128), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("budget_nanos", sa.BigInteger(), nullable=False),
        sa.Column("percents", sa.JSON(), nullable=False),
        sa.Column("url", sa.String(length=2048), nullable=False),
        sa.Column("secret", sa.String(length=128), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alert_rules")),
    )
    op.create_table(
        "alerts",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("rule_id", sa.String(length=64), nullable=False),
        sa.Column("period", sa.BigInteger(), nullable=False),
        sa.Column("percent", sa.BigInteger(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("raised_at", sa.Double(), nullable=False),
        sa.Column("next_try_at", sa.Double(), nullable=True),
        sa.Column("num_tries", sa.BigInteger(), nullable=False),
        sa.Column("delivered_at", sa.Double(), nullable=True),
        sa.Column("last_error", sa.String(length=256), nullable=False),
        sa.ForeignKeyConstraint(
            ["rule_id"],
            ["alert_rules.id"],
            name=op.f("fk_alerts_rule_id_alert_rules"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alerts")),
        sa.UniqueConstraint(
            "rule_id", "period", "percent", name=op.f("uq_alerts_rule_id_period_percent")
        ),
    )
    op.create_index(op.f("ix_alerts_next_try_at"), "alerts", ["next_try_at"])


def downgrade() -> None:
    """Rules and what was sent are lost."""
    op.drop_table("alerts")
    op.drop_table("alert_rules")
