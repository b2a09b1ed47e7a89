"""The gateway's end of the worker protocol (stage 5's far side): one connection to one worker.

                  connect      welcome     refuse    close
    new           connecting                         closed
    connecting    connecting   connected   refused   closed
    connected     connecting               refused   closed
    refused       connecting               refused   closed
    closed                                           closed

`connect` is a new connection: the first one, or after a silence, a new epoch, a full pipe or
`lose`. `welcome` is one of our version, `refuse` one of another version, or what is no message.
`WorkerConnection` has these states and changes them only by this table. It knows messages, not
bytes: a `Wire` carries them, ZeroMQ's here and modelled ones in the simulator. It knows no requests
and no queue either: a listener hears what the worker says, by plain calls.

`ZmqWorkerClient` has sockets, frames and timers. Messages are decoded on the event loop. Each
connection has a socket of its own, so that what was queued for a dead worker is never delivered to
the next one, and what an old worker still sends is never read. ZeroMQ's descriptor is watched
directly: it is edge-triggered, so it is drained until EAGAIN, and looked at again after every send
and at every timer tick. That works alike on asyncio and uvloop and costs no future per message.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, Protocol, TypeAlias

import msgspec
import zmq

from engine.protocol import (
    OLDEST_PROTOCOL_VERSION,
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
)
from gateway.errors import IllegalTransition
from gateway.workers.curve_keys import KeyPair, WorkerAddress
from gateway.workers.zmq_wire import ZmqWire

logger = logging.getLogger(__name__)

START_S = 300.0
"""A worker's process answers by then, however slow its imports and its device are."""
HELLO_INTERVAL_S = 1.0
"""How long a Welcome may take before the connection is made anew."""

REFUSED_AGAIN_S = 10.0
"""Pause before a worker of another build is asked again: by then its machine may have ours."""


class WorkerUnavailable(Exception):
    """The message was not sent: there is no connection, or the worker does not read."""


LossCause: TypeAlias = Literal["process", "silence", "planned"]
"""Why a worker process is lost: it ended by itself under a home that lives; nothing is heard of it
(its machine, its link, or the process stands still); it was told to end."""


class WorkerListener(Protocol):
    """Who hears what a worker says. All calls come on the event loop and must not block."""

    def on_connected(self, worker_id: str, epoch: str) -> None:
        """A worker process answered; nothing is running there for this gateway."""

    def on_status(self, worker_id: str, status: WorkerStatus) -> None:
        """A heartbeat of the connected epoch."""

    def on_deltas(self, worker_id: str, epoch: str, deltas: Sequence[TokenDelta]) -> None:
        """One step's output, or finishes sent again after a Hello."""

    def on_refused(self, worker_id: str, refused: Refused) -> None:
        """A Submit that was not taken."""

    def on_lost(self, worker_id: str, epoch: str, reason: str, cause: LossCause) -> None:
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

    def lose(self, reason: str, cause: LossCause) -> None:
        """It is known that the worker process ended: tell the listener now and connect anew."""

    def close(self) -> None:
        """Say nothing more and free the socket."""


def is_sent(client: WorkerClient, message: ToWorker) -> bool:
    """Queue a message; False where the connection is gone (`on_lost` comes or has come)."""
    try:
        client.send(message)
    except WorkerUnavailable as error:
        logger.info("cannot send message=%s: %s", type(message).__name__, error)
        return False
    return True


class Wire(Protocol):
    """One connection after the other to the same worker."""

    def open(self) -> None:
        """A new connection; the one before is dropped, with what was queued on it either way."""

    def send(self, message: ToWorker) -> bool:
        """Queue a message on the connection. False: it takes nothing more."""

    def drop(self) -> None:
        """End the connection, if there is one."""


ClientState: TypeAlias = Literal["new", "connecting", "connected", "refused", "closed"]
PAUSES_S: Final[Mapping[ClientState, float]] = {
    "connecting": HELLO_INTERVAL_S,
    "refused": REFUSED_AGAIN_S,
}
"""Of silence, after which a connection is made anew."""
ClientEvent: TypeAlias = Literal["connect", "welcome", "refuse", "close"]

