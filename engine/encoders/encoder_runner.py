"""Runs one resident encoder over step batches: token ids in, a row for each input out.

The encoders' sibling of `model_runner.py`. Owns the unit's modules and its current weight views. It
has no KV: its cache has no layer groups, takes no page and finds nothing, and is there so that
residency, status and leases need not ask what kind of unit they look at. `encode` may run in
another thread than the rest: it touches the batch and the weights only.
"""

from pathlib import Path

import torch

from engine.encoders.encoder_batch import EncoderBatch
from engine.encoders.encoder_model import EncoderModel
from engine.errors import PackError
from engine.memory.kv_cache import KvCache
from engine.memory.kv_plan import KvPlan
from engine.memory.page_pool import Owner, PagePool
from engine.packs.pack import PackIndex


class EncoderRunner:
    """One unit. `bind` when it has become resident, `unbind` before its pages are given back."""

    def __init__(
        self,
        unit_id: str,
        pack_dir: Path,
        index: PackIndex,
        device: torch.device,
        pool: PagePool,
        block_tokens: int,
    ) -> None:
        """Raises PackError for an index that says not what its rows are."""
        if index.encoder is None:
            raise PackError(f"{pack_dir} is an encoder's pack without its record: register it anew")
        self.unit_id = unit_id
        self.index = index
        self.cache = KvCache(
            Owner(unit_id, "kv"), KvPlan((), (), block_tokens), pool, device, caching=False
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
