"""The worker process of a server on this machine: how much memory it gets, and its configuration.

Kept alive by worker_process.py; who talks to it is not known here.
"""

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence

from gateway.config import worker_environment
from gateway.policy.budget import device_budget_bytes, host_tier_bytes, reserve_bytes
from gateway.registration.bootstrap import DEMO_MODELS_DIR
from gateway.server import machine
from gateway.server.worker_process import EarlyWorker, WorkerProcess
from gateway.settings import Settings

logger = logging.getLogger(__name__)

WORKER_ID = "worker-0"


class WorkerHome:
    """One worker. `on_exit` hears how a process of it ended. `early`: worker_process.py."""

    def __init__(
        self,
        settings: Settings,
        command: Sequence[str],
        on_exit: Callable[[str], None],
        early: EarlyWorker | None = None,
    ) -> None:
        self._settings = settings
        self._weights: Mapping[str, int] = {}
        # What its imports take by and by is no reason for another budget at each start.
        self._free_bytes = early.free_bytes if early else machine.free_memory_bytes()
        self._arena_bytes = 0
        self.endpoint = f"ipc://{machine.socket_path(settings.data_path, WORKER_ID)}"
        self.process = WorkerProcess(
            WORKER_ID,
            self.config,
            worker_environment(settings.num_threads),
            settings.worker_restart_backoff_s,
            on_exit=on_exit,
            command=command,
            early=early.process if early else None,
        )

    def set_weights(self, weights: Mapping[str, int]) -> None:
        """Bytes of each ready model's weights; a worker whose arena is too small begins anew."""
        self._weights = weights
        if 0 < self._arena_bytes < self._device_budget() and (
            max(weights.values(), default=0) > self._arena_bytes // 2
        ):
            # The demo's own budget is too small for other models: once more, with more.
            logger.info("the device budget grows: the worker is restarted")
            self.process.restart()

    def config(self) -> str:
        """engine.config.WorkerConfig as JSON; the gateway does not import the engine."""
        settings = self._settings
        self._arena_bytes = self._device_budget()
        host_bytes = host_tier_bytes(
            settings.host_tier_bytes, self._free_bytes, machine.free_shm_bytes()
        )
        left_bytes = self._free_bytes - self._arena_bytes - host_bytes
        return json.dumps(
            {
                "worker_id": WORKER_ID,
                "endpoint": self.endpoint,
                "device": settings.device,
                "device_arena_bytes": settings.device_budget_bytes,
                "device_reserve_bytes": settings.device_reserve_bytes,
                "parent_pid": os.getpid(),
                "status_interval_s": settings.status_interval_s,
                "lease_ttl_s": settings.lease_ttl_s,
                "shutdown_timeout_s": settings.shutdown_timeout_s,
                "engine": {
                    "arena_bytes": self._arena_bytes,
                    "page_bytes": settings.page_bytes,
                    "host_tier_bytes": host_bytes,
                    "host_tier_when_crowded": (
                        settings.host_tier_bytes < 0 and settings.device == "cpu"
                    ),
                    "reserve_bytes": reserve_bytes(settings.device_reserve_bytes, left_bytes),
                    "shm_dir": str(machine.SHM_DIR),
                    "shm_prefix": shm_prefix(settings),
                    "max_num_seqs": settings.max_num_seqs,
                    "max_batch_tokens": settings.max_batch_tokens,
                    "num_threads": settings.num_threads,
                    "native_kernels": settings.native_kernels,
                    "load_threads": settings.load_threads,
                    "verify_packs": settings.verify_packs,
                    "request_timeout_s": settings.request_timeout_s,
                    "prefix_cache": settings.prefix_cache,
                    "tenant_kv_share": settings.tenant_kv_share,
                },
            }
        )

    def _device_budget(self) -> int:
        demo = DEMO_MODELS_DIR.iterdir() if self._settings.demo else ()
        return device_budget_bytes(
            self._settings.device_budget_bytes,
            self._free_bytes,
            self._weights,
            frozenset(path.name for path in demo),
        )


def shm_prefix(settings: Settings) -> str:
    """First part of the host tier's file names: this data folder's alone."""
    return f"polyhost-{machine.data_dir_id(settings.data_path)}"
