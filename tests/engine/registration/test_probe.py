"""The parity probe sees what is wrong, and what it runs is the model in small.

Each mutation is one way a family could come out wrong; a probe that passes it is worth nothing.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, GPT2Config, LlamaConfig, Qwen3MoeConfig

from bench.family_configs import tiny_config
from engine.errors import RegistrationRefused
from engine.modules import repairs
from engine.modules.transformers_backend import build_skeleton, paged_attention_forward
from engine.registration import parity
from engine.registration.blueprint import (
    blueprint,
    config_geometries,
    field_of,
    kv_groups,
    module_geometries,
)
from engine.registration.parity import draw_weights, probe
from engine.registration.probe_size import (
    MAX_CHOSEN,
    MAX_EXPERTS,
    WINDOW,
    probe_configs,
    tensor_kinds,
)
from kernels.paged_attention import LayerGeometry

Attention = Callable[..., Any]
Mutation = Callable[[Attention], Attention]


def _options(**changed: Any) -> Mutation:
    def mutate(attend: Attention) -> Attention:
        def attended(*tensors: Any, **options: Any) -> Any:
            return attend(*tensors, **{**options, **changed})

        return attended

    return mutate


def _scaled(attend: Attention) -> Attention:
    def attended(*tensors: Any, **options: Any) -> Any:
        return attend(*tensors, **{**options, "scaling": options["scaling"] * 1.01})

    return attended


def _key(change: Callable[[torch.Tensor], torch.Tensor]) -> Mutation:
    def mutate(attend: Attention) -> Attention:
        def attended(module: Any, query: Any, key: Any, *rest: Any, **options: Any) -> Any:
            return attend(module, query, change(key), *rest, **options)

        return attended

    return mutate


MUTATIONS: dict[str, tuple[str, Mutation]] = {
    "scale 1 % off": ("llama", _scaled),
    "heads exchanged": ("llama", _key(lambda key: key.flip(1))),
    "neighbour's key": ("llama", _key(lambda key: key.roll(1, 2))),
    "no soft cap": ("gemma2", _options(softcap=None)),
    "no sinks": ("gpt_oss", _options(s_aux=None)),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_wrong_attention_is_refused(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, mutate = MUTATIONS[mutation]
    config = tiny_config(family)
    assert probe(config) <= parity.TOLERANCE
    wrong = mutate(paged_attention_forward)
    monkeypatch.setattr(parity, "paged_attention_forward", wrong)
    with pytest.raises(RegistrationRefused, match="differ from transformers by"):
        probe(config)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_window_off_by_one_is_refused(change: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: nn.Module, config: Any) -> dict[int, LayerGeometry]:
        return {
            layer: LayerGeometry(g.num_kv_heads, g.k_dim, g.v_dim, g.window + change)
            for layer, g in module_geometries(model, config).items()
        }

    monkeypatch.setattr(parity, "module_geometries", wrong)
    # gpt_neox-like families do not say their window to attention; then the logits tell.
    monkeypatch.setattr(parity._Watched, "attend", _unwatched)
    with pytest.raises(RegistrationRefused, match="differ from transformers by"):
        probe(tiny_config("mistral"))


@pytest.mark.parametrize("change", [-1, 1])
def test_a_chunk_off_by_one_is_refused(change: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: nn.Module, config: Any) -> dict[int, LayerGeometry]:
        found = module_geometries(model, config).items()
        return {layer: replace(g, chunk=g.chunk and g.chunk + change) for layer, g in found}

    monkeypatch.setattr(parity, "module_geometries", wrong)
    with pytest.raises(RegistrationRefused, match="differ from transformers by"):
        probe(tiny_config("llama4_text"))


def test_queries_scaled_by_places_in_the_batch_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Llama 4 asks the cache for its length; without that repair the probe fails."""
    monkeypatch.setattr(repairs, "_give_offsets", lambda module, inputs, named: (inputs, named))
    with pytest.raises(RegistrationRefused, match="differ from transformers by"):
        probe(tiny_config("llama4_text"))


def test_a_cut_keeps_chunks_full_layers_and_both_mlps() -> None:
    config = AutoConfig.for_model("llama4_text", interleave_moe_layer_step=2)
    small = next(probe_configs(config))
    assert sorted(set(small.layer_types)) == ["chunked_attention", "full_attention"]
    assert 0 < len(small.moe_layers) < small.num_hidden_layers <= 4
    told = [kind == "chunked_attention" for kind in small.layer_types]
    assert told == [bool(rotates) for rotates in small.no_rope_layers]
    assert small.attention_chunk_size == small.floor_scale == WINDOW
    chunks = {layer.chunk for layer in config_geometries(small).values()}
    assert chunks == {0, WINDOW}


def _unwatched(self: Any, module: nn.Module, *args: Any, **options: Any) -> Any:
    self.calls.append(module.layer_idx)
    return paged_attention_forward(module, *args, **options)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            LayerGeometry(4, 16, 16),
            "passes 2 heads of K 16 and V 16 to attention instead of 4 heads",
        ),
        (LayerGeometry(2, 16, 16, 5), "differ from"),
        (LayerGeometry(1, 32, 32), "passes 2 heads"),
    ],
)
def test_kv_of_another_shape_than_planned_is_refused(
    shape: LayerGeometry, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity, "module_geometries", lambda model, config: {0: shape, 1: shape})
    with pytest.raises(RegistrationRefused, match=message):
        probe(tiny_config("llama"))


