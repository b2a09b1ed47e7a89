"""The bound of service gaps after every event: a few worlds here, a thousand in `make soak`."""

import logging
from collections.abc import Iterator

import pytest

from bench.sim.gap_watch import watch


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def look(seeds: range) -> int:
    contended = 0
    for seed in seeds:
        found = watch(seed)
        assert found.ratio <= 1, f"python -m bench.sim.gap_watch --first {seed} --seeds 1"
        assert abs(found.books_off) < 0.01
        contended += found.num_contended
    return contended


def test_some_worlds() -> None:
    assert look(range(4)) > 50


@pytest.mark.soak
def test_a_thousand_worlds() -> None:
    assert look(range(1000, 2000)) > 100_000
