"""`serve`: puts the gateway together, keeps the worker alive, and takes everything down in order.

    up    lock, socket, schema, packs swept, demo, registry view, ledger, worker, HTTP, start block
    down  not ready (503 on /health/ready) -> no new connections, running requests finish
          -> what is left is aborted -> ledger written -> worker ended by its pid -> files closed

One worker process on this machine's CPU. Every decision is elsewhere: which request goes
(dispatcher.py), how much memory (policy/budget.py), when a worker is restarted
(worker_process.py). What ends the server on its own: a part of it that fails for good.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from typing import Any

import uvicorn
import zmq
from prometheus_client import CollectorRegistry, Counter
from sqlalchemy import Engine

from gateway import machine
from gateway.app import create_app
from gateway.bootstrap import DEMO_MODELS_DIR, DemoAccess, ensure_demo
from gateway.config import worker_environment
from gateway.directory import Directory
from gateway.dispatcher import TICK_S, Dispatcher
from gateway.http_protocol import http_config
from gateway.ledger import Ledger
from gateway.logs import set_up_logging
from gateway.operator_socket import OperatorDesk, listening, operator_socket
from gateway.policy.budget import device_budget_bytes, host_tier_bytes, reserve_bytes
from gateway.policy.fair_share import FairShare
from gateway.registry_poll import RegistryPoll
from gateway.service import tidy
from gateway.services import Services
from gateway.settings import Settings
from gateway.share_file import ShareFile
from gateway.start_block import start_block
from gateway.store.memory import MemoryStore
from gateway.types import HostedModel
from gateway.worker_client import ZmqWorkerClient
from gateway.worker_process import WORKER_COMMAND, WorkerProcess
from registry import locks
from registry.errors import RegistryError
from registry.residency_requests import ResidencyRequest
from registry.session import make_engine, upgrade

logger = logging.getLogger(__name__)

WORKER_ID = "worker-0"
GATEWAY_ID = "gateway-0"
LEDGER_FLUSH_TIMEOUT_S = 10.0
WORKER_STOP_TIMEOUT_S = 5.0
ABORT_GRACE_S = 2.0
"""After the shutdown time-out: how long the aborted requests may take to be answered."""


class ServerFailed(RegistryError):
    """The server cannot go on; one line for the operator."""


async def serve(settings: Settings, worker_command: Sequence[str] = WORKER_COMMAND) -> None:
    """Run until SIGTERM or SIGINT.

    Raises RegistryError (another server holds the data folder, the schema is newer) or OSError (the
    port is taken) before anything is served, ServerFailed where it cannot go on.
    """
    set_up_logging()
    data_path = settings.data_path
    data_path.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locks.hold(data_path / locks.SERVER_LOCK), _listen(settings) as listener:
        await asyncio.to_thread(upgrade, settings.database_url)
        await asyncio.to_thread(tidy, settings)
        demo = await asyncio.to_thread(ensure_demo, settings) if settings.demo else None
        engine = make_engine(settings.database_url)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        try:
            await Server(settings, engine, context, worker_command).run(listener, demo)
        finally:
            context.destroy(linger=0)
            engine.dispose()
            remove_host_tier(settings)


class Server:
    """The parts of a running gateway and the order in which they start and stop."""

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        context: zmq.Context[zmq.Socket[bytes]],
        worker_command: Sequence[str],
    ) -> None:
        self._settings = settings
        self._directory = Directory()
        share = FairShare(settings.fair_share_max_lead_s)
        self._share_file = ShareFile(settings.data_path, share)
        self._dispatcher = Dispatcher(
            settings,
            claim_orphan=lambda request_id, finish: self._ledger.claim(request_id, finish),
            share=share,
        )
        self._ledger = Ledger(
            engine,
            settings,
            self._directory.find_model,
            self._dispatcher.ack_usage,
            on_recovered=lambda posting: self._poll.count_posting(posting),
        )
        self._limit_store = MemoryStore()
        self._poll = RegistryPoll(
            engine,
            settings.data_path,
            self._directory,
            settings.key_cache_poll_s,
            self._on_models,
            self._on_wish,
            self._limit_store,
            on_reserved=self._on_reserved,
        )
        self._weights: dict[str, int] = {}
        self._free_bytes = machine.free_memory_bytes()
        self._arena_bytes = 0
        self._endpoint = f"ipc://{machine.socket_path(settings.data_path, WORKER_ID)}"
        self._client = ZmqWorkerClient(
            context,
            WORKER_ID,
            self._endpoint,
            GATEWAY_ID,
            settings.worker_heartbeat_timeout_s,
        )
        self._worker = WorkerProcess(
            WORKER_ID,
            self._worker_config,
            worker_environment(settings.num_threads),
            settings.worker_restart_backoff_s,
            on_exit=self._on_worker_exit,
            command=worker_command,
        )
        self._stop_asked = asyncio.Event()
        self._metrics_registry = CollectorRegistry()
        self._restarts = Counter(
            "polyhost_worker_restarts",
            "Worker processes that ended while the server ran and were started again.",
            ["worker"],
            registry=self._metrics_registry,
        ).labels(WORKER_ID)

    async def run(self, listener: socket.socket, demo: DemoAccess | None) -> None:
        """Serve on the socket until a signal, or until a part of the server fails for good."""
        await self._share_file.load()
        await self._poll.load()
        await self._ledger.start()
        http = self._http_server()
        background = (
            self._worker.run(),
            self._poll.run(),
            self._share_file.run(),
            self._tick(listener, demo),
        )
        desk = OperatorDesk(
            self._dispatcher, lambda name: self._directory.find_model(name) is not None
        )
        async with (
            listening(operator_socket(self._settings.data_path), desk),
            _running(*background) as parts,
        ):
            self._dispatcher.add_worker(self._client)
            serving = asyncio.create_task(http.serve(sockets=[listener]), name="http")
            with self._signals(http):
                asked = asyncio.create_task(self._stop_asked.wait())
                done, _ = await asyncio.wait(
                    [asked, serving, *parts], return_when=asyncio.FIRST_COMPLETED
                )
                asked.cancel()
                await self._stop(http, serving)
        if asked not in done:
            for part in done:
                part.result()  # Raises what ended the server.
            raise ServerFailed("the HTTP server ended by itself: its log lines say why")

    async def _stop(self, http: "_Http", serving: "asyncio.Task[None]") -> None:
        logger.info("stopping")
        self._dispatcher.begin_drain()
        await asyncio.sleep(self._settings.shutdown_notice_s)
        http.should_exit = True
        done, _ = await asyncio.wait([serving], timeout=self._settings.shutdown_timeout_s)
        if not done:
            self._dispatcher.abort_all()
        await asyncio.wait([serving])
        await self._share_file.write()
        await self._ledger.stop(LEDGER_FLUSH_TIMEOUT_S)
        self._dispatcher.close()  # The last acknowledgements linger a moment and get through.
        await self._worker.stop(WORKER_STOP_TIMEOUT_S)
        logger.info("stopped")

    def _http_server(self) -> "_Http":
        services = Services(
            settings=self._settings,
            directory=self._directory,
            dispatcher=self._dispatcher,
            ledger=self._ledger,
            metrics_registry=self._metrics_registry,
            limit_store=self._limit_store,
        )
        grace_s = self._settings.shutdown_timeout_s + ABORT_GRACE_S
        return _Http(http_config(create_app(services), self._settings, grace_s))

    async def _tick(self, listener: socket.socket, demo: DemoAccess | None) -> None:
        """The dispatcher's clock; prints the start block once a request could be served."""
        announced = False
        while True:
            await asyncio.sleep(TICK_S)
            self._dispatcher.tick()
            if self._dispatcher.ready and not announced:
                announced = True
                host, port = listener.getsockname()[:2]
                models = self._directory.models()
                print(start_block(host, port, self._settings, models, demo), flush=True)

    def _on_models(self, models: Sequence[HostedModel], weights: dict[str, int]) -> None:
        self._weights = weights
        self._dispatcher.set_catalog(models)
        if 0 < self._arena_bytes < self._device_budget() and (
            max(weights.values(), default=0) > self._arena_bytes // 2
        ):
            # The demo's own budget is too small for other models: once more, with more.
            logger.info("the device budget grows: the worker is restarted")
            self._worker.restart()

    def _on_reserved(self, shares: dict[str, float]) -> None:
        self._dispatcher.headroom.reserved = shares

    def _on_worker_exit(self, reason: str) -> None:
        self._client.lose(f"its process ended: {reason}")
        if not self._dispatcher.stopping:
            self._restarts.inc()

    def _on_wish(self, wish: ResidencyRequest) -> None:
        if wish.action == "load":
            self._dispatcher.load_model(wish.model)
        else:
            self._dispatcher.unload_model(wish.model)

    def _device_budget(self) -> int:
        demo = DEMO_MODELS_DIR.iterdir() if self._settings.demo else ()
        return device_budget_bytes(
            self._settings.device_budget_bytes,
            self._free_bytes,
            self._weights,
            frozenset(path.name for path in demo),
        )

    def _worker_config(self) -> str:
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
                "endpoint": self._endpoint,
                "parent_pid": os.getpid(),
                "status_interval_s": settings.status_interval_s,
                "lease_ttl_s": settings.lease_ttl_s,
                "shutdown_timeout_s": settings.shutdown_timeout_s,
                "engine": {
                    "arena_bytes": self._arena_bytes,
                    "page_bytes": settings.page_bytes,
                    "host_tier_bytes": host_bytes,
                    "reserve_bytes": reserve_bytes(settings.device_reserve_bytes, left_bytes),
                    "shm_dir": str(machine.SHM_DIR),
                    "shm_prefix": shm_prefix(settings),
                    "max_num_seqs": settings.max_num_seqs,
                    "max_batch_tokens": settings.max_batch_tokens,
                    "num_threads": settings.num_threads,
                    "load_threads": settings.load_threads,
                    "verify_packs": settings.verify_packs,
                    "request_timeout_s": settings.request_timeout_s,
                    "prefix_cache": settings.prefix_cache,
                    "tenant_kv_share": settings.tenant_kv_share,
                },
            }
        )

    @contextlib.contextmanager
    def _signals(self, http: "_Http") -> Iterator[None]:
        """The first SIGTERM or SIGINT stops in order, the second does not wait for requests."""
        loop = asyncio.get_running_loop()

        def on_signal() -> None:
            if self._stop_asked.is_set():
                http.force_exit = True
                self._dispatcher.abort_all()
            self._stop_asked.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)


class _Http(uvicorn.Server):
    """Uvicorn without its own signal handling: the supervisor says when to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def _listen(settings: Settings) -> Iterator[socket.socket]:
    """The socket, bound before anything slow happens. Raises OSError that names the address."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.host, settings.port))
        except OSError as error:
            where = f"{settings.host}:{settings.port}"
            raise OSError(error.errno, f"cannot listen on {where}: {error.strerror}") from error
        listener.setblocking(False)
        yield listener


@contextlib.asynccontextmanager
async def _running(*work: Coroutine[Any, Any, None]) -> AsyncIterator[list["asyncio.Task[None]"]]:
    """The coroutines as tasks, cancelled and awaited at the end."""
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def shm_prefix(settings: Settings) -> str:
    """First part of the host tier's file names: this data folder's alone."""
    return f"polyhost-{machine.data_dir_id(settings.data_path)}"


def remove_host_tier(settings: Settings) -> None:
    """A stopped server gives its shared memory back; one that was killed leaves it to the next."""
    for path in machine.SHM_DIR.glob(f"{shm_prefix(settings)}-*"):
        with contextlib.suppress(OSError):
            path.unlink()
