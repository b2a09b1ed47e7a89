"""One data folder with every model of this room, registered once, and the server most tests share.

A server costs seconds of imports (its own, its worker's), a registration as many. So all models are
registered by one process, and a test that leaves a server as it found it uses the shared one. All
of this room runs in one process of pytest-xdist (tests/conftest.py). Each tenant is one test's, so
that the test finds its own rows.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from admin.context.operator_context import open_context
from admin.operations import keys as service_keys
from admin.operations import models
from admin.operations import tenants as service_tenants
from admin.registration import registrar
from bench.servers import Server
from gateway.settings.settings import Settings
from registry.schema import upgrade
from tests.e2e.folders import DEMO_MODELS, HOSTED, NAMES, REFUSED
from tests.e2e.server import polyhost, serving

TENANTS = ("acme", "crowd", "gone", "killed", "revoked", "switcher")
# Two of the three demo models' weights and KV for all requests; never all three.
DEVICE_BUDGET = "18MiB"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A data folder to copy, the sources of its models by name, and a key of each tenant."""

    data_dir: Path
    sources: dict[str, Path]
    keys: dict[str, str]

    @property
    def key(self) -> str:
        """The key of whoever needs no tenant of its own."""
        return self.keys["acme"]

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


@pytest.fixture(scope="package")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """Everything registered before any server runs, by the registrar's real subprocess."""
    root = tmp_path_factory.mktemp("e2e")
    sources = {name: DEMO_MODELS / name for name in NAMES}
    for name, write in {**HOSTED, **REFUSED}.items():
        sources[name] = root / "sources" / name
        write(sources[name])
    settings = Settings(data_dir=str(root / "prepared"))
    settings.data_path.mkdir()
    upgrade(settings.registry_url)
    keys = {}
    with open_context(settings, "tests") as context:
        begun = [
            models.begin_registration(context, name, str(source), dtype="float32")
            for name, source in sources.items()
        ]
        ended = {model.name: model for model in registrar.run(context, begun)}
        for name in (*NAMES, *HOSTED):
            assert ended[name].state == "ready", ended[name].reason
        for tenant in TENANTS:
            service_tenants.create_tenant(context, tenant)
            _, keys[tenant] = service_keys.create_key(context, tenant, "tests")
    for name in NAMES:  # or every bill would be nothing, the wrong ones too
        prices = ("--prompt", "1", "--completion", "2")
        assert polyhost(settings.data_path, "prices", "set", name, *prices).returncode == 0
    return Prepared(settings.data_path, sources, keys)


@pytest.fixture(scope="package")
def server(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """For tests that leave it as they found it. Models come and go on it: they never all fit."""
    data_dir = prepared.copy_to(tmp_path_factory.mktemp("shared"))
    with serving(
        data_dir, "--device-budget", DEVICE_BUDGET, POLYHOST_ENCODE_PIECE_TOKENS="32"
    ) as running:
        yield running
