"""The comparing program: its scenarios run, what was run is kept, the table says what came out."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from bench import sim_compare
from bench.sim.baselines.choose import parse_policy
from bench.sim.scenarios import fairness, popularity, thrash
from bench.sim.scenarios.fairness import SCENARIOS
from bench.sim.scenarios.options import Options
from bench.sim_compare import main, read_rows
from tests.bench.sim.trace_files import write_csv

TRACE = "synthetic:rate=4,requests=10,lengths=short,scale=0.2"
OURS = parse_policy("ours")
POPULARITY = ["popularity", "--trace", TRACE, "--models", "3", "--mix", "tiny", "--memory", "0.5"]


def test_a_flood_is_kept_off_and_the_books_agree() -> None:
    """Some seconds; the whole table is a bench."""
    options = Options(seconds=14.0)
    ours, fcfs = (
        fairness.run("quiet", parse_policy(policy), 0, options) for policy in ("ours", "share=fcfs")
    )
    assert ours["num_first"] > fcfs["num_first"], "of the quiet tenant's, within the time"
    assert ours["gap_over_bound"] <= 1
    for row in (ours, fcfs):
        assert abs(row["books_off"]) < 0.01


def test_every_scenario_of_fairness_makes_its_requests() -> None:
    for scenario in SCENARIOS.values():
        both, alone = (list(scenario.arrivals(5.0, 0, alone)) for alone in (False, True))
        assert {a.tenant for a in alone} <= {0}
        assert {a.tenant for a in both} - {0}
        assert [a.at_s for a in both] == sorted(a.at_s for a in both)
        assert max(a.model for a in both) < len(scenario.models)
        assert len(scenario.weights) == len(scenario.askers)


def test_loads_of_two_models_in_turn_stay_within_their_budget() -> None:
    row = thrash.run("thrash host 1t 2/s 60s", OURS, 0, Options(seconds=30.0))
    assert 0 < row["swap_share"] <= row["allowed_share"]
    assert row["wait_max_s"] <= row["bound_s"] * 1.01
    assert row["served"] + row["refused_early"] + row["timeouts"] == row["requests"] == 60


def test_a_policy_is_baselines_and_settings() -> None:
    assert (dict(OURS.names), dict(OURS.settings)) == ({}, {})
    changed = parse_policy("ours/eviction_margin=2,starvation_s=0.5")
    assert (changed.names, changed.settings) == ({}, {"eviction_margin": 2, "starvation_s": 0.5})
    endless = {
        parse_policy(f"ours/eviction_margin={text}").settings["eviction_margin"]
        for text in ("inf", "Infinity")
    }
    assert endless == {math.inf}
    both = parse_policy("evict=lru+place=static")
    assert (both.names, both.settings) == ({"evict": "lru", "place": "static"}, {})
    for text in ("lru", "evict=nobody", "ours/margin", "ours/margin="):
        with pytest.raises(ValueError, match=r"write|no evict policy"):
            parse_policy(text)


def test_the_device_is_a_share_of_the_catalog_and_holds_the_largest_model() -> None:
    half, whole, least = (
        popularity.make_world(3, memory, "tiny", OURS, 0).device for memory in (0.5, 1.0, 0.01)
    )
    assert whole.memory_bytes == pytest.approx(2 * half.memory_bytes, abs=2)
    assert half.host_bytes == whole.host_bytes
    assert least.memory_bytes > half.memory_bytes * 2 / 3  # a model and a quarter of it


def test_what_was_run_is_kept_and_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "sweep.json"
    policies = ["ours", "evict=lru", "evict=belady"]
    line = [*POPULARITY, "--output", str(output), "--policy", *policies]
    assert main(line) == 0
    text = capsys.readouterr().out
    assert "ours / evict=lru: reload" in text
    rows = read_rows(output)
    assert {row["policy"] for row in rows.values()} == set(policies)
    assert all(row["finished"] == 10 for row in rows.values())
    # What is there is not run again; the table comes from the file alone.
    monkeypatch.setattr(sim_compare, "run_cell", None)
    assert main(line) == 0
    assert main([*line, "--table"]) == 0
    assert capsys.readouterr().out == text + text
    # Other scenarios are added to the same file.
    monkeypatch.undo()
    assert main(["re_entry", "--output", str(output), "--policy", "ours", "--seconds", "3"]) == 0
    assert len(read_rows(output)) == 4
    assert "re_entry" in capsys.readouterr().out


def test_the_verdict() -> None:
    def row(policy: str, reload_s: float, seed: int = 0) -> dict[str, Any]:
        names = (*popularity.COLUMNS, "queue_mean_s")
        return {
            **dict.fromkeys(names, 1.0),
            **{"reload_s": reload_s, "policy": policy, "scenario": "x", "seed": seed},
        }

    rows = [row("ours", 80.0), row("evict=lru", 100.0), row("evict=belady", 75.0)]
    text = "\n".join(popularity.verdicts(json.loads(json.dumps(rows))))
    assert "ours / evict=lru: reload 0.800" in text
    assert "ours: 80% of what evict=belady saves" in text
    # The interval is that of the paired worlds; one in which no request ended has no wait.
    more = [row("ours", 90.0 + seed, seed) for seed in range(1, 9)]
    more += [row("evict=lru", 100.0, seed) for seed in range(1, 9)]
    more[0]["queue_mean_s"] = None
    line = popularity.verdicts(rows + more)[1]
    found = re.search(r"reload (\S+) \((\S+) to (\S+)\).* wait 1.000 \(1.000 to 1.000\)", line)
    assert found is not None
    ratio, low, high = map(float, found.groups())
    assert ratio == 0.929
    assert 0.88 < low < ratio < high < 0.97


def test_a_window_without_requests_is_told_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One service of a provider is not asked for at every hour."""
    rates = [("m-mid", 0, at_s, 4.0, 1.0, "Gamma", 1.0, 0.25) for at_s in (0, 1200)]
    names = ("model", "client", "t_s", "rate_rps", "cv", "dist", "p1", "p2")
    write_csv(tmp_path / "traces/servegen_rates.csv.gz", names, rates)
    quantiles = ("p1", "p10", "p25", "p50", "p75", "p90", "p99", "mean")
    lengths = [("m-mid", 0, 0, field, *range(5, 13)) for field in ("input_tokens", "output_tokens")]
    head = ("model", "client", "t_s", "field", *quantiles)
    write_csv(tmp_path / "traces/servegen_lengths.csv.gz", head, lengths)
    trace = "servegen_m-mid:rate=4,requests=10,start=600"
    line = ["popularity", "--data", str(tmp_path), "--output", str(tmp_path / "x.json")]
    assert main([*line, "--models", "3", "--mix", "tiny", "--trace", trace]) == 2
    assert "no requests in that span" in capsys.readouterr().err


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    output = ["--output", str(tmp_path / "x.json")]
    for line in (
        [*POPULARITY, "--policy", "evict=nobody"],
        ["popularity", "--trace", "no_such_trace"],
        ["nothing"],
        ["real"],
    ):
        assert main([*line, *output]) == 2
    assert not (tmp_path / "x.json").exists()
