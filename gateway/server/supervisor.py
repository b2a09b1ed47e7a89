"""`serve`: puts the gateway together, keeps the workers alive, and takes everything down in order.

    up    lock, socket, database compared with the data folder's, schema, packs swept, demo,
          lost journals adopted, ledger, registry view, what the ledger left open, workers (the
          first's process is there before all of this: admin/cli/server.py), HTTP, start block
    down  not ready (503 on /health/ready) -> no new connections, running requests finish
          -> what is left is aborted -> ledger written -> workers ended -> files closed

Every decision is elsewhere: which request goes (dispatcher.py), which workers there are and what
each has (worker_slots.py, policy/memory_budget.py), when one is restarted (child_process.py). What
ends the server on its own: a part of it that fails for good. With `gateway_processes` above 1, or
with other servers, this process serves nothing itself: process_group.py.
"""

import asyncio
import logging
import socket
from collections.abc import Sequence

from admin.context.data_folder import bind_database, check_database, secure_files
from admin.operations.models import tidy
from admin.operations.users import ensure_admin
from admin.registration.bootstrap import DemoAccess, ensure_demo
from gateway.cluster.local_dispatcher import LocalDispatcher
from gateway.dispatch.counter_checkpoint import LeadFile
from gateway.dispatch.policy.fair_share import FairShare
from gateway.http.http_server import listen
from gateway.http.own_hosts import exposure
from gateway.ipc.remote import check_listening, tls_contexts
from gateway.ledger.ledger_recovery import adopt
from gateway.limits import limit_stores
from gateway.sealing.master_keys import ensure_keys
from gateway.server.child_process import WORKER_COMMAND, EarlyWorker
from gateway.server.dispatcher_process import DispatcherParts
from gateway.server.gateway_process import GatewayParts
from gateway.server.local_homes import LocalHomes, slots_here
from gateway.server.process_group import ProcessGroup
from gateway.server.process_parts import Resources, resources
from gateway.server.process_setup import (
    dispatcher_lock,
    next_epoch,
    on_stop_signals,
    set_up_logging,
)
from gateway.server.startup_banner import announce
from gateway.server.worker_launcher import remove_host_tier, worker_addresses
from gateway.server.worker_slots import WorkerSlot
from gateway.settings.cluster_settings import split_address
from gateway.settings.settings import Settings
from gateway.workers.worker_client import LossCause
from registry import locks
from registry.errors import RegistryError
from registry.schema import upgrade

logger = logging.getLogger(__name__)

GATEWAY_ID = "gateway-0"


class ServerFailed(RegistryError):
    """The server cannot go on; one line for the operator."""


async def serve(
    settings: Settings,
    worker_command: Sequence[str] = WORKER_COMMAND,
    early: EarlyWorker | None = None,
) -> None:
    """Run until SIGTERM or SIGINT. `early`: a worker's process that waits for its configuration.

    Raises RegistryError (another server holds the data folder, it belongs to another database, the
    schema is newer) or OSError (the port is taken) before anything is served, NoSuchWorkers
    where this machine has not the devices that the settings name, ServerFailed where it cannot go
    on.
    """
    set_up_logging()
    for warning in exposure(settings):
        logger.warning(warning)
    slots = await asyncio.to_thread(slots_here, settings)
    data_path = settings.data_path
    data_path.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (
        locks.hold(data_path / locks.SERVER_LOCK),
        listen(settings.host, settings.port) as listener,
    ):
        if settings.is_clustered:
            await asyncio.to_thread(check_cluster, settings)
        await asyncio.to_thread(check_database, settings)  # Before anything is made or deleted.
        await asyncio.to_thread(secure_files, settings)
        await asyncio.to_thread(ensure_keys, settings)  # Drawn here, or found damaged.
        await asyncio.to_thread(upgrade, settings.registry_url)
        await asyncio.to_thread(bind_database, settings)
        await asyncio.to_thread(tidy, settings)
        password = await asyncio.to_thread(ensure_admin, settings)
        demo = await asyncio.to_thread(ensure_demo, settings) if settings.demo else None
        gateway_ids = [f"gateway-{index}" for index in range(settings.gateway_processes)]
        await asyncio.to_thread(adopt, settings, gateway_ids, by=GATEWAY_ID)
        if settings.gateway_processes > 1 or settings.is_clustered:
            try:
                with dispatcher_lock(settings) as lock:
                    group = ProcessGroup(settings, slots, listener, lock, worker_command, early)
                    await group.run(demo, password)
            finally:
                remove_host_tier(settings)
            return
        workers = worker_addresses(settings, slots)
        try:
            with resources(settings, workers) as made_with:
                server = Server(made_with, slots, worker_command, early)
                await server.run(listener, demo, password)
        finally:
            remove_host_tier(settings)


