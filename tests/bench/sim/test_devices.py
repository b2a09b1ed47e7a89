"""Device files: what is written is read back; what cannot be is refused with its reason."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.sim.devices import DEVICES, find_device, slowed, write_device


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    figures = DEVICES["cpu-2"]
    write_device(path, figures, {"request_s": 0.02}, {"machine": {"cores": 2}})
    found = find_device(str(path))
    assert found.figures == figures
    assert found.settings == {"request_s": 0.02}


def test_a_name_gives_the_device_of_that_name() -> None:
    assert find_device("h100").figures is DEVICES["h100"]
    with pytest.raises(ValueError, match=r"h200, h100.*sim_calibrate"):
        find_device("h101")


def test_at_half_its_speed_a_device_takes_twice_as_long_for_everything() -> None:
    half = slowed(DEVICES["cpu-2"], 0.5)
    assert half.flops_per_s == DEVICES["cpu-2"].flops_per_s / 2
    assert half.host_bytes_per_s == DEVICES["cpu-2"].host_bytes_per_s / 2
    assert half.row_overhead_s == DEVICES["cpu-2"].row_overhead_s * 2
    assert half.memory_bytes == DEVICES["cpu-2"].memory_bytes


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"speed": 1.0}, "no figure 'speed'"),
        ({"flops_per_s": "fast"}, "flops_per_s is no number"),
        ({"flops_per_s": 0.0}, "flops_per_s must be above 0"),
        ({"row_overhead_s": -1.0}, "row_overhead_s is no number that is 0 or more"),
        ({"step_overhead_s": float("nan")}, "step_overhead_s is no number"),
        ({"flops_by_dtype": {"float32": 0.0}}, "flops_by_dtype"),
        ({"flops_by_dtype": [1.0]}, "flops_by_dtype"),
        ({"memory_bytes": None}, "memory_bytes"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(
    change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.json"
    write_device(path, DEVICES["cpu-2"], {}, {})
    content = json.loads(path.read_text())
    content["device"] |= change
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=reason):
        find_device(str(path))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"device": {"name": "x"}}', '{"device": 3}'])
def test_what_is_no_device_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="is no device file"):
        find_device(str(path))
