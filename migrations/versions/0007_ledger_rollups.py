"""What a posting tells, corrections, roll-ups, and what retention may delete.

Revision 0007, after 0006. Postings are kept: they are copied into a table that numbers them, in the
order in which they were made. Open records are kept too; nobody knows any more whose they were.
"""

import sqlalchemy as sa
from alembic import op

revision: str = "0007"
down_revision: str | None = "0006"
branch_labels: tuple[str, ...] | None = None
depends_on: tuple[str, ...] | None = None

KEPT = (
    *("request_id", "tenant_id", "tenant_name", "key_id", "key_name", "model", "revision"),
    *("kind", "outcome", "prompt_tokens", "cached_tokens", "completion_tokens", "cost_nanos"),
    *("service_s", "queue_s", "ttft_s", "duration_s", "posted_at"),
)
OWNERS = (
    *(("tenant_id", 64), ("key_id", 64), ("model", 128), ("revision", 128)),
    *(("kind", 32), ("outcome", 32), ("tenant_name", 128), ("key_name", 128)),
)
SECONDS = ("prefill_s", "decode_s", "load_s")
NANOS = (
    *("input_nanos", "cached_nanos", "output_nanos", "service_nanos", "load_nanos"),
    "list_nanos",
)
SUMS = (
    *("num_postings", "prompt_tokens", "cached_tokens", "completion_tokens", "cost_nanos"),
    *NANOS,
    *("service_us", "prefill_us", "decode_us", "load_us", "queue_us", "ttft_us", "duration_us"),
)


def upgrade() -> None:
    """Postings into their new table; the others beside it."""
    op.create_table(
        "ledger_state",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("rolled_seq", sa.BigInteger(), nullable=False),
        sa.Column("kept_from", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_ledger_state")),
    )
    op.execute("INSERT INTO ledger_state (id, rolled_seq, kept_from) VALUES (1, 0, 0)")
    op.create_table(
        "usage_rollups",
        sa.Column("span_s", sa.Integer(), nullable=False),
        sa.Column("began_at", sa.BigInteger(), nullable=False),
        *(
            sa.Column(name, sa.String(length=64), nullable=False)
            for name in ("tenant_id", "key_id")
        ),
        *(sa.Column(name, sa.String(length=128), nullable=False) for name in ("model", "revision")),
        *(sa.Column(name, sa.String(length=32), nullable=False) for name in ("kind", "outcome")),
        *(
            sa.Column(name, sa.String(length=128), nullable=False)
            for name in ("tenant_name", "key_name")
        ),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in SUMS),
        sa.PrimaryKeyConstraint(
            *("span_s", "began_at", "tenant_id", "key_id", "model", "revision", "kind", "outcome"),
            name=op.f("pk_usage_rollups"),
        ),
    )
    op.create_index(
        op.f("ix_usage_rollups_tenant_id_span_s_began_at"),
        "usage_rollups",
        ["tenant_id", "span_s", "began_at"],
        unique=False,
    )
    op.add_column(
        "open_records",
        sa.Column("gateway_id", sa.String(length=64), server_default="", nullable=False),
    )
    for name in ("reserved_nanos", "streamed_tokens"):
        op.add_column(
            "open_records", sa.Column(name, sa.BigInteger(), server_default="0", nullable=False)
        )
    op.create_index(
        op.f("ix_open_records_gateway_id"), "open_records", ["gateway_id"], unique=False
    )
    _put_aside(numbered=False)
    _create_postings(numbered=True)
    kept, zeros = ", ".join(KEPT), ", ".join("0" for _ in (*SECONDS, *NANOS))
    # What a request of an earlier release cost was all at list price; its parts are not known.
    op.execute(
        f"INSERT INTO postings ({kept}, arrived_at, {', '.join((*SECONDS, *NANOS))}, corrects) "
        f"SELECT {kept}, 0, {zeros}, '' FROM old_postings ORDER BY posted_at, request_id"
    )
    op.drop_table("old_postings")
    _guard(retained=True)


def downgrade() -> None:
    """Postings as they were; corrections and roll-ups are lost, what retention deleted stays so."""
    _put_aside(numbered=True)
    _create_postings(numbered=False)
    kept = ", ".join(KEPT)
    op.execute(
        f"INSERT INTO postings ({kept}) SELECT {kept} FROM old_postings "
        "WHERE outcome <> 'correction'"
    )
    op.drop_table("old_postings")
    if op.get_context().dialect.name == "postgresql":
        op.execute("DROP FUNCTION polyhost_retained()")
    _guard(retained=False)
    op.drop_index(op.f("ix_open_records_gateway_id"), table_name="open_records")
    for name in ("streamed_tokens", "reserved_nanos", "gateway_id"):
        op.drop_column("open_records", name)
    op.drop_index(op.f("ix_usage_rollups_tenant_id_span_s_began_at"), table_name="usage_rollups")
    op.drop_table("usage_rollups")
    op.drop_table("ledger_state")