TRANSITIONS: Final[Mapping[ClientState, Mapping[ClientEvent, ClientState]]] = {
    "new": {"connect": "connecting", "close": "closed"},
    "connecting": {
        "connect": "connecting",
        "welcome": "connected",
        "refuse": "refused",
        "close": "closed",
    },
    "connected": {"connect": "connecting", "refuse": "refused", "close": "closed"},
    "refused": {"connect": "connecting", "refuse": "refused", "close": "closed"},
    "closed": {"close": "closed"},
}


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
        epoch: int = 0,
    ) -> None:
        """`observes`, `epoch`: see protocol.Hello."""
        self._worker_id = worker_id
        about = PROTOCOL_VERSION, gateway_id, observes, epoch
        self._hello = Hello(*about, OLDEST_PROTOCOL_VERSION)
        self._names = worker_id, gateway_id
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._wire = wire
        self._clock = clock
        self._listener: WorkerListener | None = None
        self._epoch = ""
        self._last_heard_s = 0.0
        self._silent_s = 0.0
        self._was_lost = False
        self.state: ClientState = "new"

    @property
    def check_interval_s(self) -> float:
        """How often `check` should be called."""
        return min(HELLO_INTERVAL_S, self._heartbeat_timeout_s) / 4

    def hangs(self) -> bool:
        """Nobody has said that the worker's process ended, and it was lost by its silence and has
        been silent for as long again, or has not answered for START_S since it was first called:
        what it holds, it holds for nobody. Said once in such a time."""
        now_s = self._clock()
        bound_s = self._heartbeat_timeout_s if self._was_lost else START_S
        if self.state != "connecting" or now_s - self._silent_s <= bound_s:
            return False
        self._silent_s = now_s
        return True

    @property
    def patient_until_s(self) -> float:
        """Until then `check` has nothing to do, whatever does not arrive."""
        return self._last_heard_s + PAUSES_S.get(self.state, self._heartbeat_timeout_s)

    def start(self, listener: WorkerListener) -> None:
        """Begin to connect."""
        self._listener = listener
        self._silent_s = self._clock()
        self._connect()

    def send(self, message: ToWorker) -> None:
        """Queue a message. Raises WorkerUnavailable."""
        if self.state != "connected":
            raise WorkerUnavailable(f"worker {self._worker_id} is {self.state}")
        if not self._wire.send(message):
            raise WorkerUnavailable(f"worker {self._worker_id} does not read")

    def lose(self, reason: str, cause: LossCause) -> None:
        """Give the connection up, tell the listener and connect anew."""
        self._silent_s, self._was_lost = self._clock(), cause == "silence"
        if self.state in ("new", "closed"):
            return
        if self._connect():
            logger.warning("worker lost worker=%s as=%s: %s", *self._names, reason)
            assert self._listener is not None
            self._listener.on_lost(self._worker_id, self._epoch, reason, cause)

    def close(self) -> None:
        """Say nothing more."""
        self._on("close")
        self._wire.drop()

    def check(self) -> None:
        """See whether the worker has been silent for too long."""
        silent_s = self._clock() - self._last_heard_s
        if self.state == "connected" and silent_s > self._heartbeat_timeout_s:
            self.lose(f"silent for {silent_s:.1f} s", "silence")
        elif silent_s > PAUSES_S.get(self.state, math.inf):
            self._connect()

    def receive(self, message: FromWorker) -> None:
        """A message of the connection that is open now."""
        self._last_heard_s = self._clock()
        if isinstance(message, Welcome):
            self._welcome(message)
        elif self.state == "connected":
            self._deliver(message)

    def refuse(self, reason: str) -> None:
        """A worker of another build: nothing is sent to it until it is asked again."""
        logger.error("worker refused worker=%s as=%s: %s", *self._names, reason)
        was_connected = self._on("refuse")
        self._wire.drop()
        if was_connected:
            assert self._listener is not None
            self._listener.on_lost(self._worker_id, self._epoch, reason, "planned")

    def _on(self, event: ClientEvent) -> bool:
        """Change the state by the table. True: a worker was connected. Raises IllegalTransition,
        and then changes nothing."""
        before, state = self.state, TRANSITIONS[self.state].get(event)
        if state is None:
            raise IllegalTransition(f"worker {self._worker_id}: {event!r} while {before}")
        self.state = state
        return before == "connected"

    def _connect(self) -> bool:
        """True: a worker was connected."""
        self._wire.open()
        was_connected = self._on("connect")
        self._last_heard_s = self._clock()
        self._wire.send(self._hello)
        return was_connected

    def _welcome(self, welcome: Welcome) -> None:
        version = welcome.protocol_version
        if not OLDEST_PROTOCOL_VERSION <= version <= PROTOCOL_VERSION:
            own = f"{OLDEST_PROTOCOL_VERSION} to {PROTOCOL_VERSION}"
            self.refuse(f"it speaks protocol {version}, not {own}: run the same release")
        elif self.state == "connecting":
            self._on("welcome")
            self._was_lost = False
            self._epoch = welcome.epoch
            text = "worker connected worker=%s as=%s device=%s"
            logger.info(text, *self._names, welcome.device)
            assert self._listener is not None
            self._listener.on_connected(self._worker_id, welcome.epoch)
        elif welcome.epoch != self._epoch:
            self.lose("another process answers in its place", "process")

    def _deliver(self, message: FromWorker) -> None:
        assert self._listener is not None
        if isinstance(message, Welcome) or message.epoch != self._epoch:
            self.lose("another process answers in its place", "process")
        elif isinstance(message, StepOutput):
            self._listener.on_deltas(self._worker_id, message.epoch, message.deltas)
        elif isinstance(message, WorkerStatus):
            if message.worker_id != self._worker_id:  # Another machine has names of its own.
                message = msgspec.structs.replace(message, worker_id=self._worker_id)
            self._listener.on_status(self._worker_id, message)
        else:
            self._listener.on_refused(self._worker_id, message)


