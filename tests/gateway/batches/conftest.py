"""An application whose batches are looked for at once."""

from pathlib import Path

import pytest

from gateway.batches import batch_run, batch_runner, batches_service
from tests.gateway.edge_kit import Kit
from tests.gateway.files.file_kit import file_kit


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_runner, "LOOK_S", 0.05)
    monkeypatch.setattr(batch_run, "BEAT_S", 0.05)
    monkeypatch.setattr(batch_run, "TICK_S", 0.05)
    monkeypatch.setattr(batch_run, "RETRY_S", 0.05)
    monkeypatch.setattr(batches_service, "RECOVERY_MARGIN_S", 0.0)


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return batch_kit(tmp_path)


def batch_kit(folder: Path, **settings: object) -> Kit:
    return file_kit(folder, ledger_recovery_wait_s=0.01, **settings)
