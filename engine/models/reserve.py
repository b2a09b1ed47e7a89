"""What a step needs of the device outside the arena: activations, attention, logits. Pure.

An upper estimate from the pack's index alone, so that a model whose steps would not fit is refused
before it is loaded, with figures, and not by a failed allocation under load. It follows the torch
reference of attention (`kernels/paged_attention.py`), which gathers K and V of the rows at hand and
builds a mask; a kernel that reads pages in place needs less.
"""

import math

import torch

from engine.config import EngineConfig
from engine.modules.indexers import SCORE_TENSORS
from engine.modules.latent import SLICE_BYTES
from engine.modules.state_mixers import CONV
from engine.pack import KvGroup, PackIndex, is_indexer
from engine.sampling import PROMPT_SLICE
from engine.scheduling import STEP_TOKENS
from kernels.expert_products import BETWEEN_BYTES
from kernels.int4_blocks import COLUMNS, FORMS, ROWS
from kernels.sparse_attention import PIECE_BYTES

# Alive at once around a gated MLP: gate, up, the activated gate, their product.
WIDE_TENSORS = 4
# Residual, normalised input and its float32 copies, attention output.
HIDDEN_TENSORS = 8
# Of float32 logits: as the model gives them, shifted, probabilities, and float64 running sums.
LOGIT_BYTES = 4 + 4 + 4 + 4 + 8
# Slots of a mixture's rows in C++ and the same rows rounded or widened (kernels/native/experts.h).
EXPERTS_BYTES = 64 << 20
# On a device: between the launches of kernels/expert_products.py, and their result.
DEVICE_EXPERTS_BYTES = BETWEEN_BYTES + (64 << 20)
# Projections to query heads, alone or fused with those to keys and values.
QUERY_NAMES = ("q_proj.", "q_b_proj.")
FUSED_NAMES = ("qkv_proj.", "c_attn.", "query_key_value.", "att_proj.", "Wqkv.")
# Of layers that cache latents: what expands them, and the projection behind attention.
LATENT_NAME, OUTPUT_NAME = "kv_b_proj.weight", "o_proj.weight"
LEAST_HEAD = 64
# As wide as a latent a head, alive at once: the query absorbed, joined and gathered, the result as
# attention gives it, cut, and laid out for the product behind it.
LATENT_TENSORS = 6
# Of indexers: what weighs their heads, and the positions that published models choose at most.
HEAD_WEIGHTS, CHOSEN = "indexer.weights_proj.weight", 2048
LAYERS_TABLE = "embed_tokens_per_layer."
# Decode rows are padded to the longest table of their group, at most twice their own.
PADDING = 2


def step_bytes(index: PackIndex, config: EngineConfig) -> int:
    """Bytes at most for a step of `max_batch_tokens` tokens in `max_num_seqs` rows."""
    if index.encoder is not None:
        return _encoder_bytes(index, config)
    tokens = config.max_batch_tokens
    # Of a prompt's logprobs so many positions are worked on at once.
    rows = max(min(config.max_num_seqs, tokens), PROMPT_SLICE)
    item = _item_bytes(index.dtype)
    hidden, widest = _widths(index)
    activations = tokens * item * (WIDE_TENSORS * widest + HIDDEN_TENSORS * hidden)
    logits = rows * index.vocab_size * (LOGIT_BYTES + item)
    if any(".experts." in entry.name for entry in index.tensors):
        activations += DEVICE_EXPERTS_BYTES if config.attention_in_place else EXPERTS_BYTES
    activations += max(
        (_latent_bytes(group, config, index) for group in index.kv_groups), default=0
    )
    states = _state_bytes(index, config)
    if config.attention_in_place:
        return activations + logits + states
    attention = max(
        (_attention_bytes(group, config, index) for group in index.kv_groups), default=0
    )
    return activations + logits + max(attention, states)


def _encoder_bytes(index: PackIndex, config: EngineConfig) -> int:
    """Its inputs are computed whole, so that the longest one makes the largest step."""
    assert index.encoder is not None
    tokens = max(min(config.max_batch_tokens, STEP_TOKENS), index.max_context)
    item = _item_bytes(index.dtype)
    hidden, _ = _widths(index)
    shapes = [e.shape for e in index.tensors if len(e.shape) == 2 and "embeddings" not in e.name]
    widest = max((max(shape) for shape in shapes), default=hidden)
    activations = tokens * item * (WIDE_TENSORS * widest + HIDDEN_TENSORS * hidden)
    # Pooling is in float32; a step may be all inputs of one token.
    return activations + tokens * 4 * (hidden + index.encoder.dim)


