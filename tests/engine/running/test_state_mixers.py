"""Mixers are found by what their code asks for, and what they keep is what the library keeps."""

import math
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from engine.modules.state_mixers import attending_layers, mixers, state_shapes
from engine.modules.text_part import from_config
from engine.modules.transformers_backend import build_skeleton
from tests.engine.tiny_models import state_configs, tiny_configs

MIB = 1 << 20
# MiB a sequence, bfloat16, of the types' default sizes; layers that attend.
SIZES = {
    "qwen3_next": (74.25, 12),
    "qwen3_5_text": (49.5, 8),
    "qwen3_5_moe_text": (61.875, 10),
    "mamba2": (261.0, 0),
    "falcon_h1": (32.375, 32),
    "lfm3": (0.355, 11),
    "kimi_linear": (43.97, 6),
}


def on_meta(config: Any) -> Any:
    with torch.device("meta"):
        return from_config(config)


@pytest.mark.parametrize("family", SIZES)
def test_what_published_sizes_keep(family: str) -> None:
    config = AutoConfig.for_model(family)
    model = on_meta(config)
    states = state_shapes(model, config.hidden_size)
    kept = sum(math.prod(shape) * dtype.itemsize for shape, dtype in states.values())
    expected, attending = SIZES[family]
    assert kept / MIB == pytest.approx(expected, abs=0.01)
    assert len(attending_layers(model)) == attending


def test_a_model_without_mixers_keeps_none() -> None:
    model = on_meta(tiny_configs()["llama"])
    assert not list(mixers(model))
    assert not state_shapes(model, 48)
    assert attending_layers(model) == {0, 1, 2}


@pytest.mark.parametrize("family", sorted(state_configs()))
def test_looking_changes_nothing(family: str) -> None:
    config = state_configs()[family]
    model = build_skeleton(config, torch.float32)
    found = list(mixers(model))
    before = [(mixer.forward, list(mixer.parameters())) for mixer in found]
    first = state_shapes(model, 48, torch.float32)
    assert first == state_shapes(model, 48, torch.float32)
    for mixer, (forward, parameters) in zip(found, before, strict=True):
        assert mixer.forward is forward
        assert all(a is b for a, b in zip(mixer.parameters(), parameters, strict=True))
    assert {layer for layer, _ in first} == {mixer.layer_idx for mixer in found}


def test_states_are_in_the_dtype_that_the_library_computes_them_in() -> None:
    config = state_configs()["qwen3_next"]
    model = on_meta(config)
    dtypes = {name: dtype for (_, name), (_, dtype) in state_shapes(model, 48).items()}
    assert dtypes == {"conv": torch.bfloat16, "recurrent": torch.float32}
