"""What a configuration asks for: its tensors' names, shapes and ties, its KV geometry, its limits.

Registration's second step. Builds the module tree on the meta device (no memory, no weights) and
refuses families that keep something else of a sequence than K and V by head, or states of a fixed
size (`engine/modules/state_mixers.py`). The parity probe has the last
word on whether a family comes out right; here are the cases it could not see or would see too late.

The KV geometry of a layer (heads, widths, window) has two sources that have to agree with what the
modules hand to attention, which the probe compares: the configuration says it before anything is
built, and projections of the real skeleton say it where families depart from the usual names (other
KV heads in window layers, V narrower than K).
"""

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from engine.errors import RegistrationRefused
from engine.modules.indexers import indexers, key_geometry, read_indexer
from engine.modules.latent import latent_geometry, latent_layers
from engine.modules.own_attention import (
    kv_heads_of,
    may_be_replaced,
    own_layers,
    takes_interface,
)
from engine.modules.state_mixers import (
    StateShape,
    attending_layers,
    may_keep_states,
    mixers,
    state_shapes,
)
from engine.modules.text_part import from_config, is_wrapper
from engine.pack import (
    EncoderRecord,
    KvGroup,
    StateGroup,
    StateKey,
    Task,
    indexer_layer,
    is_indexer,
)
from engine.registration.kv_sharing import kv_sources, shares_kv
from engine.registration.wrapper import Wrapped, class_config, text_names
from kernels.paged_attention import LayerGeometry

REST = "rest"
_LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks)\.(\d+)\.")
_INDEXED = frozenset({"indexed_attention", "minimax_m3_sparse"})
_KNOWN_LAYER_TYPES = _INDEXED | {"full_attention", "sliding_attention", "chunked_attention"}
UNBOUNDED_CONTEXT = 131_072
"""Positions of a model that has no bound of its own, as recurrent ones have none."""
MAX_COUNT = (1 << 31) - 1
"""Of positions and of ids, which are int32 on their way to the model."""
_CONTEXTS = ("max_position_embeddings", "max_seq_len", "seq_length")
_OTHER_SENSES = ("vision_config", "audio_config")


def field_of(config: Any, name: str) -> Any:
    """What a configuration says, None where its family takes no notice of it.

    A config.json may hold anything, and transformers keeps it all: a GPT-2's `num_key_value_heads`
    means nothing. A field counts where the family's class has it or its modules name it.
    """
    kind = cast(Hashable, type(config))  # which mypy does not believe
    return getattr(config, name, None) if _is_read(kind, name) else None


@functools.cache
def _is_read(kind: Hashable, name: str) -> bool:
    assert isinstance(kind, type)
    if name in (getattr(kind, "attribute_map", None) or {}):
        return True
    if any(name in vars(base) or name in _annotations(base) for base in kind.__mro__):
        return True
    named = rf"['\"]{name}['\"]"
    try:
        modules = importlib.import_module(kind.__module__.replace("configuration_", "modeling_"))
        if re.search(rf"config\.{name}\b|{named}", inspect.getsource(modules)):
            return True
        # Some classes set it of another field.
        own = inspect.getsource(sys.modules[kind.__module__])
        return re.search(rf"self\.{name}\b|{named}", own) is not None
    except (ImportError, OSError):
        return True  # nobody knows: the probe will tell


def _annotations(kind: type) -> Collection[str]:
    names: Collection[str] = inspect.get_annotations(kind)
    return names


def context_of(config: Any) -> Any:
    """Positions that the configuration allows. Where positions are slopes and no table ends (MPT,
    BLOOM), those that it was trained with."""
    values = (getattr(config, name, None) for name in _CONTEXTS)
    return next((value for value in values if value is not None), None)


def layer_windows(config: Any) -> list[int]:
    """The sliding window of each layer, 0 for full attention, as transformers applies it."""
    window = field_of(config, "sliding_window") or 0
    if field_of(config, "use_sliding_window") is False:
        window = 0
    kinds = field_of(config, "layer_types")
    local = field_of(config, "attention_layers")
    if local:
        return [config.window_size if kind == "local" else 0 for kind in local]
    if not kinds:
        return [window] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


def layer_chunks(config: Any) -> list[int]:
    """The positions of a chunk of each layer that sees its own chunk only, else 0."""
    chunk = field_of(config, "attention_chunk_size") or 0
    kinds = field_of(config, "layer_types") or [""] * config.num_hidden_layers
    return [chunk if kind == "chunked_attention" else 0 for kind in kinds]


