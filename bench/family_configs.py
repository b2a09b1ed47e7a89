"""A tiny configuration of every causal LM type transformers registers (family_configs.json).

Each is a type's own defaults with everything made small, then what the type needs on top: options
that its defaults leave out (experts, sinks, several kinds of layers), and those that have to fit
together. Windows are far below the prompts of the parity probe. Nothing here knows which types can
be hosted.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

MODEL_TYPES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))

_DATA: Mapping[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
TINY: Mapping[str, Any] = _DATA["tiny"]
"""By transformers' common names; a type takes those it has."""
OVERRIDES: Mapping[str, Mapping[str, Any]] = _DATA["overrides"]
"""By type."""
_HEADS_BY_LAYER = "num_attention_heads_per_layer"
_LAYER_LISTS = ("layer_types", "mlp_layer_types", "layers_block_type", _HEADS_BY_LAYER)


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
