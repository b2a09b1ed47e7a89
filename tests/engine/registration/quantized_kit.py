"""Quantized checkpoints, written from the formats' definitions and not by our readers' code.

Each writer takes weights [n, k] and gives the tensors that a published checkpoint has for it, and
what they stand for. Fields of words are made bit by bit, scales are spread by Kronecker products.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, LlamaConfig, PretrainedConfig

from tests.engine.pack_rig import edit_json, hf_folder

NO_IDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SHAPE: dict[str, Any] = {
    **NO_IDS,
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
FP8 = torch.float8_e4m3fn
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_FP4_PARTS = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3], np.float32) / np.float32(12)
BITSANDBYTES_FP4 = np.concatenate([_FP4_PARTS, -_FP4_PARTS])
NF4 = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Kind:
    """A format as published. `write`: a weight to the tensors for it, by their endings, and values.

    `endings` are behind the name of the weight's module, so "weight" stands for "x.weight".
    """

    config: dict[str, Any]
    write: Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
    model: Callable[[], PretrainedConfig] = lambda: LlamaConfig(**SHAPE)
    quantizes: Callable[[str], bool] = lambda name: name.endswith("_proj.weight")
    extra: Tensors = field(default_factory=dict)


def spread(scale: np.ndarray[Any, Any], block: tuple[int, int], n: int, k: int) -> torch.Tensor:
    """A scale at each of its weights."""
    return torch.from_numpy(np.kron(scale, np.ones(block, scale.dtype))[:n, :k].copy())


def words(codes: np.ndarray[Any, Any], bits: int) -> torch.Tensor:
    """Codes [r, c] along their rows in int32 words, the first in the lowest bits."""
    planes = (codes.astype(np.uint8)[..., None] >> np.arange(bits, dtype=np.uint8)) & 1
    flat = planes.reshape(len(codes), -1)
    flat = np.pad(flat, ((0, 0), (0, -flat.shape[1] % 32)))
    return torch.from_numpy(np.packbits(flat, 1, "little").view("<i4").copy())


def largest(weight: torch.Tensor, block: tuple[int, int]) -> np.ndarray[Any, Any]:
    """The largest magnitude of each block."""
    n, k = weight.shape
    padded = np.pad(weight.numpy(), ((0, -n % block[0]), (0, -k % block[1])))
    shape = (padded.shape[0] // block[0], block[0], padded.shape[1] // block[1], block[1])
    found: np.ndarray[Any, Any] = np.abs(padded.reshape(shape)).max((1, 3)).astype(np.float32)
    return found


def between(
    ordered: torch.Tensor, group: int, bits: int
) -> tuple[torch.Tensor, np.ndarray[Any, Any]]:
    """The scale (float16) and the zero that put a group's least and largest weight at the ends."""
    n, k = ordered.shape
    parts = np.pad(ordered.numpy(), ((0, 0), (0, -k % group))).reshape(n, -1, group)
    least, most = np.minimum(parts.min(2), 0), np.maximum(parts.max(2), 0)
    scale = torch.from_numpy((most - least) / ((1 << bits) - 1)).to(torch.float16)
    zero = np.round(-least / scale.to(torch.float32).numpy()).astype(np.int64)
    return scale, np.clip(zero, 0, (1 << bits) - 1)


def fp8(block: tuple[int, int], name: str, shape: tuple[int, ...] | None = None) -> Any:
    """E4M3 with a float32 scale for each block, kept in `shape`; (0, 0) is one for all."""

    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        n, k = weight.shape
        size = (block[0] or n, block[1] or k)
        scale = largest(weight, size) / 448
        each = spread(scale, size, n, k)
        codes = (weight / each).to(FP8)
        kept = torch.from_numpy(scale)
        tensors = {"weight": codes, name: kept.reshape(shape) if shape is not None else kept}
        return tensors, codes.to(torch.float32) * each

    return write


