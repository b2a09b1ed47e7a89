"""KV geometry of each layer: heads, widths and window, from a configuration and from its modules.

Two sources that have to agree with what the modules hand to attention, which the parity probe
compares on a truncated model: the configuration says it before anything is built, and projections
of the real skeleton say it where families depart from the usual names (other KV heads in window
layers, V narrower than K).
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from engine.errors import RegistrationRefused
from kernels.paged_attention import LayerGeometry


def layer_windows(config: Any) -> list[int]:
    """The sliding window of each layer, 0 for full attention, as transformers applies it."""
    window = getattr(config, "sliding_window", None) or 0
    if getattr(config, "use_sliding_window", True) is False:
        window = 0
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return [window] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


def config_geometries(config: Any) -> list[LayerGeometry]:
    """KV geometry of each layer as a transformers configuration names it."""
    geometries = []
    for layer, window in zip(layer_configs(config), layer_windows(config), strict=True):
        heads = layer.num_attention_heads
        kv_heads = getattr(layer, "num_key_value_heads", None) or heads
        dim = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        if layer.model_type == "gpt_bigcode":
            kv_heads = 1 if layer.multi_query else heads
        elif layer.model_type == "jetmoe":  # repeats K and V for each expert before it attends
            kv_heads, dim = kv_heads * layer.num_experts_per_tok, layer.kv_channels
        geometries.append(LayerGeometry(kv_heads, dim, dim, window))
    return geometries


def module_geometries(model: nn.Module, config: Any) -> list[LayerGeometry]:
    """The same, corrected by the widths of K and V projections where layers have their own.

    Raises RegistrationRefused where a width cannot be heads of the layer's width, or where a layer
    attends twice.
    """
    geometries = config_geometries(config)
    seen: set[int] = set()
    for name, layer, module in _projections(model):
        if layer >= len(geometries) or layer in seen:
            raise _strange("its layers attend more than once a pass")
        seen.add(layer)
        usual = geometries[layer]
        dim = getattr(module, "head_dim", None) or usual.k_dim
        k_width = module.k_proj.out_features
        kv_heads = k_width // dim
        v_width = k_width if module.v_proj is None else module.v_proj.out_features
        if not kv_heads or k_width % dim or v_width % kv_heads:
            raise _strange(
                f"{name}: {k_width} values of K and {v_width} of V a position are not heads of "
                f"width {dim}"
            )
        geometries[layer] = LayerGeometry(kv_heads, dim, v_width // kv_heads, usual.window)
    return geometries


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
    return RegistrationRefused("unknown_family", f"the model cannot be hosted: {what}")
