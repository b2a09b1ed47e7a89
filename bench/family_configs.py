"""A tiny configuration of every causal LM type transformers registers: data.

Each is a type's own defaults with everything made small, then what the type needs on top: options
that its defaults leave out (experts, sinks, several kinds of layers), and those that have to fit
together. Windows are far below the prompts of the parity probe. Nothing here knows which types can
be hosted.
"""

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

MODEL_TYPES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))

# By transformers' common names; a type takes those it has.
TINY: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "sliding_window": 6,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "ffn_dim": 96,
    "dff": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
}
_HEADS_BY_LAYER = "num_attention_heads_per_layer"
_LAYER_LISTS = ("layer_types", "mlp_layer_types", "layers_block_type", _HEADS_BY_LAYER)
_SLIDING_FIRST = ["sliding_attention", "full_attention"]
_LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16}

OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "beam": {"n_group": 2, "topk_group": 1, "num_experts": 8},
    "cohere_compass_text": {
        "layer_types": _SLIDING_FIRST,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.0, "rope_theta": 10000.0},
        "ffn_config": {
            "hidden_size": 64,
            "ffn_hidden_size": 32,
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
    },
    "cohere2": {"layer_types": _SLIDING_FIRST},
    "cohere2_moe": {"layer_types": _SLIDING_FIRST},
    "dots1": {"n_shared_experts": 1, "layer_types": _SLIDING_FIRST, "first_k_dense_replace": 1},
    "dots3_note_text": _LATENT,
    "exaone4": {"layer_types": _SLIDING_FIRST},
    "flint": {"mlp_only_layers": [0]},
    "gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        }
    },
    "gemma4_text": {
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 8,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "global_head_dim": 32,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "gemma4_unified_text": {
        "attention_k_eq_v": False,
        "num_global_key_value_heads": 1,
        "global_head_dim": 32,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "jetmoe": {"kv_channels": 16, "num_key_value_heads": 2},
    "laguna": {"layer_types": _SLIDING_FIRST},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "mellum": {"layer_types": _SLIDING_FIRST},
    "mimo_v2_flash": {"v_head_dim": 8, "num_key_value_heads": 1},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_n_heads": 2,
    },
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.3,
        }
    },
    "qwen2": {"use_sliding_window": True, "layer_types": _SLIDING_FIRST},
    "qwen3": {"use_sliding_window": True, "layer_types": _SLIDING_FIRST},
    "roc_bert": {"pronunciation_vocab_size": 16, "shape_vocab_size": 16},
    "vaultgemma": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "zamba2": {"hybrid_layer_ids": [1]},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(model_type: str) -> Any:
    """A configuration object of this type, its own class, as its causal LM would be saved."""
    config = _tiny(model_type)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
    return config


def _tiny(model_type: str) -> Any:
    special = dict(OVERRIDES.get(model_type, {}))
    config_class = CONFIG_MAPPING[model_type]
    if "text_config" in special:
        return config_class(**special)
    defaults = config_class()
    if _is_composite(defaults):
        return defaults  # text is a part of it: judged before anything is built
    said = defaults.to_dict()
    names = getattr(defaults, "attribute_map", {})
    options = {
        names.get(name, name): value
        for name, value in TINY.items()
        if names.get(name, name) in said
    }
    layers = _layer_lists(said)
    if layers:
        options |= layers
        count = len(next(iter(layers.values())))
        options[names.get("num_hidden_layers", "num_hidden_layers")] = count
    options |= special
    return AutoConfig.for_model(model_type, **options)


def _is_composite(config: Any) -> bool:
    try:
        return config.get_text_config() is not config
    except ValueError:
        return True


def _layer_lists(said: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Lists with an entry a layer, cut to one layer of each kind they tell apart, two at least."""
    lists = {name: list(said[name]) for name in _LAYER_LISTS if said.get(name)}
    if not lists:
        return {}
    columns = list(zip(*lists.values(), strict=True))
    chosen = [columns.index(column) for column in dict.fromkeys(columns)]
    if len(chosen) < 2:
        chosen = [0, 1]
    return {
        name: [4 if name == _HEADS_BY_LAYER else values[layer] for layer in chosen]
        for name, values in lists.items()
    }
