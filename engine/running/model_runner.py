"""Runs one resident model over step batches: token ids and tables in, sampled tokens out.

Owns the model's skeleton, its current weight views and its KvCache. Does not schedule. `execute`
may run in another thread than the rest: it touches the batch, the weights and the arena only.

`NativeLayers` are a fused model's layers on a processor, by the C++ kernels: one call a step.

    NativeLayers(library, fused, plan)   or NotFused, with the reason in words
    bind()                               after fused.bind: the layers' addresses of now
    forward(ids, positions, batch)       -> hidden states; K and V of all tokens are written
    logits(states)                       -> float32 [n, V]

What engine/running/fusion.py recognises, in bfloat16, weights perhaps int8 or int4 in blocks, with
heads of a size that the registers fit. Everything else runs by torch's operators. Results differ
from the modules' by rounding: sums are float32, a product is rounded once, and what meets int8 and
int4 weights is rounded to bytes (kernels/native/bytes.h). Tensors handed to C++ by address are held
here, or by the caller's batch, until the call returns.
"""

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from engine.memory import KvCache, KvPlan, Owner, PagePool
from engine.modules.experts import native_mixture, use_library
from engine.modules.native_linears import use_linears
from engine.modules.quantized import replace_modules
from engine.modules.state_mixers import StepStates
from engine.modules.transformers_backend import (
    ModelBody,
    StepContext,
    bind_weights,
    build_skeleton,
    step_context,
    unbind_weights,
)
from engine.pack import PackIndex, schemes_in
from engine.running.batch import Scoring, StepBatch
from engine.running.fusion import Fused, Hidden, NotFused, recognise
from engine.sampling import Logprobs, SampleOutput, bring_masks, not_finite, prompt_logprobs, sample
from kernels.decoder_layer import LayerForm, LayerWeights, Product
from kernels.int4_blocks import ROWS, block_shape
from kernels.mixer_operations import native_mixers
from kernels.native_calls import (
    ACTIVATIONS,
    MAX_DIM,
    AttentionForm,
    Cache,
    Group,
    Layer,
    Linear,
    Mixture,
    NativeLibrary,
    NativeRows,
    Norm,
    Step,
    format_of,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Groups:
    """The step's rows as C++ takes them; `calls` only keeps alive what `array` points to."""

    array: "ctypes.Array[Group]"
    calls: tuple["ctypes.Array[NativeRows]", ...]


class NativeLayers:
    """One model's. `bind` after every change of its weights' addresses."""

    def __init__(
        self, library: NativeLibrary, fused: Fused, plan: KvPlan, arena: torch.Tensor
    ) -> None:
        """Raises NotFused for what the kernels do not cover."""
        for form in fused.forms:
            if form.sinks is not None:
                raise NotFused("attention has sinks")
        for group in plan.groups:
            layer = group.block.layer
            if group.block.dtype != torch.bfloat16:
                raise NotFused(f"KV is {group.block.dtype}")
            if layer.v_in_k:
                raise NotFused("attention caches latents")
            if layer.k_dim != layer.v_dim:
                raise NotFused("keys and values differ in size")
            if layer.k_dim % library.dim_multiple or layer.k_dim > MAX_DIM:
                raise NotFused(f"heads of {layer.k_dim}")
        self._library = library
        self._fused = fused
        self._plan = plan
        self._arena = arena
        self._layers: ctypes.Array[Layer] | None = None
        # What layers point to.
        self._mixtures: list[Mixture] = []
        self._stops: list[tuple[int, nn.Module | None]] = []

    def bind(self) -> None:
        """Take the addresses of the weights that `fused` is bound to. Raises NotFused."""
        layers = (Layer * len(self._fused.forms))()
        self._mixtures = []
        for i, (form, weights) in enumerate(
            zip(self._fused.forms, self._fused.weights, strict=True)
        ):
            self._fill(layers[i], i, form, weights)
        _linear(self._fused.output_head[0], self._fused.size)
        _check_sizes(layers, self._fused.size)
        self._layers = layers
        last = len(layers) - 1
        # Where a call ends: behind each layer whose MLP is a module, and at the end.
        self._stops = [
            (i + 1, weights.mlp if not (layer.mixture or layer.down.weight) else None)
            for i, (layer, weights) in enumerate(zip(layers, self._fused.weights, strict=True))
            if i == last or not (layer.mixture or layer.down.weight)
        ]

    def unbind(self) -> None:
        """Forget them."""
        self._layers = None
        self._mixtures = []

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, batch: StepBatch) -> Hidden:
        """ids, positions [T] of the whole step."""
        layers, fused = self._layers, self._fused
        assert layers is not None, "not bound"
        x, cos, sin = fused.embed(ids, positions)
        cos, sin = cos.float().contiguous(), sin.float().contiguous()
        groups = _groups(batch)
        for i, layer in enumerate(layers):
            group, place = self._plan.layer_group[i]
            table = batch.groups[group].table
            layer.cache.table = table.data_ptr() + place * table.stride(0) * table.itemsize
        first = layers[0]
        num_tokens, size = x.shape
        heads = first.form.num_heads * first.cache.dim
        inner = max(layer.gate_up.n for layer in layers)
        residual = torch.empty_like(x)
        work = [x.new_empty(num_tokens, width) for width in (size, first.qkv.n, heads, inner)]
        step = Step(
            num_tokens=num_tokens,
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            groups=groups.array,
            x=x.data_ptr(),
            residual=residual.data_ptr(),
            y=work[0].data_ptr(),
            qkv=work[1].data_ptr(),
            attended=work[2].data_ptr(),
            hidden=work[3].data_ptr(),
            half=cos.shape[-1],
            size=size,
            first=1,
        )
        begin = 0
        for end, outside in self._stops:
            step.first = begin == 0
            self._library.layers(layers, step, begin, end)
            if outside is not None:
                x.copy_(outside(work[0][None])[0])
            begin = end
        return Hidden(x, residual)

    def normed(self, hidden: Hidden, index: torch.Tensor | None) -> torch.Tensor:
        """The states that the head is given: of all tokens, or of those in `index`."""
        branch, stream = hidden.branch, hidden.stream
        if index is not None:
            branch, stream = branch.index_select(0, index), stream.index_select(0, index)
        form, weight = self._fused.forms[0], self._fused.last_norm
        norm = _norm(weight, form, branch.shape[-1])
        return self._library.add_norm(norm, branch, stream, form.residual_multiplier, first=False)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[n, H] to float32 [n, V], not rounded on the way."""
        head, scaling = self._fused.output_head
        assert isinstance(head.weight, torch.Tensor)
        logits = self._library.linear(states, head.weight, head.bias, wide=True, scale=head.scale)
        return logits if scaling == 1.0 else logits.div_(scaling)

    def _fill(self, layer: Layer, number: int, form: LayerForm, weights: LayerWeights) -> None:
        group, _ = self._plan.layer_group[number]
        block = self._plan.groups[group].block
        size, dim = self._fused.size, block.layer.k_dim
        layer.qkv = _linear(weights.qkv, size)
        layer.out = _linear(weights.out, form.num_heads * dim)
        if weights.mlp is None:
            layer.gate_up = _linear(weights.gate_up, size, halves=2)
            layer.down = _linear(weights.down, layer.gate_up.n)
        elif (mixture := native_mixture(weights.mlp, size)) is not None:
            self._mixtures.append(mixture)
            layer.mixture = ctypes.pointer(mixture)
        layer.input_norm = _norm(weights.input_norm, form, size)
        layer.post_norm = _norm(weights.post_norm, form, size)
        layer.q_norm = _norm(weights.q_norm, form, dim)
        layer.k_norm = _norm(weights.k_norm, form, dim)
        layer.head_norms = weights.q_norm is not None
        layer.form = AttentionForm(form.num_heads, form.scale, form.softcap)
        layer.activation = ACTIVATIONS[form.activation]
        layer.rotates = self._fused.rotates[number]
        layer.interleaved = form.interleaved
        layer.residual_multiplier = form.residual_multiplier
        layer.group = group
        layer.cache = Cache(
            arena=self._arena.data_ptr(),
            unit_bytes=block.unit_bytes,
            block_units=block.block_units,
            v_start_units=block.v_start_units,
            block_tokens=block.block_tokens,
            num_kv_heads=block.layer.num_kv_heads,
            dim=dim,
            window=block.layer.window,
        )


def _linear(product: Product, size: int, halves: int = 1) -> Linear:
    """Of rows of `size` values. Raises NotFused."""
    weight, scale = product.weight, product.scale
    form = format_of(weight.dtype, product.scheme) if isinstance(weight, torch.Tensor) else None
    if isinstance(weight, torch.Tensor) and weight.dtype == torch.float8_e4m3fn:
        raise NotFused("fp8 weights run slowly on a processor (register the model in int8)")
    if not isinstance(weight, torch.Tensor) or form is None:
        raise NotFused("weights are of a kind that C++ does not know")
    if (scale is not None) != (weight.dtype == torch.int8):
        raise NotFused(f"weights are {weight.dtype}")
    if halves == 2 and product.bias is not None:
        raise NotFused("gate and up have biases")
    if not weight.is_contiguous():
        raise NotFused("weights are strided")
    in_blocks = weight.dtype == torch.uint8
    rows = weight.shape[0] * (ROWS if in_blocks else 1)
    shape = block_shape((rows, size), product.scheme) if in_blocks else (rows, size)
    # Gate's and up's rows begin at a block.
    if weight.shape != shape or weight.shape[0] % halves:
        raise NotFused(f"weights are {tuple(weight.shape)} for rows of {size}")
    _check_values(product.bias, rows // halves)
    _check_values(scale, rows)
    return form.linear(
        weight.data_ptr(), _address(product.bias), _address(scale), rows // halves, size
    )


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _check_values(values: torch.Tensor | None, count: int) -> None:
    """A bias, a scale, a norm's weight: C++ reads `count` of them, whatever is there."""
    if values is None:
        return
    if values.dtype != torch.bfloat16 or values.shape != (count,) or not values.is_contiguous():
        raise NotFused(f"{count} values are {values.dtype} {tuple(values.shape)}")


