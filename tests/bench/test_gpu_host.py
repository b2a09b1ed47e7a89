"""The host's bench runs its three loads, and says so where steps fail."""

from dataclasses import replace
from typing import Any

import pytest

from bench import gpu_host


def test_all_loads_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_host.main(["--rows", "3", "--steps", "4"]) == 0
    printed = capsys.readouterr().out
    for label in ("decode, greedy", "decode, top_p", "one prompt a step"):
        assert f"{label}, 3 rows: step " in printed


def test_steps_that_fail_are_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("not today")

    broken = replace(gpu_host.LAYERS, norm=fails)
    monkeypatch.setattr(gpu_host, "LAYERS", broken)
    with pytest.raises(RuntimeError, match="steps failed"):
        gpu_host.main(["--rows", "3", "--steps", "4"])
