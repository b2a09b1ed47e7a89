"""Compiled simulations: the same figures, and never from old sources."""

import subprocess
import sys
from pathlib import Path

import pytest

import bench
from bench.sim import compiled

ROOT = Path(bench.__file__).parents[1]


def test_every_module_is_there() -> None:
    missing = [name for name in compiled.MODULES if not (ROOT / name).is_file()]
    assert missing == []
    assert list(compiled.MODULES) == sorted(compiled.MODULES, key=_package)


def test_a_folder_of_something_else_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("precious")
    assert compiled.main([str(tmp_path)]) == 2
    assert "name a new folder" in capsys.readouterr().err
    assert mine.read_text() == "precious"


def test_what_a_failed_build_left_is_built_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "compiled"
    monkeypatch.setattr(compiled, "_SETUP", "raise SystemExit(3)")
    for _ in range(2):
        assert compiled.main([str(folder)]) == 1
        assert compiled.main([str(folder), "--", "synthetic:requests=1"]) == 2


def test_old_machine_code_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / compiled.STAMP).write_text("of other sources")
    assert compiled.main([str(tmp_path), "--", "synthetic:requests=1"]) == 2
    assert f"python -m bench.sim.compiled {tmp_path}" in capsys.readouterr().err


def test_the_digest_sees_every_source(tmp_path: Path) -> None:
    for package in compiled.PACKAGES:
        (tmp_path / package).mkdir()
    before = compiled.source_digest(tmp_path)
    module = tmp_path / "engine" / "new.py"
    module.write_text("A = 1\n")
    added = compiled.source_digest(tmp_path)
    module.write_text("A = 2\n")
    assert len({before, added, compiled.source_digest(tmp_path)}) == 3


@pytest.mark.soak
def test_compiled_figures_are_the_same_to_the_last_digit(tmp_path: Path) -> None:
    folder = tmp_path / "compiled"
    assert compiled.main([str(folder)]) == 0
    run = ["synthetic:rate=20,requests=600", "--workers", "3", "--models", "9", "--out"]
    plain, quick = tmp_path / "plain", tmp_path / "quick"
    subprocess.run([sys.executable, "-m", "bench.sim", *run, str(plain)], cwd=ROOT, check=True)
    assert compiled.main([str(folder), "--", *run, str(quick)]) == 0
    for name in ("report.json", "report.html"):
        assert (plain / name).read_bytes() == (quick / name).read_bytes()


def _package(name: str) -> int:
    return ("engine", "gateway", "bench").index(name.partition("/")[0])
