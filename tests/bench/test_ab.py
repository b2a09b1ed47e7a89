"""The comparison of two trees: which runs make a pair, what is printed, what ends it."""

import json
from pathlib import Path

import pytest

from bench import ab

SPIN = "import sys, time\nwhile time.process_time() < float(sys.argv[1]) * {factor}: pass\n"


@pytest.fixture
def trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two trees with one program; ours, which we stand in, takes twice as long."""
    for name, factor in ((ab.OLD, 1), (ab.NEW, 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "spin.py").write_text(SPIN.format(factor=factor))
    monkeypatch.chdir(tmp_path / ab.NEW)
    return tmp_path / ab.OLD


def test_neither_tree_is_always_first() -> None:
    assert ab.order(3) == ["old", "new", "new", "old", "old", "new"]


def test_pairs_are_of_both_trees_and_neighbours_between_them_of_one() -> None:
    runs = list(zip(ab.order(2), (2.0, 3.0, 6.0, 5.0), strict=True))
    assert ab.ratios(runs) == [3 / 2, 6 / 5]
    assert ab.same_tree_ratios(runs) == [6 / 3]


def test_the_interval_holds_the_median() -> None:
    found = ab.interval([1.0, 1.1, 0.9, 1.02, 0.98] * 4)
    assert 0.9 < found.low < found.median == 1.0 < found.high < 1.1


def test_a_slower_tree_is_told(trees: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--old", str(trees), "--pairs", "1"]
    assert ab.main([*arguments, "--", "spin", "0.2"]) == 1
    out = capsys.readouterr().out
    assert 1.3 < float(out.partition("new over old: ")[2].split()[0]) < 2.1
    assert ab.main([*arguments, "--limit", "3", "--", "spin", "0"]) == 0


def test_a_figure_of_the_programs_own_is_compared(trees: Path) -> None:
    for tree, cost in ((trees, 1), (Path.cwd(), 2)):
        code = (
            f"import json, sys\njson.dump({{'a': {{'b': {cost}}}, 'c': 1}}, open(sys.argv[1], 'w'))"
        )
        (tree / "tell.py").write_text(code)
    figures = ["--figure", "a.b", "--figure", "c", "--output", "kept.json"]
    command = ["--old", str(trees), "--pairs", "1", *figures, "--", "tell", "{work}/result.json"]
    assert ab.main(command) == 1
    assert json.loads(Path("kept.json").read_text())["costs"] == {"old": [2.0], "new": [3.0]}


def test_a_run_that_breaks_ends_the_comparison(trees: Path) -> None:
    with pytest.raises(SystemExit, match=r"spin in .* broke:\n.*Traceback"):
        ab.main(["--old", str(trees), "--", "spin", "{work}"])
