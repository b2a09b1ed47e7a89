"""The parity probe: does a family come out of our attention as it comes out of transformers' own?

A flag in the library is not enough (some families carry it and come out wrong), so every
registration runs a truncated model of the same configuration class, with random weights, through
both: chunked prefill and decodes over scattered blocks against one eager pass. Memory that was
never written is NaN, so that reading it shows.

Weights are drawn here and not by the family's own initialization: narrow models initialized as wide
ones attend to everything alike, biases of zero and norms of one hide whole terms, and a probe of
such a model passes what is wrong.

A multimodal wrapper is held to its own logits, whether it is hosted flat or as its text part's
class; whether that class says what the wrapper says at all, `agrees` finds out first.

Encoders (`probe_encoder`): do an architecture's rows come out of a ragged batch as they should? A
truncated model, inputs of unlike lengths with padding tokens and both segments among them: once all
in one flat batch, as the engine runs them, and once each alone through transformers' own model with
eager attention. Windows are cut so that the inputs pass them.
"""

import copy
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.encoders import FAMILIES, EncoderModel, build_encoder, build_encoder_batch, pooled
from engine.encoding import Encoding
from engine.errors import RegistrationRefused
from engine.memory import KvCache, KvPlan, Owner, PagePool, plan_pack
from engine.modules.indexers import NO_MASK
from engine.modules.latent import absorb, is_latent
from engine.modules.quantized import replace_modules
from engine.modules.state_mixers import StepStates, mixers, state_shapes
from engine.modules.transformers_backend import (
    StepContext,
    bind_weights,
    build_skeleton,
    paged_attention_forward,
    step_context,
)
from engine.pack import SCALE_SUFFIX, EncoderRecord, Schemes, Task, is_indexer
from engine.protocol import EncodeInputs, SamplingParams, Submit
from engine.registration.blueprint import (
    Blueprint,
    grouped,
    grouped_states,
    module_geometries,
)
from engine.registration.encoder_families import longest_input
from engine.registration.kv_sharing import kv_sources
from engine.registration.probe_size import probe_configs
from engine.registration.quantize import rounded_twins
from engine.registration.wrapper import class_config, text_names
from engine.request import Request
from engine.running import ScheduledRow, build_batch
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
UNDERSTOOD = frozenset(
    {
        *("dropout", "scaling", "sliding_window", "softcap", "s_aux", "position_ids", "slopes"),
        *("indices", "block_indices"),
    }
)
ENCODER_WINDOW = 8
ENCODER_VOCAB = 128
ENCODER_LENGTHS = (23, 1, 9, 14, 9, 2)

logger = logging.getLogger(__name__)


class Differs(Exception):
    """The family runs, but not as transformers runs it."""


@dataclass(slots=True)
class _Watched:
    """What the modules hand to attention."""

    layers: Mapping[int, LayerGeometry]
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
        if not isinstance(layer, int) or layer not in self.layers:
            raise Differs("attends outside its decoder layers")
        self.calls.append(layer)
        wanted = self.layers[layer]
        got = replace(wanted, num_kv_heads=key.shape[1], k_dim=key.shape[3], v_dim=value.shape[3])
        own = absorb(module, query[0]) if is_latent(module) else query[0]
        if got != wanted or own.shape[2] != key.shape[3]:
            raise Differs(f"passes {_widths(got)} to attention instead of {_widths(wanted)}")
        window = kwargs.get("sliding_window") or 0
        if window not in (0, wanted.window):
            raise Differs(f"attends over {window} positions instead of {wanted.window or 'all'}")
        strange = sorted(
            name
            for name, said in kwargs.items()
            if name not in UNDERSTOOD and said is not None and not isinstance(said, bool)
        )
        if (attention_mask is not None and attention_mask is not NO_MASK) or strange:
            raise Differs(f"uses an attention mask of its own ({_named(strange)})")
        return paged_attention_forward(module, query, key, value, None, **kwargs)


def _named(strange: list[str]) -> str:
    return ", ".join(strange) or "a mask"


def _widths(layer: LayerGeometry) -> str:
    return f"{layer.num_kv_heads} heads of K {layer.k_dim} and V {layer.v_dim}"


def probe_model(plan: Blueprint, quantization: str = "") -> float:
    """As `probe` and `probe_encoder`, whichever the model needs."""
    if plan.encoder is not None:
        return probe_encoder(plan)
    config = plan.wrapper.config if plan.wrapper else plan.config
    return probe(config, quantization=quantization, as_class=plan.is_text_class)