def config_geometries(
    config: Any, attending: Collection[int] | None = None
) -> dict[int, LayerGeometry]:
    """KV geometry of each layer as a transformers configuration names it; None: all attend."""
    geometries = {}
    sights = zip(layer_windows(config), layer_chunks(config), strict=True)
    layers = zip(layer_configs(config), sights, strict=True)
    for number, (layer, (window, chunk)) in enumerate(layers):
        if attending is not None and number not in attending:
            continue
        rank = field_of(layer, "kv_lora_rank")
        if rank:
            rope = field_of(layer, "qk_rope_head_dim") or 0
            geometries[number] = latent_geometry(rank, rope, window)
            continue
        heads = layer.num_attention_heads
        kv_heads = field_of(layer, "num_key_value_heads") or heads
        dim = field_of(layer, "head_dim") or layer.hidden_size // heads
        if layer.model_type == "gpt_bigcode":
            kv_heads = 1 if layer.multi_query else heads
        elif layer.model_type == "jetmoe":  # repeats K and V for each expert before it attends
            kv_heads, dim = kv_heads * layer.num_experts_per_tok, layer.kv_channels
        geometries[number] = LayerGeometry(kv_heads, dim, dim, window, chunk=chunk)
    return geometries | _indexer_geometries(config)


def _indexer_geometries(config: Any) -> dict[int, LayerGeometry]:
    """Of the keys of layers that choose what they see, but for those that share a choice."""
    width = field_of(config, "index_head_dim")
    kinds = field_of(config, "layer_types") or ()
    own = field_of(config, "indexer_types") or ["full"] * len(kinds)
    return {
        indexer_layer(layer): key_geometry(width)
        for layer, (kind, choice) in enumerate(zip(kinds, own, strict=True))
        if width and kind in _INDEXED and choice == "full"
    }


def module_geometries(model: nn.Module, config: Any) -> dict[int, LayerGeometry]:
    """The same, corrected by the widths of K and V projections where layers have their own.

    In a model with mixers only those layers attend that call attention, and a layer that reads the
    KV of another has that one's geometry. Raises RegistrationRefused where a width cannot be heads
    of the layer's width, where a layer attends twice, or where one caches latents otherwise than
    `engine/modules/latent.py` knows.
    """
    mixed = next(mixers(model), None) is not None
    geometries = config_geometries(config, attending_layers(model) if mixed else None)
    seen: set[int] = set()
    for _, layer, module in latent_layers(model):
        if layer not in geometries or layer in seen:
            raise _strange("its layers attend more than once in a forward pass")
        seen.add(layer)
        window = geometries[layer].window
        geometries[layer] = latent_geometry(module.kv_lora_rank, module.qk_rope_head_dim, window)
    seen |= _check_indexers(model, geometries)
    if any(known.v_in_k and layer not in seen for layer, known in geometries.items()):
        raise _strange("its attention caches latents in an unknown way")
    for name, layer, module in _projections(model):
        if layer not in geometries and mixed:
            continue
        if layer not in geometries or layer in seen:
            raise _strange("its layers attend more than once in a forward pass")
        seen.add(layer)
        usual = geometries[layer]
        dim = getattr(module, "head_dim", None) or usual.k_dim
        k_width = module.k_proj.out_features
        kv_heads = k_width // dim
        v_width = k_width if module.v_proj is None else module.v_proj.out_features
        if not kv_heads or k_width % dim or v_width % kv_heads:
            raise _strange(
                f"{name}: {k_width} values of K and {v_width} of V for a position do not divide "
                f"into heads of width {dim}"
            )
        geometries[layer] = replace(
            usual, num_kv_heads=kv_heads, k_dim=dim, v_dim=v_width // kv_heads
        )
    if not takes_interface(config):
        for layer, form, module in own_layers(model):
            heads = kv_heads_of(form, module) or geometries[layer].num_kv_heads
            geometries[layer] = replace(geometries[layer], num_kv_heads=heads)
    for reader, source in kv_sources(config).items():
        geometries[reader] = geometries[source]
    return geometries


def _check_indexers(model: nn.Module, geometries: Mapping[int, LayerGeometry]) -> set[int]:
    """The layers of their keys, each as `geometries` has it."""
    found: set[int] = set()
    for _, module in indexers(model):
        measures = read_indexer(module)
        if measures is None or indexer_layer(measures.layer) in found:
            raise _strange("its attention is sparse in an unknown way")
        found.add(indexer_layer(measures.layer))
        if geometries.get(indexer_layer(measures.layer)) != key_geometry(measures.width):
            raise _strange("its indexers are not those that its configuration names")
    if found != {layer for layer in geometries if is_indexer(layer)}:
        raise _strange("its indexers are not those that its configuration names")
    return found