def _attention_bytes(group: KvGroup, config: EngineConfig, index: PackIndex) -> int:
    """A prefill chunk over the whole context, or decode rows over all KV there can be."""
    if is_indexer(group.layers[0]):
        return _indexer_bytes(group, config, index)
    item = _item_bytes(index.kv_dtype)
    context = index.max_context
    chunk = min(config.max_batch_tokens, context)
    if group.window or group.chunk:
        context = min(context, max(group.window, group.chunk) + chunk)
    per_token = group.values_per_token // len(group.layers) * item
    heads = (
        latent_heads(group, index) if group.v_in_k else _query_width(group, index) // group.k_dim
    )
    heads = max(group.num_kv_heads, heads)
    mask = -(-heads // group.num_kv_heads) * chunk * context * (1 + item)
    if group.v_in_k:
        # Either way some heads at a time, one at least, and a mask that they share.
        own = max(3 * context * per_token, chunk * context * (1 + item))
        mask = max(own, min(heads * own, SLICE_BYTES)) + chunk * context * (1 + item)
    arena_tokens = config.arena_bytes // (per_token * len(group.layers)) + 1
    cached = min(config.max_num_seqs * context, PADDING * arena_tokens)
    scores = cached * heads * 4 * 2
    return max(context * per_token + mask, cached * per_token + scores)


def _indexer_bytes(group: KvGroup, config: EngineConfig, index: PackIndex) -> int:
    """Keys of the rows at hand, also as float32; scores of some queries, one at least; what is
    chosen for the step. What attention gathers of that is less than all it could attend to."""
    item, context = _item_bytes(index.kv_dtype), index.max_context
    heads = max((e.shape[0] for e in index.tensors if HEAD_WEIGHTS in e.name), default=LEAST_HEAD)
    arena_tokens = config.arena_bytes // (group.values_per_token * item) + 1
    cached = max(context, min(config.max_num_seqs * context, PADDING * arena_tokens))
    keys = cached * group.k_dim * (item + 4)
    query = heads * context * 4 * SCORE_TENSORS
    scores = max(query, min(PIECE_BYTES, config.max_batch_tokens * query))
    chosen = config.max_batch_tokens * min(context, CHOSEN) * 16
    return keys + scores + chosen


def _state_bytes(index: PackIndex, config: EngineConfig) -> int:
    """Copies of one layer's states of all rows: as they are read, and as they will be written.

    A device's kernels compute where states lie. Mixers without a convolution are cut by rows
    (`engine/modules/state_mixers.py`) and copy there, too.
    """
    layers: dict[int, dict[str, int]] = {}
    for group in index.states:
        size = math.prod(group.shape) * _item_bytes(group.dtype)
        for layer, name in group.states:
            layers.setdefault(layer, {})[name] = size
    if config.attention_in_place:
        layers = {layer: kept for layer, kept in layers.items() if CONV not in kept}
    num_rows = min(config.max_num_seqs, config.max_batch_tokens)
    return 2 * num_rows * max((sum(kept.values()) for kept in layers.values()), default=0)


def _latent_bytes(group: KvGroup, config: EngineConfig, index: PackIndex) -> int:
    """Queries and results that are as wide as latents."""
    if not group.v_in_k or is_indexer(group.layers[0]):
        return 0
    heads = latent_heads(group, index)
    return config.max_batch_tokens * heads * group.k_dim * _item_bytes(index.dtype) * LATENT_TENSORS


def latent_heads(group: KvGroup, index: PackIndex) -> int:
    """Query heads, of which the index says nothing: rotated values of all heads by those of one.

    kv_b_proj has nope + v_dim rows a head, the query's projection nope + rope, and the output's
    v_dim columns.
    """
    rope, expanded, query, output = group.k_dim - group.v_dim, 0, 0, 0
    for entry in index.tensors:
        if len(entry.shape) < 2:
            continue
        rows, columns = entry.shape[0], entry.shape[-1]
        if entry.scheme in FORMS:
            rows, columns = rows * ROWS, entry.shape[1] * COLUMNS
        if LATENT_NAME in entry.name:
            expanded = max(expanded, rows)
        elif any(name in entry.name for name in QUERY_NAMES):
            query = max(query, rows)
        elif OUTPUT_NAME in entry.name:
            output = max(output, columns)
    return -(-(query - expanded + output) // rope) if rope else expanded // LEAST_HEAD


def _query_width(group: KvGroup, index: PackIndex) -> int:
    """Width of all query heads together, of the widest layer."""
    width = 0
    fused = group.num_kv_heads * (group.k_dim + group.v_dim)
    for entry in index.tensors:
        if len(entry.shape) == 2:
            if any(name in entry.name for name in QUERY_NAMES):
                width = max(width, entry.shape[0])
            elif any(name in entry.name for name in FUSED_NAMES):
                width = max(width, max(entry.shape) - fused)
    return width or 2 * _widths(index)[0]


def _widths(index: PackIndex) -> tuple[int, int]:
    """(hidden size, widest activation of a layer): the vocabulary's tensors do not count. A table
    of all layers has a row an id, and in it a part for each layer: only the row is computed with.
    """
    hidden, widest = 1, 1
    for entry in index.tensors:
        if len(entry.shape) < 2:
            continue
        if LAYERS_TABLE in entry.name:
            widest = max(widest, entry.shape[-1])
        elif index.vocab_size in entry.shape[-2:]:
            hidden = max(hidden, min(entry.shape[-2:]))
        else:
            widest = max(widest, *entry.shape[-2:])
    return hidden, max(hidden, widest)


def _item_bytes(dtype: str) -> int:
    found = getattr(torch, dtype)
    assert isinstance(found, torch.dtype)
    return found.itemsize
