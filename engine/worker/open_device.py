"""Opens a device: from a worker's configuration to a backend and what goes with it.

`auto` takes the first GPU that a driver shows, and where there is none the CPU, without loading a
driver; a GPU that is there and cannot be used is an error and no reason to be slow. Raises
DeviceUnusable, whose message is one line for the operator.
"""

import logging
import re
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.backend import Backend, CpuBackend, CudaBackend, CudaDevice, Device, Mover, gpu_names
from engine.config import EngineConfig, WorkerConfig
from engine.dependencies import EngineDependencies
from engine.encoders import EncoderRunner
from engine.errors import DeviceUnusable
from engine.gpu import (
    SAMPLING_KERNELS,
    DeviceLayOut,
    DeviceRunner,
    DeviceTools,
    InputBuffer,
    SamplingOperations,
    StepGraphs,
)
from engine.memory import PagePool
from engine.models import AnyRunner
from engine.pack import PackIndex
from engine.packs import DiskWeightStore, HostTier
from engine.worker.step_limits import for_cpu, for_gpu
from kernels.decoder_layer import KERNELS, Operations
from kernels.mixer_operations import MIXER_KERNELS, MixerOperations
from kernels.page_copy import page_copy

RESERVE_SHARE = 1 / 16
GRAPH_SHARE = 1 / 32
LEAST_RESERVE_BYTES = 1 << 30
LEAST_GRAPH_BYTES = 256 << 20
LEAST_ARENA_BYTES = 1 << 30
"""Of a GPU; with less, no model of any use has room."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Opened:
    """A device in use, and the configuration that fits it."""

    backend: Backend
    config: EngineConfig
    dependencies: EngineDependencies
    graphs: StepGraphs | None = None


@dataclass(frozen=True, slots=True)
class Budget:
    """A GPU's memory, in bytes."""

    arena: int
    reserve: int
    graphs: int


def open_device(config: WorkerConfig) -> Opened:
    """Raises DeviceUnusable."""
    name = config.device
    if name == "auto":
        name = next(iter(gpu_names()), "cpu")
    if name == "cpu":
        return open_cpu(config.engine)
    number = re.fullmatch(r"cuda(?::(\d+))?", name)
    if number is None:
        raise DeviceUnusable(
            f"unknown device {name!r}: set device to auto, cpu, cuda:0, cuda:1, ..."
        )
    device = CudaDevice(int(number.group(1) or 0))
    budget = budget_of(config, *device.memory())
    return open_streams(device, on_gpu(config.engine, budget), budget.graphs)


def open_cpu(config: EngineConfig) -> Opened:
    """Host memory, of which all is taken in the background."""
    config = for_cpu(config)
    backend = CpuBackend(
        config.num_pages * config.resolved_page_bytes,
        execution="thread" if config.steps_ahead else "inline",
    )
    backend.commit()
    return Opened(backend, config, EngineDependencies())


def budget_of(config: WorkerConfig, free_bytes: int, total_bytes: int) -> Budget:
    """How a GPU's free memory is divided where nobody says. Raises DeviceUnusable."""
    reserve, graphs = config.device_reserve_bytes, config.graph_bytes
    if reserve <= 0:
        reserve = max(LEAST_RESERVE_BYTES, int(free_bytes * RESERVE_SHARE))
    if graphs < 0:
        graphs = max(LEAST_GRAPH_BYTES, int(free_bytes * GRAPH_SHARE))
    most = free_bytes - reserve - graphs
    arena = config.device_arena_bytes or most
    if most < LEAST_ARENA_BYTES or arena > most:
        wanted = max(LEAST_ARENA_BYTES, config.device_arena_bytes)
        raise DeviceUnusable(
            f"the GPU has {free_bytes} of {total_bytes} bytes free; an arena of {wanted}, "
            f"{reserve} for steps and {graphs} for recorded steps do not fit: stop "
            "other programs that use it, or lower device_budget_bytes"
        )
    return Budget(arena, reserve, graphs)


def on_gpu(config: EngineConfig, budget: Budget) -> EngineConfig:
    """The engine's configuration for a GPU: its memory, one step ahead, attention in place, and
    as much a step as it has room for."""
    return msgspec.structs.replace(
        for_gpu(config, budget.reserve),
        arena_bytes=budget.arena,
        reserve_bytes=budget.reserve,
        steps_ahead=1,
        attention_in_place=True,
    )


def open_streams(
    device: Device,
    config: EngineConfig,
    graph_bytes: int,
    operations: Operations = KERNELS,
    sampling: SamplingOperations = SAMPLING_KERNELS,
    move: Mover = page_copy,
    mixers: MixerOperations = MIXER_KERNELS,
) -> Opened:
    """A backend with streams over any device. Raises DeviceUnusable."""
    backend = CudaBackend(device, config.num_pages * config.resolved_page_bytes, move)
    graphs = StepGraphs(device, graph_bytes, backend.mark)
    tools = DeviceTools(
        device, backend.arena, InputBuffer(device), graphs, operations, sampling, mixers
    )

    def make_runner(
        instance_id: str,
        pack_dir: Path,
        index: PackIndex,
        on: Backend,
        pool: PagePool,
        settings: EngineConfig,
    ) -> AnyRunner:
        if index.task != "generate":
            where = on.device
            return EncoderRunner(instance_id, pack_dir, index, where, pool, settings.block_tokens)
        return DeviceRunner(
            instance_id,
            pack_dir,
            index,
            tools,
            pool,
            settings.block_tokens,
            caching=settings.prefix_cache,
            max_chunk=settings.max_batch_tokens,
        )

    def make_weight_store(on: Backend, settings: EngineConfig) -> DiskWeightStore:
        folder = Path(settings.shm_dir)
        host = HostTier(folder, settings.shm_prefix, settings.host_tier_bytes, backend.pinner)
        return DiskWeightStore(on, host, settings.load_threads, settings.verify_packs)

    dependencies = EngineDependencies(
        make_weight_store=make_weight_store,
        make_runner=make_runner,
        lay_out=DeviceLayOut(device, config.max_num_seqs),
        counters=graphs.counters,
    )
    return Opened(backend, config, dependencies, graphs)
