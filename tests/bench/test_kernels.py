"""The kernels' bench without a GPU: every case at a tiny size, interpreted; checking, resuming."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import kernels as bench
from bench.kernel_cases import Call, Case, Prepared, Rig, Target
from bench.kernel_timing import Ceilings, Timing, summary

LIMITS: Ceilings = {"copy_gb_s": 4000.0, "matmul_tflop_s": 800.0}


def rig() -> Rig:
    return Rig(torch.device("cpu"), torch.float32, torch.Generator().manual_seed(0))


def clocked(call: Call, repeats: int, capture: bool) -> Timing:
    """What events measure on a GPU, by the clock."""
    times = []
    for _ in range(min(repeats, 1)):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    return summary(times, captured=False)


@pytest.mark.parametrize("case", bench.CASES, ids=lambda case: case.name)
def test_every_case_is_correct_when_tiny(case: Case) -> None:
    row = bench.run_case(case, rig(), True, LIMITS, clocked, 1)
    assert row["correct"], row
    assert row["rate"] > 0
    assert case.name in bench.table({case.name: row})
    assert (case.target is None) == ("target" not in row)


def simple(result: float, wanted: float = 2.0) -> Prepared:
    return Prepared(
        lambda: None,
        lambda: (torch.full((3,), result),),
        lambda: (torch.full((3,), wanted, dtype=torch.float64),),
        1e-3,
        num_bytes=4_000_000,
        peers={"other": lambda: None},
    )


def ten_us(call: Call, repeats: int, capture: bool) -> Timing:
    call()
    return summary([10.0] * repeats, captured=True)


def test_what_waits_for_the_device_is_not_captured() -> None:
    """A capture that is broken off spoils the allocator for those after it."""
    captured: list[bool] = []

    def timer(call: Call, repeats: int, capture: bool) -> Timing:
        captured.append(capture)
        return ten_us(call, repeats, capture)

    case = Case("c", "bytes", lambda rig, tiny: replace(simple(2.0), waiting=frozenset({"other"})))
    bench.run_case(case, rig(), True, LIMITS, timer, 1)
    assert captured == [True, False]


def test_a_wrong_case_is_not_timed() -> None:
    def never(call: Call, repeats: int, capture: bool) -> Timing:
        raise AssertionError("timed")

    for bad in (2.1, float("nan"), float("inf")):
        case = Case("wrong", "bytes", lambda rig, tiny, bad=bad: simple(bad))  # type: ignore[misc]
        row = bench.run_case(case, rig(), True, LIMITS, never, 3)
        assert not row["correct"]
        assert "WRONG" in bench.line("wrong", row)
        assert "not timed" in bench.table({"wrong": row})


def test_rates_and_targets() -> None:
    case = Case("good", "bytes", lambda rig, tiny: simple(2.0), Target(0.09))
    row = bench.run_case(case, rig(), True, LIMITS, ten_us, 3)
    assert row["rate"] == pytest.approx(400.0)  # 4 MB in 10 us
    assert row["of_ceiling"] == pytest.approx(0.1)
    assert row["target"] == {
        "least": 0.09,
        "of": "ceiling",
        "reached": pytest.approx(0.1),
        "met": True,
    }
    missed = replace(case, target=Target(1.7, "other"))
    found = bench.run_case(missed, rig(), True, LIMITS, ten_us, 3)
    assert found["target"]["reached"] == pytest.approx(1.0)
    assert "**missed**" in bench.table({"good": found})


def test_what_raises_is_reported_and_the_rest_goes_on() -> None:
    def fail() -> object:
        raise OSError("cannot")

    def build(rig: Rig, tiny: bool) -> Prepared:
        return replace(simple(2.0), peers={"bad": fail, "good": lambda: None})

    row = bench.run_case(Case("a", "bytes", build), rig(), True, LIMITS, ten_us, 2)
    assert row["failed_peers"] == {"bad": "OSError: cannot"}
    assert set(row["peers"]) == {"good"}
    case = Case("a", "bytes", build)
    fewer = bench.run_case(case, rig(), True, LIMITS, ten_us, 2, without=("bad",))
    assert "failed_peers" not in fewer
    done: bench.Results = {}

    def run(case: Case) -> dict[str, Any]:
        return row if case.name == "b" else {"never": fail()}

    cases = [Case(name, "bytes", build) for name in "ab"]
    assert bench.run_part(cases, done, run, lambda found: None, 10, lambda: 0.0) == 0
    assert done["b"]["correct"]
    assert not done["a"]["correct"]
    assert "OSError: cannot" in bench.line("a", done["a"])
    assert "not timed" in bench.table(done)


def test_parts_resume_where_they_stopped(tmp_path: Path) -> None:
    cases = [Case(str(i), "bytes", lambda rig, tiny: simple(2.0)) for i in range(3)]
    clock = [0.0]

    def run(case: Case) -> dict[str, Any]:
        clock[0] += 10
        good = case.name != "1" or clock[0] > 20
        prepared = replace(case, build=lambda rig, tiny: simple(2.0 if good else 3.0))
        return bench.run_case(prepared, rig(), True, LIMITS, ten_us, 2)

    def part(seconds: float, device: str = "gpu") -> int:
        done = bench.read(tmp_path, device)
        save = lambda found: bench.write(tmp_path, device, found)  # noqa: E731
        return bench.run_part(cases, done, run, save, seconds, lambda: clock[0])

    assert bench.read(tmp_path, "gpu") == {}
    assert part(15) == 1
    assert set(bench.read(tmp_path, "gpu")) == {"0"}  # the wrong one is tried again
    assert part(1000) == 0
    report = json.loads((tmp_path / "kernels.json").read_text(encoding="utf-8"))
    assert set(report["cases"]) == {"0", "1", "2"}
    assert all(row["correct"] for row in report["cases"].values())
    assert "torch" in report["packages"]
    assert (tmp_path / "kernels.md").read_text(encoding="utf-8").startswith("Kernels on gpu")
    assert bench.read(tmp_path, "another") == {}


def test_without_a_device(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        assert bench.main(["--out", str(tmp_path)]) == 2
        assert len(capsys.readouterr().out.splitlines()) == 1
        assert not list(tmp_path.iterdir())
    assert bench.main(["--dry-run", "--only", "rows=1"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert any(line.startswith("int8_linear rows=1 ") and "1.7" in line for line in listed)
    assert len({case.name for case in bench.CASES}) == len(bench.CASES)
