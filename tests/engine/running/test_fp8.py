"""Packs in fp8 through the engine: on a device, fused and by modules, and on a processor."""

import copy
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from engine.pack import FP8_SCHEME, schemes_in
from engine.registration.convert import inspect, write_pack
from engine.registration.quantize import dequantize, quantize_rows
from kernels import decoder_layer
from kernels.decoder_layer import KERNELS
from kernels.flat_reference import FLAT_REFERENCE
from kernels.fp8_linear import fp8_linear
from kernels.scaled_linear import scaled_linear_ref
from tests.engine.fake_device import opaque
from tests.engine.running.test_fusion import WIDE, Run, ask, prompts
from tests.engine.running.test_model_runner import runner, say
from tests.engine.sampling.test_prompt_logprobs import rigs_of
from tests.engine.tiny_models import TinyModel, save_folder

CONFIGS = {
    "llama": LlamaConfig(**WIDE),
    "qwen2": Qwen2Config(**WIDE),
    "qwen3-tied": Qwen3Config(**WIDE, head_dim=32, tie_word_embeddings=True),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyModel]:
    root = tmp_path_factory.mktemp("fp8")
    return {name: made(root, name, seed) for seed, name in enumerate(CONFIGS)}


def made(root: Path, name: str, seed: int) -> TinyModel:
    """A model whose reference has the weights that the pack stands for, in float32."""
    folder = root / "source" / name
    reference = copy.deepcopy(save_folder(CONFIGS[name], folder, seed))
    pack_dir, index = write_pack(inspect(folder), root / "packs", "fp8", lambda *_: None)
    schemes = schemes_in(index)
    assert len(schemes) >= 15
    assert set(schemes.values()) == {FP8_SCHEME}
    with torch.no_grad():
        for place, parameter in reference.named_parameters():
            if place in schemes:
                rounded = quantize_rows(parameter, torch.float32, FP8_SCHEME)
                parameter.copy_(dequantize(*rounded))
    return TinyModel(name, folder, pack_dir, reference)


def share_best(model: TinyModel, said: dict[str, list[int]], asks: dict[str, list[int]]) -> float:
    """Of tokens that the reference ranks first; every other is within rounding of it."""
    best, count = 0, 0
    for name, tokens in said.items():
        prompt = asks[name]
        logits = model.reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 :]
        for row, token in zip(logits, tokens, strict=False):
            assert row[token] >= row.max() - 0.2 * row.std()
            best += int(row.argmax()) == token
            count += 1
    return best / count


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_device_says_what_the_weights_stand_for(
    models: dict[str, TinyModel], name: str, fused: bool
) -> None:
    """Mixed steps and decodes, as they are launched and as they are replayed."""
    run = Run([models[name]], prefix_cache=False)
    assert run.runner(name).fused is not None
    if not fused:
        run.runner(name).fused = None
    for _ in range(3):
        asked = [ask(i, name, prompt, 8) for i, prompt in enumerate(prompts(4))]
        said = run.say(asked)
        wanted = {one.request_id: one.prompt_token_ids for one in asked}
        assert share_best(models[name], said, wanted) > 0.85
    graphs = run.opened.graphs
    assert graphs is not None
    assert graphs.counters["graphs_refused"] == 0
    assert {bool(key.form.num_chunks) for key in graphs._kept} == {False, True}
    assert graphs.counters["graph_replays"] > 5
    run.close()


def test_many_rows_are_rounded_and_few_are_not(
    models: dict[str, TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where 17 rows are many; the interpreter cannot multiply tiles of bfloat16."""
    rounded: list[int] = []

    def watched(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        rounded.append(len(x))
        return fp8_linear(x, *rest)

    monkeypatch.setattr(decoder_layer, "takes_fp8", lambda x, _: len(x) > 2)
    monkeypatch.setattr(decoder_layer, "fp8_linear", watched)
    monkeypatch.setattr(decoder_layer, "scaled_linear", scaled_linear_ref)
    operations = replace(FLAT_REFERENCE, product=opaque(KERNELS.product))
    run = Run([models["qwen2"]], operations, prefix_cache=False)
    for _ in range(2):
        asked = [ask(i, "qwen2", prompt, 4) for i, prompt in enumerate(prompts(4, 12))]
        said = run.say(asked)
        wanted = {one.request_id: one.prompt_token_ids for one in asked}
        assert share_best(models["qwen2"], said, wanted) > 0.7
    assert rounded
    assert all(count > 2 for count in rounded)
    run.close()


def test_a_processor_computes_by_modules_and_says_so(
    models: dict[str, TinyModel], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="engine.running.model_runner")
    asks = {str(i): prompt for i, prompt in enumerate(prompts(3))}
    with rigs_of(2400) as make:
        rig = make(models)
        for name, model in models.items():
            said = {
                number: say(rig, f"{name}-{number}", name, prompt, 8)
                for number, prompt in asks.items()
            }
            assert share_best(model, said, asks) > 0.85
            assert not runner(rig, name).is_native
    assert "fp8 weights run slowly on a processor" in caplog.text
