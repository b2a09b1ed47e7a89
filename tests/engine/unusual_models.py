"""Tiny models whose layers keep KV in unusual ways, for tests beside those of `tiny_models`."""

from typing import Any

from transformers import (
    Gemma3nTextConfig,
    Gemma4TextConfig,
    Llama4TextConfig,
    PretrainedConfig,
)

from tests.engine.tiny_models import MAX_CONTEXT, VOCAB

COMMON: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "vocab_size": VOCAB,
    "max_position_embeddings": MAX_CONTEXT,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
KINDS = {"s": "sliding_attention", "f": "full_attention"}


def shared_configs() -> dict[str, PretrainedConfig]:
    """Layers that read the KV of others, with a window and without; one has wider full layers."""
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    tables = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
    return {
        "gemma3n": Gemma3nTextConfig(
            **COMMON | {"intermediate_size": [96] * 6},
            **tables,
            num_hidden_layers=6,
            num_kv_shared_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            sliding_window=10,
            laurel_rank=8,
            altup_num_inputs=2,
            activation_sparsity_pattern=[0.95, 0.0, 0.0, 0.0, 0.0, 0.0],
            layer_types=[KINDS[kind] for kind in "sfssfs"],
            rope_parameters=dict.fromkeys(KINDS.values(), rope),
        ),
        "gemma4": Gemma4TextConfig(
            **COMMON,
            **tables,
            num_hidden_layers=5,
            num_kv_shared_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            global_head_dim=32,
            sliding_window=10,
            layer_types=[KINDS[kind] for kind in "sfssf"],
        ),
    }


def chunked_configs() -> dict[str, PretrainedConfig]:
    """Chunks that are no multiple of a block, alone with rotary, beside full layers without."""
    return {
        "llama4": Llama4TextConfig(
            **COMMON,
            intermediate_size_mlp=80,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=4,
            attention_chunk_size=22,
            floor_scale=9,
            attn_scale=0.4,
            moe_layers=[1, 2],
            no_rope_layers=[1, 0, 1],
            layer_types=["chunked_attention", "full_attention", "chunked_attention"],
        ),
    }
