"""Stacked experts in quantized packs: what is kept, that it is what is computed with, its size."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GptOssConfig, MixtralConfig, Qwen3MoeConfig

from engine.modules.experts import as_linears, expert_weights, linear_shape
from engine.modules.quantized import replace_modules
from engine.modules.transformers_backend import bind_weights, build_skeleton
from engine.pack import BLOB_NAME, INT8_SCHEME, SCALE_SUFFIX, schemes_in
from engine.packs.weights import build_views, check_pack
from engine.registration import parity
from engine.registration.blueprint import blueprint
from engine.registration.convert import inspect, write_pack
from engine.registration.parity import probe
from engine.registration.preflight import Room, preflight
from engine.registration.quantize import dequantize_stack, quantize_stack
from engine.registration.tensors.files import SourceTensors
from kernels.int4_blocks import INT4_BLOCKS
from tests.engine.pack_rig import hf_folder
from tests.engine.registration.test_quantize import memory, packed

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def configs() -> dict[str, Any]:
    """Experts as they are; published one by one; transposed, gate and up in turn, with biases."""
    return {
        "mixtral": MixtralConfig(**SHAPE, num_local_experts=4),
        "qwen3_moe": Qwen3MoeConfig(
            **SHAPE, moe_intermediate_size=48, num_experts=6, num_experts_per_tok=2, head_dim=32
        ),
        "gpt_oss": GptOssConfig(
            **SHAPE,
            num_local_experts=4,
            num_experts_per_tok=2,
            head_dim=32,
            rope_parameters=ROPE,
            sliding_window=8,
        ),
    }


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("name", configs())
def test_a_pack_has_each_expert_as_a_linear(tmp_path: Path, name: str, dtype: Any) -> None:
    pack_dir, index = packed(tmp_path, configs()[name], dtype)
    check_pack(pack_dir, index)
    _, plain = write_pack(inspect(tmp_path / "model"), tmp_path / "packs", "float32", _quiet)
    blob, offsets = memory(pack_dir, index)
    tensors = build_views(blob, index, offsets, 1).tensors
    source = build_views(*_of(tmp_path, plain), 1).tensors
    skeleton = build_skeleton(pack_dir, torch.bfloat16)
    names = expert_weights(skeleton)
    assert len(names) == 4
    scheme = INT4_BLOCKS if dtype == "int4" else INT8_SCHEME
    entries = {entry.name: entry for entry in index.tensors}
    small = large = 0
    for weight in names:
        assert schemes_in(index)[weight] == scheme
        num, n, k = linear_shape(skeleton, weight)
        stack = as_linears(skeleton, weight, source[weight])
        kept, scales = quantize_stack(stack, scheme, torch.bfloat16)
        assert torch.equal(tensors[weight], kept)
        if scheme == INT8_SCHEME:
            assert scales is not None
            assert torch.equal(tensors[weight + SCALE_SUFFIX], scales)
            assert kept.shape == (num, n, k)
        else:
            assert kept.shape[:3] == (num, n // 16, -(-k // 64))
        small += sum(
            entries[key].num_bytes for key in (weight, weight + SCALE_SUFFIX) if key in entries
        )
        large += 2 * math.prod((num, n, k))
        exact = dequantize_stack(kept, scales, (num, n, k), scheme)
        assert float((exact - stack.float()).norm() / stack.float().norm()) < 0.13
    # Of widths that are whole blocks, 0.28 and 0.51.
    assert small / large < (0.39 if dtype == "int4" else 0.53)
    biases = [entry for entry in index.tensors if entry.name.endswith("proj_bias")]
    assert len(biases) == (4 if name == "gpt_oss" else 0)
    assert all(entry.dtype == "bfloat16" for entry in biases)
    replace_modules(skeleton, schemes_in(index))
    bind_weights(skeleton, tensors)
    for key, parameter in skeleton.named_parameters():
        assert parameter.data_ptr() == tensors[key].data_ptr(), key


def _of(root: Path, index: Any) -> tuple[torch.Tensor, Any, list[int]]:
    blob, offsets = memory(root / "packs" / index.revision, index)
    return blob, index, offsets


def _quiet(phase: str, done: int, total: int) -> None:
    assert 0 <= done <= total


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("name", configs())
def test_the_probe_holds_experts_to_what_is_kept(name: str, dtype: str) -> None:
    assert probe(configs()[name], quantization=dtype) <= parity.TOLERANCE


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_pieces_make_the_same_pack_of_the_size_that_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: Any
) -> None:
    config = configs()["gpt_oss"]
    whole, index = packed(tmp_path / "whole", config, dtype)
    plan = blueprint(config)
    told = preflight(plan, dtype, 0, 0, tmp_path, Room(()))
    assert told.weight_bytes == sum(entry.num_bytes for entry in index.tensors)
    monkeypatch.setattr(SourceTensors.pieces, "__defaults__", (20_000,))
    pieces, _ = packed(tmp_path / "pieces", config, dtype)
    assert (pieces / BLOB_NAME).read_bytes() == (whole / BLOB_NAME).read_bytes()


def test_experts_published_one_by_one_are_stacked_first(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "model", configs()["qwen3_moe"])
    with SourceTensors([folder / "model.safetensors"]) as source:
        assert any("experts.0." in name for name in source.shapes)
    _, index = write_pack(inspect(folder), tmp_path / "packs", "int4", _quiet)
    stacked = [entry for entry in index.tensors if entry.name.endswith("gate_up_proj")]
    assert [entry.shape for entry in stacked] == [(6, 6, 2, 576)] * 2
