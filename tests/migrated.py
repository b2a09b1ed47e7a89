"""Registries with the newest schema, without walking all migrations for each test."""

import functools
import tempfile
from pathlib import Path

from sqlalchemy import make_url

from registry.schema import upgrade


def migrated(url: str) -> None:
    """As `upgrade` does it. A SQLite file that is not there is written as a copy of the first."""
    database = make_url(url).database if url.startswith("sqlite") else None
    if not database or Path(database).exists():
        upgrade(url)
        return
    Path(database).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    Path(database).write_bytes(_template())


@functools.cache
def _template() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "polyhost.db"
        upgrade(f"sqlite:///{path}")
        return path.read_bytes()
