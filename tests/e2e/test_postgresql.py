"""`polyhost serve` on PostgreSQL: the same server, and the database goes away under it."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import select

from bench.servers import Server
from registry import schema
from registry.schema import upgrade
from registry.session import appending, make_engine, reading
from tests.e2e.conftest import DEVICE_BUDGET, Prepared
from tests.e2e.server import polyhost, polyhost_json, serving, usage_rows
from tests.postgres import PostgresServer, own_server

pytestmark = pytest.mark.e2e


@pytest.fixture
def database() -> Iterator[PostgresServer]:
    with own_server() as server:
        yield server


def move(source: str, target: str) -> None:
    """All rows of one registry into an empty one."""
    upgrade(target)
    engines = make_engine(source), make_engine(target)
    with reading(engines[0]) as old, appending(engines[1], "test") as new:
        for table in schema.metadata.sorted_tables:
            rows = [dict(row) for row in old.execute(select(table)).mappings()]
            new.execute(table.delete())
            if rows:
                new.execute(table.insert(), rows)
        for table in schema.metadata.sorted_tables:
            for column in table.primary_key:
                if column.autoincrement is True:
                    sequence = f"pg_get_serial_sequence('{table.name}', '{column.name}')"
                    new.connection().exec_driver_sql(
                        f"SELECT setval({sequence}, (SELECT max({column.name}) FROM {table.name}))"
                    )
    for engine in engines:
        engine.dispose()


def chat(server: Server, key: str) -> str:
    """One answer; its id."""
    body = {"model": "sherlock", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{server.url}/v1/chat/completions", data, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["id"])


def test_serve_on_postgresql(
    prepared: Prepared, database: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_dir = prepared.copy_to(tmp_path)
    url = database.url("postgres").replace("polyhost@", "polyhost:hunter2@")
    move(f"sqlite:///{data_dir / 'polyhost.db'}", url)
    (data_dir / "polyhost.db").unlink()
    monkeypatch.setenv("POLYHOST_DATABASE_URL", url)
    with serving(data_dir, "--device-budget", DEVICE_BUDGET) as server:
        made = polyhost_json(data_dir, "keys", "create", "--tenant", "acme", "--name", "new")
        server.wait_until(lambda: server.get("/v1/models", made["key"])[0] == 200)
        ids = [chat(server, made["key"])]
        server.wait_until(server.has_posted)
        database.kill()
        assert server.get("/health/live")[0] == 200
        assert server.get("/v1/models", made["key"])[0] == 200  # keys and models are known here
        database.start()
        ids.append(chat(server, made["key"]))
        server.wait_until(server.has_posted)
        # The poll reads again: what is changed now takes effect.
        assert polyhost(data_dir, "keys", "revoke", made["id"]).returncode == 0
        server.wait_until(lambda: server.get("/v1/models", made["key"])[0] == 401)
        assert server.stop() == 0
        assert "hunter2" not in server.process.read_log()
    rows = usage_rows(data_dir, tenant="acme")
    assert [row["request_id"] for row in rows if row["key_name"] == "new"] == ids
    assert not (data_dir / "polyhost.db").exists()
