"""A registration whose database goes away: it waits, and goes on."""

from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from gateway.registration import registrar
from gateway.service.control import open_control
from gateway.settings import Settings
from registry import tenants, version
from registry.session import upgrade
from tests.postgres import own_server


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registrar, "AGAIN_S", 0.02)


def test_it_waits_until_the_database_is_back(tmp_path: Path) -> None:
    with own_server() as server:
        settings = Settings(data_dir=str(tmp_path), database_url=server.url("postgres"))
        upgrade(settings.registry_url)
        with open_control(settings, "test") as control:
            opened: list[int] = []

            def writing() -> AbstractContextManager[Session]:
                opened.append(1)
                if len(opened) == 3:
                    server.start()
                return control.writing()

            def work(session: Session) -> int:
                tenants.create_tenant(session, "acme", now_at=0.0)
                if len(opened) == 1:
                    server.kill()  # in the middle of the transaction
                return version.current(session)

            assert registrar.lasting(writing, work) == 1
            assert len(opened) == 3
            with control.reading() as session:
                assert [tenant.name for tenant in tenants.list_tenants(session)] == ["acme"]


def test_it_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registrar, "PATIENCE_S", 0.1)
    settings = Settings(data_dir=str(tmp_path))
    upgrade(settings.registry_url)
    tries: list[int] = []

    def work(session: Session) -> None:
        tries.append(1)
        session.execute(text("SELECT * FROM nothing"))

    with open_control(settings, "test") as control, pytest.raises(OperationalError):
        registrar.lasting(control.writing, work)
    assert len(tries) > 1
