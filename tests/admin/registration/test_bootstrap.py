"""The demo's bootstrap: adds what is missing, keeps what is there, respects what was taken away."""

import stat
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from admin.context import registration_files
from admin.context.operator_context import OperatorContext, open_context
from admin.operations import keys as service_keys
from admin.operations import models as service_models
from admin.operations import tenants as service_tenants
from admin.registration import bootstrap
from admin.registration.bootstrap import DEMO_KEY_FILE, DemoAccess, ensure_demo
from engine.protocol import PACK_VERSION
from gateway.auth.directory import hosted_models
from gateway.settings.settings import Settings
from registry.accounts import api_keys
from registry.errors import RegistryError
from tests.migrated import migrated

FAKE = (sys.executable, str(Path(__file__).parent / "fake_register.py"))
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
        migrated(self.settings.registry_url)

    def start(self, given_key: str = "") -> DemoAccess:
        self.said.clear()
        settings = replace(self.settings, demo_api_key=given_key)
        return ensure_demo(settings, self.said.append, self.folders, FAKE)

    def context(self) -> "Iterator[OperatorContext]":
        with open_context(self.settings, "test") as context:
            yield context


@pytest.fixture
def demo(tmp_path: Path) -> Demo:
    return Demo(tmp_path)


@pytest.fixture
def context(demo: Demo) -> Iterator[OperatorContext]:
    yield from demo.context()


def works(context: OperatorContext, plaintext: str) -> bool:
    with context.reading() as session:
        for record in api_keys.active_keys(session):
            if record.public_id == api_keys.public_id_of(plaintext):
                assert record.tenant_name == "demo"
                return api_keys.verify(record, plaintext, context.clock())
    return False


def test_the_first_start_makes_everything(demo: Demo, context: OperatorContext) -> None:
    access = demo.start()
    assert access.models == NAMES
    assert access.failed == ()
    assert works(context, access.api_key)
    assert [tenant.name for tenant in service_tenants.list_tenants(context)] == ["demo"]
    assert any("alpha, beta" in line for line in demo.said)
    path = context.data_dir / DEMO_KEY_FILE
    assert path.read_text().strip() == access.api_key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_later_starts_change_nothing(demo: Demo, context: OperatorContext) -> None:
    first = demo.start()
    keys, models = service_keys.list_keys(context), service_models.list_models(context)
    assert demo.start() == first
    assert demo.said == []
    assert service_keys.list_keys(context) == keys
    assert service_models.list_models(context) == models


def test_a_given_key_is_used_and_not_written_down(demo: Demo, context: OperatorContext) -> None:
    access = demo.start("my-own-key")
    assert access.api_key == "my-own-key"
    assert works(context, "my-own-key")
    assert not (context.data_dir / DEMO_KEY_FILE).exists()
    assert demo.start("my-own-key") == access
    other = demo.start("another-key")
    assert works(context, other.api_key)
    assert works(context, "my-own-key")


def test_a_revoked_demo_key_is_replaced_a_given_one_is_refused(
    demo: Demo, context: OperatorContext
) -> None:
    first = demo.start().api_key
    service_keys.revoke_key(context, api_keys.public_id_of(first))
    second = demo.start().api_key
    assert second != first
    assert works(context, second)
    assert not works(context, first)
    demo.start("given-key")
    service_keys.revoke_key(context, api_keys.public_id_of("given-key"))
    with pytest.raises(RegistryError, match="revoked"):
        demo.start("given-key")


def test_a_key_file_without_its_row_gets_the_row(demo: Demo, context: OperatorContext) -> None:
    context.data_dir.mkdir(exist_ok=True)
    plaintext = api_keys.generate_plaintext()
    (context.data_dir / DEMO_KEY_FILE).write_text(plaintext)
    assert demo.start().api_key == plaintext
    assert works(context, plaintext)


def test_a_removed_demo_model_stays_away(demo: Demo, context: OperatorContext) -> None:
    demo.start()
    service_models.remove_model(context, "alpha")
    access = demo.start()
    assert (access.models, access.failed) == (("beta",), ())


def test_a_failed_demo_model_is_tried_again(demo: Demo, context: OperatorContext) -> None:
    (demo.folders / "beta" / "refuse").write_text("broken")
    access = demo.start()
    assert (access.models, access.failed) == (("alpha",), ("beta: broken",))
    (demo.folders / "beta" / "refuse").unlink()
    assert demo.start().models == NAMES


def test_packs_of_an_earlier_release_are_made_anew(demo: Demo, context: OperatorContext) -> None:
    demo.start()
    before = {model.name: model for model in service_models.list_models(context)}
    pack = context.packs_dir / before["beta"].pack
    pack.mkdir(parents=True, exist_ok=True)
    for version, again in ((PACK_VERSION, False), (PACK_VERSION - 1, True)):
        index = msgspec.msgpack.encode({"version": version, "more": [1, 2]})
        (pack / registration_files.PACK_INDEX).write_bytes(index + bytes(8))
        assert demo.start().models == NAMES
        assert any("beta" in line for line in demo.said) is again
        assert not any("alpha" in line for line in demo.said)
    after = {model.name: model for model in service_models.list_models(context)}
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


def test_hosted_models_are_what_the_request_path_needs(
    demo: Demo, context: OperatorContext
) -> None:
    demo.start()
    with context.reading() as session:
        alpha, beta = hosted_models(session, context.data_dir)
    assert Path(alpha.pack_dir).is_dir()
    assert beta == replace(
        alpha,
        name="beta",
        revision="rev-beta-auto",
        pack_dir=beta.pack_dir,
        created_at=beta.created_at,
    )
