"""Models that keep states, in the whole engine: token for token what transformers says.

As in `test_engine.py`: fences lag, freed pages are NaN, integrity after every step.
"""

import functools
import random
from pathlib import Path

import pytest

from engine.constraints.constrained_rows import ConstrainedRows, Settled
from engine.errors import RequestRefused
from engine.memory.policy.kv_value import ValueParams
from engine.protocol import Constraint, SamplingParams, Submit
from engine.request import Request
from tests.engine.stamp_states import LossyRow
from tests.engine.test_engine import MODES, Driver, Mode, in_each_mode
from tests.engine.tiny_models import MAX_CONTEXT, VOCAB, TinyModel, make_tiny_models, state_configs

NAMES = sorted(state_configs())
Models = dict[str, TinyModel]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Made once."""
    return make_tiny_models(tmp_path_factory.mktemp("states"), state_configs())


@pytest.fixture(autouse=True)
def _short_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts are short here."""
    few = functools.partial(ValueParams, snapshot_tokens=16)
    monkeypatch.setattr("engine.memory.kv_cache.ValueParams", few)


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(count)]


def check(driver: Driver, model: TinyModel, asked: dict[str, list[int]], count: int) -> None:
    """All have ended, each with what `generate` says."""
    driver.run(lambda: asked.keys() <= driver.finishes.keys())
    for name, prompt in asked.items():
        assert driver.finishes[name].reason == "length", driver.finishes[name]
        assert driver.tokens[name] == model.generate(prompt, count), name


def end(driver: Driver) -> None:
    driver.engine.close()
    driver.backend.close()


@pytest.mark.parametrize("name", NAMES)
@in_each_mode
def test_answers_are_those_of_generate(models: Models, name: str, mode: Mode) -> None:
    driver = Driver({name: models[name]}, 400, mode=mode, max_batch_tokens=24)
    driver.make_resident(name)
    asked = {f"r{i}": tokens(i, count) for i, count in enumerate((25, 9, 80, 1, 2))}
    for request, prompt in asked.items():
        driver.submit(request, name, prompt, 12)
    check(driver, models[name], asked, 12)
    end(driver)


@pytest.mark.parametrize("name", NAMES)
@in_each_mode
def test_a_prefix_is_taken_up_where_its_state_was_kept(
    models: Models, name: str, mode: Mode
) -> None:
    driver = Driver({name: models[name]}, 800, mode=mode)
    driver.make_resident(name)
    beginning = tokens(1, 80)
    found = []
    for i in range(4):
        prompt = beginning + tokens(10 + i, 20)
        driver.submit(f"r{i}", name, prompt, 8)
        check(driver, models[name], {f"r{i}": prompt}, 8)
        found.append(driver.finishes[f"r{i}"].usage.cached_tokens)
    # The first meets nothing, the second sees where they part, and the others begin there.
    assert found == [0, 0, 80, 80]
    said = driver.tokens["r0"]
    prompt = beginning + tokens(10, 20) + said + tokens(99, 3)
    driver.submit("next turn", name, prompt, 8)
    check(driver, models[name], {"next turn": prompt}, 8)
    assert driver.finishes["next turn"].usage.cached_tokens == 96, "the first prompt's last block"
    driver.submit("other tenant", name, prompt, 8, tenant="other")
    check(driver, models[name], {"other tenant": prompt}, 8)
    assert driver.finishes["other tenant"].usage.cached_tokens == 0
    end(driver)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", MODES[:2], ids=str)
def test_whoever_is_preempted_comes_to_the_same_answer(
    models: Models, name: str, mode: Mode
) -> None:
    roomy = Driver({name: models[name]}, 400)
    roomy.make_resident(name)
    num_weights = roomy.engine.pool.num_pages - roomy.engine.pool.num_free
    longest = roomy.runner(name).cache.pages_for(MAX_CONTEXT)
    end(roomy)
    # Room for two sequences at their longest; eight are asked for.
    num_pages = num_weights + 2 * longest
    driver = Driver({name: models[name]}, num_pages, fence_lag=1, mode=mode, max_batch_tokens=16)
    driver.make_resident(name)
    asked = {f"r{i}": tokens(100 + i, 40 + 3 * i) for i in range(8)}
    for request, prompt in asked.items():
        driver.submit(request, name, prompt, 40)
    check(driver, models[name], asked, 40)
    if len(driver.runner(name).cache.groups) == 1:  # what is bounded grows into nobody's way
        assert driver.counter("preemptions")
    end(driver)


