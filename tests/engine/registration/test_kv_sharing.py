"""Which layers read the KV of others, and what that makes of the geometry."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from transformers import PretrainedConfig

from bench.family_configs import tiny_config
from engine.errors import RegistrationRefused
from engine.memory.kv_plan import plan_pack
from engine.modules.transformers_backend import StepContext
from engine.registration import parity
from engine.registration.blueprint import blueprint
from engine.registration.kv_sharing import kv_sources, sharing_modes
from engine.registration.parity import TOLERANCE, probe
from engine.registration.probe_size import probe_configs
from tests.engine.unusual_models import shared_configs


@pytest.mark.parametrize(
    ("name", "sources"), [("gemma3n", {3: 2, 4: 1, 5: 2}), ("gemma4", {3: 2, 4: 1})]
)
def test_a_reader_has_the_last_layer_of_its_type_as_its_source(
    name: str, sources: dict[int, int]
) -> None:
    config = shared_configs()[name]
    assert kv_sources(config) == sources
    groups = blueprint(config).kv_groups
    assert sorted(layer for group in groups for layer in group.layers) == [0, 1, 2]
    assert dict(pair for group in groups for pair in group.readers) == sources
    for group in groups:
        assert {source for _, source in group.readers} <= set(group.layers)


def test_only_sources_take_memory() -> None:
    groups = blueprint(shared_configs()["gemma3n"]).kv_groups
    plan = plan_pack(groups, "float32", 4, 8192, 64)
    assert [group.layers for group in plan.groups] == [(0, 2), (1,)]
    assert [plan.layer_group[i] for i in range(6)] == [
        *((0, 0), (1, 0), (0, 1), (0, 1), (1, 0), (0, 1))
    ]
    assert [plan.writes(layer) for layer in range(6)] == [True] * 3 + [False] * 3
    alone = tuple(msgspec.structs.replace(group, readers=()) for group in groups)
    assert plan.bytes_per_token(8192) == plan_pack(alone, "float32", 4, 8192, 64).bytes_per_token(
        8192
    )


def test_types_that_share_nothing_have_no_sources() -> None:
    assert kv_sources(tiny_config("llama")) == {}
    assert sharing_modes(tiny_config("llama")) == ["", ""]
    assert kv_sources(tiny_config("gemma4_unified_text")) == {}


class _Strange(PretrainedConfig):  # type: ignore[misc]
    model_type = "strange"
    kv_sharing_modes: Any = ()


@pytest.mark.parametrize(
    ("modes", "why"),
    [
        (["store", "reuse_but_indexer"], r"unknown way \(reuse_but_indexer\)"),
        (["reuse", "store"], "no layer before layer 0"),
        (["store", "reuse"], "no layer before layer 1"),
    ],
)
def test_what_cannot_be_read_is_refused(modes: list[str], why: str) -> None:
    config = _Strange(num_hidden_layers=2)
    config.layer_types = ["full_attention", "sliding_attention"]
    config.kv_sharing_modes = modes
    with pytest.raises(RegistrationRefused, match=why):
        kv_sources(config)


def test_a_count_that_leaves_no_layer_of_a_type_is_refused() -> None:
    config = shared_configs()["gemma3n"]
    config.num_kv_shared_layers = 5
    with pytest.raises(RegistrationRefused) as caught:
        kv_sources(config)
    assert caught.value.code == "bad_config"


@pytest.mark.parametrize("layers", [12, 30])
def test_a_small_model_keeps_each_way_to_share(layers: int) -> None:
    config = shared_configs()["gemma3n"]
    kinds = ["sliding_attention"] * 2 + ["full_attention"]
    changes = {
        "layer_types": kinds * (layers // 3),
        "intermediate_size": [96] * layers,
        "activation_sparsity_pattern": [0.9] * 3 + [0.0] * (layers - 3),
        "num_hidden_layers": layers,
        "num_kv_shared_layers": layers // 2,
    }
    large = type(config)(**{**config.to_dict(), **changes})
    smalls = list(probe_configs(large))
    assert smalls[0].num_hidden_layers < layers
    for small in smalls:
        told = zip(small.layer_types, sharing_modes(small), strict=True)
        assert set(told) >= {(kind, mode) for kind in kinds for mode in ("store", "reuse")}
    assert probe(large) <= TOLERANCE


def test_a_wrong_source_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that attends over another layer of its group."""

    def swapped(arena: torch.Tensor, plan: Any, groups: Any, states: Any) -> StepContext:
        places = dict(plan.layer_group)
        places[3] = places[0]
        return StepContext(arena, replace(plan, layer_group=places), groups, states)

    monkeypatch.setattr(parity, "StepContext", swapped)
    with pytest.raises(RegistrationRefused, match="its logits differ"):
        probe(shared_configs()["gemma4"])
