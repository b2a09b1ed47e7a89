"""The engine where memory is short and models change: nobody waits for ever, nothing is left over.

Two models are resident with hardly any KV beside them, so that a request can only run when the
other model goes; catalogs take models away, or bring other packs under their names.
"""

from pathlib import Path

import pytest
import torch

from engine.errors import RequestRefused
from engine.protocol import ModelSpec
from engine.running import model_runner
from engine.running.batch import StepBatch
from engine.sampling.sampler import SampleOutput, sample
from tests.engine.test_engine import (
    MODES,
    Driver,
    Mode,
    Models,
    generated,
    in_each_mode,
    weight_pages,
    with_lags,
)
from tests.engine.tiny_models import TinyModel

KV_PAGES = 6  # for some 64 tokens of llama


def cramped(models: Models, fence_lag: int = 0, mode: Mode = MODES[0]) -> Driver:
    """llama and qwen3 resident, KV_PAGES beside them."""
    pages = weight_pages(models["llama"]) + weight_pages(models["qwen3"]) + KV_PAGES
    driver = Driver(models, pages, fence_lag, load_kv_tokens=16, mode=mode)
    driver.make_resident("llama")
    driver.make_resident("qwen3")
    return driver


def spec_of(model: TinyModel, **change: object) -> ModelSpec:
    return ModelSpec(model.name, str(model.pack_dir), **change)  # type: ignore[arg-type]


@in_each_mode
@pytest.mark.parametrize(("prompt", "new", "fence_lag"), [(60, 60, 3), (10, 110, 0)])
def test_idle_weights_give_way_to_kv(
    tiny_models: Models, prompt: int, new: int, fence_lag: int, mode: Mode
) -> None:
    driver = cramped(tiny_models, fence_lag, mode)
    tokens = list(range(2, 2 + prompt))
    driver.submit("x", "llama", tokens, new)
    driver.run(lambda: "x" in driver.finishes, steps=500)
    assert driver.tokens["x"] == generated(tiny_models["llama"], tokens, new)
    assert any(swap.reason == "KV of llama" for swap in driver.engine.take_swaps()[0])
    driver.empty()


def test_cached_kv_stays_where_idle_weights_are_worth_less(tiny_models: Models) -> None:
    """A prompt that comes again is found, and the model that nobody has asked for goes."""
    driver = cramped(tiny_models)
    driver.submit("once", "qwen3", [2, 3, 4], 2)
    driver.run(lambda: "once" in driver.finishes)
    driver.now_s += 3600.0
    for i in range(5):
        prompt = [2 + (i * 7 + j * j) % 90 for j in range(44)]
        for name in (f"first-{i}", f"again-{i}"):
            driver.submit(name, "llama", prompt, 4)
            driver.run(lambda name=name: name in driver.finishes)  # type: ignore[misc]
        assert driver.finishes[f"again-{i}"].usage.cached_tokens >= 40, i
    assert any(swap.reason == "cached KV of llama" for swap in driver.engine.take_swaps()[0])
    assert driver.state("qwen3") in ("cold", "warm")
    driver.empty()


@with_lags
def test_models_that_need_each_others_memory_take_turns(
    tiny_models: Models, fence_lag: int, mode: Mode
) -> None:
    driver = cramped(tiny_models, fence_lag, mode)
    prompts = {f"{name}{i}": [2 + i] * 60 for name in ("llama", "qwen3") for i in range(2)}
    for name, prompt in prompts.items():
        driver.submit(name, name[:-1], prompt, 68)
    driver.engine.load("gemma", driver.now_s)
    driver.run(lambda: len(driver.finishes) == len(prompts), steps=20_000)
    for name, prompt in prompts.items():
        assert driver.tokens[name] == generated(tiny_models[name[:-1]], prompt, 68)
    driver.empty()


@in_each_mode
def test_a_load_that_fits_beside_a_request_does_not_wait_for_its_end(
    tiny_models: Models, mode: Mode
) -> None:
    """llama leaves for the KV of gemma; qwen3 fits into what gemma cannot come to need."""
    driver = Driver(tiny_models, 27 + 38 + KV_PAGES, load_kv_tokens=16, mode=mode)
    assert [weight_pages(tiny_models[n]) for n in ("gemma", "llama", "qwen3")] == [27, 38, 27]
    driver.make_resident("llama")
    driver.make_resident("gemma")
    driver.submit("x", "gemma", [3] * 60, 60)
    driver.run(lambda: driver.state("llama") != "resident")
    driver.engine.load("qwen3", driver.now_s)
    driver.engine.load("llama", driver.now_s)
    driver.run(lambda: driver.state("qwen3") == "resident", steps=2000)
    assert "x" not in driver.finishes
    driver.submit("y", "qwen3", [3] * 20, 20)
    while "x" not in driver.finishes:
        assert driver.state("llama") != "resident", "it would take what x may still need"
        driver.step()
    driver.run(lambda: "y" in driver.finishes)
    assert driver.tokens["x"] == generated(tiny_models["gemma"], [3] * 60, 60)
    assert driver.tokens["y"] == generated(tiny_models["qwen3"], [3] * 20, 20)
    driver.run(lambda: driver.state("llama") == "resident")
    driver.empty()


