"""Tiny models whose layers keep KV in unusual ways, for tests beside those of `tiny_models`."""

from typing import Any

from transformers import (
    BloomConfig,
    CodeGenConfig,
    FalconConfig,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    GPTJConfig,
    GPTNeoConfig,
    GPTNeoXJapaneseConfig,
    Llama4TextConfig,
    MptConfig,
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


def own_configs() -> dict[str, PretrainedConfig]:
    """Attention that is code of its own."""
    ids = {name: COMMON[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    shape = {"vocab_size": VOCAB, **ids}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 48}
    old = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": MAX_CONTEXT, "rotary_dim": 8}
    falcon = {**shape, **heads, "max_position_embeddings": MAX_CONTEXT}
    return {
        "gptj": GPTJConfig(**shape, **old, tie_word_embeddings=False),
        "codegen": CodeGenConfig(**shape, **old, tie_word_embeddings=False),
        "gpt_neo": GPTNeoConfig(
            **shape,
            hidden_size=48,
            num_layers=2,
            num_heads=4,
            attention_types=[[["global", "local"], 1]],
            window_size=10,
            max_position_embeddings=MAX_CONTEXT,
        ),
        "gpt_neox_japanese": GPTNeoXJapaneseConfig(
            **shape, **heads, max_position_embeddings=MAX_CONTEXT, tie_word_embeddings=False
        ),
        "bloom": BloomConfig(**shape, hidden_size=60, n_layer=2, n_head=5, seq_length=MAX_CONTEXT),
        "mpt": MptConfig(
            **shape,
            d_model=48,
            n_layers=2,
            n_heads=3,
            max_seq_len=MAX_CONTEXT,
            attn_config={"clip_qkv": 0.9},
        ),
        "falcon": FalconConfig(**falcon),
        "falcon-groups": FalconConfig(
            **falcon | {"num_attention_heads": 6},
            new_decoder_architecture=True,
            num_kv_heads=2,
        ),
    }
