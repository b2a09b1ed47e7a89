"""Runs one resident model on a device with streams: `model_runner.py`'s sibling for GPUs.

    inputs      one copy of pinned bytes (device_batch.py, device_step.py); what the step before has
                sampled is put in on the device
    layers      fused where engine/running/fusion.py recognises the model, else transformers'
                modules with our attention over the same tables; experts by the layer's operation in
                both
    graphs      steps of a form that came before are replayed (graphs.py)
    sampling    a few launches (device_sampling.py)

`execute` runs in the order of the steps and waits for nothing but masks of constrained rows.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from engine.backend import Device
from engine.errors import IntegrityError
from engine.gpu.device_batch import DeviceBatch, DeviceKvCache
from engine.gpu.device_sampling import SAMPLING_KERNELS, SamplingOperations, on_host, sample_rows
from engine.gpu.device_step import (
    DeviceStep,
    DeviceTable,
    InputBuffer,
    bring,
    bring_back,
    cut_of,
)
from engine.gpu.graphs import GraphKey, StepGraphs
from engine.memory import KvPlan, Owner, PagePool
from engine.modules.experts import use_operation
from engine.modules.indexers import has_indexers
from engine.modules.own_attention import has_slopes
from engine.modules.quantized import replace_modules
from engine.modules.state_mixers import StepStates
from engine.modules.transformers_backend import (
    ModelBody,
    StepContext,
    bind_weights,
    buffers_to,
    build_skeleton,
    step_context,
    unbind_weights,
)
from engine.pack import PackIndex, schemes_in
from engine.running import Scoring, StepBatch, has_experts, recognise
from engine.sampling import Logprobs, SampleOutput, not_finite, prompt_logprobs
from kernels.decoder_layer import KERNELS, Operations
from kernels.mixer_operations import MIXER_KERNELS, MixerOperations
from kernels.state_rows import StateBatch, StateRows

States: TypeAlias = Callable[[torch.Tensor | None], torch.Tensor]
"""Runs the layers: what the head is given, [n, H], of all tokens or of those of an index."""
Head: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Of these, the logits, [n, V]."""

Addresses = TypeVar("Addresses", StateBatch, StateRows)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeviceTools:
    """What all models of one device share. Operations by kernels, or by their references."""

    device: Device
    arena: torch.Tensor
    inputs: InputBuffer
    graphs: StepGraphs
    operations: Operations = KERNELS
    sampling: SamplingOperations = SAMPLING_KERNELS
    mixers: MixerOperations = MIXER_KERNELS


