"""The command measures what it says, in small."""

import json
from pathlib import Path

import pytest

from bench import fleet


def test_a_crowd_has_copies_that_double(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    assert fleet.main(["crowd", "choices", "--quick", "--output", str(output)]) == 0
    result = json.loads(output.read_text(encoding="utf-8"))
    growing = [copies for _, copies in result["crowd"]["copies"]]
    assert growing[:5] == [0, 1, 2, 4, 8]
    assert growing[-1] == max(growing), "nobody needs the memory of surplus copies"
    assert 0.95 < result["choices"]["candidates_over_all"] < 1.05


def test_a_world_of_one_worker_against_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "NUM_WORKERS", (1, 3))
    one, three = fleet.scaling(0.05)
    assert one["of_n_times_one"] == 1.0
    assert three["workers"] == 3
    assert three["of_n_times_one"] > 0.7
