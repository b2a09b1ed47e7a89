"""`serve`: puts the gateway together, keeps the workers alive, and takes everything down in order.

    up    lock, socket, database compared with the data folder's, schema, packs swept, demo,
          lost journals adopted, ledger, registry view, what the ledger left open, workers (the
          first's process is there before all of this: admin/cli/server.py), HTTP, start block
    down  not ready (503 on /health/ready) -> no new connections, running requests finish
          -> what is left is aborted -> ledger written -> workers ended -> files closed

Every decision is elsewhere: which request goes (dispatcher.py), which workers there are and what
each has (worker_slots.py, policy/memory_budget.py), when one is restarted (child_process.py). What
ends the server on its own: a part of it that fails for good. With `gateway_processes` above 1 this
process serves nothing itself: process_group.py.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator, Sequence

import zmq
from prometheus_client import CollectorRegistry
from sqlalchemy import Engine

from admin.alerts.alerts import AlertWatch
from admin.app import AdminApp
from admin.context.data_folder import bind_database, check_database, secure_files
from admin.operations.models import tidy
from admin.operations.users import ensure_admin
from admin.registration.bootstrap import DemoAccess, ensure_demo
from admin.web.headers import PREFIX
from gateway.auth.directory import Directory
from gateway.auth.registry_poll import RegistryPoll
from gateway.cache.cache_handler import cache_socket_path
from gateway.cluster.local_dispatcher import DISPATCHER_ID, LocalDispatcher
from gateway.dispatch.counter_checkpoint import CounterCheckpoint
from gateway.dispatch.dispatcher import TICK_S
from gateway.dispatch.operator_handler import OperatorHandler
from gateway.dispatch.policy.fair_share import FairShare
from gateway.http.http_server import HttpServer, listen, running
from gateway.http.own_hosts import exposure
from gateway.ipc import machine
from gateway.ipc.control_socket import listening, operator_socket
from gateway.ledger.ledger import Ledger
from gateway.ledger.ledger_recovery import adopt, owner_of
from gateway.limits import limit_stores
from gateway.pipeline.pipeline import Services
from gateway.server.child_process import WORKER_COMMAND, EarlyWorker
from gateway.server.local_homes import LocalHomes, slots_here
from gateway.server.process_group import ProcessGroup
from gateway.server.process_setup import dispatcher_lock, on_stop_signals, set_up_logging
from gateway.server.startup_banner import startup_banner
from gateway.server.worker_launcher import EMBEDDER_ID, embedder_connection, shm_prefix
from gateway.server.worker_slots import NoSuchWorkers, WorkerSlot
from gateway.settings.settings import Settings
from gateway.state.sweeper import build_sweeper
from gateway.types import HostedModel
from gateway.workers.worker_client import LossCause, ZmqWorkerClient
from registry import locks
from registry.errors import RegistryError
from registry.schema import upgrade
from registry.session import make_engine

logger = logging.getLogger(__name__)

GATEWAY_ID = "gateway-0"
LEDGER_FLUSH_TIMEOUT_S = 10.0


class ServerFailed(RegistryError):
    """The server cannot go on; one line for the operator."""


async def serve(
    settings: Settings,
    worker_command: Sequence[str] = WORKER_COMMAND,
    early: EarlyWorker | None = None,
) -> None:
    """Run until SIGTERM or SIGINT. `early`: a worker's process that waits for its configuration.

    Raises RegistryError (another server holds the data folder, it belongs to another database, the
    schema is newer) or OSError (the port is taken) before anything is served, ServerFailed where
    it cannot go on, or this machine has not the devices that the settings name.
    """
    set_up_logging()
    for warning in exposure(settings):
        logger.warning(warning)
    try:
        slots = await asyncio.to_thread(slots_here, settings)
    except NoSuchWorkers as error:
        raise ServerFailed(str(error)) from error
    data_path = settings.data_path
    data_path.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (
        locks.hold(data_path / locks.SERVER_LOCK),
        listen(settings.host, settings.port) as listener,
    ):
        await asyncio.to_thread(check_database, settings)  # Before anything is made or deleted.
        await asyncio.to_thread(secure_files, settings)
        await asyncio.to_thread(upgrade, settings.registry_url)
        await asyncio.to_thread(bind_database, settings)
        await asyncio.to_thread(tidy, settings)
        password = await asyncio.to_thread(ensure_admin, settings)
        demo = await asyncio.to_thread(ensure_demo, settings) if settings.demo else None
        gateway_ids = [f"gateway-{index}" for index in range(settings.gateway_processes)]
        await asyncio.to_thread(adopt, settings, gateway_ids, by=GATEWAY_ID)
        if settings.gateway_processes > 1:
            try:
                with dispatcher_lock(settings) as lock:
                    group = ProcessGroup(settings, slots, listener, lock, worker_command, early)
                    await group.run(demo, password)
            finally:
                remove_host_tier(settings)
            return
        engine = make_engine(settings.registry_url)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        try:
            server = Server(settings, slots, engine, context, worker_command, password, early)
            await server.run(listener, demo)
        finally:
            context.destroy(linger=0)
            engine.dispose()
            remove_host_tier(settings)


class Server:
    """The parts of a running gateway and the order in which they start and stop."""

    def __init__(
        self,
        settings: Settings,
        slots: Sequence[WorkerSlot],
        engine: Engine,
        context: zmq.Context[zmq.Socket[bytes]],
        worker_command: Sequence[str],
        admin_password: str = "",
        early: EarlyWorker | None = None,
    ) -> None:
        """`admin_password`: to be shown once, in the start block. `early`: see `serve`."""
        self._settings = settings
        self._admin_password = admin_password
        self._directory = Directory()
        share = FairShare(settings.fair_share_max_lead_s)
        self._share_file = CounterCheckpoint(settings.data_path, share)
        self._requests = LocalDispatcher(
            settings,
            claim_orphan=lambda *finish: self._ledger.claim(*finish),
            share=share,
        )
        self._dispatcher = self._requests.dispatcher
        self._ledger = Ledger(
            engine,
            settings,
            self._directory.rates,
            self._requests.ack_usage,
            on_recovered=lambda posting: self._poll.count_posting(posting),
        )
        self._limit_store = limit_stores.open_store(settings, GATEWAY_ID)
        self._poll = RegistryPoll(
            engine,
            settings.data_path,
            self._directory,
            settings.key_cache_poll_s,
            self._on_models,
            self._dispatcher.fulfil,
            self._limit_store,
            on_reserved=self._dispatcher.set_reserved_shares,
            on_orders=self._dispatcher.drains.set_orders,
            gateway_id=owner_of(settings.data_path, GATEWAY_ID),
        )
        self._stop_asked = asyncio.Event()
        self._metrics_registry = CollectorRegistry()
        about = (settings, slots, worker_command, self._on_worker_exit, self._metrics_registry)
        self._homes = LocalHomes(*about, early)
        self._dispatcher.drains.on_restart = self._homes.restart
        silence_s = settings.worker_heartbeat_timeout_s
        self._clients = {
            worker_id: (
                ZmqWorkerClient(context, worker_id, endpoint, GATEWAY_ID, silence_s),
                ZmqWorkerClient(
                    context, worker_id, endpoint, DISPATCHER_ID, silence_s, observes=True
                ),
            )
            for worker_id, endpoint in self._homes.endpoints
        }
        self._alerts = AlertWatch(engine, settings.alert_interval_s, self._metrics_registry)
        self._sweeper = build_sweeper(engine, settings)
        self._embedding = embedder_connection(settings, context, GATEWAY_ID)

    async def run(self, listener: socket.socket, demo: DemoAccess | None) -> None:
        """Serve on the socket until a signal, or until a part of the server fails for good."""
        await self._share_file.load()
        await self._ledger.start()  # First: spend is restored from the database alone.
        async with limit_stores.sharing(self._limit_store, self._settings, self._poll.poke):
            await self._serve(listener, demo)

    async def _serve(self, listener: socket.socket, demo: DemoAccess | None) -> None:
        await self._poll.load()
        await self._ledger.recover()
        http = self._http_server()
        background = (
            self._homes.run(),
            self._poll.run(),
            self._share_file.run(),
            self._alerts.run(),
            self._sweeper.run(),
            self._tick(listener, demo),
        )
        handler = OperatorHandler(
            self._dispatcher,
            lambda name: self._directory.find_model(name) is not None,
            self._settings.worker_labels,
        )
        async with (
            listening(operator_socket(self._settings.data_path), handler),
            running(*background) as parts,
        ):
            for own, observing in self._clients.values():
                self._requests.add_workers(own, observing)
            if self._embedding is not None:
                self._embedding.start()
            serving = http.start(listener)
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
            raise ServerFailed("the HTTP server stopped unexpectedly: see the log for the cause")

    async def _stop(self, http: HttpServer, serving: "asyncio.Task[None]") -> None:
        logger.info("stopping")
        self._requests.begin_drain()
        await http.drain(serving, self._requests.abort_all)
        await self._share_file.write()
        await self._ledger.stop(LEDGER_FLUSH_TIMEOUT_S)
        self._requests.close()  # The last acknowledgements linger a moment and get through.
        if self._embedding is not None:
            self._embedding.close()
        await self._homes.stop()
        logger.info("stopped")

    def _http_server(self) -> HttpServer:
        services = Services(
            settings=self._settings,
            directory=self._directory,
            dispatcher=self._requests,
            ledger=self._ledger,
            metrics_registry=self._metrics_registry,
            limit_store=self._limit_store,
            embedding_worker=self._embedding,
            cache_socket=cache_socket_path(self._settings.data_path, GATEWAY_ID),
            owner=owner_of(self._settings.data_path, GATEWAY_ID),
        )
        return HttpServer(services, {PREFIX: AdminApp})

    async def _tick(self, listener: socket.socket, demo: DemoAccess | None) -> None:
        """The dispatcher's clock; prints the start block once a request could be served."""
        announced = False
        while True:
            await asyncio.sleep(TICK_S)
            self._requests.tick()
            for worker_id, (_, observing) in self._clients.items():
                if observing.hangs():
                    self._homes.kill(worker_id)
            if self._requests.ready and not announced:
                announced = True
                host, port = listener.getsockname()[:2]
                models = self._directory.models()
                password = self._admin_password
                block = startup_banner(host, port, self._settings, models, demo, password)
                print(block, flush=True)

    def _on_models(self, models: Sequence[HostedModel], weights: dict[str, int]) -> None:
        self._requests.set_catalog(models)
        self._homes.set_weights(weights)
        if self._embedding is not None:
            self._embedding.set_models(models)

    def _on_worker_exit(self, worker_id: str, reason: str, cause: LossCause) -> None:
        for client in self._clients.get(worker_id, ()):
            client.lose(f"its process ended: {reason}", cause)
        if worker_id == EMBEDDER_ID and self._embedding is not None:
            self._embedding.lose(f"its process ended: {reason}", cause)

    @contextlib.contextmanager
    def _signals(self, http: HttpServer) -> Iterator[None]:
        """The first SIGTERM or SIGINT stops in order, the second does not wait for requests."""

        def on_signal() -> None:
            if self._stop_asked.is_set():
                http.force_exit = True
                self._requests.abort_all()
            self._stop_asked.set()

        with on_stop_signals(on_signal):
            yield


def remove_host_tier(settings: Settings) -> None:
    """A stopped server gives its shared memory back; one that was killed leaves it to the next."""
    for path in machine.SHM_DIR.glob(f"{shm_prefix(settings)}-*"):
        with contextlib.suppress(OSError):
            path.unlink()
