"""Tiny models with random weights, as folders and as packs: what engine tests run on.

Three families of unlike geometry, fp32, a vocabulary of 96 ids.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
)

from engine.convert import inspect, write_pack
from engine.protocol import ModelSpec

VOCAB = 96
MAX_CONTEXT = 128


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
        """Greedy continuation by transformers' `generate`, alone."""
        out = self.reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        return [int(token) for token in out[0, len(prompt) :]]


def tiny_configs() -> dict[str, PretrainedConfig]:
    """One small configuration a family."""
    common: dict[str, Any] = {
        "hidden_size": 48,
        "intermediate_size": 96,
        "vocab_size": VOCAB,
        "max_position_embeddings": MAX_CONTEXT,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
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


def save_folder(config: PretrainedConfig, folder: Path, seed: int) -> Any:
    """Random weights that do not repeat themselves at once, and a tokenizer of numbers."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    model.save_pretrained(folder)
    vocab = {f"t{i}": i for i in range(VOCAB)}
    Tokenizer(WordLevel(vocab, unk_token="t0")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": MAX_CONTEXT}))
    return model


def make_tiny_models(root: Path) -> dict[str, TinyModel]:
    """All families as folders and packs below `root`."""
    models = {}
    for seed, (name, config) in enumerate(tiny_configs().items()):
        folder = root / "source" / name
        reference = save_folder(config, folder, seed)
        pack_dir, _ = write_pack(inspect(folder), root / "packs", "float32", lambda *_: None)
        models[name] = TinyModel(name, folder, pack_dir, reference)
    return models
