"""The whole engine without its process: token for token what transformers says, whatever happens.

Fences lag and freed pages are overwritten with NaN, so that a step that read memory it no longer
owns would show in its tokens. What matters most runs in each of MODES: results at once, results one
step later, and steps in a thread of their own while the next one is prepared.
"""

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backend.cpu import CpuBackend, Execution
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import RequestRefused
from engine.memory.page_pool import PagePool
from engine.pack import read_index
from engine.protocol import Finish, ModelSpec, SamplingParams, Submit
from engine.running.model_runner import ModelRunner
from tests.engine.tiny_models import MAX_CONTEXT, VOCAB, TinyModel

PAGE = 8192
Models = dict[str, TinyModel]
Mode = tuple[int, Execution]
# (steps ahead, execution of the backend)
MODES: tuple[Mode, ...] = ((0, "inline"), (1, "inline"), (1, "thread"))
# Each mode, and each lag of the fences, with some of the other.
LAGS: tuple[tuple[int, Mode], ...] = ((0, MODES[0]), (2, MODES[1]), (0, MODES[2]), (3, MODES[2]))
with_lags = pytest.mark.parametrize(("fence_lag", "mode"), LAGS, ids=str)
in_each_mode = pytest.mark.parametrize("mode", MODES, ids=lambda mode: f"{mode[0]}-{mode[1]}")


class Driver:
    """Feeds an engine, collects its tokens, checks its integrity after every step."""

    def __init__(
        self,
        models: Models,
        num_pages: int,
        fence_lag: int = 0,
        max_batch_tokens: int = 48,
        max_num_seqs: int = 8,
        mode: Mode = MODES[0],
        **settings: Any,
    ) -> None:
        config = EngineConfig(
            arena_bytes=num_pages * PAGE,
            page_bytes=PAGE,
            shm_prefix="test",
            block_tokens=4,
            max_batch_tokens=max_batch_tokens,
            max_num_seqs=max_num_seqs,
            steps_ahead=mode[0],
            **settings,
        )
        self.backend = CpuBackend(config.arena_bytes, fence_lag, mode[1])
        self.backend.poison(0, config.arena_bytes)
        self.engine = Engine(config, self.backend)
        _poison_what_is_freed(self.engine.pool, self.backend)
        self.now_s = 0.0
        self.tokens: dict[str, list[int]] = {}
        self.finishes: dict[str, Finish] = {}
        self.engine.set_catalog([model.spec for model in models.values()], 0.0)

    def step(self) -> None:
        self.now_s += 0.01
        for delta in self.engine.step(self.now_s):
            assert delta.request_id not in self.finishes, "a token after the end"
            self.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.finish is not None:
                self.finishes[delta.request_id] = delta.finish
        self.engine.check_integrity()
        if not self.engine.has_work():
            time.sleep(0.0002)  # the loaders want the core

    def run(self, until: Callable[[], bool], steps: int = 20_000) -> None:
        for _ in range(steps):
            if until():
                return
            self.step()
        raise AssertionError(f"not reached in {steps} steps")

    def state(self, model_id: str) -> str:
        rows = {row.model_id: row for row in self.engine.status(self.now_s).models}
        return rows[model_id].state if model_id in rows else "cold"

    def make_resident(self, model_id: str) -> None:
        self.engine.load(model_id, self.now_s)
        self.run(lambda: self.state(model_id) == "resident")

    def submit(
        self,
        request_id: str,
        model_id: str,
        prompt: list[int],
        new: int,
        tenant: str = "t",
        stop: Sequence[int] = (),
        **more: Any,
    ) -> None:
        greedy, attempt = SamplingParams(0.0), 1
        about = (request_id, attempt, tenant, model_id, prompt, new, greedy, list(stop))
        submit = Submit(*about, **more)
        self.engine.submit(submit, self.now_s)

    def counter(self, name: str) -> float:
        return self.engine.status(self.now_s).counters[name]

    def runner(self, model_id: str) -> ModelRunner:
        runner = self.engine._runners[self.engine._manager.catalog.instance_of(model_id)]
        assert isinstance(runner, ModelRunner)
        return runner

    def empty(self) -> None:
        """Unload everything and see every page come back."""
        for row in self.engine.status(self.now_s).models:
            self.engine.unload(row.model_id, self.now_s)
        self.run(lambda: self.engine.pool.num_free == self.engine.pool.num_pages)
        self.engine.check_integrity()
        self.engine.close()
        self.backend.close()