def integers(
    group: int,
    bits: int,
    *,
    symmetric: bool = True,
    order: bool = False,
    packed: bool = True,
    packed_zeros: bool = True,
    fitted: bool = False,
) -> Any:
    """compressed-tensors: bfloat16 scales [n, groups]; 0: one group."""

    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        n, k = weight.shape
        size, half = group or k, 1 << (bits - 1)
        index = np.arange(k) // size
        if order:
            index = np.random.default_rng(k).permutation(index)
        ordered = weight[:, np.argsort(index, kind="stable")]
        top = torch.from_numpy(largest(ordered, (1, size)))
        scale = (top / (half - 1)).to(torch.bfloat16)
        zero = torch.zeros(scale.shape, dtype=torch.int8)
        if not symmetric:
            zero = torch.randint(-2, min(3, half), scale.shape, dtype=torch.int8)
        if fitted:
            exact, middle = between(ordered, size, bits)
            scale = exact.to(torch.bfloat16)
            zero = torch.from_numpy(middle - half).to(torch.int8)
        each, shift = scale.to(torch.float32)[:, index], zero.to(torch.float32)[:, index]
        codes = (weight / each + shift).round().clamp(-half, half - 1) + 0.0  # no zero below zero
        tensors: Tensors = {"weight_scale": scale}
        if packed:
            tensors["weight_packed"] = words(codes.numpy() + half, bits)
            tensors["weight_shape"] = torch.tensor([n, k])
        else:
            tensors["weight"] = codes.to(torch.int8)
        if not symmetric:
            stored = words((zero.numpy().astype(np.int64) + half).T, bits).T.contiguous()
            tensors["weight_zero_point"] = stored if packed and packed_zeros else zero
        if order:
            tensors["weight_g_idx"] = torch.from_numpy(index.astype(np.int32))
        return tensors, (codes - shift) * each

    return write


