"""The HTTP server of one gateway process, and what runs beside it: started, told to stop, awaited.

When it stops is its owner's to say (supervisor.py, gateway_process.py); what it answers is
app.py's.
"""

import asyncio
import contextlib
import functools
import logging
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, cast

import uvicorn

from gateway.http.acceptor import Acceptor
from gateway.http.app import Mounts, create_app
from gateway.http.http_protocol import BoundedHttp, http_config, refusal
from gateway.pipeline.pipeline import Services

logger = logging.getLogger(__name__)

ABORT_GRACE_S = 2.0
"""After the shutdown time-out: how long the aborted requests may take to be answered."""


class AcceptingServer(uvicorn.Server):
    """Uvicorn with our own way to take connections and without its signal handling."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Whoever owns it has the signals."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve on the sockets."""
        await super().startup(sockets=[])
        servers = [self._acceptor(listener) for listener in sockets or ()]
        for server in servers:
            server.start()
        self.servers = cast(list[asyncio.base_events.Server], servers)

    def _acceptor(self, listener: socket.socket) -> Acceptor:
        config = self.config
        protocol = cast(type[BoundedHttp], config.http_protocol_class)
        make = functools.partial(
            protocol,
            config=config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            _loop=asyncio.get_running_loop(),
        )
        timeout_s = protocol.bounds.head_timeout_s
        return Acceptor(listener, make, protocol.all_of_them, refusal, config.ssl, timeout_s)


class HttpServer(AcceptingServer):
    """Of a gateway process."""

    def __init__(self, services: Services, mounts: Mounts) -> None:
        grace_s = services.settings.shutdown_timeout_s + ABORT_GRACE_S
        super().__init__(http_config(create_app(services, mounts), services.settings, grace_s))
        self._settings = services.settings

    def start(self, listener: socket.socket) -> "asyncio.Task[None]":
        """Serve on the socket until `drain`."""
        return asyncio.create_task(self.serve(sockets=[listener]), name="http")

    async def drain(self, serving: "asyncio.Task[None]", abort_all: Callable[[], None]) -> None:
        """Stay for those who have not seen that the server is not ready any more; then take no new
        connections, let what runs end within the bound, and abort what is left."""
        await asyncio.sleep(self._settings.shutdown_notice_s)
        self.should_exit = True
        done, _ = await asyncio.wait([serving], timeout=self._settings.shutdown_timeout_s)
        if not done:
            abort_all()
        await asyncio.wait([serving])


@contextlib.contextmanager
def listen(host: str, port: int, *, shared: bool = False) -> Iterator[socket.socket]:
    """A bound socket; `shared`: with others of this user that are. Raises OSError that names the
    address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise OSError(
                error.errno, f"cannot listen on {host}:{port}: {error.strerror}"
            ) from error
        listener.setblocking(False)
        yield listener


@contextlib.asynccontextmanager
async def running(*work: Coroutine[Any, Any, None]) -> AsyncIterator[list["asyncio.Task[None]"]]:
    """The coroutines as tasks, cancelled and awaited at the end."""
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
