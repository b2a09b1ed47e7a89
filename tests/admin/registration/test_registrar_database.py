"""A registration whose database goes away: it waits, and goes on."""

from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from admin.context.operator_context import open_context
from admin.registration import registrar
from gateway.settings.settings import Settings
from registry import audit
from registry.accounts import tenants
from tests.migrated import migrated
from tests.postgres import own_server


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registrar, "AGAIN_S", 0.02)


def test_it_waits_until_the_database_is_back(tmp_path: Path) -> None:
    with own_server() as server:
        settings = Settings(data_dir=str(tmp_path), database_url=server.url("postgres"))
        migrated(settings.registry_url)
        with open_context(settings, "test") as context:
            opened: list[int] = []

            def writing() -> AbstractContextManager[Session]:
                opened.append(1)
                if len(opened) == 3:
                    server.start()
                return context.writing()

            def work(session: Session) -> int:
                tenants.create_tenant(session, "acme", now_at=0.0)
                if len(opened) == 1:
                    server.kill()  # in the middle of the transaction
                return audit.current_version(session)

            assert registrar.lasting(writing, work) == 1
            assert len(opened) == 3
            with context.reading() as session:
                assert [tenant.name for tenant in tenants.list_tenants(session)] == ["acme"]


def test_it_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registrar, "PATIENCE_S", 2.0)
    settings = Settings(data_dir=str(tmp_path))
    migrated(settings.registry_url)
    tries: list[int] = []

    def work(session: Session) -> None:
        tries.append(1)
        session.execute(text("SELECT * FROM nothing"))

    with open_context(settings, "test") as context, pytest.raises(OperationalError):
        registrar.lasting(context.writing, work)
    assert len(tries) > 1
