"""Layers that keep no KV of their own: which earlier layer's they read.

Some types (Gemma 3n, Gemma 4 E2B and E4B) compute keys and values in their first layers only. A
later layer has queries, and attends over what the last of those layers with its `layer_types` has
written. transformers says so in `kv_sharing_modes`, by layer: None, "store" (the last of its type
with KV of its own) or "reuse".

    kv_sources(config)   reader -> the layer whose KV it reads

Only sources have KV in pages, so a token costs what the architecture needs at least. A reader
belongs to the layer group of its source (`KvGroup.readers`): it has the source's place in every
table and writes nothing there (`KvPlan.writes`). Whether that is what the modules do, the parity
probe finds out.
"""

from collections.abc import Sequence
from typing import Any

from engine.errors import RegistrationRefused

STORE, REUSE = "store", "reuse"


def shares_kv(config: Any) -> bool:
    """Whether the type's class says which layers read the KV of others."""
    return hasattr(type(config), "kv_sharing_modes")


def sharing_modes(config: Any) -> Sequence[str]:
    """By layer: "", STORE or REUSE. Raises RegistrationRefused for what they cannot be."""
    if not shares_kv(config):
        return [""] * (getattr(config, "num_hidden_layers", None) or 0)
    try:
        modes = [mode or "" for mode in config.kv_sharing_modes]
    except (ValueError, IndexError, TypeError) as error:
        raise RegistrationRefused(
            "bad_config", f"the configuration does not say which layers share KV: {error}"
        ) from error
    strange = sorted(set(modes) - {"", STORE, REUSE})
    if strange:
        raise _strange(f"its layers share KV in an unknown way ({', '.join(strange)})")
    return modes


def kv_sources(config: Any) -> dict[int, int]:
    """Layers that read the KV of an earlier one -> that one. Raises RegistrationRefused."""
    sources: dict[int, int] = {}
    stored: dict[str, int] = {}
    for layer, mode in enumerate(sharing_modes(config)):
        if not mode:
            continue
        kind = config.layer_types[layer]
        if mode == STORE:
            stored[kind] = layer
        elif kind not in stored:
            raise _strange(f"no layer before layer {layer} stores the KV that it reads")
        else:
            sources[layer] = stored[kind]
    return sources


def _strange(what: str) -> RegistrationRefused:
    return RegistrationRefused("unknown_family", f"the model is not supported: {what}")
