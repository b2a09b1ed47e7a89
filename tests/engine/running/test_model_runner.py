"""Whole models by the C++ kernels: no further from float32 than torch's own bfloat16 is.

Through the production engine, over poisoned memory: prompts in chunks beside decodes, prefixes from
the cache, preemptions, swaps. The truth is transformers' model in float32 over the same weights.
"""

import copy
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GemmaConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    OlmoConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from engine.dependencies import device_in_words
from engine.pack import schemes_in
from engine.protocol import SamplingParams, Submit
from engine.registration.convert import inspect, write_pack
from engine.registration.quantize import dequantize, quantize_rows
from engine.running.fusion import LAYERS, NotFused
from engine.running.model_runner import ModelRunner
from kernels import int4_blocks
from kernels.decoder_layer import Product
from kernels.int4_blocks import INT4_BLOCKS
from kernels.native_calls import library
from tests.engine.sampling.test_prompt_logprobs import Rig, rigs_of
from tests.engine.test_engine import MODES, random_prompt, weight_pages
from tests.engine.tiny_models import MAX_CONTEXT, VOCAB, TinyModel, save_folder

pytestmark = pytest.mark.skipif(
    library() is None, reason="no C++ compiler when this was installed, or no such processor"
)

WIDE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 160,
    "vocab_size": VOCAB,
    "max_position_embeddings": MAX_CONTEXT,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
# Biases lie side by side in a pack where each fills 256 bytes.
BIASED = WIDE | {"hidden_size": 256}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
# Why a model of the list does not run natively.
BY_MODULES = {"olmo2": "layers are Olmo2DecoderLayer", "narrow": "heads of 8"}


def configs() -> dict[str, PretrainedConfig]:
    """Every kind of layer that is fused, with heads of 32."""
    return {
        "llama": LlamaConfig(**WIDE),
        "llama-biased": LlamaConfig(**BIASED, attention_bias=True),
        "qwen2": Qwen2Config(**BIASED),
        "qwen2-windows": Qwen2Config(
            **BIASED, use_sliding_window=True, sliding_window=10, max_window_layers=1
        ),
        "qwen3": Qwen3Config(**WIDE | {"intermediate_size": 256}, head_dim=64),
        "mistral": MistralConfig(**WIDE, sliding_window=13),
        "phi3-partial": Phi3Config(**WIDE, rope_parameters=PARTIAL),
        "granite": GraniteConfig(
            **WIDE,
            residual_multiplier=0.6,
            attention_multiplier=0.2,
            embedding_multiplier=3.0,
            logits_scaling=2.0,
        ),
        "olmo": OlmoConfig(**WIDE),
        "gemma": GemmaConfig(**WIDE, head_dim=32),
        "smollm3": SmolLM3Config(**WIDE, no_rope_layers=[1, 0]),
        "olmo2": Olmo2Config(**WIDE),
        "narrow": LlamaConfig(**WIDE | {"num_attention_heads": 16}),
    }


@pytest.fixture(name="models", scope="module")
def _models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyModel]:
    root = tmp_path_factory.mktemp("native")
    models = {}
    for seed, (name, config) in enumerate(configs().items()):
        folder = root / "source" / name
        reference = save_folder(config, folder, seed)
        # Norms of ones and biases of zeros would be right wherever they came from.
        with torch.no_grad():
            for parameter in reference.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.2)
        reference.save_pretrained(folder)
        reference = reference.to(torch.bfloat16).float()  # the weights that the pack will have
        pack_dir, _ = write_pack(inspect(folder), root / "packs", "bfloat16", lambda *_: None)
        models[name] = TinyModel(name, folder, pack_dir, reference)
    return models


@pytest.fixture(name="rigs")
def _rigs() -> Iterator[Any]:
    with rigs_of(2400) as make:
        yield make


def runner(rig: Rig, name: str) -> ModelRunner:
    found = rig.engine.runner(rig.engine._manager.catalog.instance_of(name))
    assert isinstance(found, ModelRunner)
    return found


def say(rig: Rig, name: str, model: str, prompt: list[int], new: int) -> list[int]:
    """One request alone, to its end."""
    rig.submit(name, model, prompt, new)
    rig.run(lambda: name in rig.finishes)
    return rig.tokens[name]


def truth(model: TinyModel, tokens: list[int]) -> torch.Tensor:
    """Logprobs at every position."""
    with torch.no_grad():
        logits: torch.Tensor = model.reference(torch.tensor([tokens])).logits[0]
    return logits.double().log_softmax(-1)