def _put_aside(numbered: bool) -> None:
    """The table under another name, without what has a name of its own in the schema."""
    for name in ("posted_at_request_id", "tenant_id_posted_at", *(["corrects"] * numbered)):
        op.drop_index(op.f(f"ix_postings_{name}"), table_name="postings")
    op.rename_table("postings", "old_postings")
    if op.get_context().dialect.name == "postgresql":
        op.drop_constraint(op.f("pk_postings"), "old_postings", type_="primary")
        if numbered:
            op.drop_constraint(op.f("uq_postings_request_id"), "old_postings", type_="unique")


def _create_postings(numbered: bool) -> None:
    """`numbered`: as of this revision; else as of the one before."""
    number = sa.Column(
        "seq",
        sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
        autoincrement=True,
        nullable=False,
    )
    counts = "prompt_tokens >= 0 AND cached_tokens >= 0 AND completion_tokens >= 0"
    counts += " AND cost_nanos >= 0"
    outcomes = "'finished', 'disconnected', 'failed', 'cache_hit'"
    columns: list[sa.schema.SchemaItem] = [
        sa.Column("request_id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("tenant_name", sa.String(length=128), nullable=False),
        sa.Column("key_id", sa.String(length=64), nullable=False),
        sa.Column("key_name", sa.String(length=128), nullable=False),
        sa.Column("model", sa.String(length=128), nullable=False),
        sa.Column("revision", sa.String(length=128), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("outcome", sa.String(length=32), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in KEPT[9:13]),
        *(sa.Column(name, sa.Double(), nullable=False) for name in KEPT[13:]),
        sa.CheckConstraint(
            "outcome <> 'failed' OR cost_nanos = 0", name=op.f("ck_postings_failed_is_free")
        ),
    ]
    if numbered:
        columns = [
            number,
            *columns,
            sa.Column("arrived_at", sa.Double(), nullable=False),
            *(sa.Column(name, sa.Double(), nullable=False) for name in SECONDS),
            *(sa.Column(name, sa.BigInteger(), nullable=False) for name in NANOS),
            sa.Column("corrects", sa.String(length=64), nullable=False),
            sa.PrimaryKeyConstraint("seq", name=op.f("pk_postings")),
            sa.UniqueConstraint("request_id", name=op.f("uq_postings_request_id")),
            sa.CheckConstraint(
                f"outcome IN ({outcomes}, 'correction')", name=op.f("ck_postings_outcome")
            ),
            sa.CheckConstraint(
                "(outcome = 'correction') = (corrects <> '')", name=op.f("ck_postings_corrects")
            ),
            sa.CheckConstraint(
                f"outcome = 'correction' OR ({counts})", name=op.f("ck_postings_not_negative")
            ),
        ]
    else:
        columns += [
            sa.PrimaryKeyConstraint("request_id", name=op.f("pk_postings")),
            sa.CheckConstraint(f"outcome IN ({outcomes})", name=op.f("ck_postings_outcome")),
            sa.CheckConstraint(counts, name=op.f("ck_postings_not_negative")),
        ]
    op.create_table("postings", *columns, sqlite_autoincrement=numbered)
    for indexed in (["posted_at", "request_id"], ["tenant_id", "posted_at"]):
        name = op.f(f"ix_postings_{'_'.join(indexed)}")
        op.create_index(name, "postings", indexed, unique=False)
    if numbered:
        op.create_index(op.f("ix_postings_corrects"), "postings", ["corrects"], unique=False)


def _guard(retained: bool) -> None:
    """No row is changed, and none deleted (`retained`: but those before ledger_state.kept_from)."""
    kept = "OLD.posted_at >= (SELECT kept_from FROM ledger_state)"
    if op.get_context().dialect.name == "postgresql":
        refuse = "polyhost_append_only()"
        if retained:
            op.execute(
                "CREATE FUNCTION polyhost_retained() RETURNS trigger LANGUAGE plpgsql AS $$ "
                f"BEGIN IF {kept} THEN RAISE EXCEPTION USING MESSAGE = 'postings is append-only'; "
                "END IF; RETURN OLD; END $$"
            )
        delete = "polyhost_retained()" if retained else refuse
        for action, function in (("update", refuse), ("delete", delete)):
            op.execute(
                f"CREATE TRIGGER postings_no_{action} BEFORE {action.upper()} ON postings "
                f"FOR EACH ROW EXECUTE FUNCTION {function}"
            )
        return
    refuse = "BEGIN SELECT RAISE(ABORT, 'postings is append-only'); END"
    when = f"WHEN {kept} " if retained else ""
    op.execute(f"CREATE TRIGGER postings_no_update BEFORE UPDATE ON postings {refuse}")
    op.execute(f"CREATE TRIGGER postings_no_delete BEFORE DELETE ON postings {when}{refuse}")