def _check_sizes(layers: "ctypes.Array[Layer]", size: int) -> None:
    """What comes out of a product is what goes into the next; work space is as for the first."""
    first = layers[0]
    heads = first.form.num_heads * first.cache.dim
    for layer in layers:
        both = 2 * layer.cache.num_kv_heads * layer.cache.dim
        products = [layer.qkv, layer.out]
        wanted = [(first.qkv.n, size), (size, heads)]
        if layer.down.weight:
            products += [layer.gate_up, layer.down]
            wanted += [(layer.gate_up.n, size), (size, layer.gate_up.n)]
        fit = [(product.n, product.k) for product in products] == wanted
        if not fit or layer.qkv.n - both != layer.form.num_heads * layer.cache.dim:
            raise NotFused("sizes of the products do not go together")


def _norm(weight: torch.Tensor | None, form: LayerForm, size: int) -> Norm:
    _check_values(weight, size)
    return Norm(_address(weight), form.eps, form.unit_offset, form.center)


def _groups(batch: StepBatch) -> _Groups:
    array = (Group * len(batch.groups))()
    kept = []
    for group, rows in zip(array, batch.groups, strict=True):
        calls = (NativeRows * len(rows.rows))(
            *(
                NativeRows(
                    call.token_index.data_ptr(),
                    call.chunk.data_ptr(),
                    call.slot.data_ptr(),
                    call.context_len.data_ptr(),
                    call.first.data_ptr(),
                    call.chunk.shape[0],
                    call.token_index.shape[1],
                    call.chunk.shape[1],
                )
                for call in rows.rows
            )
        )
        kept.append(calls)
        group.calls = calls
        group.num_calls = len(calls)
        group.token_chunk = rows.token_chunk.data_ptr()
        group.token_slot = rows.token_slot.data_ptr()
        group.token_offset = rows.token_offset.data_ptr()
    return _Groups(array, tuple(kept))


