"""Where a gateway looks for the active dispatcher: on its own server, and on the others (stage 5).

    the address in the lease's row   read every WATCH_S, while the database answers
    this server's own socket
    dispatcher_peers                 as configured, for when the database is away

Only the active dispatcher of all servers listens, so a place where nobody does costs one refusal,
and one whose machine is gone CONNECT_S. Who is spoken to in the end goes by the epoch
(dispatcher_client.py).
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from gateway.cluster.policy.election import AWAY_S
from gateway.ipc import ipc, remote
from gateway.ipc.ipc import Channel
from gateway.ipc.remote import TlsContexts
from gateway.settings.cluster_settings import split_address
from registry.servers import dispatcher_leases
from registry.session import make_impatient_engine

logger = logging.getLogger(__name__)

CONNECT_S = 1.0
WATCH_S = 0.5
OWN = ""
"""The address of this server's own dispatcher, where there is no other server."""


class DispatcherPlaces:
    """Addresses in the order in which they are tried; `own` stands for the socket."""

    def __init__(
        self,
        socket: Path,
        own: str = OWN,
        peers: Sequence[str] = (),
        tls: TlsContexts | None = None,
    ) -> None:
        """`own`, `peers`: as the settings name this server and the others. `tls`: to reach them."""
        self._socket = socket
        self._own = own
        self._peers = tuple(peers)
        self._tls = tls
        self.known = own
        """Where the row says that it is."""

    def in_order(self) -> list[str]:
        """Each address once."""
        return list(dict.fromkeys((self.known, self._own, *self._peers)))

    @property
    def are_several(self) -> bool:
        """Whether it could be elsewhere."""
        return self._tls is not None

    def is_own(self, address: str) -> bool:
        """Whether that is this server's own dispatcher."""
        return address == self._own

    async def connect(self, address: str, channel: Channel[Any, Any]) -> None:
        """Raises OSError where nobody listens."""
        if address == self._own:
            await ipc.connect(self._socket, channel)
        elif self._tls is not None:
            await remote.connect(split_address(address), self._tls, channel, CONNECT_S)


class DispatcherWatch:
    """Tells `on_found(address, epoch)` what the row says; nothing while the database is away."""

    def __init__(self, url: str, on_found: Callable[[str, int], None]) -> None:
        self._engine: Engine = make_impatient_engine(url, AWAY_S)
        self._on_found = on_found

    async def run(self) -> None:
        """Look for ever."""
        is_away = False
        try:
            while True:
                try:
                    found = await asyncio.to_thread(dispatcher_leases.read, self._engine)
                except SQLAlchemyError as error:
                    if not is_away:
                        logger.warning("cannot read who dispatches, trying again: %s", error)
                    is_away = True
                else:
                    is_away = False
                    if found is not None:
                        self._on_found(found.address, found.epoch)
                await asyncio.sleep(WATCH_S)
        finally:
            self._engine.dispose()
