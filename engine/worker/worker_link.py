"""The worker's socket, the peers on it, and what they have not acknowledged.

Nothing here can block or crash the steps. A ROUTER socket that gateways reach with DEALERs,
`[identity, payload]` each way: its options and bounds, decoding with a count of what was not a
message, and a send that says whether the peer is still there. What the messages mean is
`worker_loop.py`'s.

An identity stands for one connection. DEALERs get one drawn by ZeroMQ at each connect; a gateway
that chooses its own must not reuse it in a second process. A peer is a connection that said Hello:
a gateway process, or a dispatcher process, which submits nothing itself and gets reports of all
requests alike (`observes`).

`UsageOutbox` keeps finishes that no gateway has acknowledged yet: the worker's half of "usage is
posted once".

    add    a request ended; kept from here on, whether or not the Finish could be sent
    ack    the gateway has recorded it durably; forgotten
    unacked(gateway)  what is sent again to a gateway that says Hello, oldest first

Keyed by (request_id, attempt), so telling it twice is harmless. Held in memory: it outlives a
gateway, not the worker. Bounded: beyond `capacity` the oldest falls out and `num_dropped` counts
it (the gateway then bills its own last checkpoint).
"""

import logging
import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from engine.config import WorkerConfig
from engine.protocol import (
    HEARTBEAT_MS,
    HEARTBEAT_TIMEOUT_MS,
    Finish,
    FromWorker,
    TokenDelta,
    ToWorker,
    WorkerStatus,
    decode_to_worker,
    encode,
)

logger = logging.getLogger(__name__)
RequestKey: TypeAlias = tuple[str, int]
HANDSHAKE_MS = 2000
"""By tcp, a connection that has shown no allowed key by then is closed: each holds a descriptor."""


@dataclass(slots=True, eq=False)
class Peer:
    """A gateway's connection.

    `taken`: of one that observes, the Submits of anybody since its last status. `checked`: its last
    CheckIntegrity, as in WorkerStatus.
    """

    identity: bytes
    gateway_id: str
    observes: bool = False
    connected: bool = True
    taken: list[RequestKey] = field(default_factory=list)
    checked: tuple[int, str] | None = None

    def status(self, status: WorkerStatus) -> WorkerStatus:
        """What this peer gets of a status meant for all."""
        if not self.observes:
            return msgspec.structs.replace(status, service=[], checked=self.checked)
        taken, self.taken = self.taken, []
        return msgspec.structs.replace(status, taken=taken, checked=self.checked)


class PeerRequest(NamedTuple):
    """A request that has not ended: who submitted it, and what its KV takes at most."""

    peer: Peer
    kv_bytes: int


@dataclass(slots=True)
class WorkerCounters:
    """What went wrong or hit a bound; in WorkerStatus.counters, each prefixed `worker_`."""

    submits_refused: int = 0
    submits_duplicate: int = 0
    messages_without_hello: int = 0
    controls_refused: int = 0
    deltas_unknown: int = 0
    peers_lost: int = 0
    peers_refused: int = 0
    dispatchers_refused: int = 0


