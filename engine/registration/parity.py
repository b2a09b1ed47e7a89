"""The parity probe: does a family come out of our attention as it comes out of transformers' own?

A flag in the library is not enough (some families carry it and come out wrong), so every
registration runs a truncated model of the same configuration class, with random weights, through
both: chunked prefill and decodes over scattered blocks against one eager pass. Memory that was
never written is NaN, so that reading it shows.

Weights are drawn here and not by the family's own initialization: narrow models initialized as wide
ones attend to everything alike, biases of zero and norms of one hide whole terms, and a probe of
such a model passes what is wrong.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.errors import RegistrationRefused
from engine.memory.kv_cache import KvCache
from engine.memory.kv_geometry import module_geometries
from engine.memory.kv_plan import KvPlan, plan_kv
from engine.memory.page_pool import Owner, PagePool
from engine.packs.quantize import Schemes, replace_modules, rounded_twins
from engine.protocol import SamplingParams, Submit
from engine.registration.probe_size import probe_configs
from engine.request import Request
from engine.running.batch import ScheduledRow, build_batch
from engine.running.transformers_backend import (
    StepContext,
    bind_weights,
    build_skeleton,
    paged_attention_forward,
    step_context,
)
from kernels.paged_attention import LayerGeometry

TOLERANCE = 1e-4
BLOCK_TOKENS = 4
MIN_PAGE_BYTES = 1 << 13
MIN_PAGES, MAX_PAGES = 96, 768
ARENA_BYTES = 64 << 20
# Beyond the windows of a truncated model; the second is computed a token at a time.
PROBE_LENGTHS = (23, 9, 14)
PREFILL_CHUNK = 6
PROBE_ATTENTION = "polyhost_probe"
# A choice between experts is a step: where two are level, rounding chooses. Not so twice.
SEEDS = (0, 1)


# What modules say to attention beside its tensors; anything else must be empty.
UNDERSTOOD = frozenset({"dropout", "scaling", "sliding_window", "softcap", "s_aux", "position_ids"})


class Differs(Exception):
    """The family runs, but not as transformers runs it."""


@dataclass(slots=True)
class _Watched:
    """What the modules hand to attention."""

    layers: list[LayerGeometry]
    calls: list[int] = field(default_factory=list)

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Our attention, if what it is asked for is what it was planned for."""
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or layer >= len(self.layers):
            raise Differs("attends outside its decoder layers")
        self.calls.append(layer)
        wanted = self.layers[layer]
        got = LayerGeometry(key.shape[1], key.shape[3], value.shape[3], wanted.window)
        if got != wanted or query.shape[3] != key.shape[3]:
            raise Differs(f"hands {_widths(got)} to attention where {_widths(wanted)} is expected")
        window = kwargs.get("sliding_window") or 0
        if window not in (0, wanted.window):
            raise Differs(
                f"attends over {window} positions where {wanted.window or 'all'} are kept"
            )
        strange = sorted(
            name
            for name, said in kwargs.items()
            if name not in UNDERSTOOD and said is not None and not isinstance(said, bool)
        )
        if attention_mask is not None or strange:
            raise Differs(f"chooses by rules of its own what it attends to ({_named(strange)})")
        return paged_attention_forward(module, query, key, value, None, **kwargs)


def _named(strange: list[str]) -> str:
    return ", ".join(strange) or "a mask"


def _widths(layer: LayerGeometry) -> str:
    return f"{layer.num_kv_heads} heads of K {layer.k_dim} and V {layer.v_dim}"


def probe(config: Any, skeleton: nn.Module | None = None, quantization: str = "") -> float:
    """Largest difference between our path and eager attention, in deviations of the logits.

    `skeleton`: the whole model on meta, if there is one already. `quantization`: our side keeps
    its weights so, and the other has what these stand for: the loss does not count. Raises
    RegistrationRefused("parity") where it passes TOLERANCE or the family cannot run.
    """
    why = "no truncated model of it can be built"
    for small in probe_configs(config, skeleton):
        for seed in SEEDS:
            try:
                error = _largest_error(small, seed, quantization)
            except RegistrationRefused as refusal:
                why = str(refusal)
                break
            except Differs as difference:
                why = f"it {difference}"
                break
            except Exception as problem:  # noqa: BLE001 - modelling code keeps no contract
                why = f"it does not run over paged KV ({type(problem).__name__}: {problem})"
                break
            if error <= TOLERANCE:
                return error
            why = (
                f"it differs from transformers by {error:.1g} in its logits "
                f"(allowed {TOLERANCE:.0g})"
            )
    raise RegistrationRefused("parity", f"family {config.model_type!r} cannot be hosted: {why}")


