"""What a hosted model is for: generating, embedding or classifying, and what it answers with.

Revision 0002, after 0001. Models that are there already generate: until now nothing else could be
registered.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision: str = "0002"
down_revision: str | None = "0001"
branch_labels: tuple[str, ...] | None = None
depends_on: tuple[str, ...] | None = None


def upgrade() -> None:
    """Add the columns; rows that are there get their defaults."""
    columns: tuple[sa.Column[Any], ...] = (
        sa.Column("task", sa.String(length=16), server_default="generate", nullable=False),
        sa.Column("dim", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("labels", sa.JSON(), server_default=sa.text("'[]'"), nullable=False),
        sa.Column("multi_label", sa.Boolean(), server_default=sa.false(), nullable=False),
    )
    for column in columns:
        op.add_column("models", column)


def downgrade() -> None:
    """Drop the columns (SQLite from 3.35 on can)."""
    for name in ("multi_label", "labels", "dim", "task"):
        op.drop_column("models", name)