def error_of(rig: Rig, model: TinyModel, prompt: list[int]) -> float:
    """Mean distance of the prompt's logprobs from the truth."""
    name = f"{model.name}-{len(rig.finishes)}"
    rig.ask(name, model.name, prompt, count=1)
    rig.run(lambda: name in rig.finishes)
    logs = truth(model, prompt)
    errors = [
        abs(told.logprob - float(logs[position, prompt[position + 1]]))
        for position, told in enumerate(rig.scores[name])
    ]
    return sum(errors) / len(errors)


def test_families_are_as_near_to_the_truth_as_torch(
    models: dict[str, TinyModel], rigs: Any
) -> None:
    native, plain = rigs(models), rigs(models, native_kernels=False)
    rng = random.Random(4)
    for name, model in models.items():
        assert (runner(native, name)._native is None) == (name in BY_MODULES), name
        assert runner(plain, name)._native is None
        prompt = random_prompt(rng, 90)
        ours, torchs = (error_of(rig, model, prompt) for rig in (native, plain))
        assert ours <= 1.3 * torchs + 0.01, (name, ours, torchs)
        assert ours < 0.25, name


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("name", ["qwen3", "gemma", "qwen2"])
def test_quantized_packs_are_as_near_to_what_they_stand_for(
    models: dict[str, TinyModel], rigs: Any, tmp_path: Path, dtype: Any, name: str
) -> None:
    """The same rounded weights natively, by torch, and in float32."""
    source = models[name]
    pack_dir, index = write_pack(inspect(source.folder), tmp_path, dtype, lambda *_: None)
    reference = copy.deepcopy(source.reference)
    schemes = schemes_in(index)
    assert len(schemes) >= 15
    with torch.no_grad():
        for place, parameter in reference.named_parameters():
            if schemes.get(place) == INT4_BLOCKS:
                blocks = int4_blocks.quantize(parameter)
                parameter.copy_(int4_blocks.dequantize(blocks, parameter.shape[1]))
            elif place in schemes:
                parameter.copy_(dequantize(*quantize_rows(parameter, torch.bfloat16)))
    model = TinyModel("rounded", source.folder, pack_dir, reference)
    native, plain = rigs({"rounded": model}), rigs({"rounded": model}, native_kernels=False)
    assert runner(native, "rounded")._native is not None
    prompt = random_prompt(random.Random(8), 90)
    ours, torchs = (error_of(rig, model, prompt) for rig in (native, plain))
    # What is rounded to bytes on the way is off by up to 1/254, what stays in bfloat16 by 1/256.
    assert ours <= 2 * torchs + 0.01, (ours, torchs)
    assert ours < 0.25


def test_why_a_model_does_not_run_natively(
    models: dict[str, TinyModel], rigs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="engine.running.model_runner")
    rigs({name: models[name] for name in BY_MODULES})
    for why in BY_MODULES.values():
        assert why in caplog.text


def test_what_a_worker_says_it_runs(models: dict[str, TinyModel], rigs: Any) -> None:
    """An operator sees how many models run natively, and whether any could."""
    found = library()
    assert found is not None
    for native in (True, False):
        rig = rigs({name: models[name] for name in ("llama", "narrow")}, native_kernels=native)
        assert rig.counter("native_units") == (1.0 if native else 0.0)
        words = device_in_words(rig.backend, rig.engine._config)
        assert words.endswith(f"kernels for {found.name}" if native else "torch's operators")


def test_weights_that_cpp_would_read_past_are_refused(
    models: dict[str, TinyModel], rigs: Any
) -> None:
    """Only shapes and kinds that were looked at reach the kernels, which look at none."""
    rig = rigs({"qwen3": models["qwen3"]})
    found = runner(rig, "qwen3")
    native, fused = found._native, found._fused
    assert native is not None
    assert fused is not None
    whole = fused.weights[0]
    assert whole.input_norm is not None
    norm, out, down = whole.input_norm, whole.out.weight, whole.down.weight
    assert isinstance(out, torch.Tensor)
    assert isinstance(down, torch.Tensor)
    for broken in (
        replace(whole, input_norm=norm.float()),
        replace(whole, post_norm=norm[:-1]),
        replace(whole, q_norm=norm),
        replace(whole, out=Product(out[:, :-1].contiguous())),
        replace(whole, down=Product(down[:-1])),
        replace(whole, down=Product(down, bias=norm[:-1])),
    ):
        fused._weights[0] = broken
        with pytest.raises(NotFused):
            native.bind()
    fused._weights[0] = whole
    native.bind()


def test_every_fused_class_is_here(models: dict[str, TinyModel]) -> None:
    seen = {type(model.reference.model.layers[0]).__name__ for model in models.values()}
    assert seen >= LAYERS


