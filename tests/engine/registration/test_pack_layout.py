"""Packs keep what tensor parallelism and fused products need: shard axes, and neighbours."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import (
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from engine.errors import PackError
from engine.pack import BLOB_NAME, FusedGroup, PackIndex
from engine.packs.weights import build_views, check_pack
from engine.registration.convert import inspect, whole_pack, write_pack
from engine.registration.layout import shard_axis
from engine.registration.source import weight_files
from engine.registration.tensors.files import SourceTensors
from tests.engine.pack_rig import hf_folder

# Every product of a width is a multiple of 256 bytes in float32 (and in bfloat16).
SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LAYER = "model.layers.1."
QKV = tuple(f"{LAYER}self_attn.{name}_proj.weight" for name in "qkv")
QKV_BIAS = tuple(name.replace("weight", "bias") for name in QKV)
GATE_UP = (f"{LAYER}mlp.gate_proj.weight", f"{LAYER}mlp.up_proj.weight")


def quiet(phase: str, done: int, total: int) -> None:
    pass


def packed(root: Path, config: Any, dtype: Any = "auto") -> tuple[Path, PackIndex]:
    folder = hf_folder(root / "model", config)
    return write_pack(inspect(folder), root / "packs", dtype, quiet)


def arena_of(pack_dir: Path, index: PackIndex) -> tuple[torch.Tensor, list[int]]:
    """The blob with its segments apart and in another order, as pages would have them."""
    blob = np.fromfile(pack_dir / BLOB_NAME, dtype=np.uint8)
    arena = np.full(index.total_bytes + 4096 * len(index.segments), 0xFF, dtype=np.uint8)
    offsets, place = [0] * len(index.segments), 0
    for number in reversed(range(len(index.segments))):
        segment = index.segments[number]
        offsets[number] = place
        arena[place : place + segment.num_bytes] = blob[segment.offset :][: segment.num_bytes]
        place += segment.num_bytes + 4096
    return torch.from_numpy(arena), offsets


FUSED: dict[str, tuple[Any, set[tuple[str, ...]]]] = {
    "llama": (LlamaConfig(**SHAPE), {QKV, GATE_UP}),
    "qwen2": (Qwen2Config(**(SHAPE | {"num_key_value_heads": 2})), {QKV, QKV_BIAS, GATE_UP}),
    "qwen3": (Qwen3Config(**SHAPE), {QKV, GATE_UP}),
    "phi3": (Phi3Config(**SHAPE), set()),  # its tensors are fused already
    "gpt2": (
        GPT2Config(
            vocab_size=96,
            n_embd=128,
            n_layer=2,
            n_head=4,
            n_positions=64,
            bos_token_id=0,
            eos_token_id=0,
        ),
        set(),
    ),
}


def build_fused(
    arena: torch.Tensor, index: PackIndex, segment_offsets: Sequence[int]
) -> dict[str, torch.Tensor]:
    """The fused groups by name: one tensor over the bytes of all members, joined along axis 0."""
    entries = {entry.name: entry for entry in index.tensors}
    tensors: dict[str, torch.Tensor] = {}
    for group in index.fused:
        members = [entries[name] for name in group.members]
        first, rows = members[0], sum(entry.shape[0] for entry in members)
        start = segment_offsets[first.segment] + first.offset
        raw = arena[start : start + sum(entry.num_bytes for entry in members)]
        view = raw.view(getattr(torch, first.dtype))
        tensors[group.name] = view.view(rows, *first.shape[1:])
    return tensors


@pytest.mark.parametrize("family", FUSED)
def test_a_fused_view_is_its_members_joined(tmp_path: Path, family: str) -> None:
    config, wanted = FUSED[family]
    pack_dir, index = packed(tmp_path, config)
    arena, offsets = arena_of(pack_dir, index)
    tensors = build_views(arena, index, offsets, 1).tensors
    fused = build_fused(arena, index, offsets)
    groups = {group.name: group for group in index.fused}
    assert {group.members for group in index.fused if LAYER in group.name} == wanted
    assert len(groups) == 2 * len(wanted)
    for name, view in fused.items():
        joined = torch.cat([tensors[member] for member in groups[name].members], groups[name].axis)
        assert torch.equal(view, joined), name
        assert view.data_ptr() == tensors[groups[name].members[0]].data_ptr()
    check_pack(pack_dir, index)


def test_neighbours_with_a_gap_between_are_no_group(tmp_path: Path) -> None:
    config = OPTConfig(
        **{k: SHAPE[k] for k in ("vocab_size", "num_hidden_layers", "max_position_embeddings")},
        hidden_size=33,
        ffn_dim=64,
        word_embed_proj_dim=33,
        num_attention_heads=3,
        pad_token_id=1,
    )
    pack_dir, index = packed(tmp_path, config)
    assert index.fused == ()
    check_pack(pack_dir, index)


def test_shard_axes_are_the_librarys_plan(tmp_path: Path) -> None:
    _, index = packed(tmp_path, MixtralConfig(**SHAPE, num_local_experts=4))
    axes = {entry.name: entry.shard_axis for entry in index.tensors}
    assert axes["model.embed_tokens.weight"] == axes["lm_head.weight"] == 0
    assert [axes[name] for name in QKV] == [0, 0, 0]
    assert axes[f"{LAYER}self_attn.o_proj.weight"] == 1
    assert axes[f"{LAYER}input_layernorm.weight"] is None
    entries = {entry.name: entry for entry in index.tensors}
    gate_up = entries[f"{LAYER}mlp.experts.gate_up_proj"]
    assert (gate_up.shape, gate_up.shard_axis, gate_up.parts) == ((4, 512, 128), 1, (256, 256))
    assert axes[f"{LAYER}mlp.experts.down_proj"] == 2


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_shard_axes_of_rounded_weights_are_those_of_the_weights(tmp_path: Path, dtype: Any) -> None:
    _, index = packed(tmp_path, MixtralConfig(**SHAPE, num_local_experts=4), dtype)
    axes = {entry.name: entry.shard_axis for entry in index.tensors}
    assert [axes[name] for name in QKV] == [0, 0, 0]
    assert axes[f"{LAYER}self_attn.o_proj.weight"] == 1
    experts = f"{LAYER}mlp.experts."
    assert (axes[f"{experts}gate_up_proj"], axes[f"{experts}down_proj"]) == (1, 2)
    if dtype == "int8":
        assert axes[f"{experts}gate_up_proj_scale"] == 1
        assert axes[f"{experts}down_proj_scale"] is None
        assert axes[f"{LAYER}self_attn.o_proj.weight_scale"] is None


def test_what_holds_several_projections_names_their_sizes(tmp_path: Path) -> None:
    _, index = packed(tmp_path, Phi3Config(**(SHAPE | {"num_key_value_heads": 2})))
    entries = {entry.name: entry for entry in index.tensors}
    fused = entries[f"{LAYER}self_attn.qkv_proj.weight"]
    assert (fused.shard_axis, fused.parts) == (0, (128, 64, 64))
    assert entries[f"{LAYER}mlp.gate_up_proj.weight"].parts == (256, 256)
    assert entries[f"{LAYER}self_attn.o_proj.weight"].parts == ()


def test_axes_of_biases_and_scales() -> None:
    styles = {"m.*.q": "colwise", "m.*.o": "rowwise", "e": "embedding_rowwise", "n": "replicated"}
    cases = {
        ("m.3.q.weight", 2): 0,
        ("m.3.q.bias", 1): 0,
        ("m.3.q.weight_scale", 1): 0,
        ("m.3.o.weight", 2): 1,
        ("m.3.o.bias", 1): None,
        ("m.3.o.weight_scale", 1): None,
        ("e.weight", 2): 0,
        ("n.weight", 1): None,
        ("other.weight", 2): None,
    }
    for (name, num_axes), axis in cases.items():
        assert shard_axis(styles, name, num_axes) == axis, name


@pytest.mark.parametrize(
    "group",
    [
        FusedGroup("x", (QKV[0], QKV[2])),
        FusedGroup("x", (QKV[0], "missing")),
        FusedGroup("x", QKV, axis=1),
        FusedGroup("x", QKV[:1]),
    ],
)
def test_a_group_that_is_none_is_refused(tmp_path: Path, group: FusedGroup) -> None:
    pack_dir, index = packed(tmp_path, LlamaConfig(**SHAPE))
    with pytest.raises(PackError, match="do not lie together"):
        check_pack(pack_dir, msgspec.structs.replace(index, fused=(group,)))


@pytest.mark.parametrize("max_bytes", [1, 700, 4096, 1 << 20])
def test_pieces_of_a_tensor_are_the_tensor(tmp_path: Path, max_bytes: int) -> None:
    folder = hf_folder(tmp_path / "model", LlamaConfig(**SHAPE), max_shard_size="200KB")
    with SourceTensors(weight_files(folder)) as source:
        for name in source.shapes:
            pieces = list(source.pieces(name, max_bytes))
            assert torch.equal(torch.cat(pieces), source.read(name)), name
            largest = max(piece.nbytes for piece in pieces)
            assert largest <= max(max_bytes, pieces[0][0].nbytes)


def test_two_registrations_at_once_share_one_pack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = hf_folder(tmp_path / "model", LlamaConfig(**SHAPE))
    dest = tmp_path / "packs"
    others: list[tuple[Path, PackIndex]] = []

    def meanwhile(phase: str, done: int, total: int) -> None:
        """Another process begins and ends while the first one writes."""
        if phase == "convert" and not others:
            others.append((dest, None))  # type: ignore[arg-type]  # this runs once
            with monkeypatch.context() as other:
                other.setattr(os, "getpid", os.getppid)
                others[0] = write_pack(inspect(folder), dest, "auto", quiet)

    first = write_pack(inspect(folder), dest, "auto", meanwhile)
    assert others == [first]
    assert whole_pack(first[0]) == first[1]
    assert [path.name for path in dest.iterdir()] == [first[1].revision]
