"""`serve` with several gateway processes: starts them all, keeps them alive, ends them in order.

    this process          data folder's lock, listening socket, schema, demo, start block, hub
      gateway-0 .. N-1    HTTP and stages 1 to 4, 9, 10 (gateway_process.py)
      dispatcher-0, -1    one active, one in waiting (dispatcher_process.py)
      worker-0 .. M-1     stages 6 to 8

    down  gateways: not ready -> running requests finish within the bound -> ledger written
          -> dispatchers -> workers

The port is bound here, so that it is this server's alone, and not listened on: each gateway has a
socket of its own on it. A child of any kind that ends is started again, with the same pause that
doubles; one that hangs is ended first. This process serves nothing and keeps nothing that they
would miss; when it is gone, they stop.
"""

import asyncio
import logging
import socket
import sys
from collections.abc import Sequence

from prometheus_client import Counter

from admin.registration.bootstrap import DemoAccess
from gateway.cluster.process_hub import ProcessHub
from gateway.http.http_server import ABORT_GRACE_S, running
from gateway.ipc import ipc
from gateway.metrics.families import MetricsRegistry
from gateway.metrics.metrics import watch_process
from gateway.server.child_process import WORKER_STOP_TIMEOUT_S, ChildProcess, EarlyWorker
from gateway.server.local_homes import LocalHomes
from gateway.server.process_setup import ProcessConfig, hub_socket, on_stop_signals, write_config
from gateway.server.startup_banner import announce
from gateway.server.worker_launcher import worker_addresses
from gateway.server.worker_slots import WorkerSlot
from gateway.settings.config import child_environment
from gateway.settings.settings import Settings
from gateway.workers.worker_client import LossCause
from registry.models import catalog
from registry.session import make_engine, reading

logger = logging.getLogger(__name__)

NUM_DISPATCHERS = 2
LAST_STEPS_S = 15.0
"""Beyond the requests' own bound: what a gateway process may take to write its ledger and end."""


class ProcessGroup:
    """All processes of one server."""

    def __init__(
        self,
        settings: Settings,
        slots: Sequence[WorkerSlot],
        listener: socket.socket,
        lock: str,
        worker_command: Sequence[str],
        early: EarlyWorker | None = None,
    ) -> None:
        """`lock`: see process_setup.py. `early`: see child_process.py."""
        self._settings = settings
        self._listener = listener
        self._registry = MetricsRegistry()
        watch_process(self._registry)
        about = (settings, slots, worker_command, self._on_worker_exit, self._registry)
        self._homes = LocalHomes(*about, early)
        # Bound alone, or another server would not have been noticed; from here on with children.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        port = listener.getsockname()[1]
        config = ProcessConfig(settings, worker_addresses(settings, slots), port, lock)
        self._config_path = write_config(config)
        self._gateways = [
            self._child(f"gateway-{index}", "gateway.server.gateway_process")
            for index in range(settings.gateway_processes)
        ]
        self._dispatchers = [
            self._child(f"dispatcher-{index}", "gateway.server.dispatcher_process")
            for index in range(NUM_DISPATCHERS)
        ]
        self._stop_asked = asyncio.Event()
        self._restarts = Counter(
            "polyhost_process_restarts",
            "Gateway and dispatcher processes that ended while the server ran.",
            ["process"],
            registry=self._registry,
        )
        self._hub = ProcessHub(
            self._registry,
            settings.metrics_silent_s,
            settings.dispatcher_timeout_s,
            self._homes,
            self._on_silent,
        )

    async def run(self, demo: DemoAccess | None, admin_password: str = "") -> None:
        """Serve until a signal, or until a process cannot be started at all."""
        self._homes.set_weights(await asyncio.to_thread(_weights, self._settings))
        children = [*self._dispatchers, *self._gateways]
        hub_path = hub_socket(self._settings)
        async with (
            ipc.listening(hub_path, self._hub.new_channel),
            running(
                self._homes.run(),
                *(child.run() for child in children),
                self._hub.run(),
                announce(
                    lambda: all(self._hub.is_ready(child.name) for child in self._gateways),
                    lambda: _weights(self._settings),
                    self._listener,
                    self._settings,
                    demo,
                    admin_password,
                ),
            ) as parts,
        ):
            with on_stop_signals(self._on_signal):
                asked = asyncio.create_task(self._stop_asked.wait())
                done, _ = await asyncio.wait([asked, *parts], return_when=asyncio.FIRST_COMPLETED)
                asked.cancel()
                await self._stop()
        self._config_path.unlink(missing_ok=True)
        for part in done - {asked}:
            part.result()  # Raises what ended the server.

    async def _stop(self) -> None:
        logger.info("stopping")
        self._stop_asked.set()
        settings = self._settings
        bound_s = settings.shutdown_notice_s + settings.shutdown_timeout_s + ABORT_GRACE_S
        await asyncio.gather(*(child.stop(bound_s + LAST_STEPS_S) for child in self._gateways))
        await asyncio.gather(*(child.stop(WORKER_STOP_TIMEOUT_S) for child in self._dispatchers))
        await self._homes.stop()
        logger.info("stopped")

    def _child(self, name: str, module: str) -> ChildProcess:
        return ChildProcess(
            name,
            lambda: str(self._config_path),
            child_environment(),
            self._settings.worker_restart_backoff_s,
            lambda _reason, _cause: self._on_exit(name),
            command=(sys.executable, "-m", module, name),
        )

    def _on_exit(self, name: str) -> None:
        if not self._stop_asked.is_set():
            self._restarts.labels(name).inc()

    def _on_silent(self, name: str) -> None:
        logger.error(
            "process hangs and is killed: it was silent for dispatcher_timeout_s process=%s", name
        )
        for child in (*self._gateways, *self._dispatchers):
            if child.name == name:
                child.kill()

    def _on_worker_exit(self, worker_id: str, reason: str, cause: LossCause) -> None:
        self._hub.worker_ended(worker_id, reason, cause)

    def _on_signal(self) -> None:
        """The first one stops in order, the second does not wait for requests."""
        if self._stop_asked.is_set():
            for child in self._gateways:
                child.hurry()
        self._stop_asked.set()


def _weights(settings: Settings) -> dict[str, int]:
    """Bytes of each ready model's weights."""
    engine = make_engine(settings.registry_url)
    try:
        with reading(engine) as session:
            return {model.name: model.weight_bytes for model in catalog.ready_models(session)}
    finally:
        engine.dispose()
