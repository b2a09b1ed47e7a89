"""Price plans, discounts, what tenants agreed, and invoices; prices of encoders and of seconds.

Revision 0009, after 0008. Prices are kept: an encoder's tokens cost what a prompt's did.
"""

import sqlalchemy as sa
from alembic import op

revision: str = "0009"
down_revision: str | None = "0008"
branch_labels: tuple[str, ...] | None = None
depends_on: tuple[str, ...] | None = None

ADDED = ("embedding_nanos", "service_second_nanos", "load_second_nanos")
PRICES = ("prompt_nanos", "cached_nanos", "completion_nanos", *ADDED)


def upgrade() -> None:
    """Columns with what held before, and the new tables."""
    for name in ADDED:
        op.add_column(
            "prices", sa.Column(name, sa.BigInteger(), server_default="0", nullable=False)
        )
    op.execute("UPDATE prices SET embedding_nanos = prompt_nanos")
    op.create_table(
        "plan_discounts",
        sa.Column("plan", sa.String(length=128), nullable=False),
        sa.Column("valid_from", sa.Double(), nullable=False),
        sa.Column("discount_bp", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("plan", "valid_from", name=op.f("pk_plan_discounts")),
    )
    op.create_table(
        "plan_prices",
        sa.Column("plan", sa.String(length=128), nullable=False),
        sa.Column("model", sa.String(length=128), nullable=False),
        sa.Column("valid_from", sa.Double(), nullable=False),
        sa.Column("ended", sa.Boolean(), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in PRICES),
        sa.PrimaryKeyConstraint("plan", "model", "valid_from", name=op.f("pk_plan_prices")),
    )
    op.create_table(
        "tenant_terms",
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("valid_from", sa.Double(), nullable=False),
        sa.Column("plan", sa.String(length=128), nullable=False),
        sa.Column("discount_bp", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "valid_from", name=op.f("pk_tenant_terms")),
    )
    op.create_table(
        "invoices",
        sa.Column("number", sa.String(length=64), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("tenant_name", sa.String(length=128), nullable=False),
        sa.Column("began_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=False),
        sa.Column("after_seq", sa.BigInteger(), nullable=False),
        sa.Column("through_seq", sa.BigInteger(), nullable=False),
        sa.Column("currency", sa.String(length=64), nullable=False),
        sa.Column("total_nanos", sa.BigInteger(), nullable=False),
        sa.Column("issued_at", sa.Double(), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_invoices")),
        sa.UniqueConstraint("sequence", name=op.f("uq_invoices_sequence")),
        sa.UniqueConstraint("tenant_id", "began_at", name=op.f("uq_invoices_tenant_id_began_at")),
    )
    _refuse_changes("invoices")


def downgrade() -> None:
    """Plans, terms and invoices are lost; list prices of tokens stay."""
    op.drop_table("invoices")
    op.drop_table("tenant_terms")
    op.drop_table("plan_prices")
    op.drop_table("plan_discounts")
    for name in reversed(ADDED):
        op.drop_column("prices", name)


def _refuse_changes(table: str) -> None:
    """What was issued stays; the first migration made the function."""
    for action in ("UPDATE", "DELETE"):
        head = f"CREATE TRIGGER {table}_no_{action.lower()} BEFORE {action} ON {table}"
        if op.get_context().dialect.name == "postgresql":
            op.execute(f"{head} FOR EACH ROW EXECUTE FUNCTION polyhost_append_only()")
        else:
            op.execute(f"{head} BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END")
