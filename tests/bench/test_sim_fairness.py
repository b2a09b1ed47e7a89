"""The fairness table: its scenarios run, its figures are what they say."""

import json
from pathlib import Path

import pytest

from bench import sim_fairness
from bench.sim.fair_scenarios import NAMES, make
from bench.sim_fairness import run_one


def test_a_flood_is_kept_off_and_the_books_agree() -> None:
    """Some seconds; the whole table is a bench."""
    ours, fcfs = (run_one("quiet", policy, 14.0, 0) for policy in ("ours", "fcfs"))
    assert ours["num_first"] > fcfs["num_first"], "of the quiet tenant's, within the time"
    assert ours["gap_over_bound"] <= 1
    for row in (ours, fcfs):
        assert abs(row["books_off"]) < 0.01


def test_every_scenario_makes_its_requests() -> None:
    for name in NAMES:
        scenario = make(name, 5.0)
        both, alone = (list(scenario.arrivals(alone)) for alone in (False, True))
        assert {a.tenant for a in alone} <= {scenario.tenants[0]}
        assert {a.tenant for a in both} - {0}
        assert [a.at_s for a in both] == sorted(a.at_s for a in both)
        assert max(a.model for a in both) < len(scenario.world.models)
    with pytest.raises(KeyError):
        make("none", 5.0)


def test_the_command_keeps_what_was_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "table.json"
    words = ["--output", str(output), "--scenario", "re_entry", "--policy", "ours"]
    sim_fairness.main([*words, "--seconds", "3"])
    assert [row["alone"] for row in json.loads(output.read_text())["rows"]] == [False, True]
    monkeypatch.setattr(sim_fairness, "run_one", None)  # nothing is run again
    sim_fairness.main([*words, "--seconds", "3"])
    assert "re_entry" in capsys.readouterr().out
