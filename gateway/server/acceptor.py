"""Takes connections from a listening socket: counts each, refuses it in a few system calls or
hands it to a protocol, at the pace of its address.

Asyncio's own servers make transport, parser and protocol before anybody can refuse, and count no
connection of TLS before its handshake has ended. Here

    one too many (connections.py)              is told so and closed; with TLS it is closed
    one of an address that is too quick        waits, unread, until it is its turn
    a handshake                                counts as a connection, and has `handshake_timeout_s`

At most MAX_A_TURN are taken in one turn of the event loop and MAX_OPENED of them opened, which
costs most, so that those who are being served go on in between; others wait with the kernel. One
that is told to go or to wait costs little, and who comes behind hundreds of those soon has a turn.
"""

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from gateway.errors import ApiError
from gateway.server.connections import Connections, Place

logger = logging.getLogger(__name__)

BACKLOG = 2048
MAX_A_TURN = 128
MAX_OPENED = 32
QUIET_S = 60.0
"""Between two lines in the log on addresses that are too quick."""
PAUSE_S = 1.0
"""Where there is no descriptor left: those who wait go on waiting with the kernel."""
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_UNREAD_BYTES = 65_536


class Guest(Protocol):
    """What is made for each connection that is served."""

    place: Place


class Acceptor:
    """Of one listening socket. Has what uvicorn asks of its servers: `close`, `wait_closed`."""

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[], Any],
        connections: Connections,
        refusal: Callable[[ApiError], bytes],
        tls: ssl.SSLContext | None,
        handshake_timeout_s: float,
    ) -> None:
        """`make`: a protocol that is a Guest, and leaves its place when its connection is lost.
        `refusal`: what is sent to those who are refused."""
        self._listener = listener
        self._make = make
        self._connections = connections
        self._refusal = refusal
        self._refusals: dict[str, bytes] = {}
        self._tls = tls
        self._handshake_timeout_s = handshake_timeout_s
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[socket.socket, tuple[asyncio.TimerHandle, Place]] = {}
        self._opening: set[asyncio.Task[None]] = set()
        self._resuming: asyncio.TimerHandle | None = None
        self._quiet_until_s = 0.0

    def start(self) -> None:
        """From now on, until `close`."""
        self._listener.setblocking(False)
        self._listener.listen(BACKLOG)
        self._loop.add_reader(self._listener, self._take)

    def close(self) -> None:
        """Take no more; who has not been served yet is closed."""
        self._loop.remove_reader(self._listener)
        if self._resuming is not None:
            self._resuming.cancel()
        for connection, (timer, place) in self._waiting.items():
            timer.cancel()
            place.leave()
            connection.close()
        self._waiting.clear()
        if self._tls is not None:
            for task in self._opening:
                task.cancel()

    async def wait_closed(self) -> None:
        """Returns when no handshake is under way."""
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _take(self) -> None:
        num_opened = 0
        for _ in range(MAX_A_TURN):
            if num_opened == MAX_OPENED:
                return
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                logger.error("connections cannot be taken: %s", error)
                self._loop.remove_reader(self._listener)
                self._resuming = self._loop.call_later(PAUSE_S, self.start)
                return
            num_opened += self._admit(connection, address[0])

    def _admit(self, connection: socket.socket, address: str) -> bool:
        """True where it is opened at once."""
        try:
            place = self._connections.enter(address, self._loop.time())
        except ApiError as error:
            self._refuse(connection, error)
            return False
        connection.setblocking(False)
        if place.wait_s:
            self._tell_quick(address)
            timer = self._loop.call_later(place.wait_s, self._begin, connection, place)
            self._waiting[connection] = timer, place
            return False
        self._spawn(self._open(connection, place))
        return True

    def _tell_quick(self, address: str) -> None:
        """A proxy that nobody has named is slowed down, and its operator should know why."""
        now_s = self._loop.time()
        if now_s >= self._quiet_until_s:
            self._quiet_until_s = now_s + QUIET_S
            logger.warning(
                "connections of %s wait: more than connection_rate_per_address new ones a second; "
                "a proxy belongs into trusted_proxies",
                address,
            )

    def _begin(self, connection: socket.socket, place: Place) -> None:
        del self._waiting[connection]
        self._spawn(self._open(connection, place))

    def _spawn(self, opening: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(opening)
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket, place: Place) -> None:
        """Handshake and protocol."""

        def make() -> Any:
            guest = self._make()
            guest.place = place
            return guest

        timeout_s = None if self._tls is None else self._handshake_timeout_s
        is_open = False
        try:
            # Nagle's algorithm: 40 ms an answer.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(
                make, connection, ssl=self._tls, ssl_handshake_timeout=timeout_s
            )
            is_open = True
        except OSError as error:  # TLS' errors and time-outs are
            self._connections.ended["no handshake"] += 1
            logger.debug("a connection did not open: %s", error)
        finally:
            if not is_open:  # otherwise the place is the guest's to leave
                place.leave()
                connection.close()

    def _refuse(self, connection: socket.socket, error: ApiError) -> None:
        """With what it has sent already taken, so that the kernel ends it without a reset."""
        with connection:
            if self._tls is not None:
                return
            answer = self._refusals.get(error.message)
            if answer is None:
                answer = self._refusals[error.message] = self._refusal(error)
            try:
                connection.setblocking(False)
                connection.send(answer)
                connection.recv(_UNREAD_BYTES)
            except OSError:
                return  # it has gone, or has sent nothing
