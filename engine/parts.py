"""What an engine touches the world with: packs, loads, runners, the laying out of steps.

Everything else of the engine (scheduler, pool, caches, residency, eviction, leases) is arithmetic
and runs alike wherever it runs. The defaults are the real parts; the simulator in `bench/sim` gives
siblings that take modelled time and hold no bytes (`backend/sim.py` is its device).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

import torch

from engine.backend.base import Backend
from engine.config import EngineConfig
from engine.encoders.encoder_runner import EncoderRunner
from engine.memory.kv_cache import KvCache
from engine.memory.page_pool import PagePool
from engine.packs.pack import PackIndex
from engine.packs.pack_source import DiskPacks, PackSource
from engine.policy.eviction import EvictionPolicy
from engine.residency.host_tier import HostTier
from engine.residency.tiers import Tiers, WeightTiers
from engine.running.batch import LayOut, StepBatch, build_batch
from engine.running.model_runner import ModelRunner
from engine.sampling.sampler import SampleOutput
from kernels.native_calls import NativeLibrary, library


class UnitRunner(Protocol):
    """One unit, resident or not; `model_runner.ModelRunner` is the real one."""

    @property
    def index(self) -> PackIndex:
        """The pack it was made for."""

    @property
    def cache(self) -> KvCache:
        """Its KV."""

    def bind(self, tensors: dict[str, torch.Tensor], generation: int) -> None:
        """Use these weight views; cheap when the generation is the one already bound."""

    def unbind(self) -> None:
        """Forget the weights and give all KV pages back."""

    def execute(self, batch: StepBatch) -> SampleOutput:
        """Forward and sample. Called inside a launched work: perhaps in another thread."""


AnyRunner: TypeAlias = UnitRunner | EncoderRunner
MakeRunner: TypeAlias = Callable[[str, Path, PackIndex, Backend, PagePool, EngineConfig], AnyRunner]
"""(unit id, pack folder, index, backend, pool, config) -> its runner. May raise anything."""
MakeTiers: TypeAlias = Callable[[Backend, EngineConfig], WeightTiers]


def real_runner(
    unit_id: str,
    pack_dir: Path,
    index: PackIndex,
    backend: Backend,
    pool: PagePool,
    config: EngineConfig,
) -> ModelRunner | EncoderRunner:
    """A transformers model over the arena."""
    if index.task != "generate":
        device = backend.device
        return EncoderRunner(unit_id, pack_dir, index, device, pool, config.block_tokens)
    return ModelRunner(
        unit_id,
        pack_dir,
        index,
        backend.arena,
        pool,
        config.block_tokens,
        caching=config.prefix_cache,
        max_chunk=config.max_batch_tokens,
        library=native_library(config) if backend.device.type == "cpu" else None,
    )


def native_library(config: EngineConfig) -> NativeLibrary | None:
    """The C++ kernels, their threads those of torch; None where there are none, or not wanted."""
    found = library() if config.native_kernels else None
    if found is not None:
        found.set_threads(torch.get_num_threads())
    return found


def device_in_words(backend: Backend, config: EngineConfig) -> str:
    """The device, and on a CPU whose kernels it runs."""
    if backend.device.type != "cpu":
        return backend.name
    found = native_library(config)
    kernels = "torch's operators" if found is None else f"C++ kernels for {found.name}"
    return f"{backend.name}, {kernels}"


def real_tiers(backend: Backend, config: EngineConfig) -> Tiers:
    """The disk, and shared memory on top of it."""
    host = HostTier(Path(config.shm_dir), config.shm_prefix, config.host_tier_bytes)
    return Tiers(backend, host, config.load_threads, config.verify_packs)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """One of each; the defaults are the product's.

    eviction   who leaves the device; None: policy/eviction.py as configured
    """

    packs: PackSource = field(default_factory=DiskPacks)
    make_tiers: MakeTiers = real_tiers
    make_runner: MakeRunner = real_runner
    lay_out: LayOut = build_batch
    eviction: EvictionPolicy | None = None
