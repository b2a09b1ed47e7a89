"""Exactly once, by violence: each kind of kill; the long runs are soaks."""

from pathlib import Path

import pytest

from tests.e2e.violence import run


@pytest.mark.parametrize(
    ("database", "kinds"),
    [
        ("sqlite", ("server", "worker", "database", "both")),
        ("postgresql", ("database", "both")),  # A worker alone that dies is no database's affair.
    ],
)
def test_each_kind_of_kill(tmp_path: Path, database: str, kinds: tuple[str, ...]) -> None:
    wrong, told = run(tmp_path, database, requests=60, kills=len(kinds), kinds=kinds, seed=3)
    assert wrong == [], told
    ends, postings = told["ends"], told["postings"]
    assert isinstance(ends, dict)
    assert isinstance(postings, dict)
    assert ends.get("done", 0) >= 10, told
    assert ends.get("broken", 0) + ends.get("error", 0) >= 1, told
    assert sum(postings.values()) >= ends["done"], told


@pytest.mark.soak
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_a_hundred_kills(tmp_path: Path, database: str) -> None:
    wrong, told = run(tmp_path, database, requests=2000, kills=100)
    assert wrong == [], told
