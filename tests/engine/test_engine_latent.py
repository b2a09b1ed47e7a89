"""The whole engine with models that keep latents: token for token what transformers says.

What tests/engine/test_engine.py shows of models with K and V, of those that matter for another
form of KV: prefixes that are found, preemption, blocks that move, steps over many requests.
"""

import random

import pytest

from bench.family_configs import tiny_config
from engine.pack import read_index
from tests.engine.running.test_parity_mixes import Book, Mix, run_mixes
from tests.engine.test_engine import PAGE, Driver, Mode, generated, in_each_mode, weight_pages
from tests.engine.tiny_models import TinyModel, make_tiny_models

FAMILIES = ("deepseek_v3", "deepseek_v2", "longcat_flash")
LONGEST = 40


@pytest.fixture(scope="module")
def latent_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyModel]:
    configs = {family: tiny_config(family) for family in FAMILIES}
    return make_tiny_models(tmp_path_factory.mktemp("latent"), configs)


def some_prompt(rng: random.Random, longest: int = LONGEST) -> list[int]:
    return [rng.randrange(3, 90) for _ in range(rng.randint(1, longest))]


@pytest.mark.parametrize("family", FAMILIES)
def test_preemption_changes_no_token(latent_models: dict[str, TinyModel], family: str) -> None:
    model = latent_models[family]
    driver = Driver({family: model}, num_pages=weight_pages(model) + 11)
    driver.make_resident(family)
    rng = random.Random(4)
    prompts = {str(i): some_prompt(rng, 20) for i in range(8)}
    for name, prompt in prompts.items():
        driver.submit(name, family, prompt, 60)
    driver.run(lambda: len(driver.finishes) == 8 and not driver.engine.has_work())
    assert driver.counter("preemptions") > 0
    for name, prompt in prompts.items():
        assert driver.tokens[name] == generated(model, prompt, 60)
    driver.empty()


@in_each_mode
def test_a_prefix_is_found_and_read(latent_models: dict[str, TinyModel], mode: Mode) -> None:
    model = latent_models["deepseek_v3"]
    driver = Driver({"deepseek_v3": model}, num_pages=400, mode=mode)
    driver.make_resident("deepseek_v3")
    prefix = [3 + i % 50 for i in range(60)]
    prompts = {name: [*prefix, 60 + i] for i, name in enumerate(("first", "second", "stranger"))}
    for name, prompt in prompts.items():
        driver.submit(name, "deepseek_v3", prompt, 12, tenant="u" if name == "stranger" else "t")
        driver.run(lambda name=name: name in driver.finishes)  # type: ignore[misc]
        assert driver.tokens[name] == generated(model, prompt, 12)
    cached = {name: finish.usage.cached_tokens for name, finish in driver.finishes.items()}
    assert cached == {"first": 0, "second": 60, "stranger": 0}
    driver.empty()


def test_blocks_that_move_change_no_token(latent_models: dict[str, TinyModel]) -> None:
    """Sparse extents are copied together while requests run: whole blocks of K alone."""
    model = latent_models["deepseek_v3"]
    driver = Driver({"deepseek_v3": model}, num_pages=weight_pages(model) + 14)
    driver.make_resident("deepseek_v3")
    rng = random.Random(7)
    prompts: dict[str, tuple[list[int], int]] = {}
    for i in range(24):
        prompts[str(i)] = (some_prompt(rng), rng.choice((2, 5, 40)))
        driver.submit(str(i), "deepseek_v3", *prompts[str(i)])
    driver.run(lambda: len(driver.finishes) == len(prompts))
    for name, (prompt, new) in prompts.items():
        assert driver.tokens[name] == generated(model, prompt, new), name
    assert driver.counter("kv_compactions") > 0
    driver.empty()


def test_a_token_takes_what_the_architecture_asks_for(latent_models: dict[str, TinyModel]) -> None:
    """Of the pages that a cache holds: 2 layers of 32 values in float32, and their rounding."""
    model = latent_models["deepseek_v3"]
    (group,) = read_index(model.pack_dir).kv_groups
    assert group.values_per_token * 4 == 256
    driver = Driver({"deepseek_v3": model}, num_pages=400)
    driver.make_resident("deepseek_v3")
    assert 256 <= driver.runner("deepseek_v3").cache.bytes_per_token() <= 256 * 1.1
    driver.submit("one", "deepseek_v3", [5] * 64, 64)
    held = 0
    while not driver.finishes:
        driver.step()
        held = max(held, driver.engine.status(driver.now_s).pages.get("deepseek_v3/kv", 0))
    assert held * PAGE < 2 * 128 * 256
    driver.empty()


def test_mixes_of_everything_at_once(latent_models: dict[str, TinyModel]) -> None:
    """Swaps, forced moves of KV and weights, preemption, aborts, hits, as in the parity mixes."""
    total = run_mixes(Book.of(latent_models, 4), range(4), Mix)
    for event in ("hit tokens", "preemptions", "swaps", "forced kv moves"):
        assert total[event], event
