"""Layers that keep KV in unusual ways: greedy tokens are those of transformers' `generate`.

The mixes of test_parity_mixes.py (prefixes from the cache, windows left behind, preemptions, swaps)
on a processor, and on the fake device of tests/engine/gpu, whose steps are late and recorded.
"""

from collections.abc import Callable

import pytest
from transformers import PretrainedConfig

from tests.engine.gpu.test_device_engine import DeviceMix
from tests.engine.running.test_parity_mixes import Book, Mix, run_mixes
from tests.engine.tiny_models import make_tiny_models
from tests.engine.unusual_models import chunked_configs, own_configs, shared_configs

MIXES = 8
SLOPES = ("bloom", "mpt")
KINDS: dict[str, Callable[[], dict[str, PretrainedConfig]]] = {
    "shared and chunks": lambda: shared_configs() | chunked_configs(),
    "own": lambda: {n: c for n, c in own_configs().items() if n not in SLOPES},
    "slopes": lambda: {name: own_configs()[name] for name in SLOPES},
}


@pytest.fixture(scope="module", params=KINDS)
def book(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Book:
    """Prompts and answers of models of one kind."""
    models = make_tiny_models(tmp_path_factory.mktemp("unusual"), KINDS[request.param]())
    return Book.of(models, 5)


@pytest.mark.parametrize("make", [Mix, DeviceMix])
def test_greedy_tokens_are_those_of_transformers(book: Book, make: type[Mix]) -> None:
    if make is DeviceMix and set(book.models) == set(SLOPES):
        with pytest.raises(AssertionError, match="cannot be hosted"):
            run_mixes(book, range(1), make)
        return
    total = run_mixes(book, range(MIXES), make)
    assert total["requests"] > 4 * MIXES
    assert total["hit tokens"]
    assert total["preemptions"]