def layer_configs(config: Any) -> list[Any]:
    """The configuration as each layer sees it (some types have options of single layers)."""
    count = getattr(config, "num_hidden_layers", None) or 0
    if getattr(config, "is_heterogeneous", False):
        return [config.per_layer_config[i] for i in range(count)]
    return [config] * count


def _projections(model: nn.Module) -> Iterator[tuple[str, int, Any]]:
    """Modules that know their layer and project K (V may come from the same projection)."""
    for name, module in model.named_modules():
        layer = getattr(module, "layer_idx", None)
        key = getattr(module, "k_proj", None)
        if isinstance(layer, int) and hasattr(key, "out_features") and hasattr(module, "v_proj"):
            yield name, layer, module


def _strange(what: str) -> RegistrationRefused:
    return RegistrationRefused("unknown_family", f"the model is not supported: {what}")


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A model without weights.

    tensors     every parameter and persistent buffer by name, on meta, in the module tree's order
    tied        name -> name of the tensor it shares, both in `tensors`
    skeleton    the module tree on meta, for the library's own weight conversions
    wrapper     what the files hold where that is more than the model: a multimodal wrapper
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
    wrapper: Wrapped | None = None

    def state_groups(self, dtype: torch.dtype) -> tuple[StateGroup, ...]:
        """What its mixers keep of a sequence when the model is hosted in `dtype`."""
        if self.task != "generate":
            return ()
        hidden_size = self.config.get_text_config().hidden_size
        try:
            states = state_shapes(self.skeleton, hidden_size, dtype)
        except Exception as error:  # modelling code keeps no contract
            raise RegistrationRefused(
                "bad_config",
                f"the states of a {self.config.model_type!r} with this configuration cannot be "
                f"computed: {type(error).__name__}: {error}",
            ) from error
        if any(0 in shape for shape, _ in states.values()):
            raise RegistrationRefused("bad_config", "the configuration asks for empty states")
        return grouped_states(states)

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The dtype tensor `name` is kept in when the model is hosted in `dtype`."""
        wanted = self.tensors[name].dtype
        if not wanted.is_floating_point:
            return wanted
        strict = getattr(self.skeleton, "_keep_in_fp32_modules_strict", None) or ()
        if any(re.search(rf"(?:^|\.){pattern}(?:\.|$)", name) for pattern in strict):
            return torch.float32
        return dtype

    @property
    def is_text_class(self) -> bool:
        """Whether it is the text part of a wrapper, hosted as a class of its own."""
        return self.wrapper is not None and self.config is not self.wrapper.config

    def in_files(self) -> tuple[Any, Mapping[str, str]]:
        """The modules that the files' names are of, and those names -> names in `tensors`."""
        if self.wrapper is None:
            return self.skeleton, {name: name for name in self.tensors}
        return self.wrapper.skeleton, self.wrapper.names


def layer_of(name: str) -> str:
    """The segment a tensor belongs to: "layer.N", or REST."""
    match = _LAYER.search(name)
    return f"layer.{int(match.group(1))}" if match else REST


def blueprint(config: Any, as_class: bool = False) -> Blueprint:
    """`as_class`: a wrapper is hosted as its text part's own class (wrapper.py).

    Raises RegistrationRefused for what cannot be hosted.
    """
    text = config.get_text_config()
    check_family(text)
    wrapper, hosted = None, config
    if is_wrapper(config):
        whole = _built(config, whole=True)
        if as_class:
            hosted = class_config(whole)
    skeleton = _built(hosted)
    check_attention(text, skeleton)
    if is_wrapper(config):
        names = text_names(whole, skeleton)
        if names is None:
            raise _strange("its text part cannot be told from its other parts")
        wrapper = Wrapped(config, whole, names)
    if next(mixers(skeleton), None) is None:
        _check_layers(text)
    tensors = dict(skeleton.state_dict())
    tied = {
        target: source
        for target, source in (getattr(skeleton, "all_tied_weights_keys", None) or {}).items()
        if target in tensors and source in tensors
    }
    return Blueprint(
        config=hosted,
        skeleton=skeleton,
        tensors=tensors,
        tied=tied,
        kv_groups=grouped(module_geometries(skeleton, text), kv_sources(text)),
        vocab_size=int(text.vocab_size),
        max_context=_max_context(text),
        wrapper=wrapper,
    )


def _check_layers(config: Any) -> None:
    """Of a model that keeps no states. Raises RegistrationRefused for layers that keep what nobody
    knows."""
    kinds = set(field_of(config, "layer_types") or ())
    first = next(iter(layer_configs(config)), None)
    if not getattr(first, "num_attention_heads", None):
        raise _refuse(config, "it has no attention heads")
    _check_context(config)  # which models of states alone need not have
    strange = sorted(kinds - _KNOWN_LAYER_TYPES)
    if strange:
        named = ", ".join(strange)
        raise _refuse(
            config, f"it has layers of type {named}, not full, sliding or chunked attention"
        )