class _Lossy:
    """Masks that are late by chance, in place of those of the engine."""

    def __init__(self, rows: ConstrainedRows) -> None:
        self._settle = rows.settle
        self.num_lost = 0

    def settle(self, request: Request, token: int) -> Settled:
        row = request.constrained
        if isinstance(row, LossyRow) and row.loses():
            self.num_lost += 1
            return "lost"
        return self._settle(request, token)


@pytest.mark.parametrize("name", NAMES)
@in_each_mode
def test_a_token_may_be_computed_twice(
    models: Models, name: str, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver({name: models[name]}, 400, mode=mode, max_batch_tokens=24)
    driver.make_resident(name)
    lossy = _Lossy(driver.engine._constrained)
    monkeypatch.setattr(driver.engine._constrained, "settle", lossy.settle)
    asked = {f"r{i}": tokens(200 + i, count) for i, count in enumerate((30, 7, 70, 1))}
    for number, (request, prompt) in enumerate(asked.items()):
        driver.submit(request, name, prompt, 20)
        (found,) = driver.engine._scheduler.find([(request, 1)])
        if number != 1:  # one is like all others
            found.constrained = LossyRow(random.Random(number))
    check(driver, models[name], asked, 20)
    assert lossy.num_lost > 5
    end(driver)


def test_models_of_every_kind_of_memory_share_an_arena(
    models: Models, tiny_models: Models, tmp_path: Path
) -> None:
    together = {name: models[name] for name in NAMES} | {"llama": tiny_models["llama"]}
    driver = Driver(together, 260, fence_lag=1, max_num_seqs=6, kv_low_watermark=0.02)
    asked: dict[str, tuple[str, list[int]]] = {}
    rng = random.Random(5)
    for i in range(60):
        name = rng.choice(sorted(together))
        prompt = tokens(rng.randrange(12), rng.randrange(5, 60))
        if driver.state(name) != "resident":
            driver.engine.load(name, driver.now_s)
        driver.run(lambda name=name: driver.state(name) == "resident")  # type: ignore[misc]
        asked[f"r{i}"] = (name, prompt)
        driver.submit(f"r{i}", name, prompt, rng.randrange(1, 16), tenant=rng.choice("ab"))
        for _ in range(rng.randrange(12)):
            driver.step()
    driver.run(lambda: asked.keys() <= driver.finishes.keys())
    for request, (name, prompt) in asked.items():
        said = driver.tokens[request]
        assert driver.finishes[request].reason == "length"
        assert said == together[name].generate(prompt, len(said)), request
    assert sum(swap.kind == "evict" for swap in driver.engine.take_swaps()[0]) > 1
    assert driver.counter("kv_evicted_pages")
    end(driver)


@pytest.mark.parametrize("name", NAMES)
def test_a_lease_says_what_a_sequence_takes(models: Models, name: str) -> None:
    driver = Driver({name: models[name]}, 400)
    driver.make_resident(name)
    plan = driver.runner(name).cache.plan

    def offer() -> tuple[int, int, int]:
        status = driver.engine.status(driver.now_s)
        (lease,) = status.leases
        return status.free_kv_bytes, lease.kv_bytes_per_token, lease.kv_bytes_per_sequence

    free, per_token, per_sequence = offer()
    assert per_sequence == plan.bytes_per_sequence(8192) > 0
    assert (per_token > 0) == bool(plan.groups)
    driver.submit("r", name, tokens(0, 20), 10)
    taken = free - offer()[0]
    assert taken >= per_sequence
    driver.run(lambda: "r" in driver.finishes)
    end(driver)


def test_a_request_whose_versions_never_fit_is_refused(models: Models) -> None:
    roomy = Driver({"mamba2": models["mamba2"]}, 400)
    roomy.make_resident("mamba2")
    num_weights = roomy.engine.pool.num_pages - roomy.engine.pool.num_free
    cache = roomy.runner("mamba2").cache
    one, two = cache.pages_for(10), cache.pages_for(10, repeats=True)
    end(roomy)
    assert two > one
    driver = Driver({"mamba2": models["mamba2"]}, num_weights + one)
    driver.make_resident("mamba2")
    greedy, form = SamplingParams(0.0), Constraint("regex", "a+")
    asked = Submit("r", 1, "t", "mamba2", [3, 4], 5, greedy, [], constraint=form)
    with pytest.raises(RequestRefused, match="KV cache"):
        driver.engine.submit(asked, driver.now_s)
    end(driver)
