"""A transformers model becomes ours: modules without weights, our attention, bound weights.

Does not know steps, schedules or where weights come from.
"""

__all__ = [
    "experts",
    "indexers",
    "latent",
    "native_linears",
    "own_attention",
    "quantized",
    "state_mixers",
    "text_part",
    "transformers_backend",
]
