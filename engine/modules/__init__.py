"""A transformers model becomes ours: modules without weights, our attention, bound weights.

Does not know steps, schedules or where weights come from.
"""

from engine.modules.transformers_backend import (
    ModelBody,
    StepContext,
    bind_weights,
    buffers_to,
    build_skeleton,
    paged_attention_forward,
    step_context,
    unbind_weights,
)

__all__ = [
    "ModelBody",
    "StepContext",
    "bind_weights",
    "buffers_to",
    "build_skeleton",
    "experts",
    "own_attention",
    "paged_attention_forward",
    "quantized",
    "step_context",
    "text_part",
    "unbind_weights",
]
