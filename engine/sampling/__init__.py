"""From logits to token ids and logprobs, for all rows of a step at once.

What a request keeps between its steps is `engine/request.py`; a device with streams samples
by its own launches (`engine/gpu/device_sampling.py`) from what is laid out here.
"""

from engine.sampling.sampler import (
    PROMPT_SLICE,
    Logprobs,
    SampleOutput,
    not_finite,
    prompt_logprobs,
    sample,
)
from engine.sampling.sampling_batch import (
    PenaltyEntries,
    PendingTokens,
    SamplingBatch,
    SparseEdits,
    bring_masks,
    build_sampling,
    list_size,
)

__all__ = [
    "PROMPT_SLICE",
    "Logprobs",
    "PenaltyEntries",
    "PendingTokens",
    "SampleOutput",
    "SamplingBatch",
    "SparseEdits",
    "bring_masks",
    "build_sampling",
    "list_size",
    "not_finite",
    "prompt_logprobs",
    "sample",
]
