"""Every family that runs fused says what its modules say; every other runs by its modules.

Through the whole engine on a fake device that is never late, against transformers' `generate`.
"""

import random
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import (
    Glm4MoeConfig,
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoConfig,
    OlmoeConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from engine.backend.cpu import CpuBackend, Execution
from engine.backend.cuda import HostCopies
from engine.config import EngineConfig
from engine.engine import Engine
from engine.gpu.device_runner import DeviceRunner
from engine.gpu.device_sampling import SAMPLING_KERNELS, SAMPLING_REFERENCE
from engine.modules.transformers_backend import build_skeleton
from engine.pack import PackIndex, read_index
from engine.protocol import SamplingParams, Submit, TokenDelta, TokenLogprobs
from engine.registration.convert import inspect, write_pack
from engine.running.fusion import EXPERT_LAYERS, LAYERS, recognise
from engine.worker.open_device import Opened
from kernels import expert_rows
from kernels.decoder_layer import KERNELS, Operations
from kernels.expert_rows import RowShape
from kernels.flat_reference import FLAT_REFERENCE
from tests.engine.device_rig import backend_of, opened_on
from tests.engine.fake_device import FakeDevice
from tests.engine.tiny_models import (
    MAX_CONTEXT,
    VOCAB,
    TinyModel,
    make_tiny_models,
    tiny_configs,
    windowed_configs,
)

PAGE = 8192
# Multiples of 64 elements: the pack then keeps biases side by side.
WIDE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": VOCAB,
    "max_position_embeddings": MAX_CONTEXT,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}


def configs() -> dict[str, PretrainedConfig]:
    """Those of the engine's other tests, and the rest of what is fused."""
    partial = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    return {
        **tiny_configs(),
        **windowed_configs(),
        "llama-biased": LlamaConfig(**WIDE, attention_bias=True),
        # Wide enough for scales of int8 rows side by side.
        "qwen2": Qwen2Config(**WIDE | {"hidden_size": 128, "intermediate_size": 128}),
        "qwen2-windows": Qwen2Config(
            **WIDE, use_sliding_window=True, sliding_window=10, max_window_layers=1
        ),
        "phi3": Phi3Config(**WIDE),
        "phi3-partial": Phi3Config(**WIDE, rope_parameters=partial),
        "granite": GraniteConfig(
            **WIDE,
            residual_multiplier=0.6,
            attention_multiplier=0.2,
            embedding_multiplier=3.0,
            logits_scaling=2.0,
        ),
        "olmo": OlmoConfig(**WIDE),
        "smollm3": SmolLM3Config(**WIDE, no_rope_layers=[1, 0]),
        "olmo2": Olmo2Config(**WIDE),
        "olmo-clipped": OlmoConfig(**WIDE, clip_qkv=0.5),
        "mixtral": MixtralConfig(**WIDE, num_local_experts=4, num_experts_per_tok=2),
        "qwen3_moe": Qwen3MoeConfig(**WIDE, **EXPERTS, head_dim=16, norm_topk_prob=True),
        "qwen3_moe-dense": Qwen3MoeConfig(**WIDE, **EXPERTS, head_dim=16, mlp_only_layers=[1]),
        "qwen2_moe": Qwen2MoeConfig(
            **WIDE | {"hidden_size": 128}, **EXPERTS, shared_expert_intermediate_size=48
        ),
        "olmoe": OlmoeConfig(**WIDE, num_experts=6, num_experts_per_tok=2),
        "glm4_moe": Glm4MoeConfig(
            **WIDE,
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=48,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
        ),
    }


BY_MODULES = {
    "gemma3": "layers are Gemma3DecoderLayer",
    "gpt_oss": "layers are GptOssDecoderLayer",
    "olmo2": "layers are Olmo2DecoderLayer",
    "olmo-clipped": "queries, keys and values are clipped",
    "olmoe": "layers are OlmoeDecoderLayer",
    "glm4_moe": "layers are Glm4MoeDecoderLayer",
}


MIXTURES = frozenset(
    {"mixtral", "qwen3_moe", "qwen3_moe-dense", "qwen2_moe", "olmoe", "glm4_moe", "gpt_oss"}
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyModel]:
    return make_tiny_models(tmp_path_factory.mktemp("fused"), configs())