class UsageOutbox:
    """Not thread-safe; lives on the worker's step thread."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError("the outbox must hold at least one finish")
        self.capacity = capacity
        self.num_dropped = 0
        self._entries: OrderedDict[RequestKey, tuple[str, Finish]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._entries

    def owner(self, key: RequestKey) -> str:
        """The gateway it is kept for; "": it is not here."""
        return self._entries[key][0] if key in self._entries else ""

    def add(self, gateway_id: str, key: RequestKey, finish: Finish) -> None:
        """Keep `finish` for `gateway_id`. A key that is here already keeps its first finish."""
        if key in self._entries:
            return
        if len(self._entries) >= self.capacity:
            self._entries.popitem(last=False)
            self.num_dropped += 1
        self._entries[key] = (gateway_id, finish)

    def ack(self, gateway_id: str, keys: Iterable[RequestKey]) -> int:
        """Forget those of `keys` that are kept for `gateway_id`. Returns how many those were."""
        num_acked = 0
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None and entry[0] == gateway_id:
                del self._entries[key]
                num_acked += 1
        return num_acked

    def adopt(self, gateway_id: str, request_ids: Collection[str], by: str) -> list[TokenDelta]:
        """What is kept for the one gateway of these requests and their choices is kept for the
        other from here on: this, as deltas. The rest stays, for a gateway that may come back."""
        adopted = [
            delta
            for delta in self.unacked(gateway_id)
            if delta.request_id.partition("#")[0] in request_ids
        ]
        for delta in adopted:
            key = (delta.request_id, delta.attempt)
            self._entries[key] = (by, self._entries[key][1])
        return adopted

    def unacked(self, gateway_id: str) -> list[TokenDelta]:
        """What `gateway_id` has not acknowledged, as deltas without tokens, oldest first."""
        return [
            TokenDelta(request_id, attempt, [], finish)
            for (request_id, attempt), (owner, finish) in self._entries.items()
            if owner == gateway_id
        ]


class Link(Protocol):
    """Messages in and out of a worker; `WorkerLink` is the real one."""

    @property
    def num_malformed(self) -> int:
        """Frames that were no messages."""

    def wait(self, timeout_s: float) -> bool:
        """True as soon as something can be received, False after `timeout_s`."""

    def receive(self, max_messages: int) -> Iterator[tuple[bytes, ToWorker]]:
        """What has arrived, at most so many, as (identity, message). Never waits."""

    def send(self, identity: bytes, message: FromWorker) -> bool:
        """Queue one message. False: the peer is gone or takes nothing more; nothing was queued."""

    def close(self, linger_s: float) -> None:
        """Close; what is queued gets `linger_s` to leave."""


class WorkerLink:
    """Implements Link on one socket. Owned by the step thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], config: WorkerConfig) -> None:
        """Binds `config.endpoint`. Raises zmq.ZMQError where that cannot be bound."""
        self.num_malformed = 0
        self._socket = context.socket(zmq.ROUTER)
        # Without MANDATORY a ROUTER drops what it cannot deliver; with it the send fails, with
        # EHOSTUNREACH where the peer is gone and EAGAIN where its queue is full.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.SNDHWM, config.send_high_water)
        self._socket.setsockopt(zmq.RCVHWM, config.receive_high_water)
        self._socket.setsockopt(zmq.MAXMSGSIZE, config.max_frame_bytes)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._guard = _guard(context, self._socket, config) if config.is_remote else None
        self._socket.setsockopt(zmq.IPV6, "[" in config.endpoint)
        self._socket.bind(config.endpoint)

    def wait(self, timeout_s: float) -> bool:
        """True as soon as something can be received, False after `timeout_s`."""
        return bool(self._socket.poll(math.ceil(max(0.0, timeout_s) * 1e3), zmq.POLLIN))

    def receive(self, max_messages: int) -> Iterator[tuple[bytes, ToWorker]]:
        """What has arrived, at most `max_messages` frames, as (identity, message). Never waits."""
        for _ in range(max_messages):
            try:
                identity, *payload = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = self._decode(payload)
            if message is not None:
                yield identity, message

    def send(self, identity: bytes, message: FromWorker) -> bool:
        """Queue one message. False: the peer is gone or takes nothing more; nothing was queued."""
        try:
            self._socket.send_multipart([identity, encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def close(self, linger_s: float) -> None:
        """Close the socket; what is queued gets `linger_s` to leave."""
        self._socket.close(linger=round(linger_s * 1e3))
        if self._guard is not None:
            self._guard.stop()

    def _decode(self, payload: list[bytes]) -> ToWorker | None:
        try:
            (frame,) = payload
            return decode_to_worker(frame)
        except ValueError as error:  # not one frame, or (DecodeError is a ValueError) no message
            self.num_malformed += 1
            if self.num_malformed & (self.num_malformed - 1) == 0:  # 1st, 2nd, 4th ...: no flood
                logger.warning("frame dropped (%d so far): %s", self.num_malformed, error)
            return None


class _AllowedKeys:
    """Who may connect. What ZeroMQ's authenticator asks."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = frozenset(key.encode() for key in keys)
        self._num_refused = 0

    def callback(self, _domain: str, key: bytes) -> bool:
        """Whether a peer with this public key, in Z85, is one of them."""
        if key in self._keys:
            return True
        self._num_refused += 1
        if self._num_refused & (self._num_refused - 1) == 0:  # 1st, 2nd, 4th ...: no flood
            text = "key refused (%d so far): it is of no server that may connect key=%s"
            logger.warning(text, self._num_refused, key.decode())
        return False


def _guard(
    context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], config: WorkerConfig
) -> ThreadAuthenticator:
    """Encrypt the socket, let in who is allowed, and give up links on which nothing comes."""
    guard = ThreadAuthenticator(context)
    guard.start()
    guard.configure_curve_callback("*", _AllowedKeys(config.allowed_keys))
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, config.secret_key.encode())
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    return guard
