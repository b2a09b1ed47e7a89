"""Gateway and dispatcher in one process: the same parts and the same messages, without sockets.

    DispatcherProxy ==local channel==> DispatcherServer -> TicketDispatcher

Each of the two has its own connection to each worker, as two processes have: the dispatcher's
observes. Messages between them are heard in a turn of their own (`soon`), never inside the call
that sends them.

What a gateway otherwise hears now and then (who is ready, which models failed, when one will be
there) and the figures for metrics and pages are asked of the dispatcher itself.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.protocol import Finish, SwapRecord, WorkerStatus
from gateway.cluster.dispatcher_client import DispatcherLink
from gateway.cluster.dispatcher_protocol import PROTOCOL_VERSION, Hello
from gateway.cluster.dispatcher_proxy import DispatcherProxy
from gateway.cluster.dispatcher_server import DispatcherServer
from gateway.cluster.granted_requests import nobodys
from gateway.cluster.ticket_dispatcher import TicketDispatcher
from gateway.dispatch.policy.fair_share import TenantOrder
from gateway.dispatch.policy.fleet_sight import Placer
from gateway.ipc.local_channel import Soon, call_soon, local_pair
from gateway.limits.store import MemoryStore
from gateway.protocols import DispatcherSnapshot
from gateway.settings.settings import Settings
from gateway.types import HostedModel, ModelOutlook, PreparedRequest, Principal
from gateway.workers.worker_client import WorkerClient

DISPATCHER_ID = "dispatcher"
"""What workers know every dispatcher by: the newest Hello takes the place of the one before."""


class LocalDispatcher(DispatcherProxy):
    """The one gateway's, with `dispatcher`, which is this gateway's alone."""

    def __init__(
        self,
        settings: Settings,
        clock: Callable[[], float] = time.monotonic,
        claim_orphan: Callable[[str, Finish, int], bool] = nobodys,
        share: TenantOrder | None = None,
        placement: Placer | None = None,
        soon: Soon = call_soon,
    ) -> None:
        link = DispatcherLink()
        super().__init__(settings, link, clock, claim_orphan)
        self.dispatcher = TicketDispatcher(settings, clock, share, placement)
        # Of limits nothing is said here: the gateway has their store itself.
        about = (MemoryStore(), 1, math.inf, clock, self._catch_up)
        self._server = DispatcherServer(self.dispatcher, *about)
        link.hello = lambda: Hello(PROTOCOL_VERSION, "gateway-0", [], [], [])
        near, far = local_pair(soon)
        self._server.attach(far)
        link.open(near)

    @property
    def ready(self) -> bool:
        """A request could be served now."""
        return not self.stopping and self.dispatcher.ready and self._workers.is_heard

    def add_workers(self, own: WorkerClient, observing: WorkerClient) -> None:
        """Begin to connect to one more worker, by both ways."""
        self.dispatcher.add_worker(observing)
        self.add_worker(own)

    def set_catalog(self, models: Sequence[HostedModel]) -> None:
        """The `ready` models; the dispatcher knows first what a request may ask for."""
        self.dispatcher.set_catalog(models)
        super().set_catalog(models)

    def model_failure(self, model_name: str) -> str | None:
        """Why a hosted model cannot be served now; None if it can."""
        return self.dispatcher.model_failure(model_name)

    def model_outlook(self, model_name: str) -> ModelOutlook:
        """Where a hosted model is, and how soon it could answer."""
        return self.dispatcher.model_outlook(model_name)

    def worker_statuses(self) -> list[WorkerStatus]:
        """The last status of each connected worker."""
        return self.dispatcher.worker_statuses()

    def add_swap_listener(self, listener: Callable[[str, SwapRecord], None]) -> None:
        """Call `listener(worker_id, record)` once for every finished load or eviction."""
        self.dispatcher.add_swap_listener(listener)

    def snapshot(self) -> DispatcherSnapshot:
        """Figures for metrics and the operator's pages."""
        whole, own = self.dispatcher.snapshot(), super().snapshot()
        return replace(
            whole,
            num_clients_too_slow=own.num_clients_too_slow,
            num_late_messages=whole.num_late_messages + own.num_late_messages,
        )

    def _check(self, request: PreparedRequest, principal: Principal) -> None:
        """The dispatcher's own is here: what it would refuse is not asked for first."""
        is_batch = principal.is_batch or request.is_batch
        self.dispatcher.check(request, principal.tenant_id, is_batch=is_batch)

    def _catch_up(self) -> None:
        """Nobody here has read of a model that others have not read of."""
        self._server.caught_up(self._server.num_behind)

    def tick(self) -> None:
        """Time-outs, and whatever became possible by time alone."""
        self.dispatcher.tick()
        self._server.tick()
        super().tick()

    def close(self) -> None:
        """Close the connections to workers; call it last."""
        super().close()
        self.dispatcher.close()

    def check_integrity(self) -> None:
        """Raises IntegrityError unless each one's books agree."""
        self.dispatcher.check_integrity()
        super().check_integrity()
