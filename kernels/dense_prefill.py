"""Attention of prompts that are whole in a step, by cuDNN over K and V as the step computed them.

    heads  [T, heads + 2 kv_heads, dim]  q, k, v of the step's tokens, q and k rotated
    rows   (first token, length) of each prompt; nothing of it was cached before
    out    [T, heads, dim]               contiguous; tokens of no row are left alone

    o_i = softmax_j(scale q_i . k_j) v_j        0 <= j <= i, within a row

The paged kernel reads K and V from the cache and takes any row; this takes what cuDNN can, and is
for long prompts. Published figures of causal attention on an H100 are 450 to 600 TFLOP/s for cuDNN,
280 to 380 are expected of the paged kernel; which lengths are faster is the GPU run's to say.

cuDNN builds a plan for every shape it has not met, which has been reported to take 0.4 s (torch
2.11). So a row is one call, and its length is padded to one of few: behind a causal mask, zeros at
the end change nothing. A row that has such a length is read where it lies, others are copied once;
with the same strides, so that one plan serves both. Plans are kept for each thread.
"""

from collections.abc import Sequence

import torch
from torch.nn import functional

from kernels.paged_attention import LayerGeometry
from kernels.prefill_shape import HOPPER, capability
from kernels.triton_api import next_power_of_2

Row = tuple[int, int]

# The shortest prompt that is attended this way. None: none is, until a GPU has measured it.
LEAST_LENGTH: int | None = None
# Lengths between a power of two and the next: an eighth is padded at most.
STEPS = 8
MAX_DIM = 128


def takes(
    rows: Sequence[Row],
    layer: LayerGeometry,
    softcap: float,
    has_sinks: bool,
    device: torch.device,
) -> bool:
    """Whether these rows are attended here: all long enough, and nothing that cuDNN has not."""
    if LEAST_LENGTH is None or not rows or softcap or has_sinks:
        return False
    lengths = [length for _, length in rows]
    return (
        min(lengths) >= LEAST_LENGTH
        and (layer.window == 0 or layer.window >= max(lengths))
        and layer.k_dim == layer.v_dim <= MAX_DIM
        and layer.k_dim % 8 == 0
        and capability(device) >= HOPPER
    )


def padded_length(length: int) -> int:
    """The next of the lengths that have a plan."""
    step = max(1, next_power_of_2(length) // (2 * STEPS))
    return -(-length // step) * step


def dense_prefill(
    heads: torch.Tensor,
    rows: Sequence[Row],
    num_kv_heads: int,
    out: torch.Tensor,
    scale: float,
) -> None:
    """Attend the rows into `out`, one call a row. Elsewhere than on CUDA by torch's own attention.

    Raises RuntimeError where cuDNN has no plan for a shape.
    """
    num_heads = heads.shape[1] - 2 * num_kv_heads
    for start, length in rows:
        size = padded_length(length)
        one = heads[start : start + length]
        if size != length:
            one = heads.new_zeros(size, *heads.shape[1:])
            one[:length] = heads[start : start + length]
        wide = one.transpose(0, 1)[None]
        keys = num_heads + num_kv_heads
        query, key, value = wide[:, :num_heads], wide[:, num_heads:keys], wide[:, keys:]
        attended = _attend(query, key, value, scale)[0, :, :length]
        out[start : start + length] = attended.transpose(0, 1)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """[1, heads, length, dim], causal. Directly, for `sdpa_kernel` switches for all threads."""
    if query.device.type != "cuda":
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=True
        )
    call = torch.ops.aten._scaled_dot_product_cudnn_attention
    result: torch.Tensor = call(query, key, value, None, False, 0.0, True, False, scale=scale)[0]
    return result
