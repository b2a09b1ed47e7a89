"""The popularity sweep: worlds, resuming, its table."""

import dataclasses
import json
from pathlib import Path

import pytest

from bench import sim_popularity
from bench.sim_popularity import Cell, main, make_world, parse_policy, read_rows, table

TRACE = "synthetic:rate=4,requests=10,lengths=short,scale=0.2"
LINE = ["--trace", TRACE, "--models", "3", "--mix", "tiny", "--memory", "0.5", "--tenants", "2"]
CELL = Cell(TRACE, 3, "tiny", 1, 0.5, 0.5, "h100", 2, 0, "ours")


def figures(reload_s: float, **more: float) -> dict[str, float]:
    names = [key for key, _, _ in sim_popularity.COLUMNS]
    return {**dict.fromkeys([*names, "queue_mean_s"], 1.0), "reload_s": reload_s, **more}


def test_a_policy_is_baselines_and_settings() -> None:
    assert parse_policy("ours") == ({}, {})
    assert parse_policy("ours/eviction_margin=2,starvation_s=0.5") == (
        {},
        {"eviction_margin": 2, "starvation_s": 0.5},
    )
    assert parse_policy("evict=lru+place=static") == ({"evict": "lru", "place": "static"}, {})
    for text in ("lru", "evict=nobody", "ours/margin"):
        with pytest.raises(ValueError, match=r"write|no evict policy"):
            parse_policy(text)


def test_the_device_is_a_share_of_the_catalog_and_holds_the_largest_model() -> None:
    half = make_world(CELL).device
    assert make_world(dataclasses.replace(CELL, memory=1.0)).device.memory_bytes == pytest.approx(
        2 * half.memory_bytes, abs=2
    )
    two = make_world(dataclasses.replace(CELL, memory=1.0, workers=2)).device
    assert (two.memory_bytes, two.host_bytes) == (half.memory_bytes, half.host_bytes // 2)
    least = make_world(dataclasses.replace(CELL, memory=0.01)).device
    assert least.memory_bytes > half.memory_bytes * 2 / 3  # a model and a quarter of it


def test_a_sweep_runs_goes_on_and_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "sweep.json"
    policies = ["ours", "evict=lru", "evict=belady"]
    line = [*LINE, "--output", str(output), "--seeds", "0"]
    assert main([*line, "--policy", *policies]) == 0
    text = capsys.readouterr().out
    assert "ours / evict=lru: reload" in text
    rows = read_rows(output)
    assert {row["policy"] for row in rows.values()} == set(policies)
    assert all(row["figures"]["finished"] == 10 for row in rows.values())
    # What is there is not run again; the table comes from the file alone.
    monkeypatch.setattr(sim_popularity, "simulate", None)
    assert main([*line, "--policy", *policies]) == 0
    assert main([*line, "--policy", *policies, "--table"]) == 0
    assert capsys.readouterr().out == text + text


def test_the_verdict(tmp_path: Path) -> None:
    rows = {}
    for policy, reload_s in (("ours", 80.0), ("evict=lru", 100.0), ("evict=belady", 75.0)):
        cell = dataclasses.replace(CELL, policy=policy)
        rows[cell.key] = {**dataclasses.asdict(cell), "figures": figures(reload_s)}
    cells = [dataclasses.replace(CELL, policy=p) for p in ("ours", "evict=lru", "evict=belady")]
    text = table(cells, json.loads(json.dumps(rows)))
    assert "ours / evict=lru: reload 0.800" in text
    assert "ours: 80% of what evict=belady saves" in text


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    output = ["--output", str(tmp_path / "x.json")]
    assert main([*LINE, *output, "--policy", "evict=nobody"]) == 2
    assert main([*output, "--trace", "no_such_trace"]) == 2
    assert not (tmp_path / "x.json").exists()
