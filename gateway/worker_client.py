"""The gateway's end of the worker protocol: one worker, one ZeroMQ DEALER (stage 5's far side).

    connecting --Welcome of our version--> connected --silence, new epoch, full pipe--> connecting
    connecting, connected --Welcome of another version--> refused --lose--> connecting
    any --close--> closed

Messages are decoded on the event loop and handed to a listener by plain calls; this file knows no
requests and no queue. Each connection has a socket of its own, so that what was queued for a dead
worker is never delivered to the next one, and what an old worker still sends is never read.

ZeroMQ's descriptor is watched directly: it is edge-triggered, so it is drained until EAGAIN, and
looked at again after every send and at every timer tick. That works alike on asyncio and uvloop
and costs no future per message.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec
import zmq

from engine.protocol import (
    PROTOCOL_VERSION,
    FromWorker,
    Hello,
    Refused,
    StepOutput,
    TokenDelta,
    ToWorker,
    Welcome,
    WorkerStatus,
    decode_from_worker,
    encode,
)

logger = logging.getLogger(__name__)

MAX_MESSAGES_PER_DRAIN = 256
"""Then other callbacks get a turn before the rest is read."""
HELLO_INTERVAL_S = 1.0
"""How long a Welcome may take before the connection is made anew."""
SEND_HIGH_WATER = 4096
RECEIVE_HIGH_WATER = 65536


class WorkerUnavailable(Exception):
    """The message was not sent: there is no connection, or the worker does not read."""


class WorkerListener(Protocol):
    """Who hears what a worker says. All calls come on the event loop and must not block."""

    def on_connected(self, worker_id: str, epoch: str) -> None:
        """A worker process answered; nothing is running there for this gateway."""

    def on_status(self, worker_id: str, status: WorkerStatus) -> None:
        """A heartbeat of the connected epoch."""

    def on_deltas(self, worker_id: str, epoch: str, deltas: Sequence[TokenDelta]) -> None:
        """One step's output, or finishes told again after a Hello."""

    def on_refused(self, worker_id: str, refused: Refused) -> None:
        """A Submit that was not taken."""

    def on_lost(self, worker_id: str, epoch: str, reason: str) -> None:
        """The connected epoch is gone, with all it was running."""


class WorkerClient(Protocol):
    """A way to one worker, wherever it runs."""

    @property
    def worker_id(self) -> str:
        """Its name in the dispatcher."""

    def start(self, listener: WorkerListener) -> None:
        """Begin to connect; keeps trying until `close`."""

    def send(self, message: ToWorker) -> None:
        """Queue a message. Raises WorkerUnavailable."""

    def lose(self, reason: str) -> None:
        """It is known that the worker process ended: tell the listener now and connect anew."""

    def close(self) -> None:
        """Say nothing more and free the socket."""


ClientState = Literal["new", "connecting", "connected", "refused", "closed"]