class Run:
    """One engine with some models, on a device that is never late."""

    def __init__(
        self,
        models: list[TinyModel],
        operations: Operations = FLAT_REFERENCE,
        sampling: Any = SAMPLING_REFERENCE,
        **settings: Any,
    ) -> None:
        config = EngineConfig(
            **{
                "arena_bytes": 1200 * PAGE,
                "page_bytes": PAGE,
                "shm_prefix": "fused",
                "block_tokens": 4,
                "max_batch_tokens": 24,
                "max_num_seqs": 6,
                "steps_ahead": 1,
                **settings,
            }
        )
        self.opened: Opened = opened_on(FakeDevice(), config, 1 << 24, operations, sampling)
        self.engine = Engine(config, self.opened.backend, self.opened.dependencies)
        self.engine.set_catalog([model.spec for model in models], 0.0)
        self.now_s = 0.0
        for model in models:
            self.engine.load(model.name, 0.0)
        while any(row.state != "resident" for row in self.engine.status(0.0).models):
            assert all(row.state != "failed" for row in self.engine.status(0.0).models)
            self.engine.step(self.now_s)

    def runner(self, name: str) -> DeviceRunner:
        found = self.engine.runner(self.engine._manager.catalog.instance_of(name))
        assert isinstance(found, DeviceRunner)
        return found

    def state(self, name: str) -> str:
        rows = {row.model_id: row.state for row in self.engine.status(self.now_s).models}
        return rows[name]

    def say(self, asks: list[Submit]) -> dict[str, list[int]]:
        """The tokens of each, all at once."""
        for ask in asks:
            self.engine.submit(ask, self.now_s)
        said: dict[str, list[int]] = {ask.request_id: [] for ask in asks}
        open_ = set(said)
        while open_:
            for delta in self.engine.step(self.now_s):
                said[delta.request_id] += delta.token_ids
                if delta.finish is not None:
                    assert delta.finish.reason == "length", delta.finish
                    open_.remove(delta.request_id)
        return said

    def close(self) -> None:
        self.engine.check_integrity()
        self.engine.close()
        self.opened.backend.close()


def ask(number: int, name: str, prompt: list[int], new: int) -> Submit:
    return Submit(str(number), 1, "t", name, prompt, new, SamplingParams(0.0), [])