def draw_weights(model: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Random values for every parameter and persistent buffer; tied ones share theirs.

    Matrices keep the scale of what passes through them; norms lie around one, buffers around what
    they are.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn: dict[str, torch.Tensor] = {}
    shared: dict[int, torch.Tensor] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, old in model.state_dict(keep_vars=True).items():
        if id(old) in shared:
            drawn[name] = shared[id(old)]
        elif not old.is_floating_point():
            drawn[name] = old
        else:
            noise = torch.randn(old.shape, generator=generator, dtype=torch.float32)
            if name not in parameters:
                noise = old.detach() + 0.1 * noise
            elif old.dim() > 1:
                noise *= 1.0 if id(old) in embeddings else old.shape[-1] ** -0.5
            elif name.endswith("weight"):
                noise = 1 + 0.2 * noise
            drawn[name] = shared[id(old)] = noise
    return drawn


def _largest_error(config: Any, seed: int, quantization: str = "") -> float:
    eager = build_skeleton(copy.deepcopy(config), torch.float32, "eager")
    weights = exact = draw_weights(eager, seed)
    schemes: Schemes = {}
    if quantization:
        tied = getattr(eager, "all_tied_weights_keys", None) or {}
        weights, exact, schemes = rounded_twins(eager, tied, weights, quantization)
    bind_weights(eager, exact)
    generator = torch.Generator().manual_seed(seed + 1)
    prompts = [
        torch.randint(1, config.vocab_size, (length,), generator=generator).tolist()
        for length in PROBE_LENGTHS
    ]
    with torch.inference_mode():
        expected = [
            eager(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].float()
            for prompt in prompts
        ]
        spread = torch.cat(expected).std().item()
        if not spread > 0:
            raise Differs("gives no finite logits")
        if _looks_ahead(eager, prompts[0], expected[0]):
            raise Differs("sees what comes after a token, as encoders do")
        try:
            return _Paged(config, weights, schemes).largest_error(prompts, expected) / spread
        finally:  # transformers' table is for ever, the model is not
            ALL_ATTENTION_FUNCTIONS.register(PROBE_ATTENTION, paged_attention_forward)


def _looks_ahead(eager: nn.Module, prompt: list[int], expected: torch.Tensor) -> bool:
    """Whether logits before the last token change with it."""
    other = torch.tensor([[*prompt[:-1], prompt[-1] % 2 + 1]])
    logits = eager(input_ids=other, use_cache=False).logits[0].float()
    return not torch.allclose(logits[:-1], expected[:-1], rtol=1e-3, atol=1e-3)


class _Paged:
    """The truncated model over paged KV: a pool full of holes, an arena full of NaN."""

    def __init__(self, config: Any, weights: dict[str, torch.Tensor], schemes: Schemes) -> None:
        ALL_ATTENTION_FUNCTIONS.register(PROBE_ATTENTION, self._attend)
        self.model = build_skeleton(copy.deepcopy(config), torch.float32, PROBE_ATTENTION)
        replace_modules(self.model, schemes)
        bind_weights(self.model, weights)
        layers = module_geometries(self.model, config)
        self.watched = _Watched(layers)
        block_bytes = max(map(_block_bytes, layers))
        page_bytes = max(MIN_PAGE_BYTES, 1 << (2 * block_bytes - 1).bit_length())
        num_pages = max(MIN_PAGES, min(MAX_PAGES, ARENA_BYTES // page_bytes))
        pool = PagePool(num_pages, page_bytes)
        self.plan: KvPlan = plan_kv(layers, torch.float32, BLOCK_TOKENS, page_bytes, num_pages)
        self.arena = torch.full((num_pages * page_bytes,), 0xFF, dtype=torch.uint8)
        stranger = Owner("stranger", "weights")
        pages = pool.alloc_run(stranger, num_pages).pages
        pool.release(stranger, [page for page in pages if page % 3])
        pool.retire(0)
        self.cache = KvCache(Owner("probe", "kv"), self.plan, pool, self.arena.device)

    def _attend(self, *args: Any, **kwargs: Any) -> Any:
        return self.watched.attend(*args, **kwargs)

    def largest_error(self, prompts: list[list[int]], expected: list[torch.Tensor]) -> float:
        """All prompts at once, in chunks, each step's logits against the eager ones."""
        requests = [_request(number, prompt) for number, prompt in enumerate(prompts)]
        for request in requests:
            request.kv = self.cache.new_kv("probe")
        error = 0.0
        while any(request.num_uncomputed for request in requests):
            rows = [
                ScheduledRow(request, min(PREFILL_CHUNK if i != 1 else 1, request.num_uncomputed))
                for i, request in enumerate(requests)
                if request.num_uncomputed
            ]
            logits, start = self._step(rows), 0
            for row in rows:
                request, done = row.request, row.request.num_computed
                wanted = expected[int(request.submit.request_id)][done : done + row.num_tokens]
                difference = (logits[start : start + row.num_tokens] - wanted).abs().max().item()
                error = max(error, difference if difference == difference else float("inf"))
                start += row.num_tokens
                request.num_computed += row.num_tokens
                self.cache.advance(row.kv, request.token_ids, request.num_computed, 0.0)
        return error

    def _step(self, rows: list[ScheduledRow]) -> torch.Tensor:
        for row in rows:
            # A chunk at a time, so that tables interleave and windows free what left them.
            self.cache.reserve(row.kv, row.end)
        batch = build_batch(rows, self.cache, self.arena.device)
        self.watched.calls.clear()
        # As steps ask for them: the logits of given tokens, in a given order.
        backwards = torch.arange(sum(row.num_tokens for row in rows)).flip(0)
        with step_context(StepContext(self.arena, self.plan, batch.groups)):
            logits: torch.Tensor = self.model(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                use_cache=False,
                logits_to_keep=backwards,
            ).logits[0]
        if sorted(self.watched.calls) != list(range(len(self.watched.layers))):
            raise Differs("has layers that do not attend once a pass through this interface")
        return logits.flip(0).float()


def _block_bytes(layer: LayerGeometry) -> int:
    return BLOCK_TOKENS * layer.num_kv_heads * (layer.k_dim + layer.v_dim) * 4


def _request(number: int, prompt: list[int]) -> Request:
    submit = Submit(str(number), 1, "probe", "probe", prompt, 1, SamplingParams(0.0), [])
    return Request.of(submit, 0.0)
