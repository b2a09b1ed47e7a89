"""The command measures what it says, in small."""

import json
from pathlib import Path

import pytest

from bench import fleet
from bench.sim import fleet_split


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


def test_tenants_that_always_wait_share_two_workers_by_weight() -> None:
    got = fleet._shares("own models", fleet.SHARES_FROM_S + 480.0, 0)
    assert got == pytest.approx([1.0, 1.0, 1.0], abs=0.03)


def test_one_fleet_beside_workers_that_stand_alone(tmp_path: Path) -> None:
    trace, output = tmp_path / "trace.csv", tmp_path / "result.json"
    rows = [f"{number / 4},100,80,m{number % 7 % 3}" for number in range(400)]
    trace.write_text("\n".join(["t_s,in_tokens,out_tokens,model", *rows]), encoding="utf-8")
    asked = ["split", "--data", str(tmp_path), "--trace", f"{trace}:rate=2,minutes=1"]
    assert fleet.main([*asked, "--workers", "1", "2", "--seeds", "0", "--output", str(output)]) == 0
    found = json.loads(output.read_text(encoding="utf-8"))["split"]
    assert [(row["workers"], row["way"]) for row in found] == [
        (1, "ours"),
        *((2, way) for way in fleet_split.WAYS),
    ]
    for row in found:
        (run,) = row["runs"]
        assert run["ended"] == {"length": run["requests"]}
        assert run["reload_s"] < run["load_s"]
    two = {row["way"]: row["runs"][0] for row in found[1:]}
    assert two["round_robin"]["loads"] > two["static"]["loads"], "each worker has every model"
