"""The demo's bootstrap: adds what is missing, keeps what is there, respects what was taken away."""

import stat
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from engine.protocol import PACK_VERSION
from gateway.registration import bootstrap, registration_files
from gateway.registration.bootstrap import DEMO_KEY_FILE, DemoAccess, ensure_demo
from gateway.service import keys as service_keys
from gateway.service import models as service_models
from gateway.service import tenants as service_tenants
from gateway.service.control import Control, open_control
from gateway.settings import Settings
from registry import api_keys
from registry.errors import RegistryError
from registry.session import upgrade

FAKE = (sys.executable, str(Path(__file__).parents[1] / "fake_register.py"))
NAMES = ("alpha", "beta")


class Demo:
    """A data folder and demo folders, started as often as a test likes."""

    def __init__(self, tmp_path: Path) -> None:
        self.settings = Settings(data_dir=str(tmp_path / "data"), demo=True)
        self.folders = tmp_path / "demo_models"
        for name in NAMES:
            (self.folders / name).mkdir(parents=True)
            (self.folders / name / "config.json").write_text(name)
        (self.folders / "notes").mkdir()
        self.said: list[str] = []
        upgrade(self.settings.registry_url)

    def start(self, given_key: str = "") -> DemoAccess:
        self.said.clear()
        values = {name: getattr(self.settings, name) for name in Settings.__struct_fields__}
        settings = Settings(**{**values, "demo_api_key": given_key})
        return ensure_demo(settings, self.said.append, self.folders, FAKE)

    def control(self) -> "Iterator[Control]":
        with open_control(self.settings, "test") as control:
            yield control


@pytest.fixture
def demo(tmp_path: Path) -> Demo:
    return Demo(tmp_path)


@pytest.fixture
def control(demo: Demo) -> Iterator[Control]:
    yield from demo.control()


def works(control: Control, plaintext: str) -> bool:
    with control.reading() as session:
        for record in api_keys.active_keys(session):
            if record.public_id == api_keys.public_id_of(plaintext):
                assert record.tenant_name == "demo"
                return api_keys.verify(record, plaintext, control.clock())
    return False


def test_the_first_start_makes_everything(demo: Demo, control: Control) -> None:
    access = demo.start()
    assert access.models == NAMES
    assert access.failed == ()
    assert works(control, access.api_key)
    assert [tenant.name for tenant in service_tenants.list_tenants(control)] == ["demo"]
    assert any("alpha, beta" in line for line in demo.said)
    path = control.data_dir / DEMO_KEY_FILE
    assert path.read_text().strip() == access.api_key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_later_starts_change_nothing(demo: Demo, control: Control) -> None:
    first = demo.start()
    keys, models = service_keys.list_keys(control), service_models.list_models(control)
    assert demo.start() == first
    assert demo.said == []
    assert service_keys.list_keys(control) == keys
    assert service_models.list_models(control) == models


def test_a_given_key_is_used_and_not_written_down(demo: Demo, control: Control) -> None:
    access = demo.start("my-own-key")
    assert access.api_key == "my-own-key"
    assert works(control, "my-own-key")
    assert not (control.data_dir / DEMO_KEY_FILE).exists()
    assert demo.start("my-own-key") == access
    other = demo.start("another-key")
    assert works(control, other.api_key)
    assert works(control, "my-own-key")


def test_a_revoked_demo_key_is_replaced_a_given_one_is_refused(
    demo: Demo, control: Control
) -> None:
    first = demo.start().api_key
    service_keys.revoke_key(control, api_keys.public_id_of(first))
    second = demo.start().api_key
    assert second != first
    assert works(control, second)
    assert not works(control, first)
    demo.start("given-key")
    service_keys.revoke_key(control, api_keys.public_id_of("given-key"))
    with pytest.raises(RegistryError, match="revoked"):
        demo.start("given-key")


def test_a_key_file_without_its_row_gets_the_row(demo: Demo, control: Control) -> None:
    control.data_dir.mkdir(exist_ok=True)
    plaintext = api_keys.generate_plaintext()
    (control.data_dir / DEMO_KEY_FILE).write_text(plaintext)
    assert demo.start().api_key == plaintext
    assert works(control, plaintext)


def test_a_removed_demo_model_stays_away(demo: Demo, control: Control) -> None:
    demo.start()
    service_models.remove_model(control, "alpha")
    access = demo.start()
    assert (access.models, access.failed) == (("beta",), ())


def test_a_failed_demo_model_is_tried_again(demo: Demo, control: Control) -> None:
    (demo.folders / "beta" / "refuse").write_text("broken")
    access = demo.start()
    assert (access.models, access.failed) == (("alpha",), ("beta: broken",))
    (demo.folders / "beta" / "refuse").unlink()
    assert demo.start().models == NAMES


def test_packs_of_an_earlier_release_are_made_anew(demo: Demo, control: Control) -> None:
    demo.start()
    before = {model.name: model for model in service_models.list_models(control)}
    pack = control.packs_dir / before["beta"].pack
    pack.mkdir(parents=True, exist_ok=True)
    for version, again in ((PACK_VERSION, False), (PACK_VERSION - 1, True)):
        index = msgspec.msgpack.encode({"version": version, "more": [1, 2]})
        (pack / registration_files.PACK_INDEX).write_bytes(index + bytes(8))
        assert demo.start().models == NAMES
        assert any("beta" in line for line in demo.said) is again
        assert not any("alpha" in line for line in demo.said)
    after = {model.name: model for model in service_models.list_models(control)}
    assert after["alpha"] == before["alpha"]
    assert after["beta"].state == "ready"


def test_what_is_no_index_is_left_to_the_worker(tmp_path: Path) -> None:
    assert not registration_files.is_old(tmp_path / "missing")
    for content in (b"", b"rubbish", msgspec.msgpack.encode({"version": "one"}) + bytes(8)):
        (tmp_path / registration_files.PACK_INDEX).write_bytes(content)
        assert not registration_files.is_old(tmp_path)


def test_the_shipped_demo_models_are_found() -> None:
    folders = {path.name for path in bootstrap.DEMO_MODELS_DIR.iterdir() if path.is_dir()}
    assert {"shakespeare", "sherlock", "python"} <= folders


def test_hosted_models_are_what_the_request_path_needs(demo: Demo, control: Control) -> None:
    demo.start()
    with control.reading() as session:
        alpha, beta = service_models.hosted_models(session, control.data_dir)
    assert Path(alpha.pack_dir).is_dir()
    assert beta == replace(
        alpha,
        name="beta",
        revision="rev-beta-auto",
        pack_dir=beta.pack_dir,
        created_at=beta.created_at,
    )
