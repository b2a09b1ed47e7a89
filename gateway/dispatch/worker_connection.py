"""What a connection to a worker means: its states, epochs and silences (stage 5's far side).

    new --start--> connecting --Welcome of our version--> connected
    connected --silence, new epoch, full pipe, lose--> connecting
    connecting, connected --Welcome of another version--> refused --lose--> connecting
    any --close--> closed

Knows messages, not bytes: a `Wire` carries them, ZeroMQ's in `worker_client.py` and modelled ones
in the simulator. Knows no requests and no queue either: a listener hears what the worker says, by
plain calls.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

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
)

logger = logging.getLogger(__name__)

HELLO_INTERVAL_S = 1.0
"""How long a Welcome may take before the connection is made anew."""


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


class Wire(Protocol):
    """One connection after the other to the same worker."""

    def open(self) -> None:
        """A new connection; the one before is dropped, with what was queued on it either way."""

    def send(self, message: ToWorker) -> bool:
        """Queue a message on the connection. False: it takes nothing more."""

    def drop(self) -> None:
        """End the connection, if there is one."""


ClientState = Literal["new", "connecting", "connected", "refused", "closed"]


class WorkerConnection:
    """The states above. Its owner hands in what arrives (`receive`) and calls `check` on time."""

    def __init__(
        self,
        worker_id: str,
        gateway_id: str,
        heartbeat_timeout_s: float,
        wire: Wire,
        clock: Callable[[], float],
        *,
        observes: bool = False,
    ) -> None:
        """`observes`: see protocol.Hello."""
        self._worker_id = worker_id
        self._hello = Hello(PROTOCOL_VERSION, gateway_id, observes)
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._wire = wire
        self._clock = clock
        self._listener: WorkerListener | None = None
        self._epoch = ""
        self._last_heard_s = 0.0
        self.state: ClientState = "new"

    @property
    def check_interval_s(self) -> float:
        """How often `check` should be called."""
        return min(HELLO_INTERVAL_S, self._heartbeat_timeout_s) / 4

    @property
    def patient_until_s(self) -> float:
        """Until then `check` has nothing to do, whatever does not arrive."""
        connecting = self.state == "connecting"
        return self._last_heard_s + (HELLO_INTERVAL_S if connecting else self._heartbeat_timeout_s)

    def start(self, listener: WorkerListener) -> None:
        """Begin to connect."""
        self._listener = listener
        self._connect()

    def send(self, message: ToWorker) -> None:
        """Queue a message. Raises WorkerUnavailable."""
        if self.state != "connected":
            raise WorkerUnavailable(f"worker {self._worker_id} is {self.state}")
        if not self._wire.send(message):
            raise WorkerUnavailable(f"worker {self._worker_id} does not read")

    def lose(self, reason: str) -> None:
        """Give the connection up, tell the listener and connect anew."""
        if self.state in ("new", "closed"):
            return
        was_connected = self.state == "connected"
        self._connect()
        if was_connected:
            logger.warning("worker lost worker=%s: %s", self._worker_id, reason)
            assert self._listener is not None
            self._listener.on_lost(self._worker_id, self._epoch, reason)

    def close(self) -> None:
        """Say nothing more."""
        self.state = "closed"
        self._wire.drop()

    def check(self) -> None:
        """See whether the worker has been silent for too long."""
        silent_s = self._clock() - self._last_heard_s
        if self.state == "connected" and silent_s > self._heartbeat_timeout_s:
            self.lose(f"silent for {silent_s:.1f} s")
        elif self.state == "connecting" and silent_s > HELLO_INTERVAL_S:
            self._connect()

    def receive(self, message: FromWorker) -> None:
        """A message of the connection that is open now."""
        self._last_heard_s = self._clock()
        if isinstance(message, Welcome):
            self._welcome(message)
        elif self.state == "connected":
            self._deliver(message)

    def refuse(self, reason: str) -> None:
        """A worker of another build: nothing is sent to it any more."""
        logger.error("worker refused worker=%s: %s", self._worker_id, reason)
        was_connected = self.state == "connected"
        self.state = "refused"
        self._wire.drop()
        if was_connected:
            assert self._listener is not None
            self._listener.on_lost(self._worker_id, self._epoch, reason)

    def _connect(self) -> None:
        self._wire.open()
        self.state = "connecting"
        self._last_heard_s = self._clock()
        self._wire.send(self._hello)

    def _welcome(self, welcome: Welcome) -> None:
        if welcome.protocol_version != PROTOCOL_VERSION:
            self.refuse(f"it speaks protocol {welcome.protocol_version}, not {PROTOCOL_VERSION}")
        elif self.state == "connecting":
            self.state, self._epoch = "connected", welcome.epoch
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
