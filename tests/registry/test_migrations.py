"""Every migration, up and down, with rows in place, on both databases.

Nothing here knows a single migration: rows are made from what the database says of its tables, one
in every table when it appears and one more whenever its columns change. A new column with a CHECK
needs an example in EXAMPLES; all else is found out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    Connection,
    Engine,
    Inspector,
    LargeBinary,
    MetaData,
    Numeric,
    String,
    Table,
    inspect,
    select,
    text,
)
from sqlalchemy.types import Float, Integer

from registry import schema
from registry.schema import alembic_config, downgrade, upgrade
from registry.session import make_engine
from tests.registry.test_schema import drift

# Values that a CHECK asks for, by column or by table and column; of the migration's number.
EXAMPLES: dict[str, object] = {
    "limits.scope": lambda number: "key" if number == 6 else "gateway",
    "limits.owner": lambda number: "id-5" if number == 6 else "",  # a key that there is
    "state": "ready",
    "export_jobs.state": "done",
    "responses.state": "completed",
    "uploads.state": "completed",
    "batches.state": "completed",
    "cache_mode": "off",
    "action": "load",
    "audit_log.action": "tenant.create",
    "outcome": "finished",
    "scope": "key",
    "priority": "standard",
    "task": "generate",
    "role": "owner",
    "corrects": "",
    "parent_id": None,
}
# What goes with a table that is split or replaced; tests of the migration itself say where to.
REPLACED = frozenset({"quotas"})
ALEMBIC = "alembic_version"

Rows = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class State:
    """A database at one revision: what its tables are and what is in them."""

    tables: dict[str, frozenset[str]]
    rows: Rows


@pytest.fixture
def bare(url: str) -> Iterator[Engine]:
    """An engine over a database without tables."""
    engine = make_engine(url)
    yield engine
    engine.dispose()


def revisions() -> list[str]:
    script = ScriptDirectory.from_config(alembic_config())
    return [found.revision for found in reversed(list(script.walk_revisions()))]


def fill(engine: Engine, number: int, before: State) -> None:
    """A row in each table that is new or changed since `before`."""
    with engine.begin() as connection:
        found = MetaData()
        found.reflect(connection)
        found.remove(found.tables[ALEMBIC])
        for one in found.sorted_tables:
            columns = frozenset(one.columns.keys())
            one_row = one.name in ("registry_version", "ledger_state")
            if one_row or before.tables.get(one.name, frozenset()) >= columns:
                continue
            row = {c.name: example(c, one, number) for c in one.columns}
            for column in one.columns:
                for key in column.foreign_keys:
                    row[column.name] = connection.scalar(select(key.column).limit(1))
            connection.execute(one.insert(), row)


def example(column: Column[Any], owner: Table, number: int) -> object:
    for name in (f"{owner.name}.{column.name}", column.name):
        if name in EXAMPLES:
            value = EXAMPLES[name]
            return value(number) if callable(value) else value
    if isinstance(column.type, Boolean):
        return False
    if isinstance(column.type, String):
        return f"{column.name}-{number}"[: column.type.length]
    if isinstance(column.type, LargeBinary):
        return bytes([number])
    if isinstance(column.type, JSON):
        return ["of", number]
    assert isinstance(column.type, Integer | Float | Numeric), (owner.name, column)
    return number


def state(engine: Engine) -> State:
    with engine.connect() as connection:
        tables = shapes(connection, inspect(connection))
        rows: Rows = {}
        for name in tables:
            every = connection.execute(text(f'SELECT * FROM "{name}"')).mappings()
            rows[name] = [dict(row) for row in every]
    return State(tables, rows)


def shapes(connection: Connection, inspector: Inspector) -> dict[str, frozenset[str]]:
    """All that the database knows of each table, in words; columns come by their bare names too.
    Asked for all tables at once: one at a time, PostgreSQL took a minute for the whole chain."""
    words: dict[str, set[str]] = {}
    for (_, name), columns in inspector.get_multi_columns().items():
        words[name] = {c["name"] for c in columns} | {
            f"{c['name']} {c['type']} null={c['nullable']} {c['default']}" for c in columns
        }
    for (_, name), key in inspector.get_multi_pk_constraint().items():
        assert key is not None
        words[name].add(f"key {key['name']} {key['constrained_columns']}")
    for (_, name), found in inspector.get_multi_unique_constraints().items():
        words[name] |= {f"unique {u['name']} {u['column_names']}" for u in found}
    for (_, name), checks in inspector.get_multi_check_constraints().items():
        words[name] |= {f"check {c['name']} {c['sqltext']}" for c in checks}
    for (_, name), keys in inspector.get_multi_foreign_keys().items():
        words[name] |= {
            f"foreign {f['name']} {f['constrained_columns']} {f['referred_table']} {f['options']}"
            for f in keys
        }
    for (_, name), indexes in inspector.get_multi_indexes().items():
        words[name] |= {f"index {i['name']} {i['column_names']}" for i in indexes}
    query = {
        "sqlite": "SELECT tbl_name, name FROM sqlite_master WHERE type = 'trigger'",
        "postgresql": "SELECT relname, tgname FROM pg_trigger JOIN pg_class"
        " ON pg_class.oid = tgrelid WHERE NOT tgisinternal",
    }[connection.dialect.name]
    for name, trigger in connection.execute(text(query)):
        words[name].add(f"trigger {trigger}")
    return {name: frozenset(each) for name, each in words.items() if name != ALEMBIC}


def kept(before: State, after: State) -> None:
    """What both have of a table is the same in both."""
    for table in before.rows.keys() & after.rows.keys():
        assert len(before.rows[table]) == len(after.rows[table]), table
        if not before.rows[table]:
            continue
        common = sorted(before.rows[table][0].keys() & after.rows[table][0].keys())
        old = [tuple(repr(row[name]) for name in common) for row in before.rows[table]]
        new = [tuple(repr(row[name]) for name in common) for row in after.rows[table]]
        assert sorted(old) == sorted(new), table


def test_up_and_down_step_by_step_with_rows_in_place(url: str, bare: Engine) -> None:
    chain, engine = revisions(), bare
    assert chain[-1] == schema.HEAD
    at: dict[str, State] = {}
    last = State({}, {})
    for number, revision in enumerate(chain, 1):
        upgrade(url, revision)
        now = state(engine)
        kept(last, now)
        assert not last.rows.keys() - now.rows.keys() - REPLACED
        fill(engine, number, last)
        last = at[revision] = state(engine)
        empty = [name for name, rows in last.rows.items() if not rows]
        assert not empty
    assert drift(engine) == []
    for above, revision in zip(reversed(chain), reversed(chain[:-1]), strict=False):
        downgrade(url, revision)
        now = state(engine)
        assert now.tables == at[revision].tables, f"{above} does not go back to {revision}"
        kept(last, now)
        last = now
    upgrade(url)
    now = state(engine)
    kept(last, now)
    assert now.tables == at[schema.HEAD].tables
    downgrade(url, "base")
    assert set(inspect(engine).get_table_names()) <= {ALEMBIC}


def test_a_downgrade_that_forgets_would_be_seen(url: str, bare: Engine) -> None:
    upgrade(url, "0001")
    engine = bare
    before = state(engine)
    with engine.begin() as connection:
        connection.execute(text("CREATE INDEX forgotten ON tenants (weight)"))
    assert state(engine).tables != before.tables
    with engine.begin() as connection:
        connection.execute(text("UPDATE registry_version SET version = 5"))
    with pytest.raises(AssertionError, match="registry_version"):
        kept(before, state(engine))