class ZmqWorkerClient:
    """Implements WorkerClient over one ipc or tcp endpoint."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        worker_id: str,
        endpoint: str,
        gateway_id: str,
        heartbeat_timeout_s: float,
    ) -> None:
        self._context = context
        self._worker_id = worker_id
        self._endpoint = endpoint
        self._gateway_id = gateway_id
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._state: ClientState = "new"
        self._listener: WorkerListener | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._descriptor = -1
        self._epoch = ""
        self._last_heard_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._drain_handle: asyncio.Handle | None = None

    @property
    def worker_id(self) -> str:
        """Its name in the dispatcher."""
        return self._worker_id

    @property
    def state(self) -> ClientState:
        """Where the connection is; see the module's docstring."""
        return self._state

    def start(self, listener: WorkerListener) -> None:
        """Begin to connect; keeps trying until `close`. Needs the running event loop."""
        self._listener = listener
        self._connect()
        self._tick()

    def send(self, message: ToWorker) -> None:
        """Queue a message. Raises WorkerUnavailable (a pipe that is full ends the connection)."""
        if self._state != "connected" or self._socket is None:
            raise WorkerUnavailable(f"worker {self._worker_id} is {self._state}")
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again as error:
            asyncio.get_running_loop().call_soon(self._lose_full, self._socket)
            raise WorkerUnavailable(f"worker {self._worker_id} does not read") from error
        self._drain_soon()

    def lose(self, reason: str) -> None:
        """Give the connection up, tell the listener and connect anew."""
        if self._state in ("new", "closed"):
            return
        was_connected = self._state == "connected"
        self._connect()
        if was_connected:
            logger.warning("worker lost worker=%s: %s", self._worker_id, reason)
            assert self._listener is not None
            self._listener.on_lost(self._worker_id, self._epoch, reason)

    def close(self) -> None:
        """Say nothing more and free the socket; what is queued gets 0.1 s to leave."""
        self._state = "closed"
        if self._timer is not None:
            self._timer.cancel()
        self._drop_socket(linger_ms=100)

    def _lose_full(self, socket: zmq.Socket[bytes]) -> None:
        if socket is self._socket:
            self.lose("it does not read its messages")

    def _connect(self) -> None:
        self._drop_socket(linger_ms=0)
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER)
        socket.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(self._endpoint)
        self._socket = socket
        self._descriptor = socket.fileno()
        loop = asyncio.get_running_loop()
        self._state = "connecting"
        self._last_heard_s = loop.time()
        socket.send(encode(Hello(PROTOCOL_VERSION, self._gateway_id)), zmq.NOBLOCK)
        loop.add_reader(self._descriptor, self._drain)
        self._drain_soon()

    def _drop_socket(self, linger_ms: int) -> None:
        if self._drain_handle is not None:
            self._drain_handle.cancel()
            self._drain_handle = None
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            self._socket.close(linger=linger_ms)
            self._socket = None

    def _tick(self) -> None:
        """Read what an edge may have hidden, and see who has been silent for too long."""
        loop = asyncio.get_running_loop()
        self._drain()
        silent_s = loop.time() - self._last_heard_s
        if self._state == "connected" and silent_s > self._heartbeat_timeout_s:
            self.lose(f"silent for {silent_s:.1f} s")
        elif self._state == "connecting" and silent_s > HELLO_INTERVAL_S:
            self._connect()
        if self._state != "closed":
            interval_s = min(HELLO_INTERVAL_S, self._heartbeat_timeout_s) / 4
            self._timer = loop.call_later(interval_s, self._tick)

    def _drain_soon(self) -> None:
        """Sending may have consumed the edge of something that arrived meanwhile."""
        if self._drain_handle is None:
            self._drain_handle = asyncio.get_running_loop().call_soon(self._drain)

    def _drain(self) -> None:
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
            self._receive(frame)
        self._drain_soon()

    def _receive(self, frame: bytes) -> None:
        try:
            message = decode_from_worker(frame)
        except msgspec.DecodeError as error:
            self._refuse(f"it sends what is no message of protocol {PROTOCOL_VERSION}: {error}")
            return
        self._last_heard_s = asyncio.get_running_loop().time()
        if isinstance(message, Welcome):
            self._welcome(message)
        elif self._state == "connected":
            self._deliver(message)

    def _welcome(self, welcome: Welcome) -> None:
        if welcome.protocol_version != PROTOCOL_VERSION:
            self._refuse(f"it speaks protocol {welcome.protocol_version}, not {PROTOCOL_VERSION}")
        elif self._state == "connecting":
            self._state, self._epoch = "connected", welcome.epoch
            logger.info("worker connected worker=%s device=%s", self._worker_id, welcome.device)
            assert self._listener is not None
            self._listener.on_connected(self._worker_id, welcome.epoch)
        elif welcome.epoch != self._epoch:
            self.lose("another process answers in its place")

    def _deliver(self, message: FromWorker) -> None:
        assert self._listener is not None
        if isinstance(message, Welcome) or message.epoch != self._epoch:
            self.lose("another process answers in its place")
        elif isinstance(message, StepOutput):
            self._listener.on_deltas(self._worker_id, message.epoch, message.deltas)
        elif isinstance(message, WorkerStatus):
            self._listener.on_status(self._worker_id, message)
        else:
            self._listener.on_refused(self._worker_id, message)

    def _refuse(self, reason: str) -> None:
        """A worker of another build: nothing is sent to it any more."""
        logger.error("worker refused worker=%s: %s", self._worker_id, reason)
        was_connected = self._state == "connected"
        self._state = "refused"
        self._drop_socket(linger_ms=0)
        if was_connected:
            assert self._listener is not None
            self._listener.on_lost(self._worker_id, self._epoch, reason)
