"""The worker processes of a server on this machine: how much memory each gets, its configuration.

`WorkerLauncher` has one worker that serves, `EmbedderLauncher` the small one that turns questions
into vectors for the answer cache. Both run `engine.worker.main` and are kept alive by
child_process.py; who talks to them is not known here. local_homes.py has all of them.
"""

import asyncio
import contextlib
import json
import logging
import os
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import zmq

from admin.registration.bootstrap import DEMO_MODELS_DIR
from gateway.cache.embedder import EmbeddingWorker
from gateway.ipc import machine
from gateway.server.child_process import ChildProcess
from gateway.server.policy.memory_budget import device_budget_bytes, host_tier_bytes, reserve_bytes
from gateway.server.worker_slots import WorkerSlot
from gateway.settings.base_settings import MIB
from gateway.settings.config import worker_environment
from gateway.settings.settings import Settings
from gateway.workers.curve_keys import WorkerAddress
from gateway.workers.worker_client import LossCause, ZmqWorkerClient

logger = logging.getLogger(__name__)

EMBEDDER_ID = "embedder-0"
EMBEDDER = WorkerSlot(EMBEDDER_ID, "cpu")
ROOM_BYTES = 64 * MIB
"""Of the arena beside twice the weights: an old revision and its successor lie side by side."""
EMBEDDER_NUM_SEQS = 16
EMBEDDER_BATCH_TOKENS = 512


class WorkerGuard(NamedTuple):
    """Who reaches a worker from other machines, and where its packs are (engine.config)."""

    secret_key: str
    allowed_keys: Sequence[str]
    packs_dir: str


class MainMemory(NamedTuple):
    """Bytes that were free before the first worker began, and of these the host tier's."""

    free_bytes: int
    host_tier_bytes: int


def main_memory(settings: Settings, free_bytes: int) -> MainMemory:
    """Looked at once: what workers take by and by is no reason for other budgets at each start."""
    free_shm_bytes = machine.free_shm_bytes()
    host_bytes = host_tier_bytes(settings.host_tier_bytes, free_bytes, free_shm_bytes)
    return MainMemory(free_bytes, host_bytes)


class WorkerLauncher:
    """One worker. `on_exit(worker_id, reason, cause)` hears how a process of it ended; `early` is
    child_process.py's."""

    def __init__(
        self,
        settings: Settings,
        slot: WorkerSlot,
        memory: MainMemory,
        command: Sequence[str],
        on_exit: Callable[[str, str, LossCause], None],
        early: Process | None = None,
        guard: WorkerGuard | None = None,
    ) -> None:
        """`guard`: of a worker that servers of other machines reach."""
        self._settings = settings
        self._slot = slot
        self._guard = guard
        self._weights: Mapping[str, int] = {}
        self._memory = memory
        self._arena_bytes = 0
        self._num_threads = slot.threads or settings.num_threads
        self.worker_id = slot.worker_id
        self.process = ChildProcess(
            slot.worker_id,
            self.config,
            worker_environment(self._num_threads),
            settings.worker_restart_backoff_s,
            on_exit=partial(on_exit, slot.worker_id),
            command=command,
            early=early,
            is_secret=guard is not None,
        )

    def set_weights(self, weights: Mapping[str, int]) -> None:
        """Bytes of each ready model's weights."""
        self._weights = weights

    @property
    def is_outgrown(self) -> bool:
        """Whether its process began with too small an arena and would get a larger one now: the
        demo's own budget is too small for other models."""
        largest_bytes = max(self._weights.values(), default=0)
        return 0 < self._arena_bytes < self._device_budget() and (
            largest_bytes > self._arena_bytes // 2
        )

    def config(self) -> str:
        """See `_config`."""
        settings, slot = self._settings, self._slot
        self._arena_bytes = self._device_budget()
        free_bytes, host_bytes = self._memory
        left_bytes = (free_bytes - host_bytes) // slot.num_in_memory - self._arena_bytes
        engine = {
            "arena_bytes": self._arena_bytes,
            "page_bytes": settings.page_bytes,
            "host_tier_bytes": host_bytes,
            "host_tier_when_crowded": settings.host_tier_bytes < 0 and slot.device == "cpu",
            "reserve_bytes": reserve_bytes(settings.device_reserve_bytes, left_bytes),
            "shm_dir": str(machine.SHM_DIR),
            "shm_prefix": shm_prefix(settings),
            "max_num_seqs": settings.max_num_seqs,
            "max_batch_tokens": settings.max_batch_tokens,
            "num_threads": self._num_threads,
            "native_kernels": settings.native_kernels,
            "load_threads": settings.load_threads,
            "verify_packs": settings.verify_packs,
            "request_timeout_s": settings.request_timeout_s,
            "prefix_cache": settings.prefix_cache,
            "tenant_kv_share": settings.tenant_kv_share,
        }
        guard = self._guard._asdict() if self._guard else {}
        return _config(
            settings,
            slot,
            engine,
            **guard,
            device=slot.device,
            device_arena_bytes=slot.memory_bytes or settings.device_budget_bytes,
            cpus=slot.cpus,
            num_workers=slot.num_workers,
            device_reserve_bytes=settings.device_reserve_bytes,
            shutdown_timeout_s=settings.shutdown_timeout_s,
        )

    def _device_budget(self) -> int:
        demo = DEMO_MODELS_DIR.iterdir() if self._settings.demo else ()
        return device_budget_bytes(
            self._slot.memory_bytes or self._settings.device_budget_bytes,
            self._memory.free_bytes // self._slot.num_in_memory,
            self._weights,
            frozenset(path.name for path in demo),
        )


