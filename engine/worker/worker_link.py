"""The worker's socket: frames in, messages out, and nothing that can block or crash the steps.

A ROUTER socket that gateways reach with DEALERs, `[identity, payload]` each way. What lives here:
the socket's options and bounds, decoding with a count of what was not a message, and a send that
says whether the peer is still there. Who the peers are and what the messages mean is
`worker_loop.py`.

An identity stands for one connection. DEALERs get one drawn by ZeroMQ at each connect; a gateway
that chooses its own must not reuse it in a second process.
"""

import logging
import math
from collections.abc import Iterator
from typing import Protocol

import zmq

from engine.config import WorkerConfig
from engine.protocol import FromWorker, ToWorker, decode_to_worker, encode

logger = logging.getLogger(__name__)


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

    def _decode(self, payload: list[bytes]) -> ToWorker | None:
        try:
            (frame,) = payload
            return decode_to_worker(frame)
        except ValueError as error:  # not one frame, or (DecodeError is a ValueError) no message
            self.num_malformed += 1
            if self.num_malformed & (self.num_malformed - 1) == 0:  # 1st, 2nd, 4th ...: no flood
                logger.warning("frame dropped (%d so far): %s", self.num_malformed, error)
            return None
