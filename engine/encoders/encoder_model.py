"""An encoder's modules over a flat batch: token ids in, a row for each input out.

The model code is transformers' own. What is ours is attention: a function is registered with the
library's attention interface, and no mask function, so that the library builds no mask; all inputs
of a step lie in one flat sequence and each attends over itself (`kernels/ragged_attention.py`). All
else in these families goes position by position. Position ids are given as each family counts
them; pooling follows the pack's record.

A classifier's head is the model's own code as well: the body's `forward` is exchanged for one that
gives it the states it looks at (the first of each input, or their mean), one position an input.

The skeleton has parameters on `meta` until weights are bound. Knows no requests, pages or steps.

`EncoderRunner` runs one resident encoder over step batches; `model_runner.py` is its sibling. It
owns the model's modules and its current weight views. It has no KV: its cache has no layer groups,
takes no page and finds nothing, and is there so that residency, status and leases need not ask what
kind of model they look at. `encode` may run in another thread than the rest: it touches the batch
and the weights only.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.encoders.encoder_batch import EncoderBatch
from engine.errors import PackError
from engine.memory import KvCache, KvPlan, Owner, PagePool
from engine.modules.text_part import parameters_on_meta
from engine.modules.transformers_backend import bind_weights, buffers_to, unbind_weights
from engine.pack import EncoderRecord, PackIndex, Task
from kernels.ragged_attention import Groups, ragged_attention_ref

ATTENTION_NAME = "polyhost_ragged"
_GROUPS: ContextVar[Groups] = ContextVar("polyhost_groups")
Pool = Callable[[torch.Tensor], torch.Tensor]
"""[inputs, length, H] -> [inputs, H]."""


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """`stem` of its classes' names.

    pooler              its bare encoder can be built without the pooler, which no row needs
    positions_from_pad  positions count on from the padding id, as fairseq's do
    """

    stem: str
    pooler: bool = False
    positions_from_pad: bool = False


FAMILIES: dict[str, EncoderFamily] = {
    "bert": EncoderFamily("Bert", pooler=True),
    "distilbert": EncoderFamily("DistilBert"),
    "modernbert": EncoderFamily("ModernBert"),
    "roberta": EncoderFamily("Roberta", pooler=True, positions_from_pad=True),
    "xlm-roberta": EncoderFamily("XLMRoberta", pooler=True, positions_from_pad=True),
}


def ragged_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: [1, heads, T, dim] -> [1, T, heads, dim].

    `sliding_window` as the library hands it on: positions less far away than this are seen.
    """
    if attention_mask is not None:
        raise ValueError("the model builds a mask of its own")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = None if sliding_window is None else sliding_window - 1
    out = ragged_attention_ref(query[0], key[0], value[0], _GROUPS.get(), scale, window)
    return out[None], None


def build_encoder(config: Any, task: Task, dtype: torch.dtype, attention: str) -> nn.Module:
    """The module tree of a configuration, on the device that is set."""
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention}
    if task == "classify":
        model = AutoModelForSequenceClassification.from_config(config, **options)
    else:
        if FAMILIES[config.model_type].pooler:
            options["add_pooling_layer"] = False
        model = AutoModel.from_config(config, **options)
    assert isinstance(model, nn.Module)
    return model.eval()


class EncoderModel:
    """One encoder with its pooling, or its classifier's head."""

    def __init__(
        self, source: Path | Any, task: Task, record: EncoderRecord, dtype: torch.dtype
    ) -> None:
        """`source`: a pack folder, or a configuration object that is this model's alone."""
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, ragged_attention_forward)
        config = AutoConfig.from_pretrained(str(source)) if isinstance(source, Path) else source
        with parameters_on_meta():
            self._model = build_encoder(config, task, dtype, ATTENTION_NAME)
        self._body: Any = self._model.base_model if task == "classify" else self._model
        self._classifies = task == "classify"
        self._record = record
        family = FAMILIES[config.model_type]
        self._pad: int | None = config.pad_token_id if family.positions_from_pad else None

    def to(self, device: torch.device) -> None:
        """What was computed, to where the steps run."""
        buffers_to(self._model, device)

    def bind(self, tensors: dict[str, torch.Tensor]) -> None:
        """Use these weights."""
        bind_weights(self._model, tensors)

    def unbind(self) -> None:
        """Back to meta."""
        unbind_weights(self._model)

    @torch.inference_mode()
    def rows(self, batch: EncoderBatch) -> torch.Tensor:
        """float32 [inputs, dim], in the order they lie in; behind them the tokens' own, where any
        row wants those."""
        inputs: dict[str, torch.Tensor] = {}
        if self._record.segments > 1:
            types = batch.type_ids
            inputs["token_type_ids"] = torch.zeros_like(batch.input_ids) if types is None else types
        with _attending_over(batch.groups):
            states: torch.Tensor = self._body(
                input_ids=batch.input_ids,
                position_ids=position_ids(batch.input_ids[0], batch.groups, self._pad)[None],
                **inputs,
            ).last_hidden_state[0]
        if self._classifies:
            return self._logits(pooled(states, batch.groups, self._record.pooling)).float()
        rows = pooled(states.float(), batch.groups, self._record.pooling)
        rows = functional.normalize(rows, dim=-1) if self._record.normalize else rows
        return torch.cat((rows, states.float())) if batch.has_states else rows

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        """[inputs, H] -> [inputs, labels], by the model's own head."""
        seen = states[:, None]
        pooler = getattr(self._body, "pooler", None)
        given = BaseModelOutputWithPooling(
            last_hidden_state=seen, pooler_output=None if pooler is None else pooler(seen)
        )
        nothing = torch.zeros(len(states), 1, dtype=torch.int64, device=states.device)
        self._body.forward = lambda *args, **kwargs: given
        try:
            logits: torch.Tensor = self._model(input_ids=nothing).logits
        finally:
            del self._body.forward  # the class's own shows again
        return logits