def prompts(count: int, longest: int = 30) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(2, VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("kind", ["dense", "mixtures"])
def test_families_say_what_transformers_says(models: dict[str, TinyModel], kind: str) -> None:
    names = [name for name in models if (name in MIXTURES) == (kind == "mixtures")]
    run = Run([models[name] for name in names])
    asks = [
        ask(10 * i + j, name, prompt, 12)
        for i, name in enumerate(names)
        for j, prompt in enumerate(prompts(3))
    ]
    said = run.say(asks)
    for one in asks:
        wanted = models[one.model_id].generate(one.prompt_token_ids, 12)
        assert said[one.request_id] == wanted, one.model_id
    for name in names:
        runner = run.runner(name)
        assert runner.why_not_fused == BY_MODULES.get(name, ""), name
        assert (runner.fused is None) == (name in BY_MODULES)
    assert run.opened.graphs is not None
    assert run.opened.graphs.counters["graph_replays"] > 20
    assert not run.opened.graphs.counters["graphs_refused"]
    run.close()


def test_every_fused_class_is_held_to_its_modules(models: dict[str, TinyModel]) -> None:
    seen = {type(model.reference.model.layers[0]).__name__ for model in models.values()}
    assert seen >= LAYERS | EXPERT_LAYERS


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "gpt_oss"])
def test_by_interpreted_kernels(
    models: dict[str, TinyModel], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Two that are fused; one by its modules, with windows and sinks. Mixed steps and decodes, as
    they are launched and, of those that are fused, as they are replayed.
    """
    # Few programs: the interpreter takes milliseconds for each.
    monkeypatch.setattr(expert_rows, "row_shape", lambda *_, **__: RowShape(64, 64, 1))
    run = Run([models[name]], KERNELS, SAMPLING_KERNELS, max_batch_tokens=8, prefix_cache=False)
    for _ in range(1 if name in BY_MODULES else 2):
        asks = [ask(i, name, prompt, 3) for i, prompt in enumerate(prompts(2, 11))]
        said = run.say(asks)
        for one in asks:
            assert said[one.request_id] == models[name].generate(one.prompt_token_ids, 3)
    graphs = run.opened.graphs
    assert graphs is not None
    assert any(key.form.num_chunks for key in graphs._kept) == (name not in BY_MODULES)
    run.close()


@pytest.mark.parametrize("name", ["gemma3", "olmo2", "gpt_oss"])
def test_models_by_modules_are_recorded(models: dict[str, TinyModel], name: str) -> None:
    run = Run([models[name]], prefix_cache=False)
    for _ in range(3):
        asks = [ask(i, name, prompt, 8) for i, prompt in enumerate(prompts(3))]
        said = run.say(asks)
        for one in asks:
            assert said[one.request_id] == models[name].generate(one.prompt_token_ids, 8)
    graphs = run.opened.graphs
    assert graphs is not None
    assert graphs.counters["graphs_refused"] == 0
    kept = [bool(key.form.num_chunks) for key in graphs._kept]
    assert set(kept) == {False, True}
    run.close()


@pytest.mark.parametrize("name", ["granite", "gemma3"])
def test_logprobs_and_drawn_tokens_are_the_cpus(models: dict[str, TinyModel], name: str) -> None:
    """Of prompts and of answers, with everything that changes logits; fused and by modules."""
    params = SamplingParams(
        0.8,
        top_p=0.9,
        seed=11,
        frequency_penalty=0.5,
        repetition_penalty=1.2,
        min_tokens=4,
        logit_bias={5: 2.0},
    )
    asks = [
        Submit(str(i), 1, "t", name, prompt, 9, params, [7], logprobs=3, prompt_logprobs=2)
        for i, prompt in enumerate(prompts(3))
    ]
    run = Run([models[name]])
    got = deltas(run.engine, asks)
    wanted, ahead = (on_cpu(run, models[name], name, asks, steps) for steps in (0, 1))
    for ask in asks:
        tokens = [[d.token_ids for d in said[ask.request_id]] for said in (wanted, ahead)]
        assert tokens[0] == tokens[1]
    for ask in asks:
        ours, theirs = got[ask.request_id], wanted[ask.request_id]
        assert [d.token_ids for d in ours] == [d.token_ids for d in theirs]
        assert len(scores(ours)) == len(scores(theirs)) > 8
        for a, b in zip(scores(ours), scores(theirs), strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
            assert [token for token, _ in a.top] == [token for token, _ in b.top]
    run.close()


def on_cpu(
    run: "Run", model: TinyModel, name: str, asks: list[Submit], steps_ahead: int
) -> dict[str, list[TokenDelta]]:
    """By another engine."""
    config = msgspec.structs.replace(run.opened.config, steps_ahead=steps_ahead)
    execution: Execution = "thread" if steps_ahead else "inline"
    cpu = Engine(config, CpuBackend(config.arena_bytes, execution=execution))
    cpu.set_catalog([model.spec], 0.0)
    cpu.load(name, 0.0)
    while cpu.status(0.0).models[0].state != "resident":
        cpu.step(0.0)
    said = deltas(cpu, asks)
    cpu.close()
    return said


def deltas(engine: Engine, asks: list[Submit]) -> dict[str, list[TokenDelta]]:
    for ask in asks:
        engine.submit(ask, 0.0)
    found: dict[str, list[TokenDelta]] = {ask.request_id: [] for ask in asks}
    while not all(dependencies and dependencies[-1].finish for dependencies in found.values()):
        for delta in engine.step(0.0):
            found[delta.request_id].append(delta)
    return found


def scores(dependencies: list[TokenDelta]) -> list[TokenLogprobs]:
    """Of the prompt, then of the answer."""
    return [s for d in dependencies for s in d.prompt_logprobs] + [
        s for d in dependencies for s in d.logprobs
    ]


@pytest.mark.parametrize("dtype", ["int8", "fp8", "int4"])
def test_quantized_weights_are_fused_too(
    models: dict[str, TinyModel], tmp_path: Path, dtype: Any
) -> None:
    """What the fused layers say of rounded weights is what the modules say of them."""
    source = models["qwen2"].folder
    pack_dir, index = write_pack(inspect(source), tmp_path, dtype, lambda *_: None)
    model = TinyModel("small", source, pack_dir, None)
    assert any(entry.scheme for entry in index.tensors)
    run = Run([model])
    params = SamplingParams(0.0)
    asks = [
        Submit(str(i), 1, "t", "small", prompt, 1, params, [], logprobs=3, prompt_logprobs=3)
        for i, prompt in enumerate(prompts(3))
    ]
    fused = deltas(run.engine, asks)
    runner = run.runner("small")
    assert runner.fused is not None
    runner.fused = None
    by_modules = deltas(run.engine, asks)
    for one in asks:
        ours, theirs = scores(fused[one.request_id]), scores(by_modules[one.request_id])
        assert len(ours) == len(theirs) == len(one.prompt_token_ids)
        for a, b in zip(ours, theirs, strict=True):
            # bfloat16 sums in another order: some 0.02, by the processor; a wrong scale: over 0.5.
            assert a.logprob == pytest.approx(b.logprob, abs=0.15)
    run.close()


@pytest.mark.parametrize(
    ("change", "why"),
    [({"chunk": 8}, "attend in chunks"), ({"readers": ((9, 0),)}, "read the KV of others")],
)
def test_layers_that_see_kv_otherwise_are_not_fused(
    models: dict[str, TinyModel], change: dict[str, Any], why: str
) -> None:
    model = models["llama"]
    index = read_index(model.pack_dir)
    groups = tuple(msgspec.structs.replace(group, **change) for group in index.kv_groups)
    skeleton = build_skeleton(model.pack_dir, torch.float32)
    fused, said = recognise(skeleton, msgspec.structs.replace(index, kv_groups=groups))
    assert fused is None
    assert why in said


def test_a_pack_that_keeps_projections_apart_is_not_fused(models: dict[str, TinyModel]) -> None:
    model = models["qwen2"]
    index = read_index(model.pack_dir)
    alone: PackIndex = type(index)(
        **{name: getattr(index, name) for name in index.__struct_fields__} | {"fused": ()}
    )
    skeleton = build_skeleton(model.pack_dir, torch.float32)
    fused, why = recognise(skeleton, alone)
    assert fused is None
    assert "by itself" in why
    assert recognise(skeleton, index)[0] is not None


def test_a_model_comes_back_from_pinned_memory_to_its_graphs(
    models: dict[str, TinyModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warm loads are read where they lie; at home again, its steps are replayed at once."""
    model = models["llama"]
    run = Run([model], host_tier_bytes=8 << 20, shm_dir=str(tmp_path))
    backend, graphs = backend_of(run.opened), run.opened.graphs
    assert graphs is not None
    wanted = model.generate([5, 6, 7], 8)
    for number in range(2):  # the second time a prompt's step is recorded, too
        assert run.say([ask(number, "llama", [5, 6, 7], 8)])[str(number)] == wanted
    size = sum(segment.num_bytes for segment in read_index(model.pack_dir).segments)
    for _ in range(2000):
        run.engine.step(run.now_s)
        if backend.pinner.pinned_bytes >= size:
            break
        time.sleep(0.002)
    assert backend.pinner.pinned_bytes == size
    run.engine.unload("llama", run.now_s)
    while run.state("llama") != "warm":
        run.engine.step(run.now_s)
    staged: list[int] = []
    monkeypatch.setattr(HostCopies, "_stage", lambda *arguments: staged.append(1))
    captured = graphs.counters["graphs_captured"]
    run.engine.load("llama", run.now_s)
    while run.state("llama") != "resident":
        run.engine.step(run.now_s)
    assert run.say([ask(2, "llama", [5, 6, 7], 8)])["2"] == wanted
    assert not staged
    assert graphs.counters["graphs_captured"] == captured
    run.close()
