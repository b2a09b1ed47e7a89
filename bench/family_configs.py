"""A tiny configuration of every causal LM and multimodal type transformers registers.

The data is family_configs.json. Each is a type's own defaults with everything made small, then what
the type needs on top: options that its defaults leave out (experts, sinks, several kinds of
layers), and those that have to fit together. Of a wrapper the text part is made small, and its
towers shallow. Windows are far below the prompts of the parity probe. Nothing here knows which
types can be hosted.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from engine.registration.wrapper import set_text_config

ARCHITECTURES: Mapping[str, str] = {
    **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    **MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
}
MODEL_TYPES = tuple(sorted(ARCHITECTURES))

_DATA: Mapping[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
TINY: Mapping[str, Any] = _DATA["tiny"]
"""By transformers' common names; a type takes those it has."""
OVERRIDES: Mapping[str, Mapping[str, Any]] = _DATA["overrides"]
"""By type."""
WRAPPERS: Mapping[str, Mapping[str, Any]] = _DATA["wrappers"]
"""By type of a wrapper: what its text part needs (`text`; null: it cannot be made small, and is
refused before it is built), and its other parts (`parts`)."""
_HEADS_BY_LAYER = "num_attention_heads_per_layer"
_BY_LAYER = ("layer_types", "depths")
_LAYER_LISTS = ("layer_types", "mlp_layer_types", "layers_block_type", _HEADS_BY_LAYER)


def tiny_config(model_type: str) -> Any:
    """A configuration object of this type, its own class, as its model would be saved."""
    config = _tiny(model_type)
    config.architectures = [ARCHITECTURES[model_type]]
    return config


def _tiny(model_type: str) -> Any:
    special = dict(OVERRIDES.get(model_type, {}))
    config_class = CONFIG_MAPPING[model_type]
    if "text_config" in special:
        return config_class(**special)
    if model_type in WRAPPERS:
        return _tiny_wrapper(config_class(**WRAPPERS[model_type].get("parts", {})), model_type)
    defaults = config_class()
    if _is_composite(defaults):
        return _tiny_wrapper(defaults, model_type)
    return AutoConfig.for_model(model_type, **(_small(defaults) | special))


def _tiny_wrapper(config: Any, model_type: str) -> Any:
    try:
        text = config.get_text_config()
    except ValueError:  # several, of which none is judged
        return config
    if config.is_encoder_decoder:
        return config
    own = WRAPPERS.get(model_type, {}).get("text", {})
    if own is None:
        return config
    small = type(text)(**{**_small(text), **OVERRIDES.get(text.model_type, {}), **own})
    for part in vars(config).values():
        if isinstance(part, PretrainedConfig):
            by_layer = any(getattr(part, name, None) for name in _BY_LAYER)
            towers = {} if by_layer else {"num_hidden_layers": 2, "depth": 2}
            for name, value in (towers | {"out_hidden_size": small.hidden_size}).items():
                if isinstance(getattr(part, name, None), int):
                    setattr(part, name, value)
    return set_text_config(config, small)


def _small(defaults: Any) -> dict[str, Any]:
    """The type's defaults that TINY names, made small."""
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
    return options


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