class ZmqWorkerClient:
    """Implements WorkerClient over one ipc or tcp endpoint."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: WorkerAddress,
        gateway_id: str,
        heartbeat_timeout_s: float,
        *,
        keys: KeyPair | None = None,
        observes: bool = False,
        epoch: int = 0,
    ) -> None:
        """`keys`: this server's, which a worker on another machine asks for. `observes`, `epoch`:
        see protocol.Hello."""
        self._worker_id = address.worker_id
        self._wire = ZmqWire(context, address, keys, self._frame, self._full, self._cut)
        about = address.worker_id, gateway_id, heartbeat_timeout_s, self._wire, _loop_time
        self._connection = WorkerConnection(*about, observes=observes, epoch=epoch)
        self._timer: asyncio.TimerHandle | None = None

    @property
    def worker_id(self) -> str:
        """Its name in the dispatcher."""
        return self._worker_id

    @property
    def state(self) -> ClientState:
        """Where the connection is."""
        return self._connection.state

    def hangs(self) -> bool:
        """As there."""
        return self._connection.hangs()

    def start(self, listener: WorkerListener) -> None:
        """Begin to connect; keeps trying until `close`. Needs the running event loop."""
        self._connection.start(listener)
        self._tick()

    def send(self, message: ToWorker) -> None:
        """Queue a message. Raises WorkerUnavailable (a pipe that is full ends the connection)."""
        self._connection.send(message)

    def lose(self, reason: str, cause: LossCause) -> None:
        """Give the connection up, tell the listener and connect anew."""
        self._connection.lose(reason, cause)

    def close(self) -> None:
        """Say nothing more and free the socket; what is queued gets 0.1 s to leave."""
        if self._timer is not None:
            self._timer.cancel()
        self._wire.drop(linger_ms=100)
        self._connection.close()

    def _tick(self) -> None:
        """Read what an edge may have hidden, and see who has been silent for too long."""
        self._wire.look()
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
        self._connection.lose("it does not read its messages", "silence")

    def _cut(self) -> None:
        if self.state == "connected":
            self._connection.lose("the connection to its machine broke", "silence")


def _loop_time() -> float:
    return asyncio.get_running_loop().time()