@in_each_mode
def test_no_load_takes_what_a_request_comes_to_need_later(tiny_models: Models, mode: Mode) -> None:
    """x begins with one extent: a load that counted no more would take the pages of the next."""
    driver = Driver(tiny_models, 27 + 38 + 2, load_kv_tokens=16, mode=mode)
    driver.make_resident("llama")
    driver.make_resident("gemma")
    driver.submit("x", "gemma", [3] * 10, 110)
    driver.run(lambda: driver.state("llama") != "resident")
    driver.engine.load("qwen3", driver.now_s)
    while "x" not in driver.finishes:
        assert driver.state("qwen3") != "resident"
        driver.step()
    assert driver.counter("preemptions") <= 1
    assert driver.tokens["x"] == generated(tiny_models["gemma"], [3] * 10, 110)
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


@in_each_mode
@pytest.mark.parametrize("change", ["removed", "no pack", "another pack"])
def test_requests_end_when_their_model_is_taken_away(
    tiny_models: Models, tmp_path: Path, change: str, mode: Mode
) -> None:
    model = tiny_models["llama"]
    driver = Driver({"llama": model}, 400, drain_timeout_s=0.05, mode=mode)
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


def test_swaps_of_models_that_have_left_the_catalog_are_told(tiny_models: Models) -> None:
    driver = Driver(tiny_models, 400)
    driver.make_resident("llama")
    driver.make_resident("qwen3")
    for left in (["gemma"], ["gemma"], []):
        driver.engine.set_catalog([tiny_models[name].spec for name in left], driver.now_s)
        driver.engine.status(driver.now_s)
        driver.run(lambda: driver.engine.pool.num_free == driver.engine.pool.num_pages)
    swaps = [(swap.kind, swap.model_id) for swap in driver.engine.take_swaps()[0]]
    assert [kind for kind, _ in swaps] == ["load", "load", "evict", "evict"]
    # Under their models' ids, since nobody asked before the names were gone.
    instances = [tiny_models[name].pack_dir.name for name in ("llama", "qwen3")]
    assert sorted(name for kind, name in swaps if kind == "evict") == sorted(instances)
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


