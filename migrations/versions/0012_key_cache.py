"""Keys say what may be answered from the cache: two more modes, an age, a budget of false hits.

Revision 0012, after 0011. Keys that are there keep their mode.
"""

import sqlalchemy as sa
from alembic import op

revision: str = "0012"
down_revision: str | None = "0011"
branch_labels: tuple[str, ...] | None = None
depends_on: tuple[str, ...] | None = None

CHECK = "ck_api_keys_cache_mode"


def upgrade() -> None:
    """Columns of keys, and a wider check."""
    with op.batch_alter_table("api_keys") as table:
        table.add_column(sa.Column("cache_max_age_s", sa.Double(), nullable=True))
        table.add_column(sa.Column("cache_false_hit_budget", sa.Double(), nullable=True))
        table.add_column(
            sa.Column("cache_sampled", sa.Boolean(), nullable=False, server_default=sa.false())
        )
        table.drop_constraint(op.f(CHECK), type_="check")
        table.create_check_constraint(
            op.f(CHECK), "cache_mode IN ('off', 'exact', 'semantic', 'shadow')"
        )
    with op.batch_alter_table("api_keys") as table:
        table.alter_column("cache_sampled", server_default=None)


def downgrade() -> None:
    """Keys that compare meanings match exactly from then on: less is served, nothing wrongly."""
    op.execute(
        "UPDATE api_keys SET cache_mode = 'exact' WHERE cache_mode IN ('semantic', 'shadow')"
    )
    with op.batch_alter_table("api_keys") as table:
        table.drop_constraint(op.f(CHECK), type_="check")
        table.create_check_constraint(op.f(CHECK), "cache_mode IN ('off', 'exact')")
        table.drop_column("cache_sampled")
        table.drop_column("cache_false_hit_budget")
        table.drop_column("cache_max_age_s")
