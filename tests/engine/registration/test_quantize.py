"""Quantized packs: what is rounded and how, that we compute with exactly that, who is refused."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import GemmaConfig, GPT2Config, LlamaConfig, MixtralConfig, Qwen2Config

from bench.family_configs import tiny_config
from engine.errors import PackError, RegistrationRefused
from engine.modules.quantized import Int4Linear, RowsEmbedding, RowsLinear, replace_modules
from engine.modules.transformers_backend import bind_weights, build_skeleton, unbind_weights
from engine.pack import BLOB_NAME, FP8_SCHEME, INT8_SCHEME, SCALE_SUFFIX, PackIndex, schemes_in
from engine.packs.weights import build_views, check_pack
from engine.registration import parity, quantize
from engine.registration.convert import inspect, write_pack
from engine.registration.parity import probe
from engine.registration.quantize import LIMIT, dequantize, kept_bytes, quantize_rows
from engine.registration.tensors.files import SourceTensors
from kernels import int4_blocks
from kernels.int4_blocks import INT4_BLOCKS
from tests.engine.pack_rig import hf_folder
from tests.engine.registration.test_pack_layout import build_fused
from tests.engine.test_engine import Driver
from tests.engine.tiny_models import TinyModel, save_folder, tiny_configs

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
QKV = "model.layers.0.self_attn.qkv_proj.weight"


ROUNDED: Any = [
    pytest.param("int8", INT8_SCHEME, torch.int8, torch.bfloat16, id="int8"),
    pytest.param("fp8", FP8_SCHEME, torch.float8_e4m3fn, torch.float32, id="fp8"),
]


def packed(root: Path, config: Any, dtype: Any = "int8") -> tuple[Path, PackIndex]:
    return write_pack(inspect(hf_folder(root / "model", config)), root / "packs", dtype, _quiet)


def _quiet(phase: str, done: int, total: int) -> None:
    assert 0 <= done <= total


def memory(pack_dir: Path, index: PackIndex) -> tuple[torch.Tensor, list[int]]:
    blob = torch.from_numpy(np.fromfile(pack_dir / BLOB_NAME, dtype=np.uint8))
    return blob, [segment.offset for segment in index.segments]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounding_is_to_the_nearest_step_of_each_channel(dtype: torch.dtype) -> None:
    weight = torch.randn(50, 64) * torch.logspace(-6, 3, 50)[:, None]
    weight[7] = 0
    weight[8] = 1e-40  # its scale is nothing in half precision
    values, scale = quantize_rows(weight, dtype)
    assert (values.dtype, scale.dtype) == (torch.int8, dtype)
    assert int(values.abs().max()) == LIMIT
    step = scale.to(torch.float32)[:, None]
    # bfloat16's scale may be small by half a step of 1/256: 127 of them lose half a step more.
    assert bool(((dequantize(values, scale) - weight).abs() <= step * 1.01).all())
    inner = weight.abs() < 126 * step
    assert bool(((dequantize(values, scale) - weight).abs() <= step * 0.5001)[inner].all())
    assert not values[7].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, bad: float) -> None:
    folder = hf_folder(tmp_path / "model", LlamaConfig(**SHAPE))
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][200, 3] = bad
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RegistrationRefused, match=r"layers\.1\.mlp\.up_proj") as caught:
        write_pack(inspect(folder), tmp_path / "packs", "int8", _quiet)
    assert caught.value.code == "bad_weights"
    assert list((tmp_path / "packs").iterdir()) == []


@pytest.mark.parametrize(("dtype", "scheme", "kept", "of_scales"), ROUNDED)
def test_a_pack_has_rounded_linears_and_the_rest_in_bfloat16(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: Any,
    scheme: str,
    kept: torch.dtype,
    of_scales: torch.dtype,
) -> None:
    monkeypatch.setattr(SourceTensors.pieces, "__defaults__", (5000,))  # several to a tensor
    # As many KV heads as query heads: their scales then fill 256 bytes and have no gaps between.
    pack_dir, index = packed(tmp_path, Qwen2Config(**(SHAPE | {"num_key_value_heads": 4})), dtype)
    assert (index.dtype, index.kv_dtype, index.quantization) == ("bfloat16", "bfloat16", dtype)
    check_pack(pack_dir, index)
    source = load_file(tmp_path / "model" / "model.safetensors")
    tensors = build_views(*_views(pack_dir, index)).tensors
    rounded = {entry.name for entry in index.tensors if entry.scheme == scheme}
    assert {name.split(".")[-2] for name in rounded} == {"lm_head"} | {
        f"{kind}_proj" for kind in ("q", "k", "v", "o", "gate", "up", "down")
    }
    assert len(rounded) == 15
    for name, weight in source.items():
        if name in rounded:
            values, scale = quantize_rows(weight, of_scales, scheme)
            assert tensors[name].dtype == kept
            assert torch.equal(tensors[name].view(torch.uint8), values.view(torch.uint8)), name
            assert torch.equal(tensors[name + SCALE_SUFFIX], scale), name
        else:
            assert torch.equal(tensors[name], weight.to(torch.bfloat16)), name
    fused = build_fused(*memory(pack_dir, index)[:1], index, memory(pack_dir, index)[1])
    parts = [QKV.replace("qkv", kind) for kind in "qkv"]
    for suffix in ("", SCALE_SUFFIX):
        joined = torch.cat([tensors[p + suffix] for p in parts])
        assert torch.equal(fused[QKV + suffix].view(torch.uint8), joined.view(torch.uint8))
    _, plain = write_pack(inspect(tmp_path / "model"), tmp_path / "packs", "bfloat16", _quiet)
    assert plain.revision != index.revision
    assert index.total_bytes < plain.total_bytes


def _views(pack_dir: Path, index: PackIndex) -> tuple[torch.Tensor, PackIndex, list[int], int]:
    blob, offsets = memory(pack_dir, index)
    return blob, index, offsets, 1


def test_routers_stay_as_they_are(tmp_path: Path) -> None:
    _, index = packed(tmp_path, MixtralConfig(**SHAPE, num_local_experts=4))
    rounded = {entry.name.split(".")[-2] for entry in index.tensors if entry.scheme}
    assert rounded == {"q_proj", "k_proj", "v_proj", "o_proj", "lm_head", "experts"}
    assert {e.dtype for e in index.tensors if ".gate." in e.name} == {"bfloat16"}


def test_a_family_without_plain_linears_is_refused(tmp_path: Path) -> None:
    config = GPT2Config(
        vocab_size=96,
        n_embd=32,
        n_layer=1,
        n_head=2,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    with pytest.raises(RegistrationRefused, match="another dtype") as caught:
        packed(tmp_path, config)
    assert caught.value.code == "cannot_quantize"


def test_fp8_is_rounded_to_the_nearest_code_of_each_channel() -> None:
    """The middle of two goes to the even one; the largest of a row is the largest code."""
    weight = torch.tensor([[448.0, 17.0, 19.0, -17.0, 0.0], [4.48, 0.17, 0.0, 0.0, 0.0]])
    values, scale = quantize_rows(weight, torch.float32, FP8_SCHEME)
    assert values[0].float().tolist() == [448.0, 16.0, 20.0, -16.0, 0.0]
    assert values[1, 0] == 448.0
    torch.testing.assert_close(scale, torch.tensor([1.0, 0.01]))
    many = torch.randn(50, 64) * torch.logspace(-6, 3, 50)[:, None]
    off = dequantize(*quantize_rows(many, torch.float32, FP8_SCHEME)) - many
    assert 0.02 < float(off.norm() / many.norm()) < 0.03


def test_experts_in_fp8_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RegistrationRefused, match="int8 for example") as caught:
        packed(tmp_path, MixtralConfig(**SHAPE, num_local_experts=4), "fp8")
    assert caught.value.code == "cannot_quantize"


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SHAPE),
        Qwen2Config(**SHAPE, tie_word_embeddings=True),
        MixtralConfig(**SHAPE),
        GemmaConfig(**SHAPE, head_dim=32),
        tiny_config("mimo_v2_flash"),  # keys and values of unlike widths, asked of the projections
        tiny_config("biogpt"),  # an embedding with a factor that is no tensor
    ],
)
@pytest.mark.parametrize("quantization", quantize.QUANTIZATIONS)
def test_the_probe_holds_our_path_to_the_dequantized_weights(
    config: Any, quantization: str
) -> None:
    if quantization == "fp8" and hasattr(config, "num_experts_per_tok"):
        pytest.skip("experts")
    assert probe(config, quantization=quantization) <= parity.TOLERANCE


def test_the_probe_sees_a_wrong_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    right = quantize.dequantize

    def wrong(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return right(weight, torch.where(torch.arange(len(scale)) == 1, scale * 1.05, scale))

    monkeypatch.setattr(quantize, "dequantize", wrong)
    with pytest.raises(RegistrationRefused, match="differ from transformers"):
        probe(LlamaConfig(**SHAPE), quantization="int8")


def test_a_skeleton_takes_the_packs_tensors_and_gives_them_back(tmp_path: Path) -> None:
    pack_dir, index = packed(tmp_path, LlamaConfig(**SHAPE))
    model = build_skeleton(pack_dir, torch.bfloat16)
    replace_modules(model, schemes_in(index))
    assert sum(isinstance(module, RowsLinear) for module in model.modules()) == 15
    assert type(model.get_submodule("model.embed_tokens")) is nn.Embedding
    tensors = build_views(*_views(pack_dir, index)).tensors
    bind_weights(model, tensors)
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == tensors[name].data_ptr(), name
    unbind_weights(model)
    assert all(parameter.device.type == "meta" for parameter in model.parameters())


@pytest.mark.parametrize("dtype", ["int8", "fp8", "int4", "float16"])
def test_the_engine_serves_what_the_pack_stands_for(tmp_path: Path, dtype: Any) -> None:
    folder = tmp_path / "model"
    reference = save_folder(tiny_configs()["llama"], folder, 3)
    pack_dir, index = write_pack(inspect(folder), tmp_path / "packs", dtype, _quiet)
    tensors = build_views(*_views(pack_dir, index)).tensors
    schemes = schemes_in(index)
    assert bool(schemes) is (dtype != "float16")
    shapes = {name: tensor.shape for name, tensor in reference.state_dict().items()}
    exact = {
        name: stands_for(tensors, name, shapes[name], schemes.get(name, ""))
        for name in tensors
        if not name.endswith(SCALE_SUFFIX)
    }
    reference.load_state_dict(exact)
    driver = Driver({"m": TinyModel("m", folder, pack_dir, reference)}, 100)
    driver.make_resident("m")
    # One long prefill (many rows) and decodes beside it (few rows).
    prompts = {"a": [5, 6, 7], "b": list(range(2, 60)), "c": [90]}
    for name, prompt in prompts.items():
        driver.submit(name, "m", prompt, 20)
    driver.run(lambda: len(driver.finishes) == len(prompts))
    num_best = 0
    for name, prompt in prompts.items():
        tokens = driver.tokens[name]
        logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 :]
        for row, token in zip(logits, tokens, strict=False):
            assert row[token] >= row.max() - 0.1 * row.std()  # what rounding may turn over
            num_best += int(row.argmax()) == token
    assert num_best >= 54  # of 60
    driver.empty()


def stands_for(
    tensors: dict[str, torch.Tensor], name: str, shape: torch.Size, scheme: str
) -> torch.Tensor:
    if scheme == INT4_BLOCKS:
        return int4_blocks.dequantize(tensors[name], shape[1])
    if scheme:
        return dequantize(tensors[name], tensors[name + SCALE_SUFFIX])
    return tensors[name].float()


@pytest.mark.parametrize(("dtype", "scheme", "held", "of_scales"), ROUNDED)
def test_a_shared_vocabulary_is_kept_once_and_serves_both(
    tmp_path: Path, dtype: Any, scheme: str, held: torch.dtype, of_scales: torch.dtype
) -> None:
    pack_dir, index = packed(tmp_path, LlamaConfig(**SHAPE, tie_word_embeddings=True), dtype)
    kept = {entry.name: entry.scheme for entry in index.tensors}
    assert kept["model.embed_tokens.weight"] == scheme
    assert not any(name.startswith("lm_head") for name in kept)
    model = build_skeleton(pack_dir, torch.bfloat16)
    replace_modules(model, schemes_in(index))
    tensors = build_views(*_views(pack_dir, index)).tensors
    bind_weights(model, tensors)
    embedding, head = model.get_submodule("model.embed_tokens"), model.get_submodule("lm_head")
    assert isinstance(embedding, RowsEmbedding)
    assert isinstance(head, RowsLinear)
    assert embedding.weight.data_ptr() == head.weight.data_ptr()
    assert embedding.weight_scale.data_ptr() == head.weight_scale.data_ptr()
    source = load_file(tmp_path / "model" / "model.safetensors")["model.embed_tokens.weight"]
    exact = dequantize(*quantize_rows(source, of_scales, scheme))
    ids = torch.tensor([[3, 95], [0, 3]])
    assert embedding.weight.dtype == held
    assert embedding(ids).dtype == torch.bfloat16
    assert torch.allclose(embedding(ids).float(), exact[ids], rtol=2**-8)
    states = torch.randn(2, 128).bfloat16()
    assert torch.allclose(head(states).float(), states.float() @ exact.T, atol=0.05)


def test_an_int4_pack_has_blocks_and_what_does_not_fit_in_int8(tmp_path: Path) -> None:
    config = Qwen2Config(**(SHAPE | {"num_key_value_heads": 4, "intermediate_size": 200}))
    pack_dir, index = packed(tmp_path, config, "int4")
    assert (index.dtype, index.quantization) == ("bfloat16", "int4")
    check_pack(pack_dir, index)
    source = load_file(tmp_path / "model" / "model.safetensors")
    tensors = build_views(*_views(pack_dir, index)).tensors
    of_kind: dict[str, set[str]] = {}
    for entry in index.tensors:
        of_kind.setdefault(entry.scheme, set()).add(entry.name.split(".")[-2])
    # 200 rows are no whole number of blocks; 200 columns are.
    assert of_kind[INT4_BLOCKS] == {"q_proj", "k_proj", "v_proj", "o_proj", "down_proj"}
    assert of_kind[INT8_SCHEME] == {"gate_proj", "up_proj", "lm_head"}
    for name, scheme in schemes_in(index).items():
        if scheme == INT4_BLOCKS:
            assert torch.equal(tensors[name], int4_blocks.quantize(source[name])), name
    fused = build_fused(*memory(pack_dir, index)[:1], index, memory(pack_dir, index)[1])
    parts = [tensors[QKV.replace("qkv", kind)] for kind in "qkv"]
    assert torch.equal(fused[QKV], torch.cat(parts))
    model = build_skeleton(pack_dir, torch.bfloat16)
    replace_modules(model, schemes_in(index))
    assert sum(isinstance(module, Int4Linear) for module in model.modules()) == 10
    names = [name for name in source if name in {entry.name for entry in index.tensors}]
    sizes = {name: source[name].shape for name in names}
    held = sum(
        kept_bytes(sizes[name], schemes_in(index)[name])
        if name in schemes_in(index)
        else sizes[name].numel() * 2
        for name in names
    )
    assert held == sum(entry.num_bytes for entry in index.tensors)


def test_an_int4_pack_of_many_pieces_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = packed(tmp_path / "whole", LlamaConfig(**SHAPE), "int4")
    monkeypatch.setattr(SourceTensors.pieces, "__defaults__", (20_000,))
    monkeypatch.setattr(int4_blocks, "QUANTIZED_AT_ONCE", 5000)
    pieces, _ = packed(tmp_path / "pieces", LlamaConfig(**SHAPE), "int4")
    assert (pieces / BLOB_NAME).read_bytes() == (whole / BLOB_NAME).read_bytes()


def test_an_index_without_its_scales_is_refused(tmp_path: Path) -> None:
    pack_dir, index = packed(tmp_path, LlamaConfig(**SHAPE))
    entries = tuple(e for e in index.tensors if not e.name.endswith(SCALE_SUFFIX))
    fields = {name: getattr(index, name) for name in index.__struct_fields__}
    with pytest.raises(PackError, match="has no scales"):
        check_pack(pack_dir, PackIndex(**fields | {"tensors": entries, "fused": ()}))


def test_an_index_whose_codes_are_of_another_type_is_refused(tmp_path: Path) -> None:
    pack_dir, index = packed(tmp_path, LlamaConfig(**SHAPE), "fp8")
    entries = tuple(
        msgspec.structs.replace(e, dtype="int8") if e.scheme == FP8_SCHEME else e
        for e in index.tensors
    )
    with pytest.raises(PackError, match="is not float8_e4m3fn"):
        check_pack(pack_dir, msgspec.structs.replace(index, tensors=entries, fused=()))
