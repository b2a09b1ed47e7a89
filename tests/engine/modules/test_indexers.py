"""Indexers: what is found, what is kept, and that the choice counts.

That whole families come out right is for the parity probe, here with published shapes, and for
tests/engine/test_engine_sparse.py.
"""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from bench.family_configs import tiny_config
from engine.errors import RegistrationRefused
from engine.memory import plan_pack
from engine.modules import indexers as module_under_test
from engine.modules.indexers import Indexer, has_indexers, indexer_linears, indexers, read_indexer
from engine.modules.transformers_backend import build_skeleton
from engine.pack import KvGroup, indexer_layer, is_indexer
from engine.registration.blueprint import blueprint, kv_groups, module_geometries
from engine.registration.parity import probe
from engine.registration.quantize import schemes_of
from kernels import sparse_attention

FAMILIES = (
    *("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "minimax_m3_vl_text"),
    *("mistral_large4", "dots3_note_text"),
)
M3_SPARSE = {"layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57}
# Type, options, and the bytes a token that the architecture asks for: K and V or latents of every
# layer, keys of every indexer, in bfloat16.
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "deepseek_v32": ({}, 61 * (576 + 128) * 2),
    "glm_moe_dsa": ({}, 78 * (576 + 128) * 2),
    "hy_v4": ({}, (34 * 576 + 10 * 128) * 2),
    "minimax_m3_vl_text": (M3_SPARSE, (60 * 2 * 4 * 128 + 57 * 128) * 2),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_come_out_right(family: str) -> None:
    assert probe(tiny_config(family)) < 1e-5


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_shapes_come_out_right(family: str) -> None:
    config = AutoConfig.for_model(family, **PUBLISHED[family][0])
    assert probe(config) < 2e-5


@pytest.mark.parametrize("family", PUBLISHED)
def test_bytes_a_token_are_the_least_that_the_architecture_allows(family: str) -> None:
    options, wanted = PUBLISHED[family]
    groups = kv_groups(AutoConfig.for_model(family, **options))
    assert sum(group.values_per_token for group in groups) * 2 == wanted
    page_bytes = 2 << 20
    plan = plan_pack(groups, "bfloat16", 16, page_bytes, 10_000)
    assert wanted <= plan.bytes_per_token(page_bytes) < 1.07 * wanted


def test_modules_keep_what_the_configuration_says() -> None:
    """Layers that share a choice keep no keys."""
    found = blueprint(tiny_config("glm_moe_dsa"))
    assert found.kv_groups == kv_groups(found.config)
    assert found.kv_groups[1] == KvGroup((indexer_layer(0),), 1, 16, 16, v_in_k=True)
    assert [is_indexer(group.layers[0]) for group in found.kv_groups] == [False, True]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rounded_weights_come_out_right(quantization: str) -> None:
    """What chooses is never rounded; what is around it is."""
    config = AutoConfig.for_model("axk2")
    plan = blueprint(config)
    chosen = schemes_of(plan, list(plan.tensors), quantization)
    assert len(indexer_linears(plan.skeleton)) == config.num_hidden_layers * 3
    assert not indexer_linears(plan.skeleton) & chosen.keys()
    assert any("q_gate_proj" in name for name in chosen)
    assert probe(config, quantization=quantization) < 1e-5


def test_measures() -> None:
    def measured(family: str) -> list[Indexer | None]:
        model = build_skeleton(tiny_config(family), torch.float32)
        return [read_indexer(module) for _, module in indexers(model)]

    assert measured("deepseek_v32") == [Indexer(n, 16, 10, 1, 16) for n in (0, 1)]
    assert measured("minimax_m3_vl_text") == [Indexer(1, 16, 12, 4, 2)]
    assert measured("deepseek_v3") == []
    assert not has_indexers(build_skeleton(tiny_config("llama"), torch.float32))


@pytest.mark.parametrize("change", [{"index_topk": "10"}, {"head_dim": 8}, {"index_kpool": 4}])
def test_an_indexer_of_an_unknown_kind_is_refused(change: dict[str, Any]) -> None:
    config = tiny_config("deepseek_v32")
    model = build_skeleton(copy.deepcopy(config), torch.float32)
    _, module = next(indexers(model))
    for name, value in change.items():
        setattr(module, name, value)
    with pytest.raises(RegistrationRefused, match="sparse in an unknown way"):
        module_geometries(model, config)


def test_an_indexer_that_the_configuration_does_not_name_is_refused() -> None:
    config = tiny_config("deepseek_v32")
    model: Any = build_skeleton(copy.deepcopy(config), torch.float32)
    config.layer_types = ["indexed_attention", "full_attention"]
    with pytest.raises(RegistrationRefused, match="not those that its configuration names"):
        module_geometries(model, config)
    config = tiny_config("deepseek_v32")
    model.model.layers[1].self_attn.indexer = nn.Identity()
    with pytest.raises(RegistrationRefused, match="not those that its configuration names"):
        module_geometries(model, config)


@pytest.mark.parametrize("family", ["deepseek_v32", "minimax_m3_vl_text"])
def test_the_probe_sees_a_choice_that_is_not_made(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = module_under_test._PagedIndexer._choose
    monkeypatch.setattr(module_under_test._PagedIndexer, "_choose", lambda *_: None)
    with pytest.raises(RegistrationRefused, match="differ"):
        probe(tiny_config(family))
    monkeypatch.setattr(module_under_test._PagedIndexer, "_choose", choose)


def test_the_probe_sees_keys_of_another_position(monkeypatch: pytest.MonkeyPatch) -> None:
    write = module_under_test._PagedIndexer._write
    monkeypatch.setattr(
        module_under_test._PagedIndexer,
        "_write",
        lambda self, where, keys: write(self, where, keys.flip(1)),
    )
    with pytest.raises(RegistrationRefused, match="differ"):
        probe(tiny_config("deepseek_v32"))


@pytest.mark.parametrize("piece_bytes", [1, 20_000])
@pytest.mark.parametrize("family", ["deepseek_v32", "minimax_m3_vl_text"])
def test_some_queries_at_a_time_come_out_right(
    family: str, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse_attention, "PIECE_BYTES", piece_bytes)
    assert probe(tiny_config(family)) < 1e-5
