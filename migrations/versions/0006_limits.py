"""Limits by the day and by kind of token; of tenants, models and the gateway, not of keys alone.

Revision 0006, after 0005. Limits of keys are kept.
"""

import sqlalchemy as sa
from alembic import op

revision: str = "0006"
down_revision: str | None = "0005"
branch_labels: tuple[str, ...] | None = None
depends_on: tuple[str, ...] | None = None

KEPT = ("requests_per_minute", "tokens_per_minute", "max_concurrency")
ADDED = (
    "requests_per_day",
    "tokens_per_day",
    "input_tokens_per_minute",
    "input_tokens_per_day",
    "output_tokens_per_minute",
    "output_tokens_per_day",
    "max_prompt_tokens",
    "max_output_tokens",
    "day_budget_nanos",
    "month_budget_nanos",
)


def upgrade() -> None:
    """A table for all scopes in place of the keys' own."""
    op.create_table(
        "limits",
        sa.Column("scope", sa.String(length=16), nullable=False),
        sa.Column("owner", sa.String(length=128), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in (*KEPT, *ADDED)),
        sa.PrimaryKeyConstraint("scope", "owner", name=op.f("pk_limits")),
    )
    kept, added = ", ".join(KEPT), ", ".join(ADDED)
    zeros = ", ".join("0" for _ in ADDED)
    op.execute(
        f"INSERT INTO limits (scope, owner, {kept}, {added}) "
        f"SELECT 'key', key_id, {kept}, {zeros} FROM quotas"
    )
    op.drop_table("quotas")


def downgrade() -> None:
    """Only the three limits of keys that there were before are kept."""
    op.create_table(
        "quotas",
        sa.Column("key_id", sa.String(length=64), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in KEPT),
        sa.ForeignKeyConstraint(
            ["key_id"], ["api_keys.id"], name=op.f("fk_quotas_key_id_api_keys"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("key_id", name=op.f("pk_quotas")),
    )
    kept = ", ".join(KEPT)
    op.execute(
        f"INSERT INTO quotas (key_id, {kept}) SELECT owner, {kept} FROM limits WHERE scope = 'key'"
    )
    op.drop_table("limits")
