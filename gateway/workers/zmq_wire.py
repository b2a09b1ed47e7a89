"""Frames to and from one worker over ZeroMQ: on ipc on this machine, by tcp to another.

By tcp a connection is encrypted, and each end knows the other by its public key (CURVE). Heartbeats
of ZeroMQ and its monitor tell of a connection that broke; it is not mended but given up, for what
was sent on it may not have arrived (`on_cut`).
"""

import asyncio
import logging
from collections.abc import Callable
from typing import cast

import zmq
from zmq.utils.monitor import recv_monitor_message

from engine.protocol import HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS, ToWorker, encode
from gateway.workers.curve_keys import KeyPair, WorkerAddress

logger = logging.getLogger(__name__)

FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
MAX_MESSAGES_PER_DRAIN = 256
"""Then other callbacks get a turn before the rest is read."""
SEND_HIGH_WATER = 4096
RECEIVE_HIGH_WATER = 65536


class ZmqWire:
    """Implements worker_client.Wire; hands frames to `on_frame`. `on_full` comes after a send that
    failed, `on_cut` where a connection by tcp has ended."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: WorkerAddress,
        keys: KeyPair | None,
        on_frame: Callable[[bytes], None],
        on_full: Callable[[], None],
        on_cut: Callable[[], None],
    ) -> None:
        """Raises ValueError where a worker on another machine is to be reached without `keys`."""
        if address.public_key and keys is None:
            raise ValueError(f"worker {address.worker_id} needs this server's keys")
        self._context = context
        self._address = address
        self._keys = keys
        self._on_frame = on_frame
        self._on_full = on_full
        self._on_cut = on_cut
        self._monitor: zmq.Socket[bytes] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._descriptor = -1
        self._drain_handle: asyncio.Handle | None = None
        self._failure = 0

    def open(self) -> None:
        """A new socket in place of the old one."""
        self.drop()
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER)
        socket.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER)
        socket.setsockopt(zmq.LINGER, 0)
        if self._address.public_key:
            self._secure(socket)
        socket.setsockopt(zmq.IPV6, "[" in self._address.endpoint)
        socket.connect(self._address.endpoint)
        self._socket = socket
        self._descriptor = socket.fileno()
        asyncio.get_running_loop().add_reader(self._descriptor, self.drain)

    def _secure(self, socket: zmq.Socket[bytes]) -> None:
        """Encrypt it, let only the worker answer that has the key, and hear of its end."""
        assert self._keys is not None
        socket.setsockopt(zmq.CURVE_SERVERKEY, self._address.public_key.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.public_key.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret_key.encode())
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        monitor = self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | FAILURES)
        loop = asyncio.get_running_loop()
        loop.add_reader(monitor.fileno(), self._monitored, monitor)

    def _monitored(self, monitor: zmq.Socket[bytes]) -> None:
        is_cut = False
        while cast(int, monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            event = recv_monitor_message(monitor, zmq.NOBLOCK)["event"]
            is_cut |= event == zmq.EVENT_DISCONNECTED
            if event & FAILURES:
                self._failed(event)
        if is_cut and monitor is self._monitor:
            self._on_cut()

    def _failed(self, event: int) -> None:
        """Say once why no connection is made, until one is or there is another reason."""
        if event == self._failure:
            return
        self._failure = event
        address = self._address
        reason = "did not prove the public_key in polyhost.toml: compare it with the machine's"
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            assert self._keys is not None
            key = self._keys.public_key
            reason = f"refuses this server: start it with --server-key '{key}', too"
        logger.error("worker=%s at %s %s", address.worker_id, address.endpoint, reason)

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
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._descriptor)
            if self._monitor is not None:
                loop.remove_reader(self._monitor.fileno())
                self._socket.disable_monitor()
                self._monitor.close(linger=0)
                self._monitor = None
            self._socket.close(linger=linger_ms)
            self._socket = None

    def look(self) -> None:
        """Read what an edge may have hidden."""
        self.drain()
        if self._monitor is not None:
            self._monitored(self._monitor)

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
            if not cast(int, socket.get(zmq.EVENTS)) & zmq.POLLIN:
                return  # half the cost of asking for a frame and being told of none
            self._failure = 0
            self._on_frame(socket.recv(zmq.NOBLOCK))
        self._drain_soon()

    def _drain_soon(self) -> None:
        """Sending may have consumed the edge of something that arrived meanwhile."""
        if self._drain_handle is None:
            self._drain_handle = asyncio.get_running_loop().call_soon(self.drain)

    def _tell_full(self, socket: zmq.Socket[bytes]) -> None:
        if socket is self._socket:
            self._on_full()
