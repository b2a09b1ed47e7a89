"""A transformers model becomes ours: modules without weights, our attention, bound weights.

Does not know steps, schedules or where weights come from.
"""

from engine.modules.transformers_backend import (
    ModelBody,
    StepContext,
    bind_weights,
    build_skeleton,
    step_context,
    unbind_weights,
)

__all__ = [
    "ModelBody",
    "StepContext",
    "bind_weights",
    "build_skeleton",
    "experts",
    "latent",
    "native_linears",
    "own_attention",
    "quantized",
    "state_mixers",
    "step_context",
    "text_part",
    "transformers_backend",
    "unbind_weights",
]
