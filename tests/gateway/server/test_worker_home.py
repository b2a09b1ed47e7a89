"""How much memory a server's worker gets, and when it begins anew with more."""

import json
from pathlib import Path

import pytest

from gateway.server.worker_home import WorkerHome
from gateway.server.worker_process import WORKER_COMMAND, WorkerProcess
from gateway.settings import Settings


def test_the_demo_s_small_budget_grows_for_other_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restarts: list[str] = []
    monkeypatch.setattr(WorkerProcess, "restart", lambda self: restarts.append("restart"))
    settings = Settings(demo=True, data_dir=str(tmp_path))
    home = WorkerHome(settings, WORKER_COMMAND, lambda reason: None)
    demo = {"python": 9 << 20, "shakespeare": 8 << 20, "sherlock": 7 << 20}
    home.set_weights(demo)
    assert json.loads(home.config())["engine"]["arena_bytes"] == 24 << 20
    home.set_weights({**demo, "small": 1 << 20})
    assert restarts == []  # it fits as things are
    home.set_weights({**demo, "own": 20 << 20})
    assert restarts == ["restart"]
    assert json.loads(home.config())["engine"]["arena_bytes"] > 24 << 20
    home.set_weights({**demo, "own": 20 << 20})
    assert restarts == ["restart"]


@pytest.mark.parametrize(
    ("device", "host_tier_bytes", "expected"),
    [("cpu", -1, True), ("cpu", 1 << 30, False), ("auto", -1, False), ("cuda:0", -1, False)],
)
def test_a_cpu_that_was_told_nothing_copies_weights_only_when_crowded(
    tmp_path: Path, device: str, host_tier_bytes: int, expected: bool
) -> None:
    settings = Settings(data_dir=str(tmp_path), device=device, host_tier_bytes=host_tier_bytes)
    home = WorkerHome(settings, WORKER_COMMAND, lambda reason: None)
    assert json.loads(home.config())["engine"]["host_tier_when_crowded"] is expected
