"""A database file for each test of the ledger."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from registry.session import make_engine
from tests.migrated import migrated


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    url = f"sqlite:///{tmp_path / 'polyhost.db'}"
    migrated(url)
    engine = make_engine(url)
    yield engine
    engine.dispose()