def _config(
    settings: Settings, slot: WorkerSlot, engine: Mapping[str, object], **own: object
) -> str:
    """engine.config.WorkerConfig as JSON; the gateway does not import the engine."""
    config = {
        "worker_id": slot.worker_id,
        "endpoint": endpoint_of(settings, slot),
        "parent_pid": os.getpid(),
        "status_interval_s": settings.status_interval_s,
        "lease_ttl_s": settings.lease_ttl_s,
        "engine": engine,
        **own,
    }
    return json.dumps(config)


def shm_prefix(settings: Settings) -> str:
    """First part of the host tier's file names: this data folder's alone."""
    return f"polyhost-{machine.data_dir_id(settings.data_path)}"


def clear_host_tier(settings: Settings) -> None:
    """What workers of an earlier life were writing and deleting. Their process ids may be others'
    by now, so that no worker could tell. Whole packs stay."""
    for form in ("*.pack.tmp-*", "*.pack.old-*", "worth-*"):
        for path in machine.SHM_DIR.glob(f"{shm_prefix(settings)}-{form}"):
            with contextlib.suppress(OSError):
                path.unlink()


def remove_host_tier(settings: Settings) -> None:
    """Shared memory is given back at an orderly stop; what was killed leaves it to the next."""
    for path in machine.SHM_DIR.glob(f"{shm_prefix(settings)}-*"):
        with contextlib.suppress(OSError):
            path.unlink()


class EmbedderLauncher:
    """One process, or none where the settings name no model. `on_exit` as there.

    It has one model: the one that `cache_embedder` names. Always on the CPU, with few threads, an
    arena of its own and no host tier, so that a short question waits for nobody's prefill. It
    starts when the model is registered; while it is away, semantic hits are misses.
    """

    def __init__(
        self,
        settings: Settings,
        command: Sequence[str],
        on_exit: Callable[[str, str, LossCause], None],
    ) -> None:
        self._settings = settings
        self._weight_bytes = 0
        self._arena_bytes = 0
        self._is_wanted = asyncio.Event()
        self.process = ChildProcess(
            EMBEDDER_ID,
            self.config,
            worker_environment(settings.cache_embed_threads),
            settings.worker_restart_backoff_s,
            on_exit=partial(on_exit, EMBEDDER_ID),
            command=command,
        )

    def set_weights(self, weights: Mapping[str, int]) -> None:
        """Bytes of each ready model's weights; a larger revision gets a larger arena."""
        size = weights.get(self._settings.cache_embedder, 0)
        if size > self._weight_bytes:
            self._weight_bytes = size
            self._is_wanted.set()
            if 0 < self._arena_bytes < 2 * size:
                self.process.restart()

    async def run(self) -> None:
        """Keep the process alive from when its model is there."""
        await self._is_wanted.wait()
        await self.process.run()

    def config(self) -> str:
        """See `_config`."""
        settings = self._settings
        self._arena_bytes = 2 * self._weight_bytes + ROOM_BYTES
        engine = {
            "arena_bytes": self._arena_bytes,
            "shm_dir": str(machine.SHM_DIR),
            "shm_prefix": f"polyhost-embed-{machine.data_dir_id(settings.data_path)}",
            "max_num_seqs": EMBEDDER_NUM_SEQS,
            "max_batch_tokens": EMBEDDER_BATCH_TOKENS,
            "num_threads": settings.cache_embed_threads,
            "load_threads": 1,
            "verify_packs": settings.verify_packs,
            "prefix_cache": False,
        }
        return _config(settings, EMBEDDER, engine, device="cpu", shutdown_timeout_s=1.0)


def endpoint_of(settings: Settings, slot: WorkerSlot) -> str:
    """Where it listens."""
    return slot.endpoint or f"ipc://{machine.socket_path(settings.data_path, slot.worker_id)}"


def worker_addresses(settings: Settings, slots: Sequence[WorkerSlot]) -> list[WorkerAddress]:
    """Of all that serve, those of other machines among them."""
    return [
        WorkerAddress(slot.worker_id, endpoint_of(settings, slot), slot.public_key)
        for slot in slots
    ]


def embedder_connection(
    settings: Settings, context: "zmq.Context[zmq.Socket[bytes]]", gateway_id: str
) -> EmbeddingWorker | None:
    """A gateway process' way to it; None where the settings name no model."""
    if not settings.cache_embedder:
        return None
    client = ZmqWorkerClient(
        context,
        WorkerAddress(EMBEDDER_ID, endpoint_of(settings, EMBEDDER)),
        gateway_id,
        settings.worker_heartbeat_timeout_s,
    )
    return EmbeddingWorker(client, settings.cache_embedder)