def _poison_what_is_freed(pool: PagePool, backend: CpuBackend) -> None:
    retire = pool.retire

    def retire_and_poison(step: int) -> list[int]:
        pages = retire(step)
        for page in pages:
            backend.poison(page * PAGE, PAGE)
        return pages

    pool.retire = retire_and_poison  # type: ignore[method-assign]


def weight_pages(model: TinyModel) -> int:
    return sum(-(-segment.num_bytes // PAGE) for segment in read_index(model.pack_dir).segments)


_GENERATED: dict[tuple[str, tuple[int, ...], int], list[int]] = {}


def generated(model: TinyModel, prompt: list[int], new: int) -> list[int]:
    """What transformers says, asked once for all modes."""
    key = (str(model.pack_dir), tuple(prompt), new)
    if key not in _GENERATED:
        _GENERATED[key] = model.generate(prompt, new)
    return _GENERATED[key]


def random_prompt(rng: random.Random, longest: int = 40) -> list[int]:
    return [rng.randrange(2, VOCAB) for _ in range(rng.randint(1, longest))]


@with_lags
def test_greedy_tokens_are_those_of_generate_through_swaps_and_preemptions(
    tiny_models: Models, fence_lag: int, mode: Mode
) -> None:
    rng = random.Random(0)
    pages = sum(weight_pages(model) for model in tiny_models.values())
    # The weights of two of the three fit, with little room for KV beside them.
    driver = Driver(tiny_models, num_pages=pages - 4, fence_lag=fence_lag, mode=mode)
    names = list(tiny_models)
    prompts: dict[str, tuple[str, list[int], int]] = {}
    todo = []
    for i in range(36):
        item = (str(i), rng.choice(names), random_prompt(rng), rng.randint(1, 30))
        prompts[item[0]] = (item[1], item[2], item[3])
        todo.append(item)
    swaps = 0
    while len(driver.finishes) < len(prompts):
        for item in list(todo[:12]):
            if driver.state(item[1]) == "resident":
                driver.submit(*item)
                todo.remove(item)
            else:
                driver.engine.load(item[1], driver.now_s)
        driver.step()
        swaps += len(driver.engine.take_swaps()[0])
    for name, (model, prompt, new) in prompts.items():
        assert driver.tokens[name] == generated(tiny_models[model], prompt, new), name
        assert driver.finishes[name].reason == "length"
        assert driver.finishes[name].usage.generated_tokens == new
        assert driver.finishes[name].usage.prompt_tokens == len(prompt)
    assert swaps >= 6
    driver.empty()


@in_each_mode
def test_preemption_under_memory_pressure_changes_no_token(tiny_models: Models, mode: Mode) -> None:
    model = tiny_models["llama"]
    driver = Driver({"llama": model}, num_pages=weight_pages(model) + 40, mode=mode)
    driver.make_resident("llama")
    rng = random.Random(4)
    prompts = {str(i): random_prompt(rng, 20) for i in range(8)}
    for name, prompt in prompts.items():
        driver.submit(name, "llama", prompt, 60)
    driver.run(lambda: len(driver.finishes) == 8 and not driver.engine.has_work())
    assert driver.counter("preemptions") > 0
    for name, prompt in prompts.items():
        assert driver.tokens[name] == generated(model, prompt, 60)
    # What is computed twice is the system's, and memory counts where it is the larger share.
    charged = sum(finish.usage.device_s for finish in driver.finishes.values())
    again, nobodys = driver.counter("recompute_seconds"), driver.counter("unbilled_seconds")
    assert again > 0
    assert charged + again + nobodys == pytest.approx(driver.counter("busy_seconds"), rel=1e-9)
    assert all(f.usage.service_s >= f.usage.device_s for f in driver.finishes.values())
    driver.empty()


@in_each_mode
def test_seeded_sampling_repeats_alone_and_in_a_crowd(tiny_models: Models, mode: Mode) -> None:
    rng = random.Random(8)
    driver = Driver(tiny_models, num_pages=400, mode=mode)
    driver.make_resident("qwen3")
    prompts = {str(i): random_prompt(rng) for i in range(6)}

    def submit(name: str, key: str) -> None:
        sampling = SamplingParams(1.0, 0.9, seed=int(name))
        driver.engine.submit(
            Submit(key, 1, "t", "qwen3", prompts[name], 20, sampling, []), driver.now_s
        )

    for name in prompts:
        submit(name, name)
    driver.run(lambda: len(driver.finishes) == 6)
    for name in prompts:
        submit(name, f"alone-{name}")
        driver.run(lambda name=name: f"alone-{name}" in driver.finishes)  # type: ignore[misc]
        assert driver.tokens[f"alone-{name}"] == driver.tokens[name]
    assert len({tuple(tokens) for tokens in driver.tokens.values()}) > 3
    driver.empty()


@in_each_mode
def test_stop_token_ends_a_request_and_is_the_last_token(tiny_models: Models, mode: Mode) -> None:
    driver = Driver(tiny_models, num_pages=400, mode=mode)
    driver.make_resident("gemma")
    prompt = [5, 6, 7]
    expected = tiny_models["gemma"].generate(prompt, 20)
    stop = expected[4]
    cut = expected.index(stop) + 1
    driver.submit("s", "gemma", prompt, 20, stop=[stop])
    driver.submit("other", "gemma", [8, 9], 20)
    driver.run(lambda: len(driver.finishes) == 2)
    assert driver.tokens["s"] == expected[:cut]
    assert driver.finishes["s"].reason == "stop"
    assert driver.finishes["s"].usage.generated_tokens == cut
    assert driver.tokens["other"] == tiny_models["gemma"].generate([8, 9], 20)
    driver.empty()


@in_each_mode
def test_abort_ends_within_one_step_in_any_state(tiny_models: Models, mode: Mode) -> None:
    driver = Driver(tiny_models, num_pages=400, max_num_seqs=1, mode=mode)
    driver.make_resident("llama")
    driver.submit("running", "llama", [2, 3], 50)
    driver.submit("waiting", "llama", [2, 3], 50)
    for _ in range(5 + mode[0]):
        driver.step()
    for name in ("running", "waiting"):
        driver.engine.abort(name, 1)
    driver.engine.abort("never-seen", 1)
    driver.step()
    assert driver.finishes["running"].reason == "abort"
    assert driver.finishes["running"].usage.generated_tokens == len(driver.tokens["running"]) == 5
    assert driver.finishes["waiting"].usage.generated_tokens == 0
    driver.empty()


@in_each_mode
def test_time_outs_end_within_one_step_in_any_state(tiny_models: Models, mode: Mode) -> None:
    driver = Driver(tiny_models, num_pages=400, max_num_seqs=1, mode=mode, request_timeout_s=0.3)
    driver.make_resident("llama")
    driver.submit("past", "llama", [2, 3], 50, timeout_s=-1.0)
    driver.step()
    assert driver.finishes["past"].reason == "timeout"
    assert "past" not in driver.tokens or not driver.tokens["past"]
    start = driver.now_s
    driver.submit("running", "llama", [2, 3], 100, timeout_s=0.1)
    driver.submit("waiting", "llama", [4, 5], 100, timeout_s=0.05)
    driver.submit("bounded", "llama", [6, 7], 100, timeout_s=99.0)
    ended: dict[str, float] = {}
    while len(ended) < 3:
        driver.step()
        for name in driver.finishes.keys() - ended.keys() - {"past"}:
            ended[name] = driver.now_s - start
    reasons = {name: finish.reason for name, finish in driver.finishes.items()}
    assert reasons["running"] == reasons["waiting"] == reasons["bounded"] == "timeout"
    for name, due_s in (("running", 0.1), ("waiting", 0.05), ("bounded", 0.3)):
        assert due_s <= ended[name] + 1e-9 < due_s + 0.02, name
    assert driver.tokens["running"] == tiny_models["llama"].generate(
        [2, 3], len(driver.tokens["running"])
    )
    assert driver.finishes["running"].usage.generated_tokens == len(driver.tokens["running"])
    assert driver.finishes["waiting"].usage.generated_tokens == 0
    assert driver.counter("deadline_timeouts") == 4
    driver.empty()


@in_each_mode
def test_an_idle_engine_tells_what_is_in_flight(tiny_models: Models, mode: Mode) -> None:
    driver = Driver(tiny_models, num_pages=400, mode=mode)
    driver.make_resident("llama")
    driver.submit("x", "llama", [2, 3], 1)
    steps = 0
    while driver.engine.has_work():
        driver.step()
        steps += 1
        assert steps < 10
    assert driver.finishes["x"].reason == "length"
    assert steps == 1 + mode[0]
    driver.empty()


@in_each_mode
def test_charges_of_all_requests_add_up_to_the_busy_time(tiny_models: Models, mode: Mode) -> None:
    driver = Driver(tiny_models, num_pages=400, mode=mode)
    driver.make_resident("llama")
    for i in range(5):
        stop = [tiny_models["llama"].generate([2 + i] * (3 * i + 1), 10)[5]] if i % 2 else []
        driver.submit(str(i), "llama", [2 + i] * (3 * i + 1), 10, stop=stop)
    driver.run(lambda: len(driver.finishes) == 5 and not driver.engine.has_work())
    charged = sum(finish.usage.device_s for finish in driver.finishes.values())
    assert driver.counter("recompute_seconds") == 0
    busy, nobodys = driver.counter("busy_seconds"), driver.counter("unbilled_seconds")
    assert charged + nobodys == pytest.approx(busy, rel=1e-9)
    assert nobodys == 0 if mode[0] == 0 else nobodys < busy / 2
    driver.empty()


@in_each_mode
def test_a_shared_prefix_is_computed_once_and_reported(tiny_models: Models, mode: Mode) -> None:
    driver = Driver(tiny_models, num_pages=400, mode=mode)
    driver.make_resident("qwen3")
    prefix = [2 + i % 50 for i in range(40)]
    expected: dict[str, list[int]] = {}
    for name, tenant in (("first", "t"), ("second", "t"), ("stranger", "other")):
        prompt = [*prefix, 60 + len(expected)]
        expected[name] = tiny_models["qwen3"].generate(prompt, 8)
        driver.submit(name, "qwen3", prompt, 8, tenant=tenant)
        driver.run(lambda name=name: name in driver.finishes)  # type: ignore[misc]
    assert driver.tokens == expected
    cached = {name: finish.usage.cached_tokens for name, finish in driver.finishes.items()}
    assert cached == {"first": 0, "second": 40, "stranger": 0}
    assert driver.counter("prefix_cache_hits") == 40
    assert driver.counter("prefix_cache_queries") == 3 * 41
    pages = driver.engine.status(driver.now_s).pages
    assert pages["qwen3/kv_cached"] > 0
    assert sum(pages.values()) == driver.engine.pool.num_pages
    driver.empty()


def test_two_names_of_one_pack_share_weights_and_prefixes(tiny_models: Models) -> None:
    model = tiny_models["llama"]
    driver = Driver({}, num_pages=weight_pages(model) + 80)
    pack = str(model.pack_dir)
    driver.engine.set_catalog([ModelSpec("one", pack), ModelSpec("two", pack)], 0.0)
    driver.make_resident("two")
    assert driver.state("one") == "resident"
    prompt = list(range(2, 32))
    driver.submit("a", "one", prompt, 5)
    driver.run(lambda: "a" in driver.finishes)
    driver.submit("b", "two", prompt, 40)
    driver.step()
    status = driver.engine.status(driver.now_s)
    assert {lease.model_id for lease in status.leases} == {"one", "two"}
    assert {m.model_id: m.num_running for m in status.models} == {"one": 0, "two": 1}
    assert sum(status.pages.values()) == driver.engine.pool.num_pages
    driver.engine.unload("one", driver.now_s)  # the other name has a request
    assert driver.state("two") == "resident"
    driver.engine.set_catalog([ModelSpec("two", pack)], driver.now_s)
    driver.run(lambda: "b" in driver.finishes)
    assert driver.finishes["b"].usage.cached_tokens == 28
    assert driver.tokens["b"] == model.generate(prompt, 40)
    with pytest.raises(RequestRefused):
        driver.submit("c", "one", prompt, 5)
    driver.empty()


@pytest.mark.parametrize(
    ("prompt", "new", "model", "code"),
    [
        ([2], 5, "nobody", "unknown_model"),
        ([2], 5, "qwen3", "not_resident"),
        ([2] * 100, MAX_CONTEXT - 99, "llama", "context_length_exceeded"),
        ([], 5, "llama", "context_length_exceeded"),
        ([2], 0, "llama", "context_length_exceeded"),
        ([VOCAB], 5, "llama", "context_length_exceeded"),
        ([-1], 5, "llama", "context_length_exceeded"),
    ],
)
def test_what_cannot_run_is_refused_and_changes_nothing(
    tiny_models: Models, prompt: list[int], new: int, model: str, code: str
) -> None:
    driver = Driver(tiny_models, num_pages=400)
    driver.make_resident("llama")
    with pytest.raises(RequestRefused) as refused:
        driver.submit("x", model, prompt, new)
    assert refused.value.code == code
    assert not driver.engine.has_work()
    driver.empty()


@in_each_mode
def test_broken_weights_end_their_requests_and_nobody_elses(
    tiny_models: Models, mode: Mode
) -> None:
    driver = Driver(tiny_models, num_pages=400, mode=mode)
    driver.make_resident("llama")
    driver.make_resident("qwen3")
    instance = driver.engine._manager.catalog.instance_of("llama")
    views = driver.engine._residency.weights(instance).tensors
    views["model.norm.weight"].fill_(float("nan"))
    driver.submit("bad", "llama", [2, 3, 4], 10)
    driver.submit("good", "qwen3", [2, 3, 4], 10)
    driver.run(lambda: len(driver.finishes) == 2)
    assert driver.finishes["bad"].reason == "error"
    assert "not finite" in driver.finishes["bad"].error
    assert driver.tokens["good"] == tiny_models["qwen3"].generate([2, 3, 4], 10)
    driver.empty()


@in_each_mode
def test_a_broken_chunk_of_a_prompt_ends_its_request_and_is_never_found(
    tiny_models: Models, mode: Mode
) -> None:
    """The weights are broken for the first chunk only: nothing has been sampled by then."""
    model = tiny_models["llama"]
    driver = Driver(tiny_models, num_pages=400, mode=mode, max_batch_tokens=16)
    driver.make_resident("llama")
    instance = driver.engine._manager.catalog.instance_of("llama")
    norm = driver.engine._residency.weights(instance).tensors[
        "model.layers.0.input_layernorm.weight"
    ]
    sound = norm.clone()
    prompt = list(range(2, 62))
    norm.fill_(float("nan"))
    driver.submit("broken", "llama", prompt, 10)
    driver.run(lambda: driver.counter("batch_tokens") >= 16)
    norm.copy_(sound)
    driver.submit("next", "llama", prompt, 10)
    driver.run(lambda: len(driver.finishes) == 2)
    assert driver.finishes["broken"].reason == "error"
    assert driver.finishes["broken"].usage.generated_tokens == 0
    assert driver.finishes["next"].usage.cached_tokens == 0
    assert driver.tokens["next"] == model.generate(prompt, 10)
    driver.empty()


def test_leases_are_never_more_than_the_pool_can_hold(tiny_models: Models) -> None:
    pages = weight_pages(tiny_models["llama"])
    driver = Driver(tiny_models, num_pages=pages + 60, max_num_seqs=32)
    driver.make_resident("llama")
    names: list[str] = []
    while True:
        status = driver.engine.status(driver.now_s)
        lease = next(lease for lease in status.leases if lease.model_id == "llama")
        if lease.kv_tokens < 60 or not lease.num_requests:
            break
        names.append(f"r{len(names)}")
        driver.submit(names[-1], "llama", [2 + len(names)] * 20, 40)
    assert len(names) > 2
    driver.run(lambda: len(driver.finishes) == len(names))
    assert driver.engine.status(driver.now_s).counters["preemptions"] == 0
    driver.empty()


def test_a_damaged_pack_fails_with_its_reason_and_gives_its_pages_back(
    tiny_models: Models, tmp_path: Path
) -> None:
    pack = tmp_path / "pack"
    pack.mkdir()
    for file in tiny_models["llama"].pack_dir.iterdir():
        (pack / file.name).write_bytes(file.read_bytes())
    blob = bytearray((pack / "weights.bin").read_bytes())
    blob[len(blob) // 2] ^= 1
    (pack / "weights.bin").write_bytes(blob)
    damaged = TinyModel("damaged", pack, pack, None)
    driver = Driver({**tiny_models, "damaged": damaged}, num_pages=400)
    driver.engine.load("damaged", 0.0)
    driver.run(lambda: driver.state("damaged") == "failed")
    with pytest.raises(RequestRefused):
        driver.submit("x", "damaged", [2], 5)
    driver.make_resident("llama")
    driver.empty()


def test_torch_runs_one_thread_here() -> None:
    assert torch.get_num_threads() == 1
