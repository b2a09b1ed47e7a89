"""What sessions promise on both databases: snapshots, one writer at a time, an end to waiting."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError, OperationalError

from registry import audit, session
from registry.accounts import tenants
from registry.errors import AlreadyExists, InvalidValue, RegistryBusy, RegistryError
from registry.schema import upgrade
from registry.session import (
    appending,
    database_exists,
    make_engine,
    reading,
    report_busy,
    shown,
    upgrade_lock,
    writing,
)
from tests.postgres import own_server

NOW = 1_000_000.0
POSTGRESQL = pytest.mark.parametrize("database", ["postgresql"])


def create(engine: Engine, name: str) -> None:
    with writing(engine, "test") as session:
        tenants.create_tenant(session, name, now_at=NOW)


def names(engine: Engine) -> list[str]:
    with reading(engine) as session:
        return [tenant.name for tenant in tenants.list_tenants(session)]


def at_once(count: int, act: Callable[[int], None]) -> list[BaseException | None]:
    """Runs `act(0..count-1)` in threads that begin together; what each raised."""
    barrier = threading.Barrier(count)

    def run(number: int) -> BaseException | None:
        barrier.wait()
        try:
            act(number)
        except RegistryError as error:
            return error
        return None

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(run, range(count)))


def test_writers_at_once_lose_nothing(engine: Engine) -> None:
    assert at_once(12, lambda number: create(engine, f"t{number}")) == [None] * 12
    assert len(names(engine)) == 12
    with reading(engine) as session:
        assert audit.current_version(session) == 12
        assert len(audit.latest(session)) == 12


def test_what_was_checked_still_holds_when_it_is_written(engine: Engine) -> None:
    raised = at_once(8, lambda number: create(engine, "same"))
    assert sum(error is None for error in raised) == 1
    assert sum(isinstance(error, AlreadyExists) for error in raised) == 7
    create(engine, "a")
    create(engine, "b")

    def reserve(number: int) -> None:
        with writing(engine, "test") as session:
            tenants.update_tenant(session, "ab"[number], reserved_share=0.3, now_at=NOW)

    raised = at_once(2, reserve)
    assert sum(isinstance(error, InvalidValue) for error in raised) == 1


def test_a_reader_sees_one_moment(engine: Engine) -> None:
    create(engine, "before")
    with reading(engine) as session:
        seen = audit.current_version(session)
        create(engine, "meanwhile")
        assert [t.name for t in tenants.list_tenants(session)] == ["before"]
        assert audit.current_version(session) == seen
    assert names(engine) == ["before", "meanwhile"]


def test_what_raises_leaves_nothing(engine: Engine) -> None:
    def fail() -> None:
        with writing(engine, "test") as session:
            tenants.create_tenant(session, "lost", now_at=NOW)
            raise RegistryError("no")

    with pytest.raises(RegistryError, match="no"):
        fail()
    assert names(engine) == []


@POSTGRESQL
def test_a_reader_cannot_write(engine: Engine) -> None:
    with reading(engine) as session, pytest.raises(DBAPIError, match="read-only transaction"):
        session.execute(text("DELETE FROM tenants"))


@POSTGRESQL
def test_the_ledger_does_not_wait_for_operators_and_they_do_not_wait_for_ever(
    url: str, engine: Engine
) -> None:
    impatient = make_engine(url, connect_args={"options": "-c lock_timeout=100"})
    with writing(engine, "first") as first:
        tenants.create_tenant(first, "first", now_at=NOW)
        with appending(impatient, "ledger") as session:
            session.execute(text("SELECT 1"))
        with pytest.raises(RegistryBusy, match="try again"), report_busy():
            create(impatient, "second")
    create(impatient, "second")
    assert names(engine) == ["first", "second"]
    impatient.dispose()


@POSTGRESQL
def test_an_upgrade_waits_for_another_and_not_for_ever(
    url: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "UPGRADE_TIMEOUT_S", 0.2)
    with (
        upgrade_lock(engine, 1.0),
        pytest.raises(RegistryBusy, match="changing the schema"),
    ):
        upgrade(url)
    upgrade(url)


def test_a_database_that_goes_away_and_comes_back() -> None:
    with own_server() as server:
        url = server.url("postgres")
        upgrade(url)
        engine = make_engine(url)
        create(engine, "before")
        for _ in range(2):
            server.kill()
            began_s = time.monotonic()
            with pytest.raises(OperationalError):
                names(engine)
            assert time.monotonic() - began_s < session.UPGRADE_TIMEOUT_S
            server.start()
            assert names(engine) == ["before"]  # the pool's dead connections cost nobody a request
        create(engine, "after")
        engine.dispose()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "polyhost.db",
        "mysql://root:hunter2@db/polyhost",
        "postgresql+asyncpg://root:hunter2@db/polyhost",
        "postgresql+psycopg://root:hunter2@db:port/polyhost",
    ],
)
def test_urls_of_other_databases_are_refused_without_their_passwords(url: str) -> None:
    with pytest.raises(InvalidValue, match="database_url must be") as raised:
        make_engine(url)
    assert "hunter2" not in str(raised.value)


def test_a_password_is_nowhere_to_be_read() -> None:
    url = "postgres://root:hunter2@127.0.0.1:1/polyhost"
    assert shown(url) == "postgresql+psycopg://root:***@127.0.0.1:1/polyhost"
    assert database_exists(url)
    engine = make_engine(url)
    with pytest.raises(OperationalError) as raised:
        names(engine)
    assert "hunter2" not in f"{raised.value} {raised.value!r} {engine!r}"


def test_a_block_of_writing_begins_when_the_one_before_has_ended(engine: Engine) -> None:
    """Before its first statement: what it reads of a clock is later than what was committed."""
    said: list[str] = []

    def second() -> None:
        with writing(engine, "test"):
            said.append("second")

    waiting = threading.Thread(target=second)
    with writing(engine, "test"):
        waiting.start()
        time.sleep(0.2)
        said.append("first")
    waiting.join()
    assert said == ["first", "second"]