@pytest.mark.parametrize("mode", MODES)
def test_decodes_beside_prefills_swaps_and_preemptions(
    models: dict[str, TinyModel], rigs: Any, mode: Any
) -> None:
    """Every token is one that the truth ranks first, or within rounding of the first."""
    picked = {name: models[name] for name in ("qwen2-windows", "qwen3")}
    room = max(weight_pages(model) for model in picked.values()) + 24
    rig = rigs({}, num_pages=room, mode=mode, max_batch_tokens=24, load_kv_tokens=16)
    rig.engine.set_catalog([model.spec for model in picked.values()], 0.0)
    rng = random.Random(6)
    head = random_prompt(rng, 24)
    asked: dict[str, tuple[TinyModel, list[int]]] = {}
    for model in (*picked.values(), *picked.values()):
        rig.make_resident(model.name)
        for _ in range(8):
            request = str(len(asked))
            prompt = head + random_prompt(rng, 30)
            asked[request] = (model, prompt)
            rig.submit(request, model.name, prompt, 24)
        rig.run(lambda: len(rig.finishes) == len(asked))
    assert rig.counter("preemptions") > 0
    for request, (model, prompt) in asked.items():
        said = rig.tokens[request]
        assert len(said) == 24
        logs = truth(model, prompt + said)
        for i, token in enumerate(said):
            at = logs[len(prompt) - 1 + i]
            assert float(at.max() - at[token]) < 0.35, (request, i)
    rig.empty()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama", "bfloat16"), ("qwen2-windows", "bfloat16"), ("qwen3", "int8"), ("qwen3", "int4")],
)
def test_a_seed_repeats_to_the_last_bit(
    models: dict[str, TinyModel], rigs: Any, tmp_path: Path, name: str, dtype: Any
) -> None:
    """Tokens and logprobs: in a crowd, preempted, over cached prefixes; and alone."""
    source, rng = models[name], random.Random(4)
    pack_dir, _ = write_pack(inspect(source.folder), tmp_path, dtype, lambda *_: None)
    model = TinyModel(name, source.folder, pack_dir, source.reference)
    head = random_prompt(rng, 24)
    prompts = [head + random_prompt(rng, 30) for _ in range(9)]
    found: list[dict[str, list[tuple[int, float]]]] = []
    for pages, tokens in ((weight_pages(model) + 24, 24), (2400, 200)):
        rig = rigs({name: model}, num_pages=pages, max_batch_tokens=tokens, load_kv_tokens=16)
        said: dict[str, list[tuple[int, float]]] = {}
        step = rig.engine.step

        def watched(now_s: float, step: Any = step, said: Any = said) -> Any:
            deltas = step(now_s)
            for delta in deltas:
                logs = [told.logprob for told in delta.logprobs]
                pairs = zip(delta.token_ids, logs, strict=True)
                said.setdefault(delta.request_id, []).extend(pairs)
            return deltas

        rig.engine.step = watched
        for i, prompt in enumerate(prompts):
            sampling = SamplingParams(1.0, 0.95, seed=i)
            submit = Submit(str(i), 1, "t", name, prompt, 40, sampling, [], logprobs=0)
            rig.engine.submit(submit, rig.now_s)
            if pages == 2400:
                rig.run(lambda rig=rig, i=i: str(i) in rig.finishes)
        rig.run(lambda rig=rig: len(rig.finishes) == len(prompts))
        assert (rig.counter("preemptions") > 0) == (pages != 2400)
        found.append(said)
    assert found[0] == found[1]
    assert all(len(pairs) == 40 for pairs in found[0].values())


def test_answers_do_not_depend_on_the_threads(models: dict[str, TinyModel], rigs: Any) -> None:
    """Work is cut by its size, not by who does it: the same bits with one thread and with four."""
    prompt = random_prompt(random.Random(9), 60)
    said = []
    native = library()
    assert native is not None
    for threads in (1, 4):
        rig = rigs({"llama": models["llama"]})
        native.set_threads(threads)
        said.append(say(rig, "one", "llama", prompt, 40))
    native.set_threads(1)
    assert said[0] == said[1]


def test_weights_that_moved_are_followed(models: dict[str, TinyModel], rigs: Any) -> None:
    """A model that comes back, perhaps elsewhere: bound anew, the same answer."""
    small = {name: models[name] for name in ("llama", "granite")}
    sizes = [weight_pages(model) for model in small.values()]
    assert sum(sizes) > max(sizes) + 24, "both would stay"
    rig = rigs({}, num_pages=max(sizes) + 24)
    rig.engine.set_catalog([model.spec for model in small.values()], 0.0)
    prompt = random_prompt(random.Random(2), 20)
    said: dict[str, list[list[int]]] = {name: [] for name in small}
    for turn in range(3):
        for name in small:
            rig.make_resident(name)
            said[name].append(say(rig, f"{name}-{turn}", name, prompt, 10))
    assert all(answer == answers[0] for answers in said.values() for answer in answers)
