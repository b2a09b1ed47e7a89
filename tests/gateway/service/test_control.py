"""Verbs that touch disk or the running server: removal, sweeping, residency requests."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.registration import registrar, registration
from gateway.service import control as service
from gateway.service import models as service_models
from gateway.service.control import Control, open_control
from gateway.settings import Settings
from registry import locks, residency_requests
from registry.errors import NotFound, RegistryError
from registry.session import make_engine, upgrade

FAKE = (sys.executable, str(Path(__file__).parents[1] / "fake_register.py"))


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Control]:
    """Models `one` and `two` of one revision, and `other` of another."""
    settings = Settings(data_dir=str(tmp_path / "data"))
    upgrade(settings.registry_url)
    for name in ("shared", "lone"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
    with open_control(settings, "test") as control:
        begun = [
            registration.begin(control, name, str(tmp_path / source))
            for name, source in (("one", "shared"), ("two", "shared"), ("other", "lone"))
        ]
        assert all(m.state == "ready" for m in registrar.run(control, begun, command=FAKE))
        yield control


def packs(control: Control) -> set[str]:
    return {path.name for path in control.packs_dir.iterdir()}


def test_a_pack_goes_with_its_last_model(control: Control) -> None:
    assert not service_models.remove_model(control, "one")
    assert packs(control) == {"rev-shared-auto", "rev-lone-auto"}
    assert service_models.remove_model(control, "two")
    assert packs(control) == {"rev-lone-auto"}
    with pytest.raises(NotFound):
        service_models.remove_model(control, "two")


def test_under_a_running_server_the_pack_waits_for_the_next_start(control: Control) -> None:
    with locks.hold(control.data_dir / locks.SERVER_LOCK):
        assert service.server_is_running(control.data_dir)
        assert not service_models.remove_model(control, "other")
        assert "rev-lone-auto" in packs(control)
    with locks.hold(control.data_dir / locks.SERVER_LOCK):
        assert service_models.sweep_packs(control.data_dir, control.engine) == ["rev-lone-auto"]
    assert packs(control) == {"rev-shared-auto"}


def test_sweeping_takes_leftovers_and_nothing_else(control: Control, tmp_path: Path) -> None:
    (control.packs_dir / ".tmp-123").mkdir()
    (control.packs_dir / ".tmp-123" / "weights.bin").write_bytes(b"x")
    (control.packs_dir / "stray").write_text("x")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    (control.packs_dir / "link").symlink_to(outside)
    swept = service_models.sweep_packs(control.data_dir, control.engine)
    assert swept == [".tmp-123", "link", "stray"]
    assert (outside / "kept").exists()
    assert packs(control) == {"rev-shared-auto", "rev-lone-auto"}


def test_sweeping_before_anything_was_registered(tmp_path: Path) -> None:
    assert service_models.sweep_packs(tmp_path / "none", make_engine("sqlite://")) == []


def test_residency_requests_need_a_server(control: Control) -> None:
    with pytest.raises(RegistryError, match="no server is running"):
        service_models.request_residency(control, "one", "load")
    with locks.hold(control.data_dir / locks.SERVER_LOCK):
        service_models.request_residency(control, "one", "load")
        with pytest.raises(NotFound):
            service_models.request_residency(control, "none", "unload")
    with control.writing() as session:
        taken = residency_requests.take(session, now_at=control.clock())
    assert [(request.model, request.action) for request in taken] == [("one", "load")]
