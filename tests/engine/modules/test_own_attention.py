"""Attention that is code of its own, over our pages."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, FalconConfig

from engine.errors import RegistrationRefused
from engine.modules.own_attention import SLOPES, has_slopes, own_layers, takes_interface
from engine.modules.transformers_backend import (
    StepContext,
    bind_weights,
    build_skeleton,
    step_context,
)
from engine.registration.blueprint import blueprint
from engine.registration.convert import inspect, write_pack
from engine.registration.parity import TOLERANCE, draw_weights, probe
from tests.engine.tiny_models import save_folder
from tests.engine.unusual_models import own_configs

FORMS = {
    "gptj": "_attn",
    "codegen": "_attn",
    "gpt_neo": "_attn",
    "gpt_neox_japanese": "_attn",
    "bloom": "alibi",
    "mpt": "bias",
    "falcon": "rotary",
    "falcon-groups": "rotary",
}


@pytest.mark.parametrize("name", FORMS)
def test_every_layer_is_found_and_comes_out_right(name: str) -> None:
    config = own_configs()[name]
    assert not takes_interface(config)
    model = build_skeleton(config, torch.float32, "eager")
    assert [(layer, form) for layer, form, _ in own_layers(model)] == [
        (0, FORMS[name]),
        (1, FORMS[name]),
    ]
    assert probe(config) <= TOLERANCE


@pytest.mark.parametrize("name", ["gptj", "mpt"])
def test_rounded_weights_come_out_right(name: str) -> None:
    config = own_configs()[name]
    config.hidden_size = 64
    config.num_attention_heads = 4
    assert probe(config, quantization="int8") <= TOLERANCE


def test_falcon_keeps_one_head_a_group() -> None:
    """The library repeats K and V for every query head before it caches them."""
    configs = own_configs()
    heads = {name: blueprint(configs[name]).kv_groups[0].num_kv_heads for name in FORMS}
    assert heads["falcon"] == 1
    assert heads["falcon-groups"] == 2
    assert heads["bloom"] == 5


def test_a_window_by_layers_is_one() -> None:
    groups = blueprint(own_configs()["gpt_neo"]).kv_groups
    assert [(group.layers, group.window) for group in groups] == [((0,), 0), ((1,), 10)]


def test_falcon_with_slopes_is_refused() -> None:
    config = own_configs()["falcon"]
    config.alibi = True
    with pytest.raises(RegistrationRefused, match="its attention code cannot use a paged KV"):
        blueprint(config)


@pytest.mark.parametrize("heads", [1, 3, 4, 12])
def test_slopes_are_the_model_s(heads: int) -> None:
    """By head, and of numbers of heads that are no power of two."""
    for name, options in (("bloom", {"n_head": heads}), ("mpt", {"n_heads": heads})):
        config: Any = own_configs()[name]
        config.update({"hidden_size": 12 * heads} | options)
        model = build_skeleton(config, torch.float32)
        assert has_slopes(model)
        (slopes, again) = (getattr(module, SLOPES) for _, _, module in own_layers(model))
        assert torch.equal(slopes, again)
        assert slopes.shape == (heads,)
        assert ((slopes > 0) & (slopes < 1)).all()
        assert SLOPES not in "".join(model.state_dict())


def test_masks_of_all_positions_are_given_up() -> None:
    model = build_skeleton(own_configs()["gpt_neo"], torch.float32)
    largest = max(buffer.numel() for buffer in model.buffers())
    assert largest < 128 * 128


@pytest.mark.parametrize("name", FORMS)
def test_pages_of_bfloat16_are_written(name: str) -> None:
    """CodeGen rotates in float32: what is cached has V's type."""
    config = own_configs()[name]
    model = build_skeleton(config, torch.bfloat16)
    weights = draw_weights(model, 0)
    bind_weights(model, {key: value.bfloat16() for key, value in weights.items()})
    seen = []

    def attended(layer: int, query: torch.Tensor, *how: Any) -> Any:
        seen.append(query.dtype)
        raise _SeenEnoughError

    plan: Any = _Plan()
    context = StepContext(torch.empty(0), plan, (), None, attended, plan)
    ids = torch.arange(3)[None]
    if has_slopes(model):
        with step_context(context), pytest.raises(AssertionError, match="slopes"):
            model(input_ids=ids, position_ids=ids, use_cache=False)
        return
    with step_context(context), pytest.raises(_SeenEnoughError):
        model(input_ids=ids, position_ids=ids, use_cache=False)
    assert seen == [torch.bfloat16]


class _SeenEnoughError(Exception):
    """Leaves a forward pass."""


class _Plan:
    def writes(self, layer: int) -> bool:
        """All do."""
        return True


def test_masks_in_old_files_are_left_out(tmp_path: Path) -> None:
    save_folder(own_configs()["gptj"], tmp_path, 0)
    tensors = load_file(tmp_path / "model.safetensors")
    mask = torch.ones(1, 1, 128, 128, dtype=torch.bool).tril()
    for layer in range(2):
        tensors[f"transformer.h.{layer}.attn.bias"] = mask.clone()
        tensors[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e9)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    _, index = write_pack(inspect(tmp_path), tmp_path / "packs", "float32", lambda *_: None)
    assert not [entry.name for entry in index.tensors if "attn.bias" in entry.name]
    tensors["transformer.h.0.attn.other"] = torch.ones(3)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(RegistrationRefused, match="not in the model"):
        write_pack(inspect(tmp_path), tmp_path / "packs", "float32", lambda *_: None)


def test_a_context_is_that_of_training_where_no_table_ends() -> None:
    configs = own_configs()
    assert [blueprint(configs[name]).max_context for name in ("bloom", "mpt")] == [128, 128]
    with pytest.raises(RegistrationRefused, match="no valid context length"):
        blueprint(AutoConfig.for_model("bloom", hidden_size=60, n_layer=2, n_head=5))


def test_falcon_without_parallel_layers_comes_out_right() -> None:
    config = own_configs()["falcon"].to_dict()
    config |= {"multi_query": False, "parallel_attn": False, "bias": True}
    assert probe(FalconConfig(**config)) <= TOLERANCE