def test_logits_of_other_tokens_than_asked_for_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def deaf(*arguments: Any) -> nn.Module:
        model = build_skeleton(*arguments)
        hear = model.forward
        model.forward = lambda logits_to_keep=0, **given: hear(**given)
        return model

    monkeypatch.setattr(parity, "build_skeleton", deaf)
    with pytest.raises(RegistrationRefused, match="differ from transformers by"):
        probe(tiny_config("llama"))


def test_drawn_weights_hide_nothing() -> None:
    model = build_skeleton(tiny_config("gpt_oss"), torch.float32, "eager")
    drawn = draw_weights(model, 0)
    assert drawn.keys() == model.state_dict().keys()
    for name, tensor in drawn.items():
        assert tensor.std() > 0.05, name
        assert torch.isfinite(tensor).all(), name
    tied = draw_weights(build_skeleton(tiny_config("gemma"), torch.float32, "eager"), 0)
    assert tied["lm_head.weight"] is tied["model.embed_tokens.weight"]


def _shape(family: str, **options: Any) -> Any:
    return AutoConfig.for_model(family, **options)


LARGE: dict[str, Callable[[], Any]] = {
    "llama 70B": lambda: _shape(
        "llama",
        **{"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80},
        **{"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256},
    ),
    "gemma-2 27B": lambda: _shape(
        "gemma2",
        **{"hidden_size": 4608, "intermediate_size": 36864, "num_hidden_layers": 46},
        **{"num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128},
    ),
    "mixtral 8x22B": lambda: _shape(
        "mixtral", hidden_size=6144, num_hidden_layers=56, num_attention_heads=48
    ),
    "qwen3 235B": lambda: _shape(
        "qwen3_moe",
        **{"hidden_size": 4096, "num_attention_heads": 64, "num_key_value_heads": 4},
        **{"head_dim": 128, "num_hidden_layers": 94, "num_experts": 128},
    ),
    "gpt-oss 120B": lambda: _shape("gpt_oss", num_hidden_layers=36, num_local_experts=128),
    "gemma4 31B": lambda: _shape(
        "gemma4_text",
        **{"hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60},
        **{"num_attention_heads": 32, "num_key_value_heads": 16, "attention_k_eq_v": True},
        **{"num_global_key_value_heads": 4, "hidden_size_per_layer_input": 0},
    ),
    "mimo 309B": lambda: _shape("mimo_v2_flash"),
    "beam 501B": lambda: _shape("beam"),
    "opt 66B": lambda: _shape(
        "opt", hidden_size=9216, ffn_dim=36864, num_attention_heads=72, word_embed_proj_dim=9216
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_model_is_probed_in_small(name: str) -> None:
    config = LARGE[name]()
    whole = blueprint(config)
    small = next(probe_configs(config, whole.skeleton))
    assert type(small) is type(config)
    model = build_skeleton(small, torch.float32, "eager")
    assert sum(p.numel() for p in model.parameters()) < 40e6
    assert tensor_kinds(model) == tensor_kinds(whole.skeleton)
    windows = {layer.window for layer in module_geometries(model, small).values()}
    assert len(windows) == len({group.window for group in whole.kv_groups})
    assert max(windows) <= WINDOW
    widths = {(layer.k_dim, layer.v_dim) for layer in module_geometries(model, small).values()}
    assert widths == {(group.k_dim, group.v_dim) for group in whole.kv_groups}
    if getattr(config, "num_experts_per_tok", None):
        experts = getattr(small, "num_experts", None) or small.num_local_experts
        assert 1 < small.num_experts_per_tok <= MAX_CHOSEN < experts <= 2 * MAX_EXPERTS


def test_a_model_of_no_small_kind_is_refused() -> None:
    config = tiny_config("llama")
    other = build_skeleton(tiny_config("qwen3"), torch.float32, "eager")
    with pytest.raises(RegistrationRefused, match="no small model"):
        probe(config, other)


STRANGE = {
    "num_key_value_heads": 1,
    "head_dim": 7,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "linear_attention"],
    "kv_lora_rank": 8,
    "num_kv_shared_layers": 1,
}


@pytest.mark.parametrize("name", STRANGE)
def test_a_field_that_a_family_does_not_read_changes_nothing(name: str) -> None:
    shape = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    plain, strange = GPT2Config(**shape), GPT2Config(**shape, **{name: STRANGE[name]})
    assert kv_groups(strange) == kv_groups(plain)
    assert blueprint(strange).kv_groups == kv_groups(plain)


def test_a_strange_gpt2_comes_out_right() -> None:
    assert probe(GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, **STRANGE)) < 1e-4


def test_fields_that_a_family_reads_without_declaring_them_count() -> None:
    assert field_of(Qwen3MoeConfig(head_dim=96), "head_dim") == 96  # its class has no such field
    assert field_of(LlamaConfig(num_key_value_heads=2), "num_key_value_heads") == 2
    assert field_of(GPT2Config(), "num_hidden_layers") == 12  # under another name
