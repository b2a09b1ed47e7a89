"""The engine where memory is short and models change: nobody waits for ever, nothing is left over.

Two models are resident with hardly any KV beside them, so that a request can only run when the
other model goes; catalogs take models away, or bring other packs under their names.
"""

from pathlib import Path

import pytest
import torch

from engine import model_runner
from engine.batch import StepBatch
from engine.errors import RequestRefused
from engine.protocol import ModelSpec
from tests.engine.models import TinyModel
from tests.engine.test_engine import Driver, Models, weight_pages

KV_PAGES = 6  # for some 64 tokens of llama


def cramped(models: Models, fence_lag: int = 0) -> Driver:
    """llama and qwen3 resident, KV_PAGES beside them."""
    pages = weight_pages(models["llama"]) + weight_pages(models["qwen3"]) + KV_PAGES
    driver = Driver(models, pages, fence_lag, load_kv_tokens=16)
    driver.make_resident("llama")
    driver.make_resident("qwen3")
    return driver


def spec_of(model: TinyModel, **change: object) -> ModelSpec:
    return ModelSpec(model.name, str(model.pack_dir), **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("fence_lag", [0, 3])
@pytest.mark.parametrize(("prompt", "new"), [(60, 60), (10, 110)])
def test_idle_weights_give_way_to_kv(
    tiny_models: Models, fence_lag: int, prompt: int, new: int
) -> None:
    driver = cramped(tiny_models, fence_lag)
    tokens = list(range(2, 2 + prompt))
    driver.submit("x", "llama", tokens, new)
    driver.run(lambda: "x" in driver.finishes, steps=500)
    assert driver.tokens["x"] == tiny_models["llama"].generate(tokens, new)
    assert any(swap.reason == "KV of llama" for swap in driver.engine.take_swaps())
    driver.empty()


@pytest.mark.parametrize("fence_lag", [0, 3])
def test_models_that_need_each_others_memory_take_turns(
    tiny_models: Models, fence_lag: int
) -> None:
    driver = cramped(tiny_models, fence_lag)
    prompts = {f"{name}{i}": [2 + i] * 60 for name in ("llama", "qwen3") for i in range(3)}
    for name, prompt in prompts.items():
        driver.submit(name, name[:-1], prompt, 68)
    driver.engine.load("gemma", driver.now_s)
    driver.run(lambda: len(driver.finishes) == len(prompts), steps=20_000)
    for name, prompt in prompts.items():
        assert driver.tokens[name] == tiny_models[name[:-1]].generate(prompt, 68)
    driver.empty()


def test_what_can_never_fit_is_refused(tiny_models: Models) -> None:
    model = tiny_models["llama"]
    driver = Driver({"llama": model}, weight_pages(model) + KV_PAGES, load_kv_tokens=16)
    driver.make_resident("llama")
    with pytest.raises(RequestRefused, match="bytes of KV") as refused:
        driver.submit("x", "llama", [3] * 60, 60)
    assert refused.value.code == "context_length_exceeded"
    driver.submit("y", "llama", [3] * 60, 4)
    driver.run(lambda: "y" in driver.finishes)
    driver.empty()


def test_a_pin_that_comes_later_ends_what_no_longer_fits(tiny_models: Models) -> None:
    driver = cramped(tiny_models)
    driver.submit("x", "llama", [3] * 60, 60)
    pinned = spec_of(tiny_models["qwen3"], pinned=True)
    driver.engine.set_catalog([spec_of(tiny_models["llama"]), pinned], driver.now_s)
    driver.run(lambda: "x" in driver.finishes, steps=500)
    assert driver.finishes["x"].reason == "error"
    assert "does not fit" in driver.finishes["x"].error
    driver.empty()


def test_an_engine_that_waits_for_a_load_has_no_work(tiny_models: Models) -> None:
    driver = cramped(tiny_models)
    driver.engine.unload("qwen3", driver.now_s)
    driver.run(lambda: driver.state("qwen3") != "draining")
    driver.engine.load("qwen3", driver.now_s)
    driver.submit("x", "llama", [3] * 60, 60)

    def ended() -> bool:
        running = {m.model_id: m.num_running for m in driver.engine.status(driver.now_s).models}
        if driver.state("qwen3") == "loading" and not running["llama"] and driver.now_s > submitted:
            assert not driver.engine.has_work()
        return "x" in driver.finishes

    submitted = driver.now_s
    driver.run(ended, steps=20_000)
    assert driver.finishes["x"].reason == "length"
    driver.empty()


def test_removed_models_are_forgotten(tiny_models: Models) -> None:
    model = tiny_models["llama"]
    driver = Driver({}, 400)
    for i in range(3):
        driver.engine.set_catalog([ModelSpec(f"m{i}", str(model.pack_dir))], driver.now_s)
        driver.make_resident(f"m{i}")
        driver.submit(f"m{i}", f"m{i}", [3, 4], 3)
        driver.run(lambda i=i: f"m{i}" in driver.finishes)  # type: ignore[misc]
    driver.engine.set_catalog([], driver.now_s)
    driver.run(lambda: driver.engine.pool.num_free == driver.engine.pool.num_pages)
    driver.step()
    assert not driver.engine._runners
    assert not driver.engine._scheduler.queues()
    driver.empty()


@pytest.mark.parametrize("change", ["removed", "no pack", "another pack"])
def test_requests_end_when_their_model_is_taken_away(
    tiny_models: Models, tmp_path: Path, change: str
) -> None:
    model = tiny_models["llama"]
    driver = Driver({"llama": model}, 400, drain_timeout_s=0.05)
    driver.make_resident("llama")
    driver.submit("x", "llama", [3] * 10, 110)
    driver.run(lambda: "x" in driver.tokens)
    catalogs = {
        "removed": [],
        "no pack": [ModelSpec("llama", str(tmp_path))],
        "another pack": [ModelSpec("llama", str(tiny_models["qwen3"].pack_dir))],
    }
    driver.engine.set_catalog(catalogs[change], driver.now_s)
    driver.run(lambda: "x" in driver.finishes, steps=5000)
    assert driver.finishes["x"].reason == "error"
    assert driver.tokens["x"] == model.generate([3] * 10, len(driver.tokens["x"]))
    driver.empty()


def test_modules_that_do_not_take_a_pack_fail_their_model_only(
    tiny_models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(tiny_models, 400)
    driver.make_resident("qwen3")

    def other_names(*_: object) -> None:
        raise KeyError("model.renamed.weight")

    with monkeypatch.context() as patch:
        patch.setattr(model_runner, "bind_weights", other_names)
        driver.engine.load("llama", driver.now_s)
        driver.run(lambda: driver.state("llama") == "failed")
    rows = {row.model_id: row for row in driver.engine.status(driver.now_s).models}
    assert "renamed" in rows["llama"].reason
    driver.submit("x", "qwen3", [3, 4], 5)
    driver.run(lambda: "x" in driver.finishes)
    assert driver.finishes["x"].reason == "length"
    driver.empty()


def test_a_broken_row_leaves_its_neighbours_masked_logits_alone(
    tiny_models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(tiny_models, 400)
    driver.make_resident("llama")
    logits = torch.full((2, 96), -5.0)
    logits[0, 7], logits[0, 9] = -1.0, float("-inf")
    logits[1] = float("nan")

    def run(batch: StepBatch) -> torch.Tensor:
        return logits

    monkeypatch.setattr(driver.engine._runners["llama"], "run", run)
    for name in ("good", "bad"):
        driver.submit(name, "llama", [3, 4], 1)
    driver.step()
    assert driver.tokens["good"] == [7]
    assert driver.finishes["bad"].reason == "error"
    driver.empty()
