"""Packs and folders for tests: real files in the real formats, small and random."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import xxhash
from tokenizers import Tokenizer, models

from engine.backend.cpu import CpuBackend, Execution
from engine.config import EngineConfig
from engine.dependencies import real_weight_store
from engine.memory.page_pool import Owner, PagePool
from engine.modules.text_part import from_config
from engine.pack import (
    BLOB_NAME,
    CHUNK_BYTES,
    Chunk,
    KvGroup,
    PackIndex,
    Segment,
    TensorEntry,
    write_index,
)
from engine.packs.weights import DiskPacks
from engine.protocol import PACK_VERSION, ModelSpec
from engine.residency.loaded_models import ResidencyEvent
from engine.residency.residency import Residency
from tests.engine.kv_space_rig import NoKv, PagedKv

PAGE = 1 << 14


def hf_folder(folder: Path, config: Any, seed: int = 0, **save: Any) -> Path:
    """A random model saved as a Hugging Face folder, with a tokenizer that can be read."""
    torch.manual_seed(seed)
    model: Any = from_config(config, whole=True)
    model.save_pretrained(folder, **save)
    Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[])).save(str(folder / "tokenizer.json"))
    return folder


def edit_json(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file in place."""
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def random_pack(folder: Path, segment_bytes: Sequence[int], seed: int = 0) -> Path:
    """A pack of random bytes, one float32 tensor "t<N>" a segment (sizes: multiples of 4096)."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    segments: list[Segment] = []
    tensors: list[TensorEntry] = []
    chunks: list[Chunk] = []
    offset = 0
    with (folder / BLOB_NAME).open("wb") as file:
        for number, size in enumerate(segment_bytes):
            content = rng.standard_normal(size // 4, dtype=np.float32).view(np.uint8)
            file.write(content.data)
            segments.append(Segment(f"layer.{number}", offset, size))
            tensors.append(TensorEntry(f"t{number}", number, 0, size, (size // 4,), "float32"))
            for start in range(0, size, CHUNK_BYTES):
                part = content[start : start + CHUNK_BYTES]
                digest = xxhash.xxh3_64_intdigest(part.data)
                chunks.append(Chunk(number, start, len(part), digest))
            offset += size
    write_index(
        folder,
        PackIndex(
            version=PACK_VERSION,
            revision=hashlib.blake2b(f"{folder}{seed}".encode(), digest_size=16).hexdigest(),
            family="test",
            architecture="Test",
            dtype="float32",
            vocab_size=16,
            max_context=64,
            total_bytes=offset,
            segments=tuple(segments),
            tensors=tuple(tensors),
            tied={"tied": "t0"},
            chunks=tuple(chunks),
            kv_groups=(KvGroup((0,), 1, 8, 8),),
            kv_dtype="float32",
        ),
    )
    return folder


def flip_byte(path: Path, offset: int) -> None:
    """Damage one byte of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


class GuardedBackend(CpuBackend):
    """Notes every write of a loader to a page that is not ripe, or that is nobody's weights."""

    def __init__(self, pool: PagePool, fence_lag: int, execution: Execution) -> None:
        super().__init__(pool.num_pages * pool.page_bytes, fence_lag, execution)
        self._pool = pool
        self.violations: list[int] = []

    def copy_in(self, offset: int, source: memoryview) -> None:
        self._guard(offset, source.nbytes)
        super().copy_in(offset, source)

    def host_view(self, offset: int, num_bytes: int) -> memoryview:
        self._guard(offset, num_bytes)
        return super().host_view(offset, num_bytes)

    def _guard(self, offset: int, num_bytes: int) -> None:
        size = self._pool.page_bytes
        for page in range(offset // size, -(-(offset + num_bytes) // size)):
            owner = self._pool.owner_of(page)
            if not self._pool.is_ripe([page]) or owner is None or owner.kind != "weights":
                self.violations.append(page)


class Rig:
    """A residency over a real arena and pool, with an engine's part played by hand.

    `kv`: "none" leaves KV to the test (it cannot be moved), "paged" has `rig.kv` own all KV,
    "stubborn" the same, but what is live does not move.
    """

    def __init__(
        self,
        tmp_path: Path,
        num_pages: int,
        fence_lag: int = 0,
        kv: Literal["none", "paged", "stubborn"] = "none",
        execution: Execution = "inline",
        **config: Any,
    ) -> None:
        shm = tmp_path / "shm"
        shm.mkdir(exist_ok=True)
        self.config = EngineConfig(
            arena_bytes=num_pages * PAGE,
            page_bytes=PAGE,
            shm_dir=str(shm),
            shm_prefix="test",
            load_kv_tokens=1,
            **config,
        )
        self.pool = PagePool(num_pages, PAGE)
        self.backend = GuardedBackend(self.pool, fence_lag, execution)
        self.kv = PagedKv(self.pool, self.backend, kv == "stubborn")
        self.residency = Residency(
            self.config,
            self.pool,
            self.backend,
            DiskPacks(),
            real_weight_store(self.backend, self.config),
            NoKv(num_pages) if kv == "none" else self.kv,
        )
        self.busy: set[str] = set()
        self.dropped: list[str] = []
        self.now_s = 1000.0
        self._step = 0

    def catalog(self, *packs: Path, pinned: Sequence[str] = ()) -> list[str]:
        """Host these packs under their folders' names."""
        return self.residency.set_catalog(
            [ModelSpec(pack.name, str(pack), pack.name in pinned) for pack in packs]
        )

    def is_busy(self, model_id: str) -> bool:
        return model_id in self.busy

    def drop_kv(self, model_id: str) -> None:
        """What the engine does: preempt, give KV pages back."""
        self.dropped.append(model_id)
        self.busy.discard(model_id)
        self.kv.drop(model_id)
        owner = Owner(model_id, "kv")
        held = [page for page in range(self.pool.num_pages) if self.pool.owner_of(page) == owner]
        self.pool.release(owner, held)

    def poll(self, after_s: float = 0.0) -> list[ResidencyEvent]:
        """One engine step: retire the fence (poisoning what it frees), then poll."""
        self.now_s += after_s
        for page in self.pool.retire(self.backend.last_done()):
            self.backend.poison(page * PAGE, PAGE)
        events = self.residency.poll(self.now_s, self.is_busy, self.drop_kv)
        self.pool.check_integrity()
        self.residency.check_integrity()
        assert self.backend.violations == []
        self._step += 1
        self.pool.begin_step(self._step)
        self.backend.launched(self._step)
        return events
