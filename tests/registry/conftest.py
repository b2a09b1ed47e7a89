"""A migrated registry on each database that the product runs on: every test here runs on both."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from registry.session import make_engine
from tests.migrated import migrated
from tests.postgres import Databases

BOTH = ("sqlite", "postgresql")


@pytest.fixture(params=BOTH)
def database(request: pytest.FixtureRequest) -> str:
    """Which one."""
    return str(request.param)


@pytest.fixture
def url(request: pytest.FixtureRequest, database: str, tmp_path: Path) -> Iterator[str]:
    """A database of this test alone; with tables where the test asks for `engine` too."""
    if database == "sqlite":
        yield f"sqlite:///{tmp_path / 'polyhost.db'}"
        return
    databases: Databases = request.getfixturevalue("postgres")
    has_tables = "engine" in request.fixturenames
    url = databases.fresh_registry() if has_tables else databases.fresh()
    yield url
    databases.drop(url)


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    """Its engine; the schema is this build's."""
    migrated(url)
    engine = make_engine(url)
    yield engine
    engine.dispose()
