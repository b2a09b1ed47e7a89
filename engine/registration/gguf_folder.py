"""The small files of a model that is published as one GGUF file: made from its metadata.

A folder with a .gguf file needs no other: `config.json` and the tokenizer's files are made here and
lie beside it where registration works. Files that the folder has of its own come first, and the
configuration has to be its own where the metadata leave things open (scaled positions, windows, the
query scale of Gemma): a guess would answer, and answer worse. The tokenizer is transformers' own
reading of the metadata.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import processors
from transformers.integrations.gguf.gguf_tokenizer_mapping import get_gguf_tokenizer

from engine.errors import RegistrationRefused
from engine.registration.source import CONFIG_NAME, TOKENIZER_NAME, read_json
from engine.registration.tensors import GgufFile, architecture_of, number_in

try:
    from transformers.integrations.gguf import convert_gguf_tokenizer
except ImportError:  # transformers 5.17
    from transformers.integrations.ggml import (  # type: ignore[import-not-found,no-redef,unused-ignore]
        convert_gguf_tokenizer,
    )

TOKENIZER_CONFIG = "tokenizer_config.json"
ADVICE = "put the config.json of the original model beside the file"
# Said by the metadata, but not in a way that a configuration could be made of.
_OPEN = ("rope.scaling.type", "attention.sliding_window", "attn_logit_softcapping")


def complete_folder(folder: Path, path: Path) -> None:
    """Write what is missing beside `path`. Raises RegistrationRefused."""
    with GgufFile(path) as file:
        architecture = architecture_of(file)
        if (folder / CONFIG_NAME).is_file():
            kind = read_json(folder / CONFIG_NAME, "bad_config", dict).get("model_type")
            if kind not in architecture.model_types:
                raise RegistrationRefused(
                    "bad_config",
                    f"{folder / CONFIG_NAME} is of the type {kind!r:.60}, but the GGUF file is of "
                    f"the type {architecture.model_types[0]!r}; {ADVICE}",
                )
        else:
            text = json.dumps(_config(file), indent=2)
            (folder / CONFIG_NAME).write_text(text, encoding="utf-8")
    if not (folder / TOKENIZER_NAME).is_file():
        _write_tokenizer(folder, path)


def _config(file: GgufFile) -> dict[str, Any]:
    architecture, name = architecture_of(file), file.metadata["general.architecture"]
    known = file.metadata
    left_open = [key for key in _OPEN if known.get(f"{name}.{key}") not in (None, 0, "none")]
    left_open += [key for key in file.shapes if key.startswith("rope_")]
    if not architecture.stated or left_open:
        raise RegistrationRefused(
            "bad_config",
            f"the GGUF file does not say all that a {architecture.model_types[0]} needs"
            f"{f' ({left_open[0]})' if left_open else ''}: {ADVICE}",
        )
    heads, hidden = number_in(file, "attention.head_count"), number_in(file, "embedding_length")
    config = {
        "model_type": architecture.model_types[0],
        "architectures": [architecture.causal],
        "hidden_size": hidden,
        "intermediate_size": number_in(file, "feed_forward_length"),
        "num_hidden_layers": number_in(file, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": known.get(f"{name}.attention.head_count_kv") or heads,
        "head_dim": known.get(f"{name}.attention.key_length") or hidden // heads,
        "max_position_embeddings": number_in(file, "context_length"),
        "rms_norm_eps": known.get(f"{name}.attention.layer_norm_rms_epsilon", 1e-6),
        "rope_theta": known.get(f"{name}.rope.freq_base", 10000.0),
        "vocab_size": file.shapes.get("token_embd.weight", (0,))[0],
        "tie_word_embeddings": "output.weight" not in file.shapes,
        "attention_bias": "blk.0.attn_q.bias" in file.shapes,
        "dtype": "bfloat16",
    }
    turning = known.get(f"{name}.rope.dimension_count", config["head_dim"])
    if turning != config["head_dim"]:
        raise RegistrationRefused(
            "bad_config", f"the GGUF file turns {turning!r:.20} values of a head: {ADVICE}"
        )
    for kind in ("bos", "eos", "pad"):
        key = "tokenizer.ggml." + ("padding" if kind == "pad" else kind) + "_token_id"
        config[f"{kind}_token_id"] = known.get(key)
    if architecture.model_types[0] == "qwen3_moe":
        config["num_experts"] = number_in(file, "expert_count")
        config["num_experts_per_tok"] = number_in(file, "expert_used_count")
        config["moe_intermediate_size"] = number_in(file, "expert_feed_forward_length")
        config["norm_topk_prob"] = True  # as llama.cpp computes it
    return config


def _write_tokenizer(folder: Path, path: Path) -> None:
    try:
        architecture, said, options = get_gguf_tokenizer(str(path))
        tokenizer, _ = convert_gguf_tokenizer(architecture, said)
        first = options.get("bos_token")
        if options.get("add_bos_token") and first is not None:
            tokenizer.post_processor = processors.TemplateProcessing(
                single=[first, "$A"], special_tokens=[(first, tokenizer.token_to_id(first))]
            )
        tokenizer.save(str(folder / TOKENIZER_NAME))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # tokenizers raises bare Exceptions, and panics
        raise RegistrationRefused(
            "no_tokenizer",
            f"no tokenizer can be made from the GGUF file ({type(error).__name__}: {error}); "
            "put the tokenizer.json of the original model beside it",
        ) from error
    if not (folder / TOKENIZER_CONFIG).is_file():
        text = json.dumps({key: value for key, value in options.items() if value is not None})
        (folder / TOKENIZER_CONFIG).write_text(text, encoding="utf-8")
