"""Model folders for servers to host: the demo models, copies with a twist, tiny encoders."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, BertModel

from tests.gateway.encoder_kit import bert_like_tokenizer

DEMO_MODELS = Path(__file__).parents[2] / "gateway" / "demo_models"
NAMES = ("shakespeare", "sherlock", "python")
NUM_POSITIONS = 64

# A template that knows tools; the demo model's own knows none.
HERMES = """{{- bos_token -}}
{%- if tools -%}
    {{- '<|system|>' -}}
    {%- for tool in tools %}{{ tool.function.name + " " }}{% endfor -%}
    {{- 'Call with <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
    {{- '<|user|>' + message['content'] + '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def write_caller(folder: Path) -> None:
    """A demo model that is told of tools."""
    shutil.copytree(DEMO_MODELS / "python", folder)
    (folder / "chat_template.jinja").write_text(HERMES)


def write_damaged(folder: Path) -> None:
    """A whole model, in a pack of its own: the test that damages the pack hurts no other."""
    shutil.copytree(DEMO_MODELS / "sherlock", folder)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + "{#- another revision -#}")


def write_pickle(folder: Path) -> None:
    """A model whose weights are a pickle."""
    shutil.copytree(
        DEMO_MODELS / "sherlock", folder, ignore=shutil.ignore_patterns("*.safetensors")
    )
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")


def write_code(folder: Path) -> None:
    """A model that brings code of its own."""
    shutil.copytree(DEMO_MODELS / "sherlock", folder)
    (folder / "modeling_x.py").write_bytes(b"print(1)")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_x.X"}
    (folder / "config.json").write_text(json.dumps(config))


def write_embed(folder: Path) -> None:
    """A tiny random embedding model."""
    _write_bert(folder, BertModel)


def write_cross(folder: Path) -> None:
    """A tiny random cross-encoder."""
    _write_bert(folder, BertForSequenceClassification, num_labels=1)


def _write_bert(folder: Path, kind: type[Any], **options: Any) -> None:
    tokenizer = bert_like_tokenizer()
    torch.manual_seed(7)
    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=NUM_POSITIONS,
        **options,
    )
    kind(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))


Writer = Callable[[Path], None]
HOSTED: dict[str, Writer] = {
    "caller": write_caller,
    "damaged": write_damaged,
    "embed": write_embed,
    "cross": write_cross,
}
REFUSED: dict[str, Writer] = {"pickle": write_pickle, "code": write_code}
