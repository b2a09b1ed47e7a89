"""An application with a database and a folder for objects."""

from pathlib import Path

import pytest

from tests.gateway.edge_kit import Kit, make_kit
from tests.migrated import migrated


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    kit = make_kit(tmp_path / "tiny", max_context=1024)
    migrated(kit.edge.services.settings.registry_url)
    return kit
