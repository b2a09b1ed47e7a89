"""A transformers model becomes ours: modules without weights, our attention, bound weights.

Does not know steps, schedules or where weights come from.
"""

from engine.modules.transformers_backend import (
    Int8Linear,
    ModelBody,
    StepContext,
    bind_weights,
    buffers_to,
    build_skeleton,
    is_lookup,
    paged_attention_forward,
    parameters_on_meta,
    replace_modules,
    step_context,
    unbind_weights,
)

__all__ = [
    "Int8Linear",
    "ModelBody",
    "StepContext",
    "bind_weights",
    "buffers_to",
    "build_skeleton",
    "is_lookup",
    "paged_attention_forward",
    "parameters_on_meta",
    "replace_modules",
    "step_context",
    "unbind_weights",
]
