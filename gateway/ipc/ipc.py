"""Messages between processes of one server, over a Unix socket in the data folder.

    frame = length (4 bytes, big endian) | msgpack of a list of messages

What is said in one turn of the event loop goes as one frame. Knows no messages: a `Channel` is
given their decoder. Why a stream and not ZeroMQ, which workers are reached by: the kernel closes a
stream in the moment in which its process dies, however it died, and both ends of a connection see
the same end of it. So nothing that was meant for one process ever reaches the one after it, and a
death is known at once and without heartbeats, which here only find processes that hang.

Bounded: a frame (MAX_FRAME_BYTES), and what may lie unsent for a peer that does not read
(MAX_UNSENT_BYTES); beyond either the connection ends. Who may connect is who may open the socket:
this user (machine.socket_path makes its folder).
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

import msgspec

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 64 << 20
MAX_UNSENT_BYTES = 64 << 20
_LENGTH_BYTES = 4

In = TypeVar("In")
Out = TypeVar("Out")
Heard = TypeVar("Heard")
Said = TypeVar("Said", contravariant=True)

_encoder = msgspec.msgpack.Encoder()


class MessageChannel(Protocol[Heard, Said]):
    """One end of a connection: `Channel`, or `LocalChannel` within a process."""

    on_message: Callable[[Heard], None]
    on_lost: Callable[[str], None]
    closed: bool

    @property
    def silent_s(self) -> float:
        """How long nothing has come."""

    def send(self, message: Said) -> None:
        """Queue a message. On a connection that has ended it is dropped: `on_lost` tells."""

    def close(self) -> None:
        """Send what is queued, say nothing more, and hear nothing more."""

    def lose(self, reason: str) -> None:
        """End it as if it had broken."""


class Channel(asyncio.Protocol, Generic[In, Out]):
    """One connection. All calls come on the event loop.

    `on_message` is called for each message in order, `on_lost` once at the end, unless this side
    closed it.
    """

    def __init__(self, decoder: "msgspec.msgpack.Decoder[list[In]]") -> None:
        self._decoder = decoder
        self.on_message: Callable[[In], None] = lambda message: None
        self.on_lost: Callable[[str], None] = lambda reason: None
        self.on_made: Callable[[], None] = lambda: None
        self.on_gone: Callable[[], None] = lambda: None
        """Of a listener: a connection is there; it is gone, whichever side ended it."""
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._outgoing: list[Out] = []
        self._ending = ""
        self.closed = False
        self.heard_s = 0.0
        """When anything came last, by the event loop's clock."""

    @property
    def silent_s(self) -> float:
        """How long nothing has come."""
        return asyncio.get_running_loop().time() - self.heard_s

    def send(self, message: Out) -> None:
        """Queue a message. On a connection that has ended it is dropped: `on_lost` tells."""
        if self.closed or self._ending or self._transport is None:
            return
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self.flush)
        self._outgoing.append(message)

    def flush(self) -> None:
        """Write what is queued now."""
        transport, messages = self._transport, self._outgoing
        if not messages or transport is None or self.closed:
            return
        self._outgoing = []
        body = _encoder.encode(messages)
        if len(body) > MAX_FRAME_BYTES:
            self._end(f"a frame of {len(body)} bytes")
            return
        transport.write(len(body).to_bytes(_LENGTH_BYTES, "big") + body)
        if transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._end("it does not read")

    def close(self) -> None:
        """Send what is queued, say nothing more, and hear nothing more."""
        if not self.closed:
            self.flush()
            self.closed = True
            if self._transport is not None:
                self._transport.close()

    def lose(self, reason: str) -> None:
        """End it as if it had broken."""
        self._end(reason)

    # asyncio.Protocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Both ends are there."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass
        self.heard_s = asyncio.get_running_loop().time()
        self.on_made()

    def data_received(self, data: bytes) -> None:
        """Whole frames go on, the rest waits for more."""
        self.heard_s = asyncio.get_running_loop().time()
        received = self._received
        received += data
        begin = 0
        while len(received) - begin >= _LENGTH_BYTES and not (self.closed or self._ending):
            size = int.from_bytes(received[begin : begin + _LENGTH_BYTES], "big")
            if size > MAX_FRAME_BYTES:
                self._end(f"a frame of {size} bytes")
                return
            if len(received) - begin - _LENGTH_BYTES < size:
                break
            begin += _LENGTH_BYTES + size
            self._frame(bytes(received[begin - size : begin]))
        del received[:begin]

    def connection_lost(self, exc: Exception | None) -> None:
        """The other end is gone, or this one closed it."""
        self.on_gone()
        if not self.closed:
            self.closed = True
            self.on_lost(self._ending or (str(exc) if exc else "it ended"))

    def _frame(self, body: bytes) -> None:
        try:
            messages = self._decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._end(f"it sends what is no message: {error}")
            return
        for message in messages:
            if self.closed or self._ending:
                return
            self.on_message(message)

    def _end(self, reason: str) -> None:
        if self.closed:
            return
        self._ending = reason
        if self._transport is None:
            self.closed = True
        else:
            self._transport.abort()


async def connect(path: Path, channel: Channel[Any, Any]) -> None:
    """Raises OSError where nobody listens."""
    await asyncio.get_running_loop().create_unix_connection(lambda: channel, str(path))


@contextlib.asynccontextmanager
async def listening(
    path: Path, new_channel: Callable[[], Channel[Any, Any]]
) -> AsyncIterator[None]:
    """Take connections on this path until the block ends, which ends them too. What lies there is
    of a process that is gone: the caller holds a lock that says so. Raises OSError where it cannot
    be bound."""
    accept = Accepted(new_channel)
    path.unlink(missing_ok=True)
    mask = os.umask(0o077)
    try:
        server = await asyncio.get_running_loop().create_unix_server(accept, str(path))
    finally:
        os.umask(mask)
    async with accept.until_closed(server):
        yield


class Accepted:
    """The connections of a listener: makes their channels, and ends them with it. Of a connection
    over TLS whose handshake fails nothing is kept: its channel hears neither begin nor end."""

    def __init__(self, new_channel: Callable[[], Channel[Any, Any]]) -> None:
        self._new_channel = new_channel
        self._channels: set[Channel[Any, Any]] = set()
        self.num_begun = self.num_made = 0
        """Connections that were accepted, and those whose handshake, if any, succeeded."""

    def __call__(self) -> Channel[Any, Any]:
        """For a connection that is being made."""
        self.num_begun += 1
        channel = self._new_channel()
        on_made = channel.on_made

        def made() -> None:
            self.num_made += 1
            self._channels.add(channel)
            on_made()

        channel.on_made = made
        channel.on_gone = lambda: self._channels.discard(channel)
        return channel

    @contextlib.asynccontextmanager
    async def until_closed(self, server: asyncio.Server) -> AsyncIterator[None]:
        """The end of the block ends the listener and its connections."""
        try:
            yield
        finally:
            server.close()
            for channel in list(self._channels):
                channel.close()
            await asyncio.sleep(0)  # in which their transports close