def check_cluster(settings: Settings) -> None:
    """What its processes need to be one of several servers: they would try again for ever. Raises
    RegistryError, OSError."""
    tls_contexts(*settings.tls_files(settings.data_path))
    try:
        check_listening(split_address(settings.dispatcher_address))
    except OSError as error:
        raise RegistryError(
            f"cannot listen at dispatcher_address {settings.dispatcher_address} ({error}): set it "
            "to a free port and an address of this machine"
        ) from error


class Server:
    """The one gateway, its dispatcher and the workers' homes in this process, and the order in
    which they start and stop."""

    def __init__(
        self,
        made_with: Resources,
        slots: Sequence[WorkerSlot],
        worker_command: Sequence[str],
        early: EarlyWorker | None = None,
    ) -> None:
        """`early`: see `serve`."""
        settings = self._settings = made_with.settings
        share = FairShare(settings.fair_share_max_lead_s)
        requests = self._requests = LocalDispatcher(
            settings,
            claim_orphan=lambda *finish: self._gateway.ledger.claim(*finish),
            share=share,
        )
        self._homes = LocalHomes(
            settings, slots, worker_command, self._on_worker_exit, made_with.registry, early
        )
        store = limit_stores.open_store(settings, GATEWAY_ID)
        about = (made_with, requests, store, requests.dispatcher)
        self._gateway = GatewayParts(GATEWAY_ID, *about, self._homes.set_weights)
        self._dispatching = DispatcherParts(
            made_with,
            requests.dispatcher,
            share,
            self._homes,
            self._gateway.directory,
            {"gateway": requests.check_integrity},
            requests.tick,
            next_epoch(settings),
            LeadFile(settings.data_path),
        )

    async def run(
        self, listener: socket.socket, demo: DemoAccess | None, admin_password: str = ""
    ) -> None:
        """Serve on the socket until a signal, or until a part of the server fails for good.
        `admin_password`: to be shown once, in the start block."""
        gateway, dispatching, settings = self._gateway, self._dispatching, self._settings
        await dispatching.share_file.load()
        await gateway.ledger.start()  # First: spend is restored from the database alone.
        async with limit_stores.sharing(gateway.store, settings, gateway.poll.poke):
            await gateway.load()
            about = (listener, settings, demo, admin_password)
            block = announce(lambda: self._requests.ready, self._model_names, *about)
            async with dispatching.running(self._homes.run(), gateway.poll.run(), block) as parts:
                dispatching.connect()
                gateway.connect()
                with on_stop_signals(gateway.stop):
                    ended = await gateway.serve(listener, parts)
                    await dispatching.share_file.write()
                    await gateway.close()
                    await self._homes.stop()
                    logger.info("stopped")
        for part in ended:
            part.result()  # Raises what ended the server.
        if ended:
            raise ServerFailed("the HTTP server stopped unexpectedly: see the log for the cause")

    def _model_names(self) -> list[str]:
        return [model.name for model in self._gateway.directory.models()]

    def _on_worker_exit(self, worker_id: str, reason: str, cause: LossCause) -> None:
        self._gateway.worker_ended(worker_id, reason, cause)
        self._dispatching.worker_ended(worker_id, reason, cause)
