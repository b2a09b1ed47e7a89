"""Connections from a listening socket: counted, refused in a few system calls or handed to a
protocol, at the pace of their address.

Asyncio's own servers make transport, parser and protocol before anybody can refuse, and count no
connection of TLS before its handshake has ended. Here

    one too many, in all or of one address     is told so and closed; with TLS it is closed
    one of an address that is too quick        waits, unread, until it is its turn
    a handshake                                counts as a connection, and has `handshake_timeout_s`

At most MAX_A_TURN are taken in one turn of the event loop and MAX_OPENED of them opened, which
costs most, so that those who are being served go on in between; others wait with the kernel. One
that is told to go or to wait costs little, and who comes behind hundreds of those soon has a turn.

`Connections` has the counts, one object per gateway process; figures for /metrics are read from it.
One address of IPv6 is one network of 64 bits: whoever has one address of it has them all.
"""

import asyncio
import errno
import ipaddress
import logging
import socket
import ssl
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from gateway.errors import RATE_LIMITED, UNAVAILABLE, ApiError
from gateway.settings.http_settings import HttpSettings
from registry.accounts.key_terms import Network, within

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
_RETRY_S = 1.0
_MAPPED = b"\0" * 10 + b"\xff\xff"
_NETWORK_BYTES = 8


@dataclass(slots=True)
class Connections:
    """`max_total`, `max_per_address`, `rate_per_address` (a second): 0 for no bound. Addresses of
    `proxies` have none of the last two."""

    max_total: int = 0
    max_per_address: int = 0
    proxies: tuple[Network, ...] = ()
    rate_per_address: float = 0.0
    ended: Counter[str] = field(default_factory=Counter)
    """Connections that this side ended, by why."""
    num_open: int = 0
    num_delayed: int = 0
    """Connections that had to wait until they were served, so far."""
    _by_party: Counter[bytes] = field(default_factory=Counter)
    _due_s: OrderedDict[bytes, float] = field(default_factory=OrderedDict)

    def enter(self, address: str, now_s: float = 0.0) -> "ConnectionSlot":
        """One more. Raises ApiError where it is one too many; then it is not counted."""
        party = _party_of(address)
        if self.max_total and self.num_open >= self.max_total:
            self.ended["too many"] += 1
            message = "the maximum number of connections to this server is reached: try again later"
            raise ApiError(UNAVAILABLE, message, retry_after_s=_RETRY_S)
        if (
            self.max_per_address
            and self._by_party[party] >= self.max_per_address
            and not within(address, self.proxies)
        ):
            self.ended["too many of one address"] += 1
            message = (
                f"your IP address has {self.max_per_address} open connections, the maximum: reuse "
                "connections or close some"
            )
            raise ApiError(RATE_LIMITED, message, retry_after_s=_RETRY_S)
        self._by_party[party] += 1
        self.num_open += 1
        return ConnectionSlot(self, party, self._wait_s(address, party, now_s))

    def leave(self, party: bytes) -> None:
        """One less."""
        self.num_open -= 1
        self._by_party[party] -= 1
        if not self._by_party[party]:
            del self._by_party[party]

    def _wait_s(self, address: str, party: bytes, now_s: float) -> float:
        """A second's worth at once, then one after the other (GCRA). Times that are over are
        forgotten as others come, two a call, so that all come round."""
        if not self.rate_per_address:
            return 0.0
        due_s = max(self._due_s.get(party, 0.0), now_s)
        wait_s = max(0.0, due_s - now_s - 1.0)
        if wait_s and within(address, self.proxies):
            return 0.0
        self._due_s[party] = due_s + 1.0 / self.rate_per_address
        self._due_s.move_to_end(party)
        for _ in range(2):
            first = next(iter(self._due_s))
            if self._due_s[first] > now_s:
                break
            del self._due_s[first]
        self.num_delayed += wait_s > 0.0
        return wait_s


@dataclass(slots=True, eq=False)
class ConnectionSlot:
    """Of one connection, from before its handshake to its end. `wait_s`: until it is served."""

    connections: Connections
    party: bytes
    wait_s: float = 0.0
    _is_left: bool = False

    def leave(self) -> None:
        """Once; again it changes nothing."""
        if not self._is_left:
            self._is_left = True
            self.connections.leave(self.party)


class Guest(Protocol):
    """What is made for each connection that is served."""

    place: ConnectionSlot


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
        self._waiting: dict[socket.socket, tuple[asyncio.TimerHandle, ConnectionSlot]] = {}
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
                logger.error("cannot accept connections, trying again: %s", error)
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
                "connections from %s are delayed: more than connection_rate_per_address new ones a "
                "second; if this is a proxy, add it to trusted_proxies",
                address,
            )

    def _begin(self, connection: socket.socket, place: ConnectionSlot) -> None:
        del self._waiting[connection]
        self._spawn(self._open(connection, place))

    def _spawn(self, opening: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(opening)
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket, place: ConnectionSlot) -> None:
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


def connections_of(settings: HttpSettings) -> Connections:
    """Bounded as the settings say."""
    named = [proxy.strip() for proxy in settings.trusted_proxies.split(",") if proxy.strip()]
    everybody = ("0.0.0.0/0", "::/0") if "*" in named else ()
    proxies = tuple(ipaddress.ip_network(name) for name in everybody or named)
    return Connections(
        settings.max_connections,
        settings.max_connections_per_address,
        proxies,
        settings.connection_rate_per_address,
    )


def _party_of(address: str) -> bytes:
    """Whose address it is: of IPv6 its /64, but for an IPv4 address in IPv6's dress."""
    if ":" not in address:
        return address.encode()
    try:
        packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0])
    except OSError:
        return address.encode()
    if packed.startswith(_MAPPED):
        return socket.inet_ntop(socket.AF_INET, packed[len(_MAPPED) :]).encode()
    return packed[:_NETWORK_BYTES]