def fp4_codes(weight: torch.Tensor, each: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two codes a byte, and their values."""
    codes = np.abs((weight / each).numpy()[..., None] - FP4).argmin(-1)
    packed = (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)
    return torch.from_numpy(packed), torch.from_numpy(FP4[codes])


def nvfp4(modelopt: bool) -> Any:
    """E4M3 scales for 16, and a scale of these that divides or multiplies."""

    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        n, k = weight.shape
        whole = torch.tensor(448 * 6 / float(weight.abs().max()))
        scale = (torch.from_numpy(largest(weight, (1, 16))) / 6 * whole).to(FP8)
        told = 1 / whole
        exact = scale.to(torch.float32) * told if modelopt else scale.to(torch.float32) / whole
        each = spread(exact.numpy(), (1, 16), n, k)
        packed, values = fp4_codes(weight, each)
        if modelopt:
            tensors = {"weight": packed, "weight_scale": scale, "weight_scale_2": told}
        else:
            tensors = {"weight_packed": packed, "weight_scale": scale}
            tensors["weight_global_scale"] = whole.reshape(1)
        return tensors, values * each

    return write


def mixed(wide: Any, tall: Any) -> Any:
    """One format for weights that are wider than they are high, and another for the others."""
    return lambda weight: (wide if weight.shape[1] > weight.shape[0] else tall)(weight)


def mxfp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """compressed-tensors: exponents of two for 32."""
    n, k = weight.shape
    exponent = np.ceil(np.log2(largest(weight, (1, 32)) / 6)).astype(np.int32)
    each = spread(np.exp2(exponent).astype(np.float32), (1, 32), n, k)
    packed, values = fp4_codes(weight, each)
    scale = torch.from_numpy((exponent + 127).astype(np.uint8))
    return {"weight_packed": packed, "weight_scale": scale}, values * each


def mxfp4_experts(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """gpt-oss: the parameter [experts, k, n] is kept as [experts, n, k / 32, 16]."""
    experts, k, n = weight.shape
    found = [mxfp4(one.T.contiguous()) for one in weight]
    blocks = torch.stack([tensors["weight_packed"] for tensors, _ in found])
    scales = torch.stack([tensors["weight_scale"] for tensors, _ in found])
    values = torch.stack([values.T for _, values in found])
    return {"_blocks": blocks.view(experts, n, k // 32, 16), "_scales": scales}, values


def gptq(
    bits: int,
    group: int,
    *,
    first_version: bool,
    order: bool = False,
    symmetric: bool = False,
    fitted: bool = False,
) -> Any:
    """Words along k, zeros along n; in the first version less by one in every field."""

    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        n, k = weight.shape
        index = np.arange(k) // group
        if order:
            index = np.random.default_rng(k).permutation(index)
        groups = k // group
        ordered = weight[:, np.argsort(index, kind="stable")]
        top = largest(ordered, (1, group))
        scale = torch.from_numpy(top / (1 << (bits - 1))).to(torch.float16)
        zero = np.random.default_rng(n).integers(0 if first_version else 5, 11, (n, groups))
        zero %= 1 << bits
        if symmetric:
            zero = np.full_like(zero, 1 << (bits - 1))
        elif fitted:
            scale, zero = between(ordered, group, bits)
        each, shift = scale.to(torch.float32)[:, index], zero[:, index]
        codes = np.clip(np.round((weight / each).numpy()) + shift, 0, (1 << bits) - 1)
        stored = words(zero.T, bits).numpy().view(np.uint32)
        if first_version:
            stored = stored - np.uint32(sum(1 << bit for bit in range(0, 32, bits)))
        tensors = {
            "qweight": words(codes, bits).T.contiguous(),
            "qzeros": torch.from_numpy(stored.view(np.int32).copy()),
            "scales": scale.T.contiguous(),
            "g_idx": torch.from_numpy(index.astype(np.int32)),
            "bias": torch.zeros(n, dtype=torch.float16),
        }
        return tensors, torch.from_numpy((codes - shift).astype(np.float32)) * each

    return write


def awq(group: int, *, fitted: bool = False) -> Any:
    """Words along n, eight channels in the order in which AutoAWQ's kernels want them."""

    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        n, k = weight.shape
        scale = torch.from_numpy(largest(weight, (1, group)) / 8).to(torch.float16)
        zero = np.random.default_rng(n).integers(5, 11, (n, k // group))
        if fitted:
            scale, zero = between(weight, group, 4)
        each = spread(scale.to(torch.float32).numpy(), (1, group), n, k)
        shift = np.kron(zero, np.ones((1, group), np.int64))
        codes = np.clip(np.round((weight / each).numpy()) + shift, 0, 15)

        def interleaved(values: np.ndarray[Any, Any]) -> torch.Tensor:
            by_word = values.T.reshape(values.shape[1], n // 8, 8)
            return words(by_word[..., [0, 2, 4, 6, 1, 3, 5, 7]].reshape(values.shape[1], n), 4)

        tensors = {"qweight": interleaved(codes), "qzeros": interleaved(zero)}
        tensors["scales"] = scale.T.contiguous()
        return tensors, torch.from_numpy((codes - shift).astype(np.float32)) * each

    return write


def nf4(nested: bool, block: int = 64, outer: int = 256, kind: str = "nf4") -> Any:
    """bitsandbytes: blocks over all rows, their factors perhaps in eight bits."""

    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        flat = weight.numpy().reshape(-1, block)
        top = np.abs(flat).max(1).astype(np.float32)
        said: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16"}
        said["shape"] = list(weight.shape)
        values_of = NF4 if kind == "nf4" else BITSANDBYTES_FP4
        tensors: Tensors = {"weight.quant_map": torch.from_numpy(values_of.copy())}
        if nested:
            table = np.linspace(-1, 1, 256).astype(np.float32)
            offset = float(top.mean())
            starts = np.arange(0, len(top), outer)
            factor = np.maximum.reduceat(np.abs(top - offset), starts).astype(np.float32)
            each = factor[np.arange(len(top)) // outer]
            codes = np.abs(((top - offset) / each)[:, None] - table).argmin(1)
            exact = torch.from_numpy(table[codes]) * torch.from_numpy(each) + offset
            top = exact.numpy()
            tensors["weight.absmax"] = torch.from_numpy(codes.astype(np.uint8))
            tensors["weight.nested_absmax"] = torch.from_numpy(factor)
            tensors["weight.nested_quant_map"] = torch.from_numpy(table)
            said |= {"nested_blocksize": outer, "nested_dtype": "float32", "nested_offset": offset}
        else:
            tensors["weight.absmax"] = torch.from_numpy(top)
        chosen = np.abs(flat[..., None] / top[:, None, None] - values_of).argmin(-1)
        values = torch.from_numpy(values_of[chosen]) * torch.from_numpy(top)[:, None]
        by_two = chosen.reshape(-1, 2)
        tensors["weight"] = torch.from_numpy((by_two[:, :1] << 4 | by_two[:, 1:]).astype(np.uint8))
        blob = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = blob
        return tensors, values.reshape(weight.shape)

    return write


def llm_int8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """bitsandbytes: a byte a weight, and what 127 is in each row."""
    top = weight.abs().amax(1)
    codes = (weight * 127 / top[:, None]).round() + 0.0  # no zero below zero
    tensors = {"weight": codes.to(torch.int8), "SCB": top}
    tensors["weight_format"] = torch.tensor(0, dtype=torch.uint8)
    return tensors, codes * (top[:, None] / 127)


def compressed(kind: str, **weights: Any) -> dict[str, Any]:
    """As llm-compressor writes it."""
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def _gpt_oss() -> PretrainedConfig:
    return GptOssConfig(
        **(SHAPE | {"intermediate_size": 32}),
        head_dim=16,
        sliding_window=9,
        num_local_experts=3,
        num_experts_per_tok=2,
        layer_types=["full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )


def _gptq_config(bits: int, group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, **more}


MIXED = {
    "model.layers.0.mlp.down_proj": {"quant_algo": "NVFP4", "group_size": 16},
    "model.layers.0.mlp.up_proj": {"quant_algo": "FP8"},
}
MODELOPT_FP8 = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
_INT4 = {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group"}
KINDS: dict[str, Kind] = {
    "fp8 blocks": Kind(
        {"quant_method": "fp8", "weight_block_size": [40, 24]}, fp8((40, 24), "weight_scale_inv")
    ),
    "fp8 tensor": Kind(
        {"quant_method": "fp8", "activation_scheme": "static"},
        fp8((0, 0), "weight_scale_inv", ()),
        extra={"model.layers.0.mlp.up_proj.activation_scale": torch.ones(())},
    ),
    "fp8 channels": Kind(
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        fp8((1, 0), "weight_scale"),
        extra={"model.layers.0.self_attn.k_scale": torch.ones(1)},
    ),
    "fp8 modelopt": Kind(
        MODELOPT_FP8,
        fp8((0, 0), "weight_scale", ()),
        extra={
            "model.layers.0.self_attn.k_proj.k_scale": torch.ones(()),
            "model.layers.0.mlp.up_proj.input_scale": torch.ones(()),
        },
    ),
    "fp8 fbgemm": Kind(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        fp8((1, 0), "weight_scale"),
        extra={"model.layers.0.mlp.up_proj.input_scale_ub": torch.ones(1)},
    ),
    "mixed modelopt": Kind(
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": MIXED},
        mixed(nvfp4(True), fp8((0, 0), "weight_scale", ())),
        extra={"model.layers.0.self_attn.v_proj.v_scale": torch.ones(())},
    ),
    "int4": Kind(compressed("pack-quantized", **_INT4), integers(32, 4)),
    "int4 asymmetric, ordered": Kind(
        compressed("pack-quantized", **_INT4, actorder="group"),
        integers(32, 4, symmetric=False, order=True),
    ),
    "int8 packed": Kind(
        compressed("pack-quantized", num_bits=8, type="int", strategy="channel"), integers(0, 8)
    ),
    "int8": Kind(
        compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
        integers(0, 8, symmetric=False, packed=False),
    ),
    "nvfp4": Kind(
        compressed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16), nvfp4(False)
    ),
    "nvfp4 modelopt": Kind({"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4(True)),
    "mxfp4": Kind(
        compressed("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32), mxfp4
    ),
    "mxfp4 gpt-oss": Kind(
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
        mxfp4_experts,
        _gpt_oss,
        lambda name: name.endswith("_proj") and "experts" in name,
    ),
    "gptq": Kind(_gptq_config(4, 32), gptq(4, 32, first_version=True)),
    "gptq of 8 bits, ordered": Kind(
        _gptq_config(8, 16, desc_act=True), gptq(8, 16, first_version=True, order=True)
    ),
    "gptq v2, ordered": Kind(
        _gptq_config(4, 16, desc_act=True, checkpoint_format="gptq_v2"),
        gptq(4, 16, first_version=False, order=True),
    ),
    "awq": Kind({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq(32)),
    "nf4": Kind({"quant_method": "bitsandbytes", "load_in_4bit": True}, nf4(False)),
    "nf4 nested": Kind({"quant_method": "bitsandbytes", "load_in_4bit": True}, nf4(True)),
    "bitsandbytes int8": Kind({"quant_method": "bitsandbytes", "load_in_8bit": True}, llm_int8),
}
"""Every format that registration reads, as it is published."""


def write_checkpoint(folder: Path, kind: Kind) -> Path:
    """A random model in this format, and beside it its plain twin `<folder>-twin`."""
    torch.manual_seed(1)
    hf_folder(folder, kind.model(), dtype=torch.float32)
    twin = hf_folder(folder.with_name(f"{folder.name}-twin"), kind.model())
    quantize_folder(folder, twin, kind)
    return twin


def quantize_folder(folder: Path, twin: Path, kind: Kind) -> None:
    """A plain model in this format instead, and in `twin` the weights that it stands for."""
    weights = load_file(folder / "model.safetensors")
    kept: Tensors = dict(kind.extra)
    for name, weight in weights.items():
        if not kind.quantizes(name):
            kept[name] = weight
            continue
        tensors, values = kind.write(weight.to(torch.float32))
        base = name.removesuffix("weight")
        kept |= {base + ending: tensor for ending, tensor in tensors.items()}
        weights[name] = values.contiguous()
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(weights, twin / "model.safetensors", metadata={"format": "pt"})
    edit_json(folder / "config.json", lambda c: c.update(quantization_config=kind.config))
