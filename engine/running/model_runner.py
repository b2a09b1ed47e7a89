"""Runs one resident unit over step batches: token ids and tables in, sampled tokens out.

Owns the unit's skeleton, its current weight views and its KvCache. Does not schedule. `execute`
may run in another thread than the rest: it touches the batch, the weights and the arena only.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from engine.memory.kv_cache import KvCache
from engine.memory.kv_plan import plan_kv
from engine.memory.page_pool import Owner, PagePool
from engine.packs.pack import PackIndex
from engine.packs.quantize import replace_modules, schemes_in
from engine.running.batch import Scoring, StepBatch
from engine.running.fusion import NotFused, recognise
from engine.running.model_body import ModelBody
from engine.running.native_layers import NativeLayers
from engine.running.transformers_backend import (
    StepContext,
    bind_weights,
    build_skeleton,
    step_context,
    unbind_weights,
)
from engine.sampling.logprobs import Logprobs, prompt_logprobs
from engine.sampling.sampler import SampleOutput, not_finite, sample
from engine.sampling.sampling_batch import bring_masks
from kernels.native_calls import NativeLibrary
from kernels.paged_attention import LayerGeometry

logger = logging.getLogger(__name__)


def layer_geometries(index: PackIndex) -> list[LayerGeometry]:
    """One geometry per layer, from the pack's layer groups."""
    layers: dict[int, LayerGeometry] = {}
    for group in index.kv_groups:
        for layer in group.layers:
            layers[layer] = LayerGeometry(
                group.num_kv_heads, group.k_dim, group.v_dim, group.window
            )
    return [layers[i] for i in range(len(layers))]


class ModelRunner:
    """One unit. `bind` when it has become resident, `unbind` before its pages are given back."""

    def __init__(
        self,
        unit_id: str,
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
        self.unit_id = unit_id
        self.index = index
        self._arena = arena
        plan = plan_kv(
            layer_geometries(index),
            getattr(torch, index.kv_dtype),
            block_tokens,
            pool.page_bytes,
            pool.num_pages,
        )
        self.cache = KvCache(Owner(unit_id, "kv"), plan, pool, arena.device, caching, max_chunk)
        self._model = build_skeleton(pack_dir, getattr(torch, index.dtype))
        replace_modules(self._model, schemes_in(index))
        self._body = ModelBody(self._model)
        self._fused, why = (None, "") if library is None else recognise(self._model, index)
        self._native: NativeLayers | None = None
        if library is not None and self._fused is not None:
            try:
                self._native = NativeLayers(library, self._fused, plan, arena)
            except NotFused as reason:
                why = str(reason)
        if why:
            logger.info("unit %s runs by its modules: %s", unit_id, why)
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
                logger.info("unit %s runs by its modules: %s", self.unit_id, why)
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
        with step_context(StepContext(self._arena, batch.plan, batch.groups)):
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
