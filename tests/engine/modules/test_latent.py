"""Attention that caches latents: the algebra, the shapes that are kept, what is found and refused.

That whole families come out right is for the parity probe, here with published shapes, and for
tests/engine/test_engine_latent.py.
"""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import xxhash
from torch import nn
from transformers import AutoConfig

from bench.family_configs import tiny_config
from engine.errors import RegistrationRefused
from engine.memory import plan_pack
from engine.modules import latent
from engine.modules.latent import (
    absorb,
    expanding_is_cheaper,
    is_latent,
    latent_layers,
    project,
    read_weights,
)
from engine.modules.transformers_backend import bind_weights, build_skeleton
from engine.pack import INDEX_NAME, KvGroup, read_index
from engine.registration import parity
from engine.registration.blueprint import blueprint, kv_groups, module_geometries
from engine.registration.convert import inspect, write_pack
from engine.registration.parity import draw_weights, probe
from engine.registration.quantize import schemes_of
from engine.registration.wrapper import set_text_config
from tests.engine.pack_rig import hf_folder

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
}
# Name -> (type, options that differ from the type's defaults, bytes a token in bfloat16).
PUBLISHED: dict[str, tuple[str, dict[str, Any], int]] = {
    "DeepSeek-V3": (
        "deepseek_v3",
        {"rope_parameters": YARN, "max_position_embeddings": 163840},
        70_272,
    ),
    "DeepSeek-V2-Lite": (
        "deepseek_v2",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1408,
            "intermediate_size": 10944,
            "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
            "max_position_embeddings": 163840,
        },
        31_104,
    ),
    "GLM-4.7-Flash": ("glm4_moe_lite", {}, 54_144),
    "MiniCPM3-4B": ("minicpm3", {}, 35_712),
    "LongCat-Flash": ("longcat_flash", {}, 64_512),
}


def config_of(name: str) -> Any:
    family, options, _ = PUBLISHED[name]
    return AutoConfig.for_model(family, **options)


@pytest.mark.parametrize("name", PUBLISHED)
def test_bytes_a_token_are_the_least_that_the_architecture_allows(name: str) -> None:
    config = config_of(name)
    groups = kv_groups(config)
    wanted = PUBLISHED[name][2]
    row = config.kv_lora_rank + config.qk_rope_head_dim
    assert wanted == config.num_hidden_layers * row * 2
    assert sum(group.values_per_token for group in groups) * 2 == wanted
    page_bytes = 2 << 20
    plan = plan_pack(groups, "bfloat16", 16, page_bytes, 10_000)
    assert wanted <= plan.bytes_per_token(page_bytes) < 1.06 * wanted


@pytest.mark.parametrize("name", ["DeepSeek-V2-Lite", "LongCat-Flash"])
def test_modules_keep_what_the_configuration_says(name: str) -> None:
    config = config_of(name)
    found = blueprint(config)
    assert found.kv_groups == kv_groups(config)
    assert len(read_weights(found.skeleton)) == config.num_hidden_layers


@pytest.mark.parametrize("name", ["DeepSeek-V2-Lite", "GLM-4.7-Flash"])
@pytest.mark.parametrize("quantization", ["", "int8"])
def test_published_shapes_come_out_right(name: str, quantization: str) -> None:
    assert probe(config_of(name), quantization=quantization) < 1e-5


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_rounded_weights_come_out_right(quantization: str) -> None:
    """kv_b_proj is read as a tensor, so it is never rounded; everything around it is."""
    config = tiny_config("minicpm3")
    assert probe(config, quantization=quantization) < 1e-5
    plan = blueprint(config)
    chosen = schemes_of(plan, list(plan.tensors), quantization)
    leaves = {name.split(".")[-2] for name in chosen}
    assert "kv_b_proj" not in leaves
    assert {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "up_proj"} <= leaves


def test_scores_are_scaled_as_the_modules_say() -> None:
    """Yarn scales them too: by the widths of heads alone they would come out wrong."""
    config = tiny_config("deepseek_v3")
    model = build_skeleton(config, torch.float32)
    _, _, layer = next(latent_layers(model))
    assert layer.scaling != pytest.approx((12 + 8) ** -0.5)
    assert probe(config) < 1e-5


def built(family: str = "deepseek_v3", attention: str | None = None) -> nn.Module:
    options = {} if attention is None else {"attention": attention}
    model = build_skeleton(tiny_config(family), torch.float32, **options)
    bind_weights(model, draw_weights(model, 0))
    return model


