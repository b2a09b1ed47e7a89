"""What a configuration asks for: its tensors' names, shapes and ties, its KV geometry, its limits.

Registration's second step. Builds the module tree on the meta device (no memory, no weights) and
refuses families whose KV cannot be kept in pages of K and V per head. The parity probe has the last
word on whether a family comes out right; here are the cases it could not see or would see too late.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from engine.errors import RegistrationRefused
from engine.memory.kv_geometry import config_geometries, layer_configs, module_geometries
from engine.packs.pack import EncoderRecord, KvGroup, Task
from kernels.paged_attention import LayerGeometry

REST = "rest"
_LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks)\.(\d+)\.")
_KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
MAX_COUNT = (1 << 31) - 1
"""Of positions and of ids, which are int32 on their way to the model."""
_OTHER_SENSES = ("vision_config", "audio_config")


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A model without weights.

    tensors     every parameter and persistent buffer by name, on meta, in the module tree's order
    tied        name -> name of the tensor it shares, both in `tensors`
    skeleton    the module tree on meta, for the library's own weight conversions
    """

    config: Any
    skeleton: nn.Module
    tensors: dict[str, torch.Tensor]
    tied: dict[str, str]
    kv_groups: tuple[KvGroup, ...]
    vocab_size: int
    max_context: int
    task: Task = "generate"
    encoder: EncoderRecord | None = None

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The dtype tensor `name` is kept in when the model is hosted in `dtype`."""
        wanted = self.tensors[name].dtype
        if not wanted.is_floating_point:
            return wanted
        strict = getattr(self.skeleton, "_keep_in_fp32_modules_strict", None) or ()
        if any(re.search(rf"(?:^|\.){pattern}(?:\.|$)", name) for pattern in strict):
            return torch.float32
        return dtype


def layer_of(name: str) -> str:
    """The segment a tensor belongs to: "layer.N", or REST."""
    match = _LAYER.search(name)
    return f"layer.{int(match.group(1))}" if match else REST


def blueprint(config: Any) -> Blueprint:
    """Raises RegistrationRefused for what cannot be hosted."""
    _check_family(config)
    try:
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # modelling code of 189 families: no contract on its error types
        raise RegistrationRefused(
            "bad_config",
            f"transformers cannot build a {config.model_type!r} from this configuration: "
            f"{type(error).__name__}: {error}",
        ) from error
    assert isinstance(skeleton, nn.Module)
    tensors = dict(skeleton.state_dict())
    tied = {
        target: source
        for target, source in (getattr(skeleton, "all_tied_weights_keys", None) or {}).items()
        if target in tensors and source in tensors
    }
    return Blueprint(
        config=config,
        skeleton=skeleton,
        tensors=tensors,
        tied=tied,
        kv_groups=_grouped(module_geometries(skeleton, config)),
        vocab_size=int(config.vocab_size),
        max_context=_max_context(config),
    )


def kv_groups(config: Any) -> tuple[KvGroup, ...]:
    """Layers grouped by KV geometry, in the order of their first layer; nothing is built."""
    return _grouped(config_geometries(config))


def _grouped(layers: Sequence[LayerGeometry]) -> tuple[KvGroup, ...]:
    members: dict[tuple[int, int, int, int], list[int]] = {}
    for number, layer in enumerate(layers):
        key = (layer.num_kv_heads, layer.k_dim, layer.v_dim, layer.window)
        members.setdefault(key, []).append(number)
    return tuple(KvGroup(tuple(layers), *geometry) for geometry, layers in members.items())


def _max_context(config: Any) -> int:
    """Positions that come out right in any batch.

    "longrope" takes other frequencies for the whole batch as soon as its longest sequence passes
    the original length, whatever is in the cache: such models are hosted up to that length.
    """
    longest = int(config.max_position_embeddings)
    rope = getattr(config, "rope_parameters", None) or {}
    for kind in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if kind.get("rope_type") == "longrope":
            original = kind.get("original_max_position_embeddings")
            longest = min(longest, int(original or longest))
    return longest


def _check_family(config: Any) -> None:
    family = config.model_type

    def refuse(why: str) -> RegistrationRefused:
        return RegistrationRefused("unknown_family", f"family {family!r} cannot be hosted: {why}")

    first = next(iter(layer_configs(config)), None)
    if not getattr(first, "num_attention_heads", None):
        raise refuse("it has no attention heads")
    if any(getattr(config, name, None) is not None for name in _OTHER_SENSES):
        raise refuse("it reads more than text")
    if getattr(config, "add_cross_attention", False):
        raise refuse("it attends to another model's states")
    if not _takes_attention(config):
        raise refuse("its attention is code of its own, which cannot be given another memory")
    if getattr(first, "kv_lora_rank", None):
        raise refuse("its attention caches a latent, which is not supported yet")
    if getattr(config, "num_kv_shared_layers", None):
        raise refuse("its layers share their KV, which is not supported yet")
    strange = sorted(set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYER_TYPES)
    if strange:
        raise refuse(f"layers of type {', '.join(strange)} are neither full nor sliding attention")
    for name, meaning in (("max_position_embeddings", "context length"), ("vocab_size", "size")):
        value = getattr(config, name, None)
        if not isinstance(value, int) or not 1 <= value <= MAX_COUNT:
            raise RegistrationRefused(
                "bad_config", f"the configuration has no sensible {meaning} ({name}: {value!r:.40})"
            )


def _takes_attention(config: Any) -> bool:
    """Whether the family's modules call attention by the name the configuration gives."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    says = getattr(model_class, "_can_set_attn_implementation", None)
    return bool(says()) if says is not None else True
