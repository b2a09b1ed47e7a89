"""True-shape models with random weights: what benchmarks run where no real weights may be fetched.

Lives here: the way from a row of `model_shapes.json` to a Hugging Face folder (config, bf16
safetensors, tokenizer, chat template, generation config). Does not: registering or serving it.

Three properties make such a folder fit for measuring:
- Every id of the vocabulary decodes to ASCII text of its own and no id is special, so text and
  tokens can be counted against one another (a tokenizer smaller than the vocabulary decodes most
  ids to nothing, and clients then miscount). Other characters in a prompt are dropped.
- Nothing names an end-of-sequence token, so an answer always has exactly `max_tokens` tokens.
- Matrices are normal with deviation 1/sqrt(fan_in), so activations keep their scale from layer to
  layer and logits are spread (deviation ~LOGIT_STD) instead of all alike or all one token.
"""

import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

DEFAULT_SHAPES = Path(__file__).with_name("model_shapes.json")
LOGIT_STD = 2.0
NORM_STD = 0.05
BIAS_STD = 0.02
MAX_SHARD_BYTES = 2 << 30
MAX_SYLLABLES = 3
# Qwen2's own rule for cutting text into words: transformers rebuilds that family's tokenizer from
# the vocabulary and merges alone, so every folder uses it and all readers agree.
WORD_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPACE = "\u0120"  # how byte-level BPE writes a space
CONSONANTS = "bcdfghjklmnpqrstvwxz"
VOWELS = "aeiouy"
NEWLINE = "\u010a"
# ChatML without an end mark. `transformers serve` looks for this very opening of the assistant's
# turn and sends the whole prompt back as the first text when it is missing.
TURN = "<|im_start|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

Shape = Mapping[str, Any]

# Shape keys that a transformers config takes under the same name.
_SAME_NAME = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "tie_word_embeddings",
)
_LLAMA_LIKE = (
    "intermediate_size",
    "num_key_value_heads",
    "head_dim",
    "attention_bias",
    "sliding_window",
    "rope_theta",
    "rope_scaling",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "rope_local_base_freq",
    "sliding_window_pattern",
    "moe_intermediate_size",
    "num_experts",
    "num_experts_per_tok",
    "norm_topk_prob",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
)


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """What was written: the folder, its parameters and their bytes."""

    folder: Path
    shape: str
    num_params: int
    weight_bytes: int


def read_shapes(path: Path = DEFAULT_SHAPES) -> dict[str, Shape]:
    """Shapes by public model name. Raises OSError or ValueError on a file that is none."""
    shapes = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(shapes, dict):
        raise ValueError(f"{path} is no object of shapes by model name")
    return shapes


def config_kwargs(shape: Shape) -> dict[str, Any]:
    """The shape in the words of its family's transformers config; no special token ids at all."""
    kwargs: dict[str, Any] = {key: shape[key] for key in _SAME_NAME}
    family = shape["model_type"]
    norm_eps = shape.get("norm_eps", 1e-5)
    if family == "gpt2":
        kwargs |= {
            "n_inner": shape["intermediate_size"],
            "activation_function": shape["hidden_act"],
            "layer_norm_epsilon": norm_eps,
        }
    elif family == "opt":
        kwargs |= {
            "ffn_dim": shape["intermediate_size"],
            "activation_function": shape["hidden_act"],
            "word_embed_proj_dim": shape["hidden_size"],
            "do_layer_norm_before": shape["do_layer_norm_before"],
        }
    elif family == "gpt_neox":
        kwargs |= {
            "intermediate_size": shape["intermediate_size"],
            "hidden_act": shape["hidden_act"],
            "layer_norm_eps": norm_eps,
            "rotary_pct": shape["rotary_pct"],
            "rope_theta": shape["rope_theta"],
            "use_parallel_residual": shape["parallel_residual"],
        }
    else:
        act = "hidden_activation" if family.startswith("gemma") else "hidden_act"
        kwargs |= {key: shape[key] for key in _LLAMA_LIKE if key in shape}
        kwargs |= {"rms_norm_eps": norm_eps, act: shape["hidden_act"]}
    return kwargs | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def build(shapes: Mapping[str, Shape], name: str, folder: Path, seed: int | None = 0) -> BuiltModel:
    """Write the model `name` into `folder` (made if missing). The same seed gives the same bytes;
    None gives files whose tensors are holes: all zeros, and no room on the disk.

    Never holds more than one shard in memory. Raises KeyError where the shapes lack the name.
    """
    shape = shapes[name]
    folder.mkdir(parents=True, exist_ok=True)
    config = AutoConfig.for_model(shape["model_type"], **config_kwargs(shape))
    config.architectures = [shape["architecture"]]
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    weight_bytes = _write_weights(model, folder, seed)
    config_dict = config.to_dict()
    # Explicit nulls: left out, some families' defaults would bring an end token back.
    config_dict |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    _write_json(folder / "config.json", config_dict)
    _write_json(folder / "generation_config.json", {"do_sample": False})
    _write_tokenizer(folder, shape["vocab_size"], shape["max_position_embeddings"])
    num_params = sum(parameter.numel() for parameter in model.parameters())
    return BuiltModel(folder, name, num_params, weight_bytes)


