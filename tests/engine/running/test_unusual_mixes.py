"""Layers that keep KV in unusual ways: greedy tokens are those of transformers' `generate`.

The mixes of test_parity_mixes.py (prefixes from the cache, windows left behind, preemptions, swaps)
on a processor, and on the fake device of tests/engine/gpu, whose steps are late and recorded.
"""

import pytest

from tests.engine.gpu.test_device_engine import DeviceMix
from tests.engine.running.test_parity_mixes import Book, Mix, run_mixes
from tests.engine.tiny_models import TinyModel, make_tiny_models
from tests.engine.unusual_models import chunked_configs, shared_configs

MIXES = 8


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyModel]:
    """One of each."""
    return make_tiny_models(
        tmp_path_factory.mktemp("unusual"), shared_configs() | chunked_configs()
    )


@pytest.fixture(scope="module")
def book(models: dict[str, TinyModel]) -> Book:
    """Prompts and answers."""
    return Book.of(models, 5)


@pytest.mark.parametrize("make", [Mix, DeviceMix])
def test_greedy_tokens_are_those_of_transformers(book: Book, make: type[Mix]) -> None:
    total = run_mixes(book, range(MIXES), make)
    assert total["requests"] > 4 * MIXES
    assert total["hit tokens"]
    assert total["preemptions"]
