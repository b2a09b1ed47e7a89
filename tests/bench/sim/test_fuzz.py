"""Random worlds in which everything goes wrong: a few here, a thousand in `make soak`."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from bench.sim.fuzz import Fuzz


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Lost workers and failed loads are what these worlds are about: nobody reads of them."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def run(seeds: Sequence[int]) -> Counter[str]:
    happened: Counter[str] = Counter()
    for seed in seeds:
        try:
            happened += Fuzz(seed).run()
        except BaseException:
            print(f"python -m bench.sim.fuzz --first {seed} --seeds 1 --verbose")
            raise
    return happened


def test_some_worlds() -> None:
    happened = run(range(4))
    assert happened["inside: engine_steps"] > 200
    assert happened["outcome stop"]


@pytest.mark.soak
def test_a_thousand_worlds() -> None:
    happened = run(range(1000, 2000))
    for event in ("preemptions", "kv_evicted_pages", "kv_moved_pages", "retries"):
        assert any(happened[f"inside: {prefix}{event}"] for prefix in ("", "engine_")), event
