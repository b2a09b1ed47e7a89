"""The whole engine with models that choose what they see: token for token what transformers says.

What tests/engine/test_engine_latent.py shows of latents, with contexts well beyond what is chosen
of them: prefixes whose keys are found, preemption, blocks that move, mixes of everything. No token
is padding: one whose embedding is zero scores all positions alike, and of equal scores the
library's cached pass chooses others than its full pass.
"""

import random

import pytest

from bench.family_configs import tiny_config
from engine.pack import is_indexer, read_index
from tests.engine.running.test_parity_mixes import Book, Mix, run_mixes
from tests.engine.test_engine import Driver, Mode, generated, in_each_mode, weight_pages
from tests.engine.test_engine_latent import some_prompt
from tests.engine.tiny_models import TinyModel, make_tiny_models

FAMILIES = ("deepseek_v32", "glm_moe_dsa", "hy_v4", "minimax_m3_vl_text")


@pytest.fixture(scope="module")
def sparse_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyModel]:
    configs = {family: tiny_config(family) for family in FAMILIES}
    return make_tiny_models(tmp_path_factory.mktemp("sparse"), configs)


@pytest.mark.parametrize("family", FAMILIES)
def test_preemption_changes_no_token(sparse_models: dict[str, TinyModel], family: str) -> None:
    model = sparse_models[family]
    driver = Driver({family: model}, num_pages=weight_pages(model) + 20)
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


@pytest.mark.parametrize("family", FAMILIES)
@in_each_mode
def test_a_prefix_is_found_and_read(
    sparse_models: dict[str, TinyModel], family: str, mode: Mode
) -> None:
    model = sparse_models[family]
    driver = Driver({family: model}, num_pages=400, mode=mode)
    driver.make_resident(family)
    prefix = [3 + i % 50 for i in range(60)]
    prompts = {name: [*prefix, 60 + i] for i, name in enumerate(("first", "second", "stranger"))}
    for name, prompt in prompts.items():
        driver.submit(name, family, prompt, 12, tenant="u" if name == "stranger" else "t")
        driver.run(lambda name=name: name in driver.finishes)  # type: ignore[misc]
        assert driver.tokens[name] == generated(model, prompt, 12)
    cached = {name: finish.usage.cached_tokens for name, finish in driver.finishes.items()}
    assert cached == {"first": 0, "second": 60, "stranger": 0}
    driver.empty()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_takes_what_the_architecture_asks_for(
    sparse_models: dict[str, TinyModel], family: str
) -> None:
    """A lease and the pages that are held count the keys of indexers as all KV."""
    model = sparse_models[family]
    groups = read_index(model.pack_dir).kv_groups
    keys = sum(g.values_per_token for g in groups if is_indexer(g.layers[0]))
    least = sum(group.values_per_token for group in groups) * 4
    assert least > keys * 4 > 0
    driver = Driver({family: model}, num_pages=400)
    driver.make_resident(family)
    (lease,) = driver.engine.status(driver.now_s).leases
    assert least <= lease.kv_bytes_per_token <= 1.15 * least
    driver.empty()


def test_mixes_of_everything_at_once(sparse_models: dict[str, TinyModel]) -> None:
    """Swaps, forced moves of KV and weights, preemption, aborts, hits, as in the parity mixes."""
    total = run_mixes(Book.of(sparse_models, 4), range(6), Mix)
    for event in ("hit tokens", "preemptions", "swaps", "forced kv moves"):
        assert total[event], event