def probe(
    config: Any,
    skeleton: nn.Module | None = None,
    quantization: str = "",
    as_class: bool = False,
) -> float:
    """Largest difference between our path and eager attention, in deviations of the logits.

    `skeleton`: the whole model on meta, if there is one already. `quantization`: our side keeps
    its weights so, and the other has what these stand for: the loss does not count. `as_class`: our
    side is the class of the wrapper's text part. Raises RegistrationRefused("parity") where it
    passes TOLERANCE or the family cannot run.
    """
    why = "no small model of this type could be built for the parity check"
    for small in probe_configs(config, skeleton):
        for seed in SEEDS:
            try:
                error = _largest_error(small, seed, quantization, as_class)
            except RegistrationRefused as refusal:
                why = str(refusal)
                break
            except Differs as difference:
                why = f"it {difference}"
                break
            except Exception as problem:  # noqa: BLE001 - modelling code keeps no contract
                why = f"it cannot run with a paged KV cache ({type(problem).__name__}: {problem})"
                break
            if error <= TOLERANCE:
                return error
            why = f"its logits differ from transformers by {error:.1g} (allowed {TOLERANCE:.0g})"
    text = f"model type {config.model_type!r} failed the parity check: {why}"
    raise RegistrationRefused("parity", text)


def draw_weights(model: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Random values for every parameter and persistent buffer; tied ones share theirs.

    Matrices keep the scale of what passes through them; norms lie around one, buffers around what
    they are. Those of mixers stay as they are: some belong together, as a decay and its powers.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn: dict[str, torch.Tensor] = {}
    shared: dict[int, torch.Tensor] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    computed = {id(buffer) for mixer in mixers(model) for buffer in mixer.buffers()}
    embeddings = {
        id(module.get_parameter("weight"))
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module._parameters  # a tower's has none
    }
    for name, old in model.state_dict(keep_vars=True).items():
        if id(old) in shared:
            drawn[name] = shared[id(old)]
        elif not old.is_floating_point() or id(old) in computed:
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


def agrees(config: Any) -> bool:
    """Whether a wrapper's text part has a class of its own that says what the wrapper says."""
    try:
        small = next(probe_configs(config))
        return all(_class_error(small, seed) <= TOLERANCE for seed in SEEDS)
    except Exception as problem:  # noqa: BLE001 - modelling code keeps no contract
        logger.debug("the text class of %s does not run: %s", config.model_type, problem)
        return False


@torch.inference_mode()
def _class_error(config: Any, seed: int) -> float:
    """Between a wrapper and its text part's class, in deviations of the logits."""
    wrapper = build_skeleton(copy.deepcopy(config), torch.float32, "eager")
    weights = draw_weights(wrapper, seed)
    bind_weights(wrapper, weights)
    text = class_config(wrapper)
    if text is None:
        return float("inf")
    model = build_skeleton(text, torch.float32, "eager")
    names = text_names(wrapper, model)
    if names is None:
        return float("inf")
    bind_weights(model, {new: weights[old] for old, new in names.items()})
    generator = torch.Generator().manual_seed(seed + 1)
    tokens = torch.randint(1, text.vocab_size, (1, max(PROBE_LENGTHS)), generator=generator)
    wanted, got = (m(input_ids=tokens, use_cache=False).logits.float() for m in (wrapper, model))
    return float((got - wanted).abs().max() / wanted.std())


def _largest_error(config: Any, seed: int, quantization: str = "", as_class: bool = False) -> float:
    eager = build_skeleton(copy.deepcopy(config), torch.float32, "eager")
    weights = exact = draw_weights(eager, seed)
    schemes: Schemes = {}
    if quantization:
        tied = getattr(eager, "all_tied_weights_keys", None) or {}
        weights, exact, schemes = rounded_twins(eager, tied, weights, quantization)
    bind_weights(eager, exact)
    hosted = class_config(eager) if as_class else config
    generator = torch.Generator().manual_seed(seed + 1)
    vocab_size = config.get_text_config().vocab_size
    prompts = [
        torch.randint(1, vocab_size, (length,), generator=generator).tolist()
        for length in PROBE_LENGTHS
    ]
    with torch.inference_mode():
        expected = [
            eager(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].float()
            for prompt in prompts
        ]
        spread = torch.cat(expected).std().item()
        if not spread > 0:
            raise Differs("produces logits that are not finite")
        if _looks_ahead(eager, prompts[0], expected[0]):
            raise Differs("attends to later tokens, as encoders do")
        try:
            paged = _Paged(hosted, weights, schemes, eager)
            return paged.largest_error(prompts, expected) / spread
        finally:  # transformers' table is for ever, the model is not
            ALL_ATTENTION_FUNCTIONS.register(PROBE_ATTENTION, paged_attention_forward)


def _looks_ahead(eager: nn.Module, prompt: list[int], expected: torch.Tensor) -> bool:
    """Whether logits before the last token change with it."""
    other = torch.tensor([[*prompt[:-1], prompt[-1] % 2 + 1]])
    logits = eager(input_ids=other, use_cache=False).logits[0].float()
    return not torch.allclose(logits[:-1], expected[:-1], rtol=1e-3, atol=1e-3)


class _Paged:
    """The truncated model over paged KV: a pool full of holes, an arena full of NaN."""

    def __init__(
        self, config: Any, weights: dict[str, torch.Tensor], schemes: Schemes, eager: nn.Module
    ) -> None:
        """`weights`, `schemes`: by the names in `eager`, which has them or what they stand for."""
        ALL_ATTENTION_FUNCTIONS.register(PROBE_ATTENTION, self._attend)
        self.model = build_skeleton(copy.deepcopy(config), torch.float32, PROBE_ATTENTION)
        names: dict[str, str] | None = {name: name for name in weights}
        if type(self.model) is not type(eager):
            names = text_names(eager, self.model)
        assert names is not None
        names |= {n + SCALE_SUFFIX: new + SCALE_SUFFIX for n, new in names.items()}
        replace_modules(self.model, {names[name]: how for name, how in schemes.items()})
        bind_weights(self.model, {names[name]: tensor for name, tensor in weights.items()})
        text = config.get_text_config()
        layers = module_geometries(self.model, text)
        attending = {layer: kept for layer, kept in layers.items() if not is_indexer(layer)}
        self.watched = _Watched(attending)
        shapes = state_shapes(self.model, config.get_text_config().hidden_size, torch.float32)
        # Of a block, or of one head of a state.
        largest = max(
            *(_block_bytes(layer) for layer in layers.values()),
            *(math.prod(shape[1:]) * 4 for shape, _ in shapes.values()),
            1,
        )
        page_bytes = max(MIN_PAGE_BYTES, 1 << (2 * largest - 1).bit_length())
        num_pages = max(MIN_PAGES, min(MAX_PAGES, ARENA_BYTES // page_bytes))
        pool = PagePool(num_pages, page_bytes)
        groups, states = grouped(layers, kv_sources(text)), grouped_states(shapes)
        self.plan: KvPlan = plan_pack(
            groups, "float32", BLOCK_TOKENS, page_bytes, num_pages, states
        )
        self.arena = torch.full((num_pages * page_bytes,), 0xFF, dtype=torch.uint8)
        other = Owner("other", "weights")
        pages = pool.alloc_run(other, num_pages).pages
        pool.release(other, [page for page in pages if page % 3])
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
                wanted = expected[int(request.submit.request_id)][
                    done : done + row.num_scheduled_tokens
                ]
                difference = (
                    (logits[start : start + row.num_scheduled_tokens] - wanted).abs().max().item()
                )
                error = max(error, difference if difference == difference else float("inf"))
                start += row.num_scheduled_tokens
                request.num_computed += row.num_scheduled_tokens
                self.cache.advance(row.kv, request.token_ids, request.num_computed, 0.0)
        return error

    def _step(self, rows: list[ScheduledRow]) -> torch.Tensor:
        for row in rows:
            # A chunk at a time, so that tables interleave and windows free what left them.
            self.cache.reserve(row.kv, row.end)
            self.cache.begin_row(row.kv, row.first, row.end, 0.0)
        batch = build_batch(rows, self.cache, self.arena.device)
        self.watched.calls.clear()
        # As steps ask for them: the logits of given tokens, in a given order.
        backwards = torch.arange(sum(row.num_scheduled_tokens for row in rows)).flip(0)
        states = StepStates(self.arena, self.plan, batch.states, batch.state_rows)
        with step_context(StepContext(self.arena, self.plan, batch.groups, states)):
            logits: torch.Tensor = self.model(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                use_cache=False,
                logits_to_keep=backwards,
            ).logits[0]
        if sorted(self.watched.calls) != sorted(self.watched.layers):
            raise Differs("has layers that do not attend exactly once in a forward pass")
        return logits.flip(0).float()


def _block_bytes(layer: LayerGeometry) -> int:
    return BLOCK_TOKENS * layer.num_kv_heads * layer.row_dim * 4


def _request(number: int, prompt: list[int]) -> Request:
    submit = Submit(str(number), 1, "probe", "probe", prompt, 1, SamplingParams(0.0), [])
    return Request.of(submit, 0.0)


def probe_encoder(plan: Blueprint) -> float:
    """Largest absolute difference of the rows.

    Raises RegistrationRefused("parity") where it passes TOLERANCE or the model cannot run.
    """
    assert plan.encoder is not None
    what = f"a {type(plan.skeleton).__name__}"
    try:
        error = _encoder_error(_short_encoder(plan.config), plan.task, plan.encoder)
    except Exception as problem:  # modelling code: no contract on its error types
        raise RegistrationRefused(
            "parity",
            f"the parity check failed: {what} cannot run batches of different lengths "
            f"({type(problem).__name__}: {problem}); this version cannot host it",
        ) from problem
    if not error <= TOLERANCE:
        raise RegistrationRefused(
            "parity",
            f"the parity check failed: the output of {what} differs from transformers by "
            f"{error:.1g} (allowed {TOLERANCE:.0g}); this version cannot host it",
        )
    return error


def _short_encoder(config: Any) -> Any:
    """The same class and options: a layer of each kind, at least two, few words, short windows."""
    small = copy.deepcopy(config)
    layers = min(2, config.num_hidden_layers)
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    small.num_hidden_layers = layers = max(layers, len(kinds))
    if kinds:
        small.layer_types = (kinds * layers)[:layers]
        small.local_attention = min(ENCODER_WINDOW, config.local_attention)
    small.vocab_size = min(ENCODER_VOCAB, config.vocab_size)
    small.pad_token_id = 0
    if FAMILIES[config.model_type].positions_from_pad:
        small.pad_token_id = 1
        small.max_position_embeddings = longest_input(config) + 2
    return small


@torch.inference_mode()
def _encoder_error(config: Any, task: Task, record: EncoderRecord) -> float:
    generator = torch.Generator().manual_seed(1)

    def draw(length: int, high: int) -> list[int]:
        return torch.randint(0, high, (length,), generator=generator).tolist()

    lengths = [min(length, longest_input(config)) for length in ENCODER_LENGTHS]
    inputs = [draw(length, config.vocab_size) for length in lengths]
    types = [draw(length, record.segments) if record.segments > 1 else [] for length in lengths]
    eager = build_encoder(copy.deepcopy(config), task, torch.float32, "eager")
    weights = draw_weights(eager, 0)
    bind_weights(eager, weights)
    expected = [_alone(eager, ids, kinds, record) for ids, kinds in zip(inputs, types, strict=True)]
    model = EncoderModel(copy.deepcopy(config), task, record, torch.float32)
    model.bind(weights)
    submit = Submit(
        request_id="probe",
        attempt=1,
        tenant_id="probe",
        model_id="probe",
        prompt_token_ids=list(chain.from_iterable(inputs)),
        max_tokens=0,
        sampling=SamplingParams(),
        stop_token_ids=[],
        encode=EncodeInputs(lengths, list(chain.from_iterable(types))),
    )
    request = Request.of(submit, 0.0)
    request.encoding = Encoding.of(submit, record)
    batch = build_encoder_batch([ScheduledRow(request, request.num_prompt)], torch.device("cpu"))
    got = model.rows(batch)[torch.from_numpy(batch.places[0])]
    wanted = torch.stack(expected)[torch.from_numpy(request.encoding.order)]
    difference = (got - wanted).abs().max().item()
    return difference if difference == difference else float("inf")


def _alone(
    eager: nn.Module, ids: Sequence[int], types: Sequence[int], record: EncoderRecord
) -> torch.Tensor:
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids))}
    if types:
        inputs["token_type_ids"] = torch.tensor([types])
    output = eager(**inputs)
    if hasattr(output, "logits"):
        logits: torch.Tensor = output.logits[0]
        return logits
    row = pooled(output.last_hidden_state[0], [(1, len(ids))], record.pooling)[0]
    return functional.normalize(row, dim=-1) if record.normalize else row