class DeviceRunner:
    """One model. `bind` when it has become resident, `unbind` before its pages are given back."""

    def __init__(
        self,
        instance_id: str,
        pack_dir: Path,
        index: PackIndex,
        tools: DeviceTools,
        pool: PagePool,
        block_tokens: int,
        caching: bool = True,
        max_chunk: int = 0,
    ) -> None:
        """`caching`: the prefix cache; `max_chunk`: see KvCache."""
        self.instance_id = instance_id
        self.index = index
        self._tools = tools
        plan = KvPlan.of(index, block_tokens, pool)
        # Tables are the host's; the device has copies of its own (device_step.py).
        host = torch.device("cpu")
        owner = Owner(instance_id, "kv")
        self.cache = DeviceKvCache(owner, plan, pool, host, caching, max_chunk)
        self._tables = [DeviceTable(tools.device, len(group.layers)) for group in plan.groups]
        self._model: Any = build_skeleton(pack_dir, getattr(torch, index.dtype))
        if has_slopes(self._model):
            raise ValueError("positions are slopes (ALiBi), which the kernels do not know")
        if has_indexers(self._model):
            raise ValueError("an indexer chooses what it attends to, which the kernels do not know")
        replace_modules(self._model, schemes_in(index))
        buffers_to(self._model, tools.device.torch_device)
        self._body = ModelBody(self._model)
        by_kernels = use_operation(self._model, tools.operations.experts)
        self.fused, self.why_not_fused = recognise(self._model, index, experts=by_kernels)
        if self.fused is None:
            logger.info(
                "model %s runs with PyTorch modules instead of fused kernels: %s",
                instance_id,
                self.why_not_fused,
            )
        config: Any = self._model.config
        self._num_heads: int = getattr(config, "num_attention_heads", 1)
        where = tools.device.torch_device
        self.cache.tile_tokens = tuple(cut_of(g, self._num_heads, where) for g in plan.groups)
        waits = _chooses_experts(self._model) and not (by_kernels and has_experts(self._model))
        recorded = not _asks_positions(self._model) and (self.fused is not None or not waits)
        # Mixers take groups of rows as they come: no two steps are of one form.
        recorded = recorded and not plan.states
        self.cache.records_decodes = self.cache.records_chunks = recorded
        self._generation: int | None = None
        self._weights: tuple[int, ...] = ()

    def bind(self, tensors: dict[str, torch.Tensor], generation: int) -> None:
        """Use these weight views; cheap when the generation is the one already bound."""
        if generation == self._generation:
            return
        bind_weights(self._model, tensors)
        if self.fused is None:
            self._weights = tuple(tensors[name].data_ptr() for name in sorted(tensors))
        else:
            self._weights = self.fused.bind(tensors)
        self._tools.graphs.drop(self.instance_id, but_at=self._weights)
        self._generation = generation

    def unbind(self) -> None:
        """Forget the weights and give all KV pages back. Graphs stay: it may come back home."""
        unbind_weights(self._model)
        if self.fused is not None:
            self.fused.unbind()
        self._generation = None
        self.cache.drop_all()

    def execute(self, batch: StepBatch) -> SampleOutput:
        """Compute K and V of all tokens, and a token for each sampling row."""
        if not isinstance(batch, DeviceBatch):
            raise IntegrityError("a step for a device was not laid out for one")
        with torch.inference_mode():
            run = self._tools.inputs.bring(batch.packed)
            for table, (chunks, number) in zip(self._tables, batch.chunks, strict=True):
                table.update(chunks, number)
            tables = [table.table for table in self._tables]
            step = DeviceStep(self._tools.device, self._tools.arena, batch, run, tables)
            if batch.known:
                _fill_in(step, batch.known[0])
            if self.fused is None:
                states, head = self._by_modules(step, self._states(batch))
            else:
                states, head = self._by_layers(step)
            logits, prompt = self._logits(step, batch, states, head)
            return self._sample(logits, prompt, batch, run)

    def _by_layers(self, step: DeviceStep) -> tuple[States, Head]:
        fused, operations = self.fused, self._tools.operations
        assert fused is not None

        def states(index: torch.Tensor | None) -> torch.Tensor:
            hidden = fused.forward(
                step.ids,
                step.positions,
                lambda layer, cos, sin: step.layer(layer, self._num_heads, cos, sin),
                operations,
            )
            return fused.normed(hidden, index, operations)

        return states, lambda found: fused.head(found, operations)

    def _by_modules(self, step: DeviceStep, kept: StepStates) -> tuple[States, Head]:
        attended, operations = step.attended, self._tools.operations
        context = StepContext(self._tools.arena, step.plan, (), kept, attended, operations)

        def states(index: torch.Tensor | None) -> torch.Tensor:
            with step_context(context):
                found = self._body.states(step.ids[None].long(), step.positions[None].long())
            return found if index is None else found.index_select(0, index)

        return states, self._body.project

    def _states(self, batch: DeviceBatch) -> StepStates:
        """What rows keep beside KV, with its addresses on the device."""
        return StepStates(
            self._tools.arena,
            batch.plan,
            tuple(self._brought(states) for states in batch.states),
            tuple(self._brought(rows) for rows in batch.state_rows),
            self._tools.mixers,
        )

    def _brought(self, record: Addresses) -> Addresses:
        tensors: dict[str, Any] = {
            name: self._bring(value)
            for name in (field.name for field in fields(record))
            if isinstance(value := getattr(record, name), torch.Tensor)
        }
        return replace(record, **tensors)

    def _logits(
        self, step: DeviceStep, batch: DeviceBatch, states: States, head: Head
    ) -> tuple[torch.Tensor, Logprobs | None]:
        scoring, prompt = batch.scoring, None
        index = step.logit_index if scoring is None else None
        found = self._tools.graphs.run(self._key(batch), lambda: states(index))
        if scoring is not None:
            assert step.logit_index is not None
            prompt = self._score(found, scoring, head)
            found = found.index_select(0, step.logit_index)
        return head(found[: len(batch.rows)]).float(), prompt

    def _key(self, batch: DeviceBatch) -> GraphKey | None:
        if batch.form is None:
            return None
        if self._tools.graphs.has_given_up(self.instance_id, bool(batch.form.num_chunks)):
            # Steps that are not recorded need no padding.
            if batch.form.num_chunks:
                self.cache.records_chunks = False
            else:
                self.cache.records_decodes = False
        tables_at = chain.from_iterable(table.place for table in self._tables)
        places = (self._tools.inputs.address, *tables_at)
        return GraphKey(self.instance_id, batch.form, self._weights, places)

    def _score(self, states: torch.Tensor, scoring: Scoring, project: Head) -> Logprobs:
        picked = states.index_select(0, self._bring(scoring.index))
        return prompt_logprobs(picked, self._bring(scoring.next_ids), scoring.num_logprobs, project)

    def _sample(
        self,
        logits: torch.Tensor,
        prompt: Logprobs | None,
        batch: DeviceBatch,
        run: torch.Tensor,
    ) -> SampleOutput:
        num_sampling = len(batch.sampling_rows)
        output = sample_rows(
            logits[:num_sampling],
            batch.fields.sampling,
            run,
            batch.sampling,
            self._tools.sampling,
            self._bring,
            batch.known[0] if batch.known else None,
        )
        if num_sampling < len(logits):
            output = replace(output, unsampled_broken=not_finite(logits[num_sampling:]))
        output = output if prompt is None else replace(output, prompt=prompt)
        # Behind the step's kernels and before its event: whoever waits for that reads memory only.
        return replace(output, on_host=on_host(output, self._bring_back))

    def _bring(self, tensor: torch.Tensor) -> torch.Tensor:
        return bring(self._tools.device, tensor)

    def _bring_back(self, tensor: torch.Tensor) -> torch.Tensor:
        return bring_back(self._tools.device, tensor)


def _chooses_experts(model: nn.Module) -> bool:
    """Unless by kernels that makes the host wait for the device, which no capture takes."""
    names = {type(module).__name__.lower() for module in model.modules()}
    return any("moe" in name or "expert" in name for name in names) or has_experts(model)


def _asks_positions(model: nn.Module) -> bool:
    """Whether rotary angles depend on the longest context: then the host looks at positions."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        kinds = kind.values() if isinstance(kind, dict) else (kind,)
        if any(one in ("dynamic", "longrope") for one in kinds):
            return True
    return False


def _fill_in(step: DeviceStep, sampled: torch.Tensor) -> None:
    """The tokens that the step before has sampled, where the ids have none yet."""
    unknown = step.source >= 0
    there = sampled.index_select(0, step.source.clamp(min=0)).to(step.ids.dtype)
    step.ids.copy_(torch.where(unknown, there, step.ids))
