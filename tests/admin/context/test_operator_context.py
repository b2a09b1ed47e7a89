"""Verbs that touch disk or the running server: removal, sweeping, residency requests."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from admin.context import operator_context as service
from admin.context.operator_context import OperatorContext, open_context
from admin.operations import models
from admin.operations import models as service_models
from admin.registration import registrar
from gateway.settings.settings import Settings
from registry import locks
from registry.errors import NotFound, RegistryError
from registry.models import residency_requests
from registry.session import make_engine
from tests.migrated import migrated

FAKE = (sys.executable, str(Path(__file__).parents[1] / "registration" / "fake_register.py"))


@pytest.fixture
def context(tmp_path: Path) -> Iterator[OperatorContext]:
    """Models `one` and `two` of one revision, and `other` of another."""
    settings = Settings(data_dir=str(tmp_path / "data"))
    migrated(settings.registry_url)
    for name in ("shared", "lone"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
    with open_context(settings, "test") as context:
        begun = [
            models.begin_registration(context, name, str(tmp_path / source))
            for name, source in (("one", "shared"), ("two", "shared"), ("other", "lone"))
        ]
        assert all(m.state == "ready" for m in registrar.run(context, begun, command=FAKE))
        yield context


def packs(context: OperatorContext) -> set[str]:
    return {path.name for path in context.packs_dir.iterdir()}


def test_a_pack_goes_with_its_last_model(context: OperatorContext) -> None:
    assert not service_models.remove_model(context, "one")
    assert packs(context) == {"rev-shared-auto", "rev-lone-auto"}
    assert service_models.remove_model(context, "two")
    assert packs(context) == {"rev-lone-auto"}
    with pytest.raises(NotFound):
        service_models.remove_model(context, "two")


def test_under_a_running_server_the_pack_waits_for_the_next_start(context: OperatorContext) -> None:
    with locks.hold(context.data_dir / locks.SERVER_LOCK):
        assert service.server_is_running(context.data_dir)
        assert not service_models.remove_model(context, "other")
        assert "rev-lone-auto" in packs(context)
    with locks.hold(context.data_dir / locks.SERVER_LOCK):
        assert service_models.sweep_packs(context.data_dir, context.engine) == ["rev-lone-auto"]
    assert packs(context) == {"rev-shared-auto"}


def test_sweeping_takes_leftovers_and_nothing_else(
    context: OperatorContext, tmp_path: Path
) -> None:
    (context.packs_dir / ".tmp-123").mkdir()
    (context.packs_dir / ".tmp-123" / "weights.bin").write_bytes(b"x")
    (context.packs_dir / "stray").write_text("x")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    (context.packs_dir / "link").symlink_to(outside)
    swept = service_models.sweep_packs(context.data_dir, context.engine)
    assert swept == [".tmp-123", "link", "stray"]
    assert (outside / "kept").exists()
    assert packs(context) == {"rev-shared-auto", "rev-lone-auto"}


def test_sweeping_before_anything_was_registered(tmp_path: Path) -> None:
    assert service_models.sweep_packs(tmp_path / "none", make_engine("sqlite://")) == []


def test_residency_requests_need_a_server(context: OperatorContext) -> None:
    with pytest.raises(RegistryError, match="no server is running"):
        service_models.request_residency(context, "one", "load")
    with locks.hold(context.data_dir / locks.SERVER_LOCK):
        service_models.request_residency(context, "one", "load")
        with pytest.raises(NotFound):
            service_models.request_residency(context, "none", "unload")
    with context.writing() as session:
        taken = residency_requests.take(session, now_at=context.clock())
    assert [(request.model, request.action) for request in taken] == [("one", "load")]
