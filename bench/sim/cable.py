"""Messages between one gateway and one worker: what ZeroMQ does to them, in simulated time.

    open      a new connection; the worker sees a new identity
    sent      arrives after a latency, in order, on the connection on which it was sent
    no worker what is sent is kept, and given to the next process under an identity of its own
    broken    what is under way is lost on both sides; the gateway's socket connects again by itself
              and does not notice, the worker's sends to the old identity fail

Messages are the protocol's own objects; nothing is encoded.
"""

import math
from collections.abc import Callable
from typing import Protocol

from bench.sim.loop import DELIVERY, Loop
from engine.protocol import FromWorker, ToWorker

RECONNECT_S = 0.1
"""ZeroMQ tries to connect again after so long."""


class Socket(Protocol):
    """The worker's end."""

    @property
    def is_up(self) -> bool:
        """A process listens."""

    def plug(self, identity: bytes, cable: "Cable") -> None:
        """A connection begins."""

    def unplug(self, identity: bytes) -> None:
        """A connection has ended."""

    def deliver(self, identity: bytes, message: ToWorker) -> None:
        """A message arrives now."""


class Cable:
    """Implements gateway.workers.worker_client.Wire; the worker's end is `to_gateway`."""

    def __init__(
        self,
        loop: Loop,
        worker: Socket,
        gateway_id: str,
        receive: Callable[[FromWorker], None],
        latency_s: Callable[[], float],
    ) -> None:
        self._loop = loop
        self._worker = worker
        self._gateway_id = gateway_id
        self._receive = receive
        self._latency_s = latency_s
        self._is_open = False
        self._identity = b""  # as the process that is there knows it; empty: not connected
        self._kept: list[ToWorker] = []
        self._num_opened = 0
        self._num_paths = 0
        self._num_breaks = 0
        self._ended_s: dict[bytes, float] = {}  # when the process behind an identity died
        self._last_in_s = 0.0
        self._last_out_s = 0.0
        self.num_messages = 0

    def open(self) -> None:
        """A new connection."""
        self.drop()
        self._is_open = True
        self._num_opened += 1
        self._connect()

    def drop(self) -> None:
        """End the connection: what the worker still sends on it is never read."""
        self._is_open = False
        self._kept.clear()
        self._unplug()

    def send(self, message: ToWorker) -> bool:
        """Never full: what a pipe holds is far more than a simulation has under way."""
        if not self._is_open:
            return False
        if not self._identity:
            self._kept.append(message)
            return True
        self.num_messages += 1
        arrival_s = self._last_out_s = max(self._last_out_s, self._loop.now_s + self._latency_s())
        identity, num_breaks = self._identity, self._num_breaks

        def arrive() -> None:
            if self._num_breaks == num_breaks:
                self._worker.deliver(identity, message)

        self._loop.at(arrival_s, arrive, rank=DELIVERY)
        return True

    def to_gateway(self, message: FromWorker, sent_s: float) -> None:
        """What the worker sends at `sent_s`, which may be later than now."""
        self.num_messages += 1
        arrival_s = self._last_in_s = max(
            self._last_in_s, sent_s + self._latency_s(), self._loop.now_s
        )
        connection = self._num_opened, self._num_breaks
        identity = self._identity

        def arrive() -> None:
            # Though its process may have died since: what it had sent by then is on its way.
            is_sent = sent_s <= self._ended_s.get(identity, math.inf)
            if is_sent and self._is_open and (self._num_opened, self._num_breaks) == connection:
                self._receive(message)

        self._loop.at(arrival_s, arrive, rank=DELIVERY)

    def worker_ended(self) -> None:
        """The process is gone; the socket will find the next one."""
        if self._identity:
            self._ended_s[self._identity] = self._loop.now_s
            self._identity = b""

    def worker_started(self) -> None:
        """A process listens."""
        if self._is_open:
            self._loop.after(RECONNECT_S, self._connect)

    def break_(self) -> None:
        """The connection is lost and made anew: nobody is told."""
        if self._identity:
            self._num_breaks += 1
            self._unplug()
            self._loop.after(RECONNECT_S, self._connect)

    def _connect(self) -> None:
        if not self._is_open or self._identity or not self._worker.is_up:
            return
        self._num_paths += 1
        self._identity = f"{self._gateway_id}/{self._num_paths}".encode()
        self._worker.plug(self._identity, self)
        kept, self._kept = self._kept, []
        for message in kept:
            self.send(message)

    def _unplug(self) -> None:
        if self._identity:
            self._worker.unplug(self._identity)
            self._identity = b""
