"""A data folder with the three demo models in fp32, a tenant and a key; copied for each server."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.server import DEMO_MODELS, NAMES, polyhost, polyhost_json


@dataclass(frozen=True, slots=True)
class Prepared:
    """A folder to copy, and the key that works on it."""

    data_dir: Path
    key: str

    def copy_to(self, folder: Path) -> Path:
        """A data folder of one's own. Packs are shared by hard links."""
        target = folder / "data"
        shutil.copytree(self.data_dir, target, copy_function=_link_packs)
        return target


def _link_packs(source: str, target: str) -> str:
    if "/packs/" in source:
        Path(target).hardlink_to(source)
        return target
    return str(shutil.copy2(source, target))


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """Everything registered through the command line, before any server runs."""
    data_dir = tmp_path_factory.mktemp("e2e") / "prepared"
    for name in NAMES:
        done = polyhost(
            data_dir,
            *("models", "add", name, "--source", str(DEMO_MODELS / name), "--dtype", "float32"),
        )
        assert done.returncode == 0, done.stdout + done.stderr
    polyhost_json(data_dir, "tenants", "add", "acme")
    created = polyhost_json(data_dir, "keys", "create", "--tenant", "acme", "--name", "tests")
    return Prepared(data_dir, created["key"])
