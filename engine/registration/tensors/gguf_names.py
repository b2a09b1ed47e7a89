"""What llama.cpp's names are in transformers' modules, and what its converter did to the weights.

By architecture: the names of a layer's tensors, and what is undone: rows of q and k that are in
another order (llama), norms that are kept with one added (gemma), experts that are stacked. A name
that is not known stays as it is, and is refused where it has no place in the model.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.errors import RegistrationRefused
from engine.registration.tensors.gguf_file import GgufFile
from engine.registration.tensors.gguf_steps import kept_of
from engine.registration.tensors.scaled import Kept, Quantized, Rows, bad

LAYER = "blk."
MAX_EXPERTS = 1 << 12
KV_HEADS = "attention.head_count_kv"
_OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "output": "lm_head",
    "output_norm": "model.norm",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Factors of positions: what config.json says of them is the same.
_POSITIONS = frozenset({"rope_freqs.weight"})


@dataclass(frozen=True, slots=True)
class Architecture:
    """One of llama.cpp's, as transformers has it.

    model_types   of the configurations that it may come with, the usual one first
    stated        whether the metadata say all that a configuration needs
    turned        whether rows of q and k lie in pairs
    raised        whether norms are kept with one added
    """

    model_types: tuple[str, ...]
    causal: str
    stated: bool = True
    turned: bool = False
    raised: bool = False
    names: dict[str, str] = field(default_factory=dict)


ARCHITECTURES = {
    "llama": Architecture(("llama", "mistral"), "LlamaForCausalLM", turned=True),
    "qwen2": Architecture(("qwen2",), "Qwen2ForCausalLM"),
    "qwen3": Architecture(("qwen3",), "Qwen3ForCausalLM"),
    "qwen3moe": Architecture(
        ("qwen3_moe",), "Qwen3MoeForCausalLM", names={"ffn_gate_inp": "mlp.gate"}
    ),
    "gemma2": Architecture(("gemma2",), "Gemma2ForCausalLM", False, raised=True, names=_GEMMA),
    "gemma3": Architecture(("gemma3_text",), "Gemma3ForCausalLM", False, raised=True, names=_GEMMA),
}


def architecture_of(file: GgufFile) -> Architecture:
    """Raises RegistrationRefused("unknown_family")."""
    name = file.metadata.get("general.architecture")
    found = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if found is None:
        raise RegistrationRefused(
            "unknown_family",
            f"GGUF files of the architecture {name!r:.60} are not supported "
            f"({', '.join(ARCHITECTURES)} are); register the model's safetensors",
        )
    return found


def number_in(file: GgufFile, name: str) -> int:
    """A count of the architecture's. Raises RegistrationRefused."""
    value = file.metadata.get(f"{file.metadata['general.architecture']}.{name}")
    if type(value) is not int or not 0 < value < 1 << 31:
        raise RegistrationRefused(
            "bad_config", f"the GGUF file has {value!r:.60} for {name}; use another file"
        )
    return value


def find_gguf(file: GgufFile) -> Iterator[tuple[str, Quantized]]:
    """Every tensor under transformers' name. Raises RegistrationRefused."""
    architecture = architecture_of(file)
    for key, shape in file.shapes.items():
        if key in _POSITIONS:
            continue
        stem, _, kind = key.rpartition(".")
        leaf, prefix = stem, ""
        if key.startswith(LAYER):
            number, _, leaf = stem.removeprefix(LAYER).partition(".")
            prefix = f"model.layers.{number}."
        if prefix and leaf in _EXPERTS and len(shape) == 3:
            if shape[0] > MAX_EXPERTS:
                raise bad(key, f"has {shape[0]} experts, more than {MAX_EXPERTS}")
            for expert in range(shape[0]):
                name = f"{prefix}mlp.experts.{expert}.{_EXPERTS[leaf]}.{kind}"
                yield name, _expert(file, key, expert)
            continue
        names = _LAYER_NAMES | architecture.names if prefix else _OUTSIDE
        name = f"{prefix}{names[leaf]}.{kind}" if leaf in names else key
        order, shift = None, 0.0
        if architecture.turned and prefix and leaf in ("attn_q", "attn_k"):
            order = _unpaired(file, key, leaf == "attn_q")
        if architecture.raised and leaf.endswith("norm"):
            shift = 1.0
        yield name, _whole(file, key, order, shift)


def _whole(file: GgufFile, key: str, order: torch.Tensor | None, shift: float) -> Quantized:
    """`order`: the rows of the file in the order of the model's; `shift`: what is taken off."""
    shape = file.shapes[key]
    if len(shape) > 2 or (len(shape) == 1 and file.dtypes[key] not in ("F32", "F16", "BF16")):
        raise bad(key, f"has the shape {shape} in blocks of {file.dtypes[key]}")

    def open_rows() -> Rows:
        if len(shape) == 1 or order is not None:
            packed = file.rows(key, 0, shape[0] if len(shape) > 1 else 1)

            def pick(start: int, stop: int) -> torch.Tensor:
                if len(shape) == 1:
                    values = file.values(key, packed)[0]
                    return (values if order is None else values[order])[start:stop] - shift
                assert order is not None
                return file.values(key, packed[order[start:stop]]) - shift

            return pick
        return lambda start, stop: file.values(key, file.rows(key, start, stop)) - shift

    def kept() -> Kept | None:
        return None if len(shape) == 1 or shift else kept_of(file, key, order, 0, shape[0])

    return Quantized(shape, open_rows, kept)


def _expert(file: GgufFile, key: str, number: int) -> Quantized:
    _, rows, columns = file.shapes[key]
    first = number * rows

    def open_rows() -> Callable[[int, int], Any]:
        return lambda start, stop: file.values(key, file.rows(key, first + start, first + stop))

    return Quantized((rows, columns), open_rows, lambda: kept_of(file, key, None, first, rows))


def _unpaired(file: GgufFile, key: str, is_query: bool) -> torch.Tensor:
    """llama.cpp rotates neighbours, transformers halves of a head: which row is which."""
    heads = number_in(file, "attention.head_count")
    if not is_query and f"{file.metadata['general.architecture']}.{KV_HEADS}" in file.metadata:
        heads = number_in(file, KV_HEADS)
    rows = file.shapes[key][0]
    if rows % (2 * heads):
        raise bad(key, f"has {rows} rows, which {heads} heads do not divide")
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).reshape(-1)
