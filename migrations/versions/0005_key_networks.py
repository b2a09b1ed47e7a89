"""Networks that a key may be used from.

Revision 0005, after 0004. Keys that are there may be used from anywhere, as before.
"""

import sqlalchemy as sa
from alembic import op

revision: str = "0005"
down_revision: str | None = "0004"
branch_labels: tuple[str, ...] | None = None
depends_on: tuple[str, ...] | None = None


def upgrade() -> None:
    """Add a column."""
    op.add_column("api_keys", sa.Column("allowed_cidrs", sa.JSON(none_as_null=True), nullable=True))


def downgrade() -> None:
    """Revoke keys that are bound to networks (they would be let in from anywhere), drop the
    column."""
    op.execute(
        "UPDATE api_keys SET revoked_at = created_at "
        "WHERE allowed_cidrs IS NOT NULL AND revoked_at IS NULL"
    )
    op.drop_column("api_keys", "allowed_cidrs")
