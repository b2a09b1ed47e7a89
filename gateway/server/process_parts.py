"""What gateways and dispatchers are made of alike, in one process or several.

    gateway_process.py       GatewayParts       HTTP, stages 1 to 4, 9 and 10
    dispatcher_process.py    DispatcherParts    stage 5
    local_homes.py           LocalHomes         the workers' processes

With one gateway process all three are in it (supervisor.py); with several each is in a process of
its own (process_group.py). This module knows neither.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import zmq
from sqlalchemy import Engine

from gateway.auth.directory import Directory
from gateway.auth.registry_poll import RegistryPoll
from gateway.dispatch.dispatcher import Dispatcher
from gateway.ipc.remote import TlsContexts, tls_contexts
from gateway.ledger.ledger_recovery import owner_of
from gateway.limits.store import LimitStore
from gateway.metrics.families import MetricsRegistry
from gateway.metrics.metrics import watch_process
from gateway.settings.settings import Settings
from gateway.types import HostedModel
from gateway.workers.curve_keys import WorkerAddress, key_pair
from gateway.workers.worker_client import LossCause, ZmqWorkerClient
from registry.session import make_engine

REMOTE_SILENCE_S = 3.0
"""A worker on another machine counts as lost after so long, or as the setting says if that is
less: a machine that goes says nothing, and its requests go on elsewhere. Only its home, which sees
the process, waits for as long as the setting says before it kills it."""


class Resources(NamedTuple):
    """Of one process. `workers`: where each listens. `registry`: its metrics."""

    settings: Settings
    workers: Sequence[WorkerAddress]
    engine: Engine
    context: zmq.Context[zmq.Socket[bytes]]
    registry: MetricsRegistry

    def clients(self, gateway_id: str, epoch: int = 0) -> dict[str, ZmqWorkerClient]:
        """A connection to each worker, not begun yet, by its name. `epoch`: of a dispatcher. Raises
        KeyFileError, OSError."""
        settings = self.settings
        name = owner_of(settings.data_path, gateway_id)  # Other servers have a gateway-0, too.
        keys = key_pair(settings.data_path)
        silence_s = settings.worker_heartbeat_timeout_s
        return {
            address.worker_id: ZmqWorkerClient(
                self.context,
                address,
                name,
                min(silence_s, REMOTE_SILENCE_S) if address.public_key else silence_s,
                keys=keys,
                observes=epoch > 0,
                epoch=epoch,
            )
            for address in self.workers
        }

    def tls(self) -> TlsContexts | None:
        """Of connections to other servers; None where there are none. Raises RegistryError."""
        settings = self.settings
        if not settings.is_clustered:
            return None
        return tls_contexts(*settings.tls_files(settings.data_path))

    def poll(
        self,
        directory: Directory,
        store: LimitStore,
        on_models: Callable[[Sequence[HostedModel], dict[str, int]], None],
        dispatcher: Dispatcher | None = None,
        gateway_id: str = "",
    ) -> RegistryPoll:
        """The process' look at the registry. `dispatcher`: the one in this process, which carries
        out what operators ask for. `gateway_id`: see RegistryPoll."""
        settings = self.settings
        about = (self.engine, settings.data_path, directory, settings.key_cache_poll_s, on_models)
        if dispatcher is None:
            return RegistryPoll(
                *about,
                lambda request: None,
                store,
                takes_requests=False,
                gateway_id=gateway_id,
            )
        return RegistryPoll(
            *about,
            dispatcher.fulfil,
            store,
            on_reserved=dispatcher.set_reserved_shares,
            on_orders=dispatcher.drains.set_orders,
            gateway_id=gateway_id,
        )


@contextlib.contextmanager
def resources(settings: Settings, workers: Sequence[WorkerAddress]) -> Iterator[Resources]:
    """Closed at the end, whatever was not sent."""
    engine = make_engine(settings.registry_url)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    try:
        registry = MetricsRegistry()
        watch_process(registry)
        yield Resources(settings, workers, engine, context, registry)
    finally:
        context.destroy(linger=0)
        engine.dispose()


def lose(
    clients: Mapping[str, ZmqWorkerClient], worker_id: str, reason: str, cause: LossCause
) -> None:
    """A worker's process has ended."""
    client = clients.get(worker_id)
    if client is not None:
        client.lose(f"its process ended: {reason}", cause)
