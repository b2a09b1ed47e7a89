"""Tiny models with random weights, as folders and as packs: what engine tests run on.

Families of unlike geometry, fp32, a vocabulary of 96 ids: three with full attention, and three
whose layers have windows far below the context (one of them with sinks and experts).
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    Cohere2VisionConfig,
    FalconH1Config,
    Gemma3Config,
    Gemma3TextConfig,
    GemmaConfig,
    GptOssConfig,
    Lfm3Config,
    LlamaConfig,
    Mamba2Config,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from engine.modules.text_part import body_of, from_config, head_of, is_wrapper
from engine.protocol import ModelSpec
from engine.registration.convert import inspect, write_pack

VOCAB = 96
MAX_CONTEXT = 128

# The longest answer that was asked for, by pack and prompt: a shorter one is its beginning.
_SAID: dict[tuple[Path, tuple[int, ...]], list[int]] = {}


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A folder, its pack, and transformers' own model for reference."""

    name: str
    folder: Path
    pack_dir: Path
    reference: Any

    @property
    def spec(self) -> ModelSpec:
        """As a worker's catalog names it."""
        return ModelSpec(self.name, str(self.pack_dir))

    def generate(self, prompt: list[int], max_tokens: int) -> list[int]:
        """Greedy continuation by transformers' `generate`, alone. Asked once for all tests."""
        key = (self.pack_dir, tuple(prompt))
        if len(_SAID.get(key, ())) < max_tokens:
            _SAID[key] = self._generate(prompt, max_tokens)
        return _SAID[key][:max_tokens]

    def _generate(self, prompt: list[int], max_tokens: int) -> list[int]:
        out = self.reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        return [int(token) for token in out[0, len(prompt) :]]


def _common() -> dict[str, Any]:
    return {
        "hidden_size": 48,
        "intermediate_size": 96,
        "vocab_size": VOCAB,
        "max_position_embeddings": MAX_CONTEXT,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }


def tiny_configs() -> dict[str, PretrainedConfig]:
    """One small configuration a family."""
    common = _common()
    return {
        "llama": LlamaConfig(
            num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, **common
        ),
        "qwen3": Qwen3Config(
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=16,
            **common,
        ),
        "gemma": GemmaConfig(
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=24,
            **common,
        ),
    }


def windowed_configs() -> dict[str, PretrainedConfig]:
    """Windows that are no multiple of a block, alone and beside full layers, and sinks.

    gpt_oss routes every token to all experts: a choice between two of them is a step that no
    tolerance covers.
    """
    common = _common()
    return {
        "mistral": MistralConfig(
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            sliding_window=13,
            **common,
        ),
        "gemma3": Gemma3TextConfig(
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            sliding_window=10,
            query_pre_attn_scalar=16,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            tie_word_embeddings=False,
            **common,
        ),
        "gpt_oss": GptOssConfig(
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=12,
            sliding_window=9,
            num_local_experts=2,
            num_experts_per_tok=2,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            **common,
        ),
    }


def wrapper_configs() -> dict[str, PretrainedConfig]:
    """Multimodal wrappers with small towers: one hosted as its text class, two flat."""
    common = _common()
    tower = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    siglip = {**tower, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    text = windowed_configs()["gemma3"].to_dict()
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, **common}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]}
    return {
        "gemma3": Gemma3Config(
            text_config=text, vision_config=siglip, mm_tokens_per_image=4, tie_word_embeddings=True
        ),
        "qwen2_5_vl": Qwen2_5_VLConfig(
            text_config={**shape, "rope_parameters": rope},
            vision_config={**tower, "depth": 1, "num_heads": 2, "out_hidden_size": 48},
        ),
        "cohere2_vision": Cohere2VisionConfig(
            text_config={
                "model_type": "cohere2",
                **shape,
                "layer_types": ["sliding_attention", "full_attention"],
                "sliding_window": 10,
            },
            vision_config={"model_type": "siglip_vision_model", **siglip},
        ),
    }


def save_folder(config: PretrainedConfig, folder: Path, seed: int) -> Any:
    """Random weights that do not repeat themselves at once, and a tokenizer of numbers.

    A wrapper's towers are NaN.
    """
    torch.manual_seed(seed)
    model = from_config(config, whole=True, dtype=torch.float32).eval()
    parts = (body_of(model), head_of(model)) if is_wrapper(config) else (model,)
    text = {id(p) for part in parts if part is not None for p in part.parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if id(parameter) not in text:
                parameter.fill_(math.nan)
            if "embed" in name and config.tie_word_embeddings:
                continue  # a large tied embedding always answers with the token it was given
            if parameter.dim() > 1:
                parameter.mul_(6)
            elif name.endswith("sinks"):
                parameter.normal_()
    assert isinstance(model, PreTrainedModel)
    model.save_pretrained(folder)
    vocab = {f"t{i}": i for i in range(VOCAB)}
    Tokenizer(WordLevel(vocab, unk_token="t0")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": MAX_CONTEXT}))
    return model


def make_tiny_models(
    root: Path, configs: dict[str, PretrainedConfig] | None = None
) -> dict[str, TinyModel]:
    """These configurations (else `tiny_configs`) as folders and packs below `root`."""
    models = {}
    for seed, (name, config) in enumerate((configs or tiny_configs()).items()):
        folder = root / "source" / name
        reference = save_folder(config, folder, seed)
        pack_dir, _ = write_pack(inspect(folder), root / "packs", "float32", lambda *_: None)
        models[name] = TinyModel(name, folder, pack_dir, reference)
    return models


def state_configs() -> dict[str, PretrainedConfig]:
    """Layers that keep a state: beside attention, beside windows, in one layer with attention, and
    nothing else; heads of states fit into a page of 8192 bytes."""
    common = _common()
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    mamba = {"mamba_n_heads": 8, "mamba_d_head": 12, "mamba_d_state": 16, "mamba_expand": 2}
    return {
        "qwen3_next": Qwen3NextConfig(
            **(common | heads),
            head_dim=16,
            num_hidden_layers=3,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            num_experts=0,
        ),
        "lfm3": Lfm3Config(
            **(common | heads),
            head_dim=12,
            num_hidden_layers=3,
            layer_types=["conv", "sliding_attention", "full_attention"],
            sliding_window=10,
            tie_word_embeddings=False,
        ),
        "falcon_h1": FalconH1Config(
            **(common | heads | mamba), head_dim=12, num_hidden_layers=2, mamba_d_ssm=96
        ),
        "mamba2": Mamba2Config(
            **common, num_hidden_layers=2, num_heads=8, head_dim=12, state_size=16, n_groups=2
        ),
    }
