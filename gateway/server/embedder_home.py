"""The small worker process that turns questions into vectors for the answer cache.

The program is the other workers' (`engine.worker.main`), with one model: the one that
`cache_embedder` names. Always on the CPU, with few threads, an arena of its own and no host tier,
so that a short question waits for nobody's prefill. It starts when the model is registered, and is
kept alive like any worker; while it is away, semantic hits are misses.
"""

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence

import zmq

from gateway.cache.embed_worker import EmbeddingWorker
from gateway.config import worker_environment
from gateway.dispatch.worker_client import ZmqWorkerClient
from gateway.server import machine
from gateway.server.worker_process import WorkerProcess
from gateway.settings import Settings
from gateway.settings_kinds import MIB

EMBEDDER_ID = "embedder-0"
ROOM_BYTES = 64 * MIB
"""Of the arena beside twice the weights: an old revision and its successor lie side by side."""
MAX_NUM_SEQS = 16
MAX_BATCH_TOKENS = 512


class EmbedderHome:
    """One process, or none where the settings name no model. `on_exit` hears how one ended."""

    def __init__(
        self, settings: Settings, command: Sequence[str], on_exit: Callable[[str], None]
    ) -> None:
        self._settings = settings
        self._weight_bytes = 0
        self._arena_bytes = 0
        self._is_wanted = asyncio.Event()
        self.process = WorkerProcess(
            EMBEDDER_ID,
            self.config,
            worker_environment(settings.cache_embed_threads),
            settings.worker_restart_backoff_s,
            on_exit=on_exit,
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
        """engine.config.WorkerConfig as JSON."""
        settings = self._settings
        self._arena_bytes = 2 * self._weight_bytes + ROOM_BYTES
        return json.dumps(
            {
                "worker_id": EMBEDDER_ID,
                "endpoint": endpoint(settings),
                "device": "cpu",
                "parent_pid": os.getpid(),
                "status_interval_s": settings.status_interval_s,
                "lease_ttl_s": settings.lease_ttl_s,
                "shutdown_timeout_s": 1.0,
                "engine": {
                    "arena_bytes": self._arena_bytes,
                    "shm_dir": str(machine.SHM_DIR),
                    "shm_prefix": f"polyhost-embed-{machine.data_dir_id(settings.data_path)}",
                    "max_num_seqs": MAX_NUM_SEQS,
                    "max_batch_tokens": MAX_BATCH_TOKENS,
                    "num_threads": settings.cache_embed_threads,
                    "load_threads": 1,
                    "verify_packs": settings.verify_packs,
                    "prefix_cache": False,
                },
            }
        )


def endpoint(settings: Settings) -> str:
    """Where it listens."""
    return f"ipc://{machine.socket_path(settings.data_path, EMBEDDER_ID)}"


def connection(
    settings: Settings, context: "zmq.Context[zmq.Socket[bytes]]", gateway_id: str
) -> EmbeddingWorker | None:
    """A gateway process' way to it; None where the settings name no model."""
    if not settings.cache_embedder:
        return None
    client = ZmqWorkerClient(
        context,
        EMBEDDER_ID,
        endpoint(settings),
        gateway_id,
        settings.worker_heartbeat_timeout_s,
    )
    return EmbeddingWorker(client, settings.cache_embedder)