@contextlib.contextmanager
def _attending_over(groups: Groups) -> Iterator[None]:
    token = _GROUPS.set(groups)
    try:
        yield
    finally:
        _GROUPS.reset(token)


def position_ids(token_ids: torch.Tensor, groups: Groups, pad: int | None) -> torch.Tensor:
    """int64 [T]: from 0 in each input; or from `pad` + 1, padding tokens themselves left out.

    The second is fairseq's way: a padding token in a text has the position `pad` and counts for
    nothing.
    """
    found = []
    for ids, length in _by_group(token_ids, groups):
        if pad is None:
            found.append(torch.arange(length, device=ids.device).repeat(len(ids)))
        else:
            counted = ids.ne(pad).long()
            found.append((counted.cumsum(1) * counted + pad).reshape(-1))
    return torch.cat(found)


def pooled(states: torch.Tensor, groups: Groups, pooling: str) -> torch.Tensor:
    """[T, H] -> [inputs, H times the number of poolings]."""
    kinds = [POOLINGS[name] for name in pooling.split("+")]
    return torch.cat(
        [torch.cat([kind(part) for kind in kinds], -1) for part, _ in _by_group(states, groups)]
    )


def _by_group(flat: torch.Tensor, groups: Groups) -> Iterator[tuple[torch.Tensor, int]]:
    """[T, ...] as [count, length, ...] by group, with the length."""
    sizes = [count * length for count, length in groups]
    for part, (count, length) in zip(torch.split(flat, sizes), groups, strict=True):
        yield part.reshape(count, length, *flat.shape[1:]), length


def _weighted_mean(states: torch.Tensor) -> torch.Tensor:
    """Later positions count for more: 1, 2, 3 ..."""
    weights = torch.arange(1, states.shape[1] + 1, device=states.device, dtype=states.dtype)
    return (states * weights[:, None]).sum(1) / weights.sum()


def _mean_sqrt_len(states: torch.Tensor) -> torch.Tensor:
    return states.sum(1) / math.sqrt(states.shape[1])


POOLINGS: Mapping[str, Pool] = {
    "cls": lambda states: states[:, 0],
    "last": lambda states: states[:, -1],
    "max": lambda states: states.amax(1),
    "mean": lambda states: states.mean(1),
    "mean_sqrt_len": _mean_sqrt_len,
    "weighted_mean": _weighted_mean,
}


class EncoderRunner:
    """One model. `bind` when it has become resident, `unbind` before its pages are given back."""

    def __init__(
        self,
        instance_id: str,
        pack_dir: Path,
        index: PackIndex,
        device: torch.device,
        pool: PagePool,
        block_tokens: int,
    ) -> None:
        """Raises PackError for an index that says not what its rows are."""
        if index.encoder is None:
            raise PackError(f"the pack {pack_dir} has no encoder record: register the model again")
        self.instance_id = instance_id
        self.index = index
        self.cache = KvCache(
            Owner(instance_id, "kv"), KvPlan((), {}, block_tokens), pool, device, caching=False
        )
        dtype = getattr(torch, index.dtype)
        self._model = EncoderModel(pack_dir, index.task, index.encoder, dtype)
        self._model.to(device)
        self._generation: int | None = None

    def bind(self, tensors: dict[str, torch.Tensor], generation: int) -> None:
        """Use these weight views; cheap when the generation is the one already bound."""
        if generation != self._generation:
            self._model.bind(tensors)
            self._generation = generation

    def unbind(self) -> None:
        """Forget the weights."""
        self._model.unbind()
        self._generation = None
        self.cache.drop_all()

    def encode(self, batch: EncoderBatch) -> torch.Tensor:
        """float32 [inputs, dim], in the order they lie in the batch."""
        return self._model.rows(batch)
