"""Migrations are the only way the schema is made, and they make what the tables say."""

import io
import multiprocessing
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, inspect, text
from sqlalchemy.exc import DatabaseError

from registry import schema
from registry.accounts import api_keys, quotas, tenants
from registry.accounts.quotas import UNLIMITED, Limits
from registry.audit import current_version
from registry.errors import SchemaError
from registry.models import catalog
from registry.money import ledger
from registry.money.ledger import Posting
from registry.schema import alembic_config, downgrade, upgrade
from registry.session import database_exists, make_engine, reading, writing


def drift(engine: Engine) -> list[object]:
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        return list(compare_metadata(context, schema.metadata))


def test_the_migrated_schema_is_the_tables(engine: Engine) -> None:
    assert drift(engine) == []


def test_drift_would_be_seen(engine: Engine) -> None:
    with writing(engine, "test") as session:
        session.execute(text("ALTER TABLE tenants ADD COLUMN surplus TEXT"))
    assert drift(engine)


def test_down_and_up_again(url: str, engine: Engine) -> None:
    downgrade(url, "base")
    assert set(inspect(engine).get_table_names()) <= {"alembic_version"}
    upgrade(url)
    assert drift(engine) == []
    with reading(engine) as session:
        assert current_version(session) == 0


def test_models_of_an_older_schema_generate(url: str, engine: Engine) -> None:
    downgrade(url, "0001")
    values = (
        "'mdl_1', 'old', '/m', 'auto', 'ready', 'done', 0, 0, '', '', '', 0, NULL, 'r', 'rev',"
        " 'p', 'llama', 'float32', 1, 2, 3, FALSE, 1, 0, 0, NULL"
    )
    with writing(engine, "test") as session:
        session.execute(text(f"INSERT INTO models VALUES ({values})"))
    upgrade(url)
    assert drift(engine) == []
    with reading(engine) as session:
        [model] = catalog.list_models(session)
    assert (model.task, model.dim, model.labels, model.multi_label) == ("generate", 0, [], False)
    downgrade(url, "0001")
    with reading(engine) as session:
        assert session.execute(text("SELECT name FROM models")).scalars().all() == ["old"]


def test_limits_and_keys_of_an_older_schema_are_kept(url: str, engine: Engine) -> None:
    now_at = 1000.0
    with writing(engine, "test") as session:
        tenant = tenants.create_tenant(session, "acme", now_at=now_at)
        free, _ = api_keys.create_key(session, tenant.id, "free", now_at=now_at)
        bound, _ = api_keys.create_key(
            session, tenant.id, "bound", allowed_cidrs=["10.0.0.0/8"], now_at=now_at
        )
        quotas.set_limits(
            session, "key", free.id, {"tokens_per_minute": 5, "tokens_per_day": 6}, now_at=now_at
        )
        quotas.set_limits(session, "gateway", "", {"tokens_per_day": 7}, now_at=now_at)
    downgrade(url, "0003")
    upgrade(url)
    assert drift(engine) == []
    with reading(engine) as session:
        assert api_keys.get_key(session, free.id).limits == Limits(tokens_per_minute=5)
        assert quotas.get_limits(session, "gateway") == UNLIMITED
        # It would have been let in from anywhere.
        assert not api_keys.get_key(session, bound.id).usable(now_at)
        assert api_keys.get_key(session, free.id).usable(now_at)


def test_head_is_the_newest_migration() -> None:
    assert ScriptDirectory.from_config(alembic_config()).get_current_head() == schema.HEAD


def test_upgrade_twice_changes_nothing(url: str, engine: Engine) -> None:
    upgrade(url)
    with engine.connect() as connection:
        schema.require(connection)


def test_an_empty_database_and_another_schema_are_refused(url: str, tmp_path: Path) -> None:
    assert database_exists(url) == (not url.startswith("sqlite"))
    engine = make_engine(url)
    with engine.connect() as connection, pytest.raises(SchemaError, match="db upgrade"):
        schema.require(connection)
    upgrade(url)
    with writing(engine, "test") as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with engine.connect() as connection, pytest.raises(SchemaError, match="9999"):
        schema.require(connection)
    with pytest.raises(SchemaError, match="9999"):
        upgrade(url)
    engine.dispose()


def test_two_processes_starting_at_once(url: str) -> None:
    spawn = multiprocessing.get_context("spawn")
    starts = [spawn.Process(target=upgrade, args=(url,)) for _ in range(3)]
    for start in starts:
        start.start()
    for start in starts:
        start.join()
    assert [start.exitcode for start in starts] == [0, 0, 0]
    engine = make_engine(url)
    assert drift(engine) == []
    engine.dispose()


@pytest.mark.parametrize("database", ["sqlite"])
def test_sqlite_is_set_up_for_money(engine: Engine) -> None:
    with engine.connect() as connection:
        pragmas = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
    assert pragmas == {
        "journal_mode": "wal",
        "synchronous": 2,
        "foreign_keys": 1,
        "busy_timeout": 5000,
    }


@pytest.mark.parametrize(
    "statement", ["UPDATE postings SET cost_nanos = 0", "DELETE FROM postings"]
)
def test_postings_are_append_only(engine: Engine, statement: str) -> None:
    posting = Posting(
        "r", "t", "k", "m", "v", "chat", "finished", 1, 0, 1, 7, 0.0, 0.0, 0.0, 0.0, 0.0
    )
    with writing(engine, "test") as session:
        ledger.post_many(session, [posting])
    with pytest.raises(DatabaseError, match="append-only"), writing(engine, "test") as session:
        session.execute(text(statement))


def test_the_migrations_are_also_postgresql() -> None:
    config = alembic_config()
    config.attributes["dialect"] = "postgresql"
    config.output_buffer = out = io.StringIO()
    command.upgrade(config, "head", sql=True)
    statements = out.getvalue()
    num_tables = statements.count("CREATE TABLE") - statements.count("DROP TABLE")
    assert num_tables == len(schema.metadata.tables) + 1
    assert "id BIGSERIAL" in statements
    assert "%" not in statements  # drivers and scripts disagree on how often to double it
    assert statements.count("EXECUTE FUNCTION polyhost_append_only()") >= 4
    assert statements.count("EXECUTE FUNCTION polyhost_retained()") == 1
