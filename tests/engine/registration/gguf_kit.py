"""GGUF files written from the format's description, models as llama.cpp's converter has them."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig

from tests.engine.pack_rig import hf_folder

F32, Q8_0 = 0, 8
ALIGNMENT = 32
Blocks = tuple[tuple[int, ...], int, bytes]
"""Shape with the slowest axis first, ggml's type, and bytes."""

LLAMA_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
}
GEMMA_NAMES = LLAMA_NAMES | {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
}
EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value(said: Any) -> bytes:
    """Type and value of a metadata entry."""
    if isinstance(said, bool):
        return struct.pack("<I?", 7, said)
    if isinstance(said, int):
        return struct.pack("<II", 4, said)
    if isinstance(said, float):
        return struct.pack("<If", 6, said)
    if isinstance(said, str):
        return struct.pack("<I", 8) + text(said)
    if said and isinstance(said[0], str):
        return struct.pack("<IIQ", 9, 8, len(said)) + b"".join(text(one) for one in said)
    return struct.pack(f"<IIQ{len(said)}i", 9, 5, len(said), *said)


def write_gguf(path: Path, metadata: dict[str, Any], tensors: dict[str, Blocks]) -> Path:
    """A file of version 3."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(text(key) + value(said) for key, said in metadata.items())
    offset, body = 0, b""
    for name, (shape, kind, content) in tensors.items():
        head += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += struct.pack("<IQ", kind, offset)
        body += content + b"\0" * (-len(content) % ALIGNMENT)
        offset = len(body)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head + b"\0" * (-len(head) % ALIGNMENT) + body)
    return path


def q8_0(weight: torch.Tensor) -> tuple[Blocks, torch.Tensor]:
    """Blocks of 32 with a half for what 127 is over 127, and what they stand for."""
    flat = weight.numpy().reshape(-1, 32)
    scale = (np.abs(flat).max(1, keepdims=True) / 127).astype(np.float16)
    codes = np.round(flat / scale.astype(np.float32)).astype(np.int8)
    content = np.concatenate([scale.view(np.uint8), codes.view(np.uint8)], 1).tobytes()
    values = scale.astype(np.float32) * codes
    return (tuple(weight.shape), Q8_0, content), torch.from_numpy(values).reshape(weight.shape)


def plain(weight: torch.Tensor) -> Blocks:
    return tuple(weight.shape), F32, weight.numpy().astype("<f4").tobytes()


def paired(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's order of the rows of q and k."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def model_metadata(arch: str, config: Any) -> dict[str, Any]:
    """What the converter says of a model and of its byte-level tokenizer."""
    merges = ["a b", "ab c"]
    letters = [chr(number) for number in range(0x21, 0x7F) if chr(number) not in "abc"]
    tokens = ["<s>", "a", "b", "c", "ab", "abc", *letters][: config.vocab_size]
    said = {
        "general.architecture": arch,
        "general.alignment": ALIGNMENT,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{arch}.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, *[1] * (len(tokens) - 1)],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }
    if getattr(config, "num_experts", 0):
        said[f"{arch}.expert_count"] = config.num_experts
        said[f"{arch}.expert_used_count"] = config.num_experts_per_tok
        said[f"{arch}.expert_feed_forward_length"] = config.moe_intermediate_size
    if hasattr(config, "head_dim") and arch != "llama":
        said[f"{arch}.attention.key_length"] = config.head_dim
    return said


def write_model(
    folder: Path, arch: str, config: PretrainedConfig, **more: Any
) -> tuple[Path, dict[str, torch.Tensor]]:
    """`folder` with one file, and beside it a plain twin; gives the twin's folder and weights."""
    twin = hf_folder(folder.with_name(f"{folder.name}-twin"), config)
    weights = load_file(twin / "model.safetensors")
    names = GEMMA_NAMES if arch.startswith("gemma") else LLAMA_NAMES
    tensors: dict[str, Blocks] = {}
    stacked: dict[str, list[torch.Tensor]] = {}
    for name in sorted(weights):
        weight = weights[name]
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        inside = name.startswith("model.layers.")
        if ".experts." in name:
            kind = EXPERTS[name.split(".")[-2]]
            stacked.setdefault(f"blk.{layer}.{kind}.weight", []).append(weight)
            _, weights[name] = q8_0(weight)
            continue
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            weight = paired(weight, heads)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            weight = weight + 1
        key = f"blk.{layer}.{names[rest]}" if inside else names[name]
        if weight.dim() == 1 or "mlp.gate." in name:
            tensors[key] = plain(weight)
            if arch.startswith("gemma"):
                weights[name] = weight - 1
            continue
        tensors[key], _ = q8_0(weight)
        _, weights[name] = q8_0(weights[name])  # rows are blocks of their own: any order will do
    for key, experts in stacked.items():
        tensors[key], _ = q8_0(torch.stack(experts))
    write_gguf(folder / "model-Q8_0.gguf", model_metadata(arch, config) | more, tensors)
    save_file(weights, twin / "model.safetensors", metadata={"format": "pt"})
    return twin, weights
