"""Runs one resident unit over step batches: token ids and tables in, sampled tokens out.

Owns the unit's skeleton, its current weight views and its KvCache. Does not schedule. `execute`
may run in another thread than the rest: it touches the batch, the weights and the arena only.
"""

from dataclasses import replace
from pathlib import Path

import torch

from engine.memory.kv_cache import KvCache
from engine.memory.kv_plan import plan_kv
from engine.memory.page_pool import Owner, PagePool
from engine.packs.pack import PackIndex
from engine.packs.quantize import replace_linears
from engine.running.batch import Scoring, StepBatch
from engine.running.model_body import ModelBody
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
from kernels.paged_attention import LayerGeometry


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
    ) -> None:
        """`caching`: the prefix cache; `max_chunk`: see KvCache."""
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
        replace_linears(self._model, [entry.name for entry in index.tensors if entry.scheme])
        self._body = ModelBody(self._model)
        self._generation: int | None = None

    def bind(self, tensors: dict[str, torch.Tensor], generation: int) -> None:
        """Use these weight views; cheap when the generation is the one already bound."""
        if generation != self._generation:
            bind_weights(self._model, tensors)
            self._generation = generation

    def unbind(self) -> None:
        """Forget the weights and give all KV pages back."""
        unbind_weights(self._model)
        self._generation = None
        self.cache.drop_all()

    def execute(self, batch: StepBatch) -> SampleOutput:
        """Compute K and V of all T tokens, and a token for each sampling row."""
        with torch.inference_mode():
            if batch.scoring is None:
                logits, scores = self._logits(batch), None
            else:
                logits, scores = self._scored(batch, batch.scoring)
            num_sampling = len(batch.sampling_rows)
            masks = bring_masks(batch.sampling, logits.device)
            output = sample(logits[:num_sampling], masks)
            if num_sampling < len(logits):
                output = replace(output, unsampled_broken=not_finite(logits[num_sampling:]))
            return output if scores is None else replace(output, prompt=scores)

    def _scored(self, batch: StepBatch, scoring: Scoring) -> tuple[torch.Tensor, Logprobs]:
        with self._body.keeping() as kept:
            logits = self._logits(batch)
        hidden = kept.hidden[scoring.index]
        scores = prompt_logprobs(hidden, scoring.next_ids, scoring.num_logprobs, kept.project)
        return logits, scores

    def _logits(self, batch: StepBatch) -> torch.Tensor:
        """float32 [rows, vocab]: of the sampling rows, then of the others."""
        with step_context(StepContext(self._arena, batch.plan, batch.groups)):
            output = self._model(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                use_cache=False,
                logits_to_keep=batch.logit_index,
            )
        logits: torch.Tensor = output.logits[0]
        return logits.float()
