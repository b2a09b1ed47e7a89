"""The parity probe: does a family come out of our attention as it comes out of transformers' own?

A flag in the library is not enough (some families carry it and come out wrong), so every
registration runs a truncated model of the same configuration class, with random weights, through
both: chunked prefill and decodes over scattered blocks against one eager pass.
"""

import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from engine.batch import ScheduledRow, build_batch
from engine.errors import RegistrationRefused
from engine.kv_cache import KvCache
from engine.kv_plan import plan_kv
from engine.page_pool import Owner, PagePool
from engine.protocol import SamplingParams, Submit
from engine.request import Request
from engine.transformers_backend import (
    StepContext,
    bind_weights,
    build_skeleton,
    step_context,
)
from kernels.paged_attention import LayerGeometry

TOLERANCE = 1e-4
BLOCK_TOKENS = 4
PAGE_BYTES = 1 << 16
PROBE_LENGTHS = (23, 9, 14)
PREFILL_CHUNK = 6


def truncated(config: Any) -> Any:
    """The same class and options at probe size: two layers, everything narrow, fp32."""
    small = copy.deepcopy(config)
    small.num_hidden_layers = min(2, config.num_hidden_layers)
    if getattr(small, "layer_types", None):
        kinds = list(dict.fromkeys(config.layer_types))
        small.layer_types = (kinds * 2)[: small.num_hidden_layers]
    if getattr(small, "sliding_window", None):
        small.sliding_window = 8
    small.vocab_size = 128
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if hasattr(small, name):
            setattr(small, name, None)
    return small


def layer_windows(config: Any) -> list[int]:
    """The sliding window of each layer, 0 for full attention, as transformers applies it."""
    window = getattr(config, "sliding_window", None) or 0
    if getattr(config, "use_sliding_window", True) is False:
        window = 0
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return [window] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


def config_geometries(config: Any) -> list[LayerGeometry]:
    """KV geometry of each layer from a transformers configuration."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return [LayerGeometry(kv_heads, dim, dim, window) for window in layer_windows(config)]


def probe(config: Any) -> float:
    """Largest absolute difference of logits between our path and eager attention.

    Raises RegistrationRefused("parity") where it passes TOLERANCE or the family cannot run.
    """
    small = truncated(config)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            eager = AutoModelForCausalLM.from_config(
                copy.deepcopy(small), attn_implementation="eager", dtype=torch.float32
            ).eval()
        error = _largest_error(eager, small)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, IndexError) as problem:
        raise RegistrationRefused(
            "parity",
            f"family {config.model_type!r} does not run on the paged attention path "
            f"({type(problem).__name__}: {problem}); it cannot be hosted by this version",
        ) from problem
    if not error <= TOLERANCE:
        raise RegistrationRefused(
            "parity",
            f"family {config.model_type!r} differs from transformers by {error:.2g} in its logits "
            f"(allowed {TOLERANCE:.0g}); it cannot be hosted by this version",
        )
    return error


@torch.inference_mode()
def _largest_error(eager: nn.Module, config: Any) -> float:
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(0, config.vocab_size, (length,), generator=generator).tolist()
        for length in PROBE_LENGTHS
    ]
    expected = [
        eager(input_ids=torch.tensor([prompt]), use_cache=False).logits[0] for prompt in prompts
    ]
    pool = PagePool(256, PAGE_BYTES)
    plan = plan_kv(
        config_geometries(config), torch.float32, BLOCK_TOKENS, PAGE_BYTES, pool.num_pages
    )
    arena = torch.full((256 * PAGE_BYTES,), 0xFF, dtype=torch.uint8)
    cache = KvCache(Owner("probe", "kv"), plan, pool, arena.device)
    model = build_skeleton(copy.deepcopy(config), torch.float32)
    bind_weights(model, dict(eager.state_dict(keep_vars=True)))
    requests = [_request(i, prompt) for i, prompt in enumerate(prompts)]
    for request in requests:
        request.kv = cache.new_kv("probe")
    error = 0.0
    while any(request.num_uncomputed for request in requests):
        rows = [
            ScheduledRow(request, min(PREFILL_CHUNK if i != 1 else 1, request.num_uncomputed))
            for i, request in enumerate(requests)
            if request.num_uncomputed
        ]
        for row in rows:
            # A chunk at a time, so that tables interleave and windows free what left them.
            cache.reserve(row.kv, row.end)
        batch = build_batch(rows, cache, arena.device)
        with step_context(StepContext(arena, plan, batch.groups)):
            logits = model(
                input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False
            ).logits[0]
        start = 0
        for row in rows:
            request, done = row.request, row.request.num_computed
            wanted = expected[int(request.submit.request_id)][done : done + row.num_tokens]
            got = logits[start : start + row.num_tokens]
            difference = (got - wanted).abs().max().item()
            error = max(error, difference if difference == difference else float("inf"))
            start += row.num_tokens
            request.num_computed += row.num_tokens
            cache.advance(row.kv, request.token_ids, request.num_computed, 0.0)
    return error


def _request(number: int, prompt: list[int]) -> Request:
    submit = Submit(str(number), 1, "probe", "probe", prompt, 1, SamplingParams(0.0), [])
    return Request.of(submit, 0.0)