@torch.inference_mode()
def test_absorbed_products_are_those_of_the_expanded_heads() -> None:
    eager, ours = built(attention="eager"), built()
    (_, number, theirs), (_, _, module) = (next(latent_layers(m)) for m in (eager, ours))
    assert number == 0
    assert not is_latent(theirs)
    random = torch.Generator().manual_seed(0)
    query, kept, rotated, weights = (
        torch.randn(*shape, generator=random)
        for shape in ((1, 4, 7, 20), (1, 1, 9, 24), (1, 1, 9, 8), (1, 4, 7, 9))
    )
    key, value = theirs.expand_kv(kept, rotated)
    scores, out = query @ key.transpose(2, 3), weights @ value
    key, value = module.expand_kv(kept, rotated)
    assert key.shape == (1, 1, 9, 32)
    assert torch.equal(value, key[..., :24])
    attended = (weights @ value)[0]
    for part in (slice(None), slice(1, 3)):
        absorbed = absorb(module, query[0, part], part)
        assert torch.allclose(absorbed @ key[0].transpose(1, 2), scores[0, part], atol=1e-4)
        assert torch.allclose(project(module, attended[part], part), out[0, part], atol=1e-4)


def test_other_layers_are_left_alone() -> None:
    model = built("llama")
    assert not list(latent_layers(model))
    assert not is_latent(model.get_submodule("model.layers.0.self_attn"))


def test_latents_of_an_unknown_kind_are_refused() -> None:
    config = tiny_config("deepseek_v2")
    model = build_skeleton(copy.deepcopy(config), torch.float32)
    attention: Any = model.get_submodule("model.layers.1.self_attn")
    attention.kv_b_proj = nn.Linear(24, 4 * 22, bias=True)
    with pytest.raises(RegistrationRefused, match="latents in an unknown way") as caught:
        module_geometries(model, config)
    assert caught.value.code == "unknown_family"


def test_the_probe_sees_a_wrong_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        latent, "project", lambda module, rows, heads: project(module, rows.flip(-1), heads)
    )
    with pytest.raises(RegistrationRefused, match="differ"):
        probe(tiny_config("minicpm3"))


def test_the_probe_sees_wrong_values_of_an_expanded_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expand = latent._expand

    def wrong(module: Any, key: torch.Tensor, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = expand(module, key, heads)
        return keys, values.flip(1)

    monkeypatch.setattr(latent, "_expand", wrong)
    with pytest.raises(RegistrationRefused, match="differ"):
        probe(tiny_config("minicpm3"))


@pytest.mark.parametrize("slice_bytes", [1, 3000])
@pytest.mark.parametrize("expands", [False, True])
def test_each_way_and_some_heads_at_a_time_come_out_right(
    expands: bool, slice_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latent, "expanding_is_cheaper", lambda *_: expands)
    monkeypatch.setattr(latent, "SLICE_BYTES", slice_bytes)
    for family in ("deepseek_v2", "glm4_moe_lite"):
        assert probe(tiny_config(family)) < 1e-5


def test_the_way_is_chosen_by_products() -> None:
    """With the widths of DeepSeek-V3: 1,152 a pair and head instead of 384, or 131,072 a token."""
    model = blueprint(config_of("DeepSeek-V3")).skeleton
    _, _, module = next(latent_layers(model))
    assert not expanding_is_cheaper(module, 1, 4096)
    assert not expanding_is_cheaper(module, 330, 16_384)
    assert expanding_is_cheaper(module, 340, 16_384)
    assert expanding_is_cheaper(module, 64, 64)


def test_the_probe_sees_v_of_another_width(monkeypatch: pytest.MonkeyPatch) -> None:
    right = module_geometries

    def as_if_not(model: nn.Module, config: Any) -> Any:
        return {layer: replace(kind, v_dim=16) for layer, kind in right(model, config).items()}

    monkeypatch.setattr(parity, "module_geometries", as_if_not)
    with pytest.raises(RegistrationRefused, match="instead of 1 heads"):
        probe(tiny_config("minicpm3"))


def test_values_a_token() -> None:
    assert KvGroup((0, 1), 2, 16, 8, 4).values_per_token == 96
    assert KvGroup((0, 1), 1, 24, 16, v_in_k=True).values_per_token == 48


def test_an_index_says_where_v_lies_in_k(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "model", tiny_config("deepseek_v3"))
    pack_dir, written = write_pack(inspect(folder), tmp_path / "packs", "float32", lambda *_: None)
    index = read_index(pack_dir)
    assert index == written
    assert index.kv_groups == (KvGroup((0, 1), 1, 32, 24, v_in_k=True),)


def test_an_index_of_before_says_that_it_does_not(tmp_path: Path) -> None:
    """A field with a default is no reason for another version of packs."""
    folder = hf_folder(tmp_path / "model", tiny_config("llama"))
    pack_dir, index = write_pack(inspect(folder), tmp_path / "packs", "float32", lambda *_: None)
    old = msgspec.to_builtins(index)
    for group in old["kv_groups"]:
        del group["v_in_k"]
    data = msgspec.msgpack.encode(old)
    (pack_dir / INDEX_NAME).write_bytes(data + xxhash.xxh3_64_digest(data))
    assert read_index(pack_dir) == index


def test_a_wrapper_of_a_text_model_that_keeps_latents_comes_out_right() -> None:
    """Mistral Small 4: its text part's class is no causal model of its own in the library."""
    text = tiny_config("mistral4")
    config = set_text_config(tiny_config("mistral3"), text)
    assert all(group.v_in_k for group in blueprint(config).kv_groups)
    assert probe(config) < 1e-5
