"""Mixtures by the C++ kernels: as near to float32 as torch's bfloat16, the same bits in any batch.

Through the production engine. Most tokens go to all experts here: a choice between two of them is a
step that no tolerance covers.
"""

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GptOssConfig, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig

from engine.modules.experts import as_linears, expert_weights
from engine.pack import schemes_in
from engine.protocol import SamplingParams, Submit
from engine.registration.convert import inspect, write_pack
from engine.registration.quantize import (
    dequantize,
    dequantize_stack,
    quantize_rows,
    quantize_stack,
)
from engine.running.fusion import EXPERT_LAYERS
from kernels import int4_blocks
from kernels.int4_blocks import INT4_BLOCKS
from kernels.native_calls import library
from tests.engine.running.test_model_runner import WIDE, error_of, runner
from tests.engine.sampling.test_prompt_logprobs import rigs_of
from tests.engine.test_engine import random_prompt
from tests.engine.tiny_models import TinyModel, save_folder

pytestmark = pytest.mark.skipif(
    library() is None, reason="no C++ compiler when this was installed, or no such processor"
)
CHOICE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 80}
# Where layers run: all in one call; a call each, the MLP a module; none, but the experts do.
HOW = {"mixtral": 1, "qwen3_moe": 1, "qwen3_moe-dense": 1, "qwen2_moe": 2, "gpt_oss": 0}


def configs() -> dict[str, Any]:
    """Every kind of router and gate that C++ knows, and layers without experts beside others."""
    return {
        "mixtral": MixtralConfig(**WIDE, num_local_experts=4, num_experts_per_tok=4),
        "qwen3_moe": Qwen3MoeConfig(**WIDE, **CHOICE, head_dim=64, norm_topk_prob=False),
        "qwen3_moe-dense": Qwen3MoeConfig(
            **WIDE, **CHOICE, head_dim=32, norm_topk_prob=True, mlp_only_layers=[1]
        ),
        "qwen2_moe": Qwen2MoeConfig(
            **WIDE | {"hidden_size": 256}, **CHOICE, shared_expert_intermediate_size=96
        ),
        "gpt_oss": GptOssConfig(
            **WIDE,
            num_local_experts=4,
            num_experts_per_tok=4,
            head_dim=32,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
    }


@pytest.fixture(name="models", scope="module")
def _models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyModel]:
    root = tmp_path_factory.mktemp("mixtures")
    models = {}
    for seed, (name, config) in enumerate(configs().items()):
        folder = root / "source" / name
        reference = save_folder(config, folder, seed).to(torch.bfloat16).float()
        pack_dir, _ = write_pack(inspect(folder), root / "packs", "bfloat16", lambda *_: None)
        models[name] = TinyModel(name, folder, pack_dir, reference)
    return models


@pytest.fixture(name="rigs")
def _rigs() -> Iterator[Any]:
    with rigs_of(2400) as make:
        yield make


def rounded(source: TinyModel, root: Path, dtype: Any) -> TinyModel:
    """Its pack in that dtype, and a reference that has what the pack stands for."""
    pack_dir, index = write_pack(inspect(source.folder), root, dtype, lambda *_: None)
    reference = copy.deepcopy(source.reference)
    schemes, stacks = schemes_in(index), expert_weights(reference)
    assert stacks <= set(schemes)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            scheme = schemes.get(name)
            if name in stacks and scheme is not None:
                stack = as_linears(reference, name, parameter)
                kept, scale = quantize_stack(stack, scheme, torch.bfloat16)
                exact = dequantize_stack(kept, scale, tuple(stack.shape), scheme)
                parameter.copy_(as_linears(reference, name, exact))
            elif scheme == INT4_BLOCKS:
                blocks = int4_blocks.quantize(parameter)
                parameter.copy_(int4_blocks.dequantize(blocks, parameter.shape[1]))
            elif scheme is not None:
                parameter.copy_(dequantize(*quantize_rows(parameter, torch.bfloat16)))
    return TinyModel(source.name, source.folder, pack_dir, reference)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_mixtures_are_as_near_to_the_truth_as_torch(
    models: dict[str, TinyModel], rigs: Any, tmp_path: Path, dtype: Any
) -> None:
    found = models
    if dtype != "bfloat16":
        found = {name: rounded(model, tmp_path, dtype) for name, model in models.items()}
    native, plain = rigs(found), rigs(found, native_kernels=False)
    rng = random.Random(4)
    for name, model in found.items():
        layers = runner(native, name)._native
        stops = 0 if layers is None else len(layers._stops)
        assert stops == HOW[name], name
        prompt = random_prompt(rng, 90)
        ours, torchs = (error_of(rig, model, prompt) for rig in (native, plain))
        # What is rounded to bytes on the way is off by up to 1/254, what stays by 1/256.
        assert ours <= (1.3 if dtype == "bfloat16" else 2) * torchs + 0.01, (name, ours, torchs)
        assert ours < 0.25, name


def test_every_class_with_experts_is_here(models: dict[str, TinyModel]) -> None:
    seen = {type(model.reference.model.layers[0]).__name__ for model in models.values()}
    assert seen >= EXPERT_LAYERS


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_a_seed_repeats_alone_and_in_a_crowd(
    models: dict[str, TinyModel], rigs: Any, tmp_path: Path, dtype: Any
) -> None:
    """To the last bit of the logprobs."""
    source, rng = models["qwen3_moe-dense"], random.Random(4)
    pack_dir, _ = write_pack(inspect(source.folder), tmp_path, dtype, lambda *_: None)
    model = TinyModel("m", source.folder, pack_dir, source.reference)
    prompts = [random_prompt(rng, 30) for _ in range(6)]
    found = []
    for alone in (True, False):
        rig = rigs({"m": model}, max_batch_tokens=200 if alone else 24)
        said: dict[str, list[tuple[int, float]]] = {}
        step = rig.engine.step

        def watched(now_s: float, step: Any = step, said: Any = said) -> Any:
            deltas = step(now_s)
            for delta in deltas:
                logs = [told.logprob for told in delta.logprobs]
                said.setdefault(delta.request_id, []).extend(
                    zip(delta.token_ids, logs, strict=True)
                )
            return deltas

        rig.engine.step = watched
        for i, prompt in enumerate(prompts):
            sampling = SamplingParams(1.0, 0.95, seed=i)
            submit = Submit(str(i), 1, "t", "m", prompt, 16, sampling, [], logprobs=0)
            rig.engine.submit(submit, rig.now_s)
            if alone:
                rig.run(lambda rig=rig, i=i: str(i) in rig.finishes)
        rig.run(lambda rig=rig: len(rig.finishes) == len(prompts))
        found.append(said)
    assert found[0] == found[1]
    assert all(len(pairs) == 16 for pairs in found[0].values())
