"""An application with a database and a folder for objects, and keys that may keep files."""

from pathlib import Path

import pytest

from tests.gateway.edge_kit import Kit
from tests.gateway.files.file_kit import file_kit


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return file_kit(tmp_path)
