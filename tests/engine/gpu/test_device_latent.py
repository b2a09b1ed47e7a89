"""Models that keep latents on a late device: recorded steps, blocks of K alone, moves, preemption.

The mixes of tests/engine/gpu/test_device_engine.py, with references in the kernels' places.
"""

from pathlib import Path

import pytest

from bench.family_configs import tiny_config
from engine.gpu import device_batch
from tests.engine.gpu.test_device_engine import NARROW, PROMPTS, DeviceMix
from tests.engine.running.test_parity_mixes import Book, run_mixes
from tests.engine.tiny_models import make_tiny_models

FAMILIES = ("minicpm3", "youtu", "deepseek_v3")
NUM_MIXES = 6


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Book:
    configs = {family: tiny_config(family) for family in FAMILIES}
    return Book.of(make_tiny_models(tmp_path_factory.mktemp("latent"), configs), PROMPTS)


def test_greedy_tokens_are_those_of_transformers(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_batch, "FIRST_CHUNK_WIDTH", NARROW)
    total = run_mixes(book, range(NUM_MIXES), DeviceMix)
    for event in ("hit tokens", "preemptions", "graph_replays", "mixed replays"):
        assert total[event], event
    assert total["forced kv moves"]
    assert not total["graphs_refused"]


def test_a_model_that_chooses_what_it_sees_is_not_loaded(tmp_path: Path) -> None:
    models = make_tiny_models(tmp_path, {"deepseek_v32": tiny_config("deepseek_v32")})
    mix = DeviceMix(Book(models, {"deepseek_v32": [[5]]}), 0)
    mix.engine.load("deepseek_v32", 0.0)
    mix._until(lambda: mix._state("deepseek_v32") == "failed")
    (row,) = mix.engine.status(mix.now_s).models
    assert "an indexer chooses what it attends to" in row.reason
    mix._empty()