@in_each_mode
def test_a_broken_row_leaves_its_neighbours_masked_logits_alone(
    tiny_models: Models, monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> None:
    driver = Driver(tiny_models, 400, mode=mode)
    driver.make_resident("llama")
    logits = torch.full((2, 96), -5.0)
    logits[0, 7], logits[0, 9] = -1.0, float("-inf")
    logits[1] = float("nan")

    def execute(batch: StepBatch) -> SampleOutput:
        return sample(logits, batch.sampling)

    monkeypatch.setattr(driver.runner("llama"), "execute", execute)
    for name in ("good", "bad"):
        driver.submit(name, "llama", [3, 4], 1)
    driver.run(lambda: len(driver.finishes) == 2, steps=3)
    assert driver.tokens["good"] == [7]
    assert driver.finishes["bad"].reason == "error"
    driver.empty()


@in_each_mode
@pytest.mark.parametrize("error", [RuntimeError("no memory"), MemoryError(), ValueError("shape")])
def test_a_failed_step_ends_its_requests_and_nobody_elses(
    tiny_models: Models, monkeypatch: pytest.MonkeyPatch, error: Exception, mode: Mode
) -> None:
    driver = Driver(tiny_models, 400, mode=mode)
    driver.make_resident("llama")
    driver.make_resident("qwen3")
    prompts = {"in it": [3, 4, 5], "later": [6] * 30, "elsewhere": [3, 4]}
    driver.submit("in it", "llama", prompts["in it"], 40)
    driver.submit("elsewhere", "qwen3", prompts["elsewhere"], 20)
    driver.run(lambda: len(driver.tokens.get("in it", [])) >= 3)
    execute = driver.runner("llama").execute
    failures: list[StepBatch] = []

    def fail_once(batch: StepBatch) -> SampleOutput:
        if failures:
            return execute(batch)
        failures.append(batch)
        raise error

    monkeypatch.setattr(driver.runner("llama"), "execute", fail_once)
    driver.run(lambda: bool(failures))
    # With a step ahead, this one is launched on the step that has just failed.
    driver.submit("later", "llama", prompts["later"], 20)
    driver.run(lambda: len(driver.finishes) == 3)
    assert driver.finishes["in it"].reason == "error"
    assert type(error).__name__ in driver.finishes["in it"].error
    for name, model in (("later", "llama"), ("elsewhere", "qwen3")):
        assert driver.finishes[name].reason == "length"
        assert driver.tokens[name] == generated(tiny_models[model], prompts[name], 20)
    assert driver.counter("steps_failed") == 1
    driver.empty()


@in_each_mode
def test_a_model_that_leaves_with_a_step_in_flight_keeps_that_steps_tokens(
    tiny_models: Models, mode: Mode
) -> None:
    model = tiny_models["llama"]
    driver = Driver({"llama": model}, 400, mode=mode, drain_timeout_s=0.02)
    driver.make_resident("llama")
    for i in range(3):
        driver.submit(str(i), "llama", [3 + i] * 9, 60)
    for _ in range(6):
        driver.run(lambda: driver.state("llama") == "resident")
        for _ in range(4):
            driver.step()
        driver.engine.unload("llama", driver.now_s)
        driver.run(lambda: driver.state("llama") != "draining")
    driver.run(lambda: len(driver.finishes) == 3)
    for i in range(3):
        assert driver.tokens[str(i)] == generated(model, [3 + i] * 9, 60)
    assert len(driver.engine.take_swaps()[0]) >= 8
    driver.empty()


@in_each_mode
def test_weights_and_kv_that_move_with_a_step_in_flight_change_no_token(
    tiny_models: Models, mode: Mode
) -> None:
    """The hole qwen3 leaves is too small for gemma unless llama's weights or KV move."""
    models = {name: tiny_models[name] for name in ("qwen3", "llama", "gemma")}
    largest = max(map(weight_pages, models.values()))
    pages = weight_pages(models["qwen3"]) + weight_pages(models["llama"]) + largest // 2 + 12
    driver = Driver(models, pages, mode=mode, load_kv_tokens=16, fence_lag=1)
    driver.make_resident("qwen3")
    driver.make_resident("llama")
    prompts = {str(i): [5 + i] * (7 + i) for i in range(4)}
    for name, prompt in prompts.items():
        driver.submit(name, "llama", prompt, 25)
    for _ in range(3):
        driver.step()
    driver.engine.unload("qwen3", driver.now_s)
    driver.engine.load("gemma", driver.now_s)
    driver.run(lambda: len(driver.finishes) == 4 and driver.state("gemma") == "resident")
    for name, prompt in prompts.items():
        assert driver.tokens[name] == generated(models["llama"], prompt, 25)
    driver.submit("g", "gemma", [9, 8, 7], 20)
    driver.run(lambda: "g" in driver.finishes)
    assert driver.tokens["g"] == generated(models["gemma"], [9, 8, 7], 20)
    driver.empty()


@in_each_mode
def test_cached_blocks_give_way_before_anybody_is_preempted(
    tiny_models: Models, mode: Mode
) -> None:
    models = {name: tiny_models[name] for name in ("llama", "qwen3")}
    pages = sum(map(weight_pages, models.values()))
    driver = Driver(models, pages + 40, mode=mode, fence_lag=1)
    driver.engine.set_catalog([spec_of(model, pinned=True) for model in models.values()], 0.0)
    for i in range(8):
        name = ("llama", "qwen3")[i % 2]
        driver.make_resident(name)
        prompt = [2 + i] * 50
        driver.submit(str(i), name, prompt, 20)
        driver.run(lambda i=i: str(i) in driver.finishes)  # type: ignore[misc]
        assert driver.tokens[str(i)] == generated(models[name], prompt, 20)
    assert driver.counter("preemptions") == 0
    assert driver.counter("kv_evicted_pages") > 0
    driver.empty()


@in_each_mode
def test_a_tenant_with_many_requests_leaves_room_for_another(
    tiny_models: Models, mode: Mode
) -> None:
    model = tiny_models["llama"]
    driver = Driver(
        {"llama": model}, weight_pages(model) + 60, mode=mode, tenant_kv_share=0.5, max_num_seqs=32
    )
    driver.make_resident("llama")
    for i in range(8):
        driver.submit(f"much{i}", "llama", [2 + i] * 60, 40, tenant="much")
    driver.run(lambda: len(driver.tokens) >= 2)
    driver.submit("little", "llama", [40] * 20, 20, tenant="little")
    driver.run(lambda: "little" in driver.finishes)
    assert sum(name.startswith("much") for name in driver.finishes) < 8
    driver.run(lambda: len(driver.finishes) == 9)
    for i in range(8):
        assert driver.tokens[f"much{i}"] == generated(model, [2 + i] * 60, 40)
    driver.empty()


def test_a_model_whose_steps_need_more_than_the_reserve_is_not_loaded(
    tiny_models: Models,
) -> None:
    driver = Driver(tiny_models, 400, reserve_bytes=1 << 16)
    driver.engine.load("llama", 0.0)
    rows = {row.model_id: row for row in driver.engine.status(0.0).models}
    assert rows["llama"].state == "failed"
    assert "reserve_bytes" in rows["llama"].reason
    driver.engine.load("llama", 0.0)
    driver.empty()


def test_a_revision_that_replaces_one_name_leaves_the_other_its_pack(
    tiny_models: Models,
) -> None:
    old, new = (str(tiny_models[name].pack_dir) for name in ("llama", "qwen3"))
    driver = Driver({}, 400)
    driver.engine.set_catalog([ModelSpec("a", old), ModelSpec("b", old, pinned=True)], 0.0)
    driver.make_resident("a")
    prompt = [3] * 10
    for name in ("a", "b"):
        driver.submit(name, name, prompt, 40)
    driver.run(lambda: len(driver.tokens) == 2)
    driver.engine.set_catalog([ModelSpec("a", new), ModelSpec("b", old)], driver.now_s)
    assert driver.state("b") == "resident"
    driver.make_resident("a")
    driver.submit("new", "a", prompt, 10)
    driver.run(lambda: len(driver.finishes) == 3)
    for name in ("a", "b"):
        assert driver.tokens[name] == generated(tiny_models["llama"], prompt, 40)
    assert driver.tokens["new"] == generated(tiny_models["qwen3"], prompt, 10)
    driver.empty()


@in_each_mode
def test_a_model_that_runs_class_batch_leaves_as_an_idle_one(
    tiny_models: Models, mode: Mode
) -> None:
    """At once; what ran waits, without asking for the model, and goes on when it is back."""
    models = {name: tiny_models[name] for name in ("llama", "qwen3")}
    pages = max(map(weight_pages, models.values())) + 2 * KV_PAGES
    driver = Driver(models, pages, load_kv_tokens=16, mode=mode, drain_timeout_s=100.0)
    driver.make_resident("llama")
    prompt = list(range(2, 22))
    driver.submit("line", "llama", prompt, 30, is_batch=True)
    driver.run(lambda: len(driver.tokens.get("line", ())) > 4)
    driver.engine.load("qwen3", driver.now_s)
    driver.run(lambda: driver.state("qwen3") == "resident", steps=2000)
    assert "line" not in driver.finishes
    for _ in range(50):
        driver.step()
    assert driver.state("llama") in ("cold", "warm")
    driver.make_resident("llama")
    driver.run(lambda: "line" in driver.finishes)
    assert driver.tokens["line"] == generated(tiny_models["llama"], prompt, 30)
    driver.empty()


def test_kv_of_class_batch_makes_room_for_weights_before_any_model_leaves(
    tiny_models: Models,
) -> None:
    models = {name: tiny_models[name] for name in ("llama", "qwen3", "gemma")}
    weights = {name: weight_pages(model) for name, model in models.items()}
    pages = sum(weights.values()) + KV_PAGES
    driver = Driver(models, pages, load_kv_tokens=16, max_num_seqs=16)
    for name in ("llama", "qwen3"):
        driver.make_resident(name)
    num_lines = 0
    while driver.engine.pool.num_free + driver.engine.num_cached_pages > weights["gemma"] // 2:
        num_lines += 1
        driver.submit(f"line{num_lines}", "llama", [num_lines] * 40, 60, is_batch=True)
        for _ in range(4):
            driver.step()
    driver.make_resident("gemma")
    assert [driver.state(name) for name in models] == ["resident"] * 3
    assert driver.counter("preemptions") > 0
    # Nobody's weights leave for their KV: what does not fit waits, until it is taken off.
    driver.engine.abort_all([(f"line{number + 1}", 1) for number in range(num_lines)])
    driver.run(lambda: len(driver.finishes) == num_lines)
    driver.empty()