def build_once(name: str, folder: Path, seed: int = 0, path: Path = DEFAULT_SHAPES) -> None:
    """`build`, unless the folder has the model already."""
    if not (folder / "tokenizer_config.json").exists():
        print(f"making {name} with random weights", file=sys.stderr)
        build(read_shapes(path), name, folder, seed)


def vocabulary(vocab_size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Token ids and BPE merges: ASCII characters, syllables, and words of one to three syllables.

    A syllable is consonant + vowel and only " " + syllables join further, so a word has one way to
    be merged and text read back gives the ids it was made of (but for the few bare syllables).
    Raises ValueError where the vocabulary is too small for the syllables or too large for words.
    """
    syllables = [consonant + vowel for consonant in CONSONANTS for vowel in VOWELS]
    ascii_chars = [chr(code) for code in range(ord("!"), ord("~") + 1)]
    tokens = [TURN, SPACE, NEWLINE, *ascii_chars, *syllables]
    merges = [(syllable[0], syllable[1]) for syllable in syllables]
    if vocab_size < len(tokens):
        raise ValueError(f"a vocabulary needs at least {len(tokens)} ids, got {vocab_size}")
    stems = [SPACE]
    while len(tokens) < vocab_size:
        pairs = [(stem, syllable) for stem in stems for syllable in syllables]
        pairs = pairs[: vocab_size - len(tokens)]
        stems = [stem + syllable for stem, syllable in pairs]
        if len(stems[0]) > 2 * MAX_SYLLABLES + 1:
            raise ValueError(f"no words for {vocab_size} ids")
        tokens += stems
        merges += pairs
    return {token: index for index, token in enumerate(tokens)}, merges


def _write_tokenizer(folder: Path, vocab_size: int, max_length: int) -> None:
    vocab, merges = vocabulary(vocab_size)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.add_tokens([AddedToken(TURN, normalized=False, special=False)])
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    no_special = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"))
    _write_json(
        folder / "tokenizer_config.json",
        no_special
        | {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": max_length,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _write_weights(model: torch.nn.Module, folder: Path, seed: int | None) -> int:
    generator = torch.Generator().manual_seed(seed or 0)
    state = model.state_dict()
    shards = _plan_shards(model)
    total_bytes = sum(num_bytes for shard in shards for _, num_bytes in shard)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = "model.safetensors"
        if len(shards) > 1:
            name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        if seed is None:
            _write_holes(folder / name, {key: state[key] for key, _ in shard})
        else:
            tensors = {key: _random_tensor(model, key, state[key], generator) for key, _ in shard}
            save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys((key for key, _ in shard), name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)
    return total_bytes


def _write_holes(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """safetensors by hand: a header, and a file cut to its length."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[key] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [start, end]}
    content = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(content).to_bytes(8, "little") + content)
        file.truncate(8 + len(content) + end)


def _plan_shards(model: torch.nn.Module) -> list[list[tuple[str, int]]]:
    """Names and bytes of what is saved, cut into files; tied tensors appear once."""
    shards: list[list[tuple[str, int]]] = [[]]
    filled = 0
    for key, num_bytes in _saved_tensors(model):
        if shards[-1] and filled + num_bytes > MAX_SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append((key, num_bytes))
        filled += num_bytes
    return shards


def _saved_tensors(model: torch.nn.Module) -> Iterator[tuple[str, int]]:
    tied = getattr(model, "all_tied_weights_keys", {})
    for key, tensor in model.state_dict().items():
        if key not in tied:
            yield key, tensor.numel() * tensor.element_size()


def _random_tensor(
    model: torch.nn.Module, key: str, like: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    values = torch.empty(like.shape, dtype=torch.float32)
    owner_name, _, leaf = key.rpartition(".")
    owner = model.get_submodule(owner_name)
    if like.ndim >= 2:
        is_embedding = isinstance(owner, torch.nn.Embedding) or "lm_head" in key
        # Conv1D (GPT-2) keeps [in, out]; Linear keeps [out, in].
        fan_in = like.shape[0] if type(owner).__name__ == "Conv1D" else like.shape[-1]
        scale = LOGIT_STD if is_embedding else 1.0
        values.normal_(0.0, scale / math.sqrt(fan_in), generator=generator)
    elif leaf == "bias":
        values.normal_(0.0, BIAS_STD, generator=generator)
    else:
        # Gemma's norms multiply by (1 + weight), all others by the weight.
        centre = 0.0 if re.match(r"Gemma\d*RMSNorm", type(owner).__name__) else 1.0
        values.normal_(centre, NORM_STD, generator=generator)
    return values.to(like.dtype)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def nearest_shape(shapes: Mapping[str, Shape], size_bytes: int) -> str:
    """The shape whose bf16 matrices come closest to `size_bytes`."""
    return min(shapes, key=lambda name: abs(shapes[name]["params_matmul_approx"] * 2 - size_bytes))
