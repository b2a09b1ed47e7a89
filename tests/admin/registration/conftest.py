"""The registry that registrations of a test go through."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from admin.context.operator_context import OperatorContext, open_context
from gateway.settings.settings import Settings
from tests.migrated import migrated


@pytest.fixture
def context(tmp_path: Path) -> Iterator[OperatorContext]:
    settings = Settings(data_dir=str(tmp_path / "data"))
    migrated(settings.registry_url)
    with open_context(settings, "test") as context:
        yield context
