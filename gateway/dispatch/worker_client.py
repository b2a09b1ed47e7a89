"""The gateway's end of the worker protocol over ZeroMQ: one worker, one DEALER.

What a connection means (states, epochs, silences) is `worker_connection.py`; here are sockets,
frames and timers. Messages are decoded on the event loop. Each connection has a socket of its own,
so that what was queued for a dead worker is never delivered to the next one, and what an old worker
still sends is never read.

ZeroMQ's descriptor is watched directly: it is edge-triggered, so it is drained until EAGAIN, and
looked at again after every send and at every timer tick. That works alike on asyncio and uvloop
and costs no future per message.
"""

import asyncio
from collections.abc import Callable

import msgspec
import zmq

from engine.protocol import PROTOCOL_VERSION, ToWorker, decode_from_worker, encode
from gateway.dispatch.worker_connection import ClientState, WorkerConnection, WorkerListener

MAX_MESSAGES_PER_DRAIN = 256
"""Then other callbacks get a turn before the rest is read."""
SEND_HIGH_WATER = 4096
RECEIVE_HIGH_WATER = 65536


class ZmqWorkerClient:
    """Implements WorkerClient over one ipc or tcp endpoint."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        worker_id: str,
        endpoint: str,
        gateway_id: str,
        heartbeat_timeout_s: float,
        *,
        observes: bool = False,
    ) -> None:
        """`observes`: see protocol.Hello."""
        self._worker_id = worker_id
        self._wire = _ZmqWire(context, endpoint, self._frame, self._full)
        self._connection = WorkerConnection(
            worker_id, gateway_id, heartbeat_timeout_s, self._wire, _loop_time, observes=observes
        )
        self._timer: asyncio.TimerHandle | None = None

    @property
    def worker_id(self) -> str:
        """Its name in the dispatcher."""
        return self._worker_id

    @property
    def state(self) -> ClientState:
        """Where the connection is."""
        return self._connection.state

    def start(self, listener: WorkerListener) -> None:
        """Begin to connect; keeps trying until `close`. Needs the running event loop."""
        self._connection.start(listener)
        self._tick()

    def send(self, message: ToWorker) -> None:
        """Queue a message. Raises WorkerUnavailable (a pipe that is full ends the connection)."""
        self._connection.send(message)

    def lose(self, reason: str) -> None:
        """Give the connection up, tell the listener and connect anew."""
        self._connection.lose(reason)

    def close(self) -> None:
        """Say nothing more and free the socket; what is queued gets 0.1 s to leave."""
        if self._timer is not None:
            self._timer.cancel()
        self._wire.drop(linger_ms=100)
        self._connection.close()

    def _tick(self) -> None:
        """Read what an edge may have hidden, and see who has been silent for too long."""
        self._wire.drain()
        self._connection.check()
        if self.state != "closed":
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._connection.check_interval_s, self._tick)

    def _frame(self, frame: bytes) -> None:
        try:
            message = decode_from_worker(frame)
        except msgspec.DecodeError as error:
            reason = f"it sends what is no message of protocol {PROTOCOL_VERSION}: {error}"
            self._connection.refuse(reason)
            return
        self._connection.receive(message)

    def _full(self) -> None:
        self._connection.lose("it does not read its messages")


class _ZmqWire:
    """Implements Wire; hands frames to `on_frame`. `on_full` comes after a send that failed."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        on_frame: Callable[[bytes], None],
        on_full: Callable[[], None],
    ) -> None:
        self._context = context
        self._endpoint = endpoint
        self._on_frame = on_frame
        self._on_full = on_full
        self._socket: zmq.Socket[bytes] | None = None
        self._descriptor = -1
        self._drain_handle: asyncio.Handle | None = None

    def open(self) -> None:
        """A new socket in place of the old one."""
        self.drop()
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER)
        socket.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(self._endpoint)
        self._socket = socket
        self._descriptor = socket.fileno()
        asyncio.get_running_loop().add_reader(self._descriptor, self.drain)

    def send(self, message: ToWorker) -> bool:
        """Queue a message; False where the pipe is full."""
        socket = self._socket
        if socket is None:
            return False
        try:
            socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            # Not now: the caller is in the midst of something that goes by this worker.
            asyncio.get_running_loop().call_soon(self._tell_full, socket)
            return False
        self._drain_soon()
        return True

    def drop(self, linger_ms: int = 0) -> None:
        """Close the socket; what is queued gets `linger_ms` to leave."""
        if self._drain_handle is not None:
            self._drain_handle.cancel()
            self._drain_handle = None
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            self._socket.close(linger=linger_ms)
            self._socket = None

    def drain(self) -> None:
        """Read until nothing is left, or others should get a turn."""
        if self._drain_handle is not None:
            self._drain_handle.cancel()
            self._drain_handle = None
        socket = self._socket
        for _ in range(MAX_MESSAGES_PER_DRAIN):
            # A message may have ended this connection or begun another.
            if socket is None or socket is not self._socket:
                return
            try:
                frame = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_frame(frame)
        self._drain_soon()

    def _drain_soon(self) -> None:
        """Sending may have consumed the edge of something that arrived meanwhile."""
        if self._drain_handle is None:
            self._drain_handle = asyncio.get_running_loop().call_soon(self.drain)

    def _tell_full(self, socket: zmq.Socket[bytes]) -> None:
        if socket is self._socket:
            self._on_full()


def _loop_time() -> float:
    return asyncio.get_running_loop().time()
