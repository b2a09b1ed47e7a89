"""A migrated SQLite registry on disk, as the product uses it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from registry.session import make_engine, upgrade


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'polyhost.db'}"


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    upgrade(url)
    engine = make_engine(url)
    yield engine
    engine.dispose()