def _refuse(config: Any, why: str) -> RegistrationRefused:
    return RegistrationRefused(
        "unknown_family", f"model type {config.model_type!r} is not supported: {why}"
    )


def _built(config: Any, whole: bool = False) -> nn.Module:
    """On meta. Raises RegistrationRefused."""
    try:
        with torch.device("meta"):
            return from_config(config, whole)
    except Exception as error:  # modelling code of 189 families: no contract on its error types
        raise RegistrationRefused(
            "bad_config",
            f"transformers cannot build a {config.model_type!r} from this configuration: "
            f"{type(error).__name__}: {error}",
        ) from error


def kv_groups(config: Any) -> tuple[KvGroup, ...]:
    """The layer groups of a configuration; nothing is built."""
    return grouped(config_geometries(config), kv_sources(config))


def grouped(layers: Mapping[int, LayerGeometry], sources: Mapping[int, int]) -> tuple[KvGroup, ...]:
    """Layers grouped by KV geometry, in the order of their first layer; those in `sources` beside
    the layers whose KV they read."""
    members: dict[LayerGeometry, list[int]] = {}
    for number, layer in layers.items():
        if number not in sources:
            members.setdefault(layer, []).append(number)
    return tuple(
        KvGroup(
            tuple(numbers),
            layer.num_kv_heads,
            layer.k_dim,
            layer.v_dim,
            window=layer.window,
            v_in_k=layer.v_in_k,
            chunk=layer.chunk,
            readers=tuple((reader, of) for reader, of in sources.items() if of in numbers),
        )
        for layer, numbers in members.items()
    )


def grouped_states(states: Mapping[StateKey, StateShape]) -> tuple[StateGroup, ...]:
    """States grouped by shape and dtype, in the order of their first layer."""
    members: dict[StateShape, list[StateKey]] = {}
    for key, shape in states.items():
        members.setdefault(shape, []).append(key)
    return tuple(
        StateGroup(tuple(keys), shape, str(dtype).removeprefix("torch."))
        for (shape, dtype), keys in members.items()
    )


def _max_context(config: Any) -> int:
    """Positions that come out right in any batch.

    "longrope" takes other frequencies for the whole batch as soon as its longest sequence passes
    the original length, whatever is in the cache: such models are hosted up to that length.
    """
    longest = int(context_of(config) or UNBOUNDED_CONTEXT)
    rope = getattr(config, "rope_parameters", None) or {}
    for kind in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if kind.get("rope_type") == "longrope":
            original = kind.get("original_max_position_embeddings")
            longest = min(longest, int(original or longest))
    return longest


def check_family(config: Any) -> None:
    """Raises RegistrationRefused for text that cannot be hosted, before anything is built."""
    refuse = functools.partial(_refuse, config)
    if any(getattr(config, name, None) is not None for name in _OTHER_SENSES):
        raise refuse("it takes other inputs than text")
    if getattr(config, "add_cross_attention", False):
        raise refuse("it has cross-attention")
    if not takes_interface(config) and not may_be_replaced(config):
        raise refuse("its attention code cannot use a paged KV cache")
    if field_of(config, "num_kv_shared_layers") and not shares_kv(config):
        raise refuse("its layers share KV, but the type does not say which")
    if not _may_keep_states(config):
        _check_layers(config)
    _check_count("vocab_size", "vocabulary size", getattr(config, "vocab_size", None))
    if context_of(config) is not None:
        _check_context(config)


def _may_keep_states(config: Any) -> bool:
    """What its states are is found by running its mixers; the probe sees whether that is all."""
    beside = type(config).__module__.replace("configuration_", "modeling_")
    try:
        return may_keep_states(importlib.import_module(beside))
    except ImportError:
        return True  # nobody knows


def _check_context(config: Any) -> None:
    _check_count("max_position_embeddings", "context length", context_of(config))


def _check_count(name: str, meaning: str, value: Any) -> None:
    if not isinstance(value, int) or not 1 <= value <= MAX_COUNT:
        raise RegistrationRefused(
            "bad_config", f"the configuration has no valid {meaning} ({name}: {value!r:.40})"
        )


def check_attention(config: Any, skeleton: nn.Module) -> None:
    """Raises RegistrationRefused for attention that cannot be ours in every layer."""
    if takes_interface(config):
        return
    layers = {layer for layer, _, _ in own_layers(skeleton)}
    if layers != set(range(config.num_hidden_layers)):
        raise _refuse(config, "its attention code cannot use a paged KV cache")
