"""The report's files: deterministic, self-contained, well-formed, runs side by side."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from bench.sim.columns import Slo
from bench.sim.report import PARTS, value_at, write_report
from bench.sim.types import Run
from tests.bench.sim.some_runs import a_run, a_world


class Balance(HTMLParser):
    """Whether every element is closed by its own end, and what is asked for from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.outside: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Count it and look where it points."""
        if tag != "meta":
            self.open.append(tag)
        self.outside += [v for k, v in attrs if k in ("src", "href") and v and v[0] != "#"]
        self.outside += [tag] if tag in ("script", "link", "iframe", "img") else []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Closed by itself."""

    def handle_endtag(self, tag: str) -> None:
        """Must close the last one."""
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        """Text."""
        self.words.append(data)


def looked_at(folder: Path) -> Balance:
    """The page, read."""
    page = Balance()
    page.feed((folder / "report.html").read_text(encoding="utf-8"))
    return page


def test_one_run(tmp_path: Path) -> None:
    write_report({"ours": a_run()}, tmp_path / "new" / "folder", workload="synthetic:rate=2")
    page = looked_at(tmp_path / "new" / "folder")
    assert page.wrong == page.open == page.outside == []
    words = " ".join(page.words)
    for expected in ("synthetic:rate=2", "Within the SLO", "tenant1", "Pages by owner", "reloads"):
        assert expected in words
    assert "@import" not in words
    assert "url(" not in words
    assert "prefers-color-scheme:dark" in words


def test_runs_side_by_side(tmp_path: Path) -> None:
    runs = {"ours": a_run(), "<fcfs>": a_run(2, scale=3.0)}
    write_report(runs, tmp_path, slo=Slo(1.0, 0.1))
    page = looked_at(tmp_path)
    assert page.wrong == page.open == page.outside == []
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "&lt;fcfs&gt;" in text
    row = re.search(r"<tr><td[^>]*>time to first token, p50</td>(.*?)</tr>", text)
    assert row is not None
    ours, other = re.findall(r"<td( class=best)?>(.*?)</td>", row[1])
    assert ours[0]
    assert not other[0]
    assert "1.25 s" in ours[1]
    assert "3.75 s <small>+200 %</small>" in other[1]


def test_files_are_the_same_every_time_whatever_the_wall_time(tmp_path: Path) -> None:
    one, other = a_run(), a_run()
    other.wall_s = 99.0
    write_report({"a": one}, tmp_path / "1")
    write_report({"a": other}, tmp_path / "2")
    for name in ("report.json", "report.html"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


def test_the_json_has_every_figure_of_the_page(tmp_path: Path) -> None:
    run = a_run()
    run.records.outcome[0] = 5
    run.samples[50].service_s[0] += 1.0
    write_report({"a": run}, tmp_path)
    text = (tmp_path / "report.json").read_text(encoding="utf-8")
    tree = json.loads(text)
    assert tree["format"] == 1
    assert text == json.dumps(tree, indent=1, sort_keys=True) + "\n"
    paths = [figure.path for figures in PARTS.values() for figure in figures]
    missing = [path for path in paths if value_at(tree["runs"]["a"], path) is None]
    assert missing == []


def test_an_empty_run_has_a_page(tmp_path: Path) -> None:
    write_report({"a": Run(a_world()), "b": Run(a_world())}, tmp_path)
    assert looked_at(tmp_path).wrong == []


def test_a_report_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a run"):
        write_report({}, tmp_path)
