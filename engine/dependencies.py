"""What an engine touches the world with: packs, loads, runners, the laying out of steps.

Everything else of the engine (scheduler, pool, caches, residency, eviction, leases) is arithmetic
and runs alike wherever it runs. The defaults are the real ones; the simulator in `bench/sim` gives
siblings that take modelled time and hold no bytes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import torch

from engine.backend import Backend
from engine.config import EngineConfig
from engine.encoders import EncoderRunner
from engine.memory import PagePool
from engine.models import MakeRunner
from engine.pack import PackIndex
from engine.packs import DiskPacks, DiskWeightStore, HostTier, PackSource, WeightStore
from engine.residency import EvictionPolicy
from engine.running import LayOut, ModelRunner, build_batch
from kernels.native_calls import NativeLibrary, library

MakeWeightStore: TypeAlias = Callable[[Backend, EngineConfig], WeightStore]


def real_runner(
    instance_id: str,
    pack_dir: Path,
    index: PackIndex,
    backend: Backend,
    pool: PagePool,
    config: EngineConfig,
) -> ModelRunner | EncoderRunner:
    """A transformers model over the arena."""
    if index.task != "generate":
        device = backend.device
        return EncoderRunner(instance_id, pack_dir, index, device, pool, config.block_tokens)
    return ModelRunner(
        instance_id,
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


def real_weight_store(backend: Backend, config: EngineConfig) -> DiskWeightStore:
    """The disk, and shared memory on top of it."""
    host = HostTier(Path(config.shm_dir), config.shm_prefix, config.host_tier_bytes)
    return DiskWeightStore(backend, host, config.load_threads, config.verify_packs)


@dataclass(frozen=True, slots=True)
class EngineDependencies:
    """One of each; the defaults are the product's.

    eviction   who leaves the device; None: policy/eviction.py as configured
    counters   of the device, for the worker's status; they change as it runs
    """

    packs: PackSource = field(default_factory=DiskPacks)
    make_weight_store: MakeWeightStore = real_weight_store
    make_runner: MakeRunner = real_runner
    lay_out: LayOut = build_batch
    eviction: EvictionPolicy | None = None
    counters: Mapping[str, float] = field(default_factory=dict)
