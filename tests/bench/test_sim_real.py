"""Calibration on tiny shapes, and the parts of the comparison that need no server."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from bench import machine, shapes, sim_calibrate
from bench.sim import packs
from bench.sim.devices import DEVICES, Device, read_device
from bench.sim.scenarios import real
from bench.sim.types import Arrival
from bench.sim_real import swaps
from tests.bench.test_shapes import SHAPES

TINY = SHAPES["llama"]
KNOWN = {"test/one": TINY, "test/two": TINY | {"num_hidden_layers": 6}}


def test_calibration_writes_a_file_that_the_simulator_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "memcpy_seconds", lambda num_bytes, repeats=5: 1.0)
    monkeypatch.setattr(shapes, "read_shapes", lambda *path: KNOWN)
    monkeypatch.setattr(packs, "_shapes", lambda: KNOWN)
    monkeypatch.setattr(sim_calibrate, "pin_this", lambda place: None)
    monkeypatch.setattr(sim_calibrate, "ARENA_BYTES", 64 << 20)
    monkeypatch.setattr(sim_calibrate, "ALONE", 0.0)
    monkeypatch.setattr(sim_calibrate, "DECODES", ((1, 8), (3, 20)))
    monkeypatch.setattr(sim_calibrate, "PROMPTS", (4, 60))
    path = tmp_path / "mine.json"
    line = ["--output", str(path), "--shapes", *KNOWN, "--rounds", "1", "--no-server"]
    assert sim_calibrate.main([*line, "--work-dir", str(tmp_path)]) == 0
    figures = read_device(path).figures
    assert figures.name == "mine"
    assert "error of the fit" in figures.source
    assert set(figures.flops_by_dtype) == {"float32"}
    assert figures.step_overhead_s + figures.row_overhead_s + figures.layer_overhead_s > 0
    errors = json.loads(path.read_text())["errors"]
    assert errors["decode"]["steps"] > 10
    assert all(math.isfinite(row["median"]) for row in errors.values())


def test_calibration_needs_two_shapes(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        sim_calibrate.parse(["--output", "x.json", "--shapes", "a", "a"])


def plan(num_workers: int = 1) -> real.Plan:
    """Two tenants, three models, a request every 0.4 s after the warm-ups."""
    trace = "synthetic:rate=2.5,requests=30,lengths=short,max_prompt=60,max_tokens=exact"
    return real.make_plan(trace, None, 8, num_workers)


def test_a_plan_warms_every_model_up_and_leaves_no_room_for_all() -> None:
    made = plan()
    num = len(real.MODELS)
    assert [(a.at_s, a.model) for a in made.arrivals[:num]] == [(0.0, 0), (5.0, 1), (10.0, 2)]
    assert all(a.at_s >= made.start_s == 15.0 for a in made.arrivals[num:])
    sizes = [packs.SimPacks([m]).pack(0).index.total_bytes for m in real.MODELS]
    assert sum(sizes) > made.settings["device_budget_bytes"] > sum(sizes) - max(sizes)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_simulated_side_serves_all_of_it_and_swaps(num_workers: int) -> None:
    made = plan(num_workers)
    device = Device(DEVICES["cpu-2"], {"request_s": 0.01})
    found = real.simulated(made, [a.prompt_tokens for a in made.arrivals], device)
    assert found["requests"] == 30
    assert found["tokens"] == sum(a.max_tokens for a in made.arrivals[3:])
    assert found["loads"] >= 1
    assert 0.01 < found["ttft_p50_s"] <= found["ttft_p95_s"]


def figures(**changed: float) -> dict[str, Any]:
    names = ("ttft_p50_s", "ttft_p95_s", "tok_s", "tpot_p50_s", "e2e_p50_s", "loads", "wall_s")
    return dict.fromkeys((*names, "load_p50_s", "worker_cpu_s"), 1.0) | changed


def test_figures_are_held_against_the_median_and_the_goals() -> None:
    rounds = [figures(ttft_p50_s=value) for value in (1.0, 2.0, 9.0)]
    modelled = figures(ttft_p50_s=2.2, tok_s=0.8, ttft_p95_s=1.25)
    found = real.compare(rounds, modelled, figures(ttft_p50_s=2.4))
    assert found["ttft_p50_s"]["error_at_share"] == pytest.approx(0.2)
    assert found["ttft_p50_s"]["error"] == pytest.approx(0.1)
    assert [found[name]["reached"] for name in real.GOALS] == [True, False, True]
    assert found["loads"]["reached"] is None
    lines = real.table(found).splitlines()
    assert [line.split()[0] for line in lines if "MISSED" in line] == ["tok_s"]


def test_figures_are_of_times_since_the_trace_began() -> None:
    made = real.Plan("", [Arrival(0.0, 0, 0, (), 1, 1)], {}, 10.0)
    found = real._figures(made, [(11.0, 11.5, 13.5, 5), (10.0, 10.2, 10.2, 1)], [0.1, 0.3])
    assert found["wall_s"] == pytest.approx(3.5)
    assert found["tok_s"] == pytest.approx(6 / 3.5)
    assert found["tpot_p50_s"] == pytest.approx(0.5)
    assert found["ttft_s"] == [0.2, 0.5]
    assert (found["loads"], found["load_p50_s"]) == (2, pytest.approx(0.2))


def test_swaps_are_read_from_the_log() -> None:
    text = (
        '{"message": "swap model=a kind=load tier=disk bytes=7 seconds=0.2500 reason="}\n'
        '{"message": "swap model=b kind=evict tier=none bytes=7 seconds=0.0010 reason=room"}\n'
    )
    assert [(s.model, s.kind, s.tier, s.seconds) for s in swaps(text)] == [
        ("a", "load", "disk", 0.25),
        ("b", "evict", "none", 0.001),
    ]