class ModelRunner:
    """One model. `bind` when it has become resident, `unbind` before its pages are given back."""

    def __init__(
        self,
        instance_id: str,
        pack_dir: Path,
        index: PackIndex,
        arena: torch.Tensor,
        pool: PagePool,
        block_tokens: int,
        caching: bool = True,
        max_chunk: int = 0,
        library: NativeLibrary | None = None,
    ) -> None:
        """`caching`: the prefix cache; `max_chunk`: see KvCache; `library`: C++ kernels for the
        layers they cover, None: torch's operators."""
        self.instance_id = instance_id
        self.index = index
        self._arena = arena
        plan = KvPlan.of(index, block_tokens, pool)
        self.cache = KvCache(Owner(instance_id, "kv"), plan, pool, arena.device, caching, max_chunk)
        self._model = build_skeleton(pack_dir, getattr(torch, index.dtype))
        replace_modules(self._model, schemes_in(index))
        if library is not None:
            use_library(self._model, library)
            use_linears(self._model, library)
        self._body = ModelBody(self._model)
        self._fused, why = None, ""
        if library is not None:
            self._fused, why = recognise(self._model, index, experts=True)
        self._native: NativeLayers | None = None
        if library is not None and self._fused is not None:
            try:
                self._native = NativeLayers(library, self._fused, plan, arena)
            except NotFused as reason:
                why = str(reason)
        if why:
            logger.info(
                "model %s runs with PyTorch modules instead of fused kernels: %s", instance_id, why
            )
        # float16 is what C++ does not know.
        self._mixers = native_mixers(None if index.dtype == "float16" else library)
        self._drawer = None if library is None else library.draw
        self._generation: int | None = None

    @property
    def is_native(self) -> bool:
        """Whether its layers run by the C++ kernels."""
        return self._native is not None

    def bind(self, tensors: dict[str, torch.Tensor], generation: int) -> None:
        """Use these weight views; cheap when the generation is the one already bound."""
        if generation == self._generation:
            return
        bind_weights(self._model, tensors)
        if self._native is not None and self._fused is not None:
            self._fused.bind(tensors)
            try:
                self._native.bind()
            except NotFused as why:
                logger.info(
                    "model %s runs with PyTorch modules instead of fused kernels: %s",
                    self.instance_id,
                    why,
                )
                self._native = None
        self._generation = generation

    def unbind(self) -> None:
        """Forget the weights and give all KV pages back."""
        unbind_weights(self._model)
        if self._native is not None and self._fused is not None:
            self._fused.unbind()
            self._native.unbind()
        self._generation = None
        self.cache.drop_all()

    def execute(self, batch: StepBatch) -> SampleOutput:
        """Compute K and V of all T tokens, and a token for each sampling row."""
        with torch.inference_mode():
            logits, scores = self._run(batch)
            num_sampling = len(batch.sampling_rows)
            masks = bring_masks(batch.sampling, logits.device)
            output = sample(logits[:num_sampling], masks, self._drawer)
            if num_sampling < len(logits):
                output = replace(output, unsampled_broken=not_finite(logits[num_sampling:]))
            return output if scores is None else replace(output, prompt=scores)

    def _run(self, batch: StepBatch) -> tuple[torch.Tensor, Logprobs | None]:
        """float32 [rows, vocab], of the sampling rows, then of the others; the prompts' scores."""
        native = self._native
        if native is not None:
            hidden = native.forward(batch.input_ids[0], batch.position_ids[0], batch)
            if batch.scoring is None:
                return native.logits(native.normed(hidden, batch.logit_index)), None
            states = native.normed(hidden, None)
            scores = _score(states, batch.scoring, native.logits)
            return native.logits(states[batch.logit_index]), scores
        if batch.scoring is None:
            return self._by_modules(batch), None
        with self._body.keeping() as kept:
            logits = self._by_modules(batch)
        return logits, _score(kept.hidden, batch.scoring, kept.project)

    def _by_modules(self, batch: StepBatch) -> torch.Tensor:
        states = StepStates(self._arena, batch.plan, batch.states, batch.state_rows, self._mixers)
        with step_context(StepContext(self._arena, batch.plan, batch.groups, states)):
            output = self._model(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                use_cache=False,
                logits_to_keep=batch.logit_index,
            )
        logits: torch.Tensor = output.logits[0]
        return logits.float()


def _score(
    states: torch.Tensor, scoring: Scoring, project: Callable[[torch.Tensor], torch.Tensor]
) -> Logprobs:
    hidden = states[scoring.index]
    return prompt_logprobs(hidden, scoring.next_ids, scoring.num_logprobs, project)
