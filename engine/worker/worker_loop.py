"""The worker between its socket and its engine: the far end of stage 5, the doorstep of stage 6.

One `tick` = take in what has arrived -> one engine step -> send each gateway its tokens -> send a
status if one is due -> rest if there is nothing to run. One thread, no locks, nothing that blocks
on a gateway.

What lives here: who asked for which request, what happens to it when that gateway goes, and the way
to the end of the process (draining). Sockets, peers and unacknowledged finishes are
`worker_link.py`, statuses `worker_status.py`, the process around it (signals, threads, logs)
`main.py`. Models, memory and scheduling are the engine's.

A peer is a connection that said Hello. It is lost when a send to it fails, or when its gateway says
Hello on another connection: its requests are aborted, their finishes are kept for its `gateway_id`
and sent again on that gateway's next connection. Tokens never change connection, since what was
sent on the old one may not have arrived.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import get_args

import msgspec

from engine.config import WorkerConfig
from engine.engine import Engine
from engine.errors import IntegrityError, RequestRefused
from engine.protocol import (
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    Abort,
    AckUsage,
    AdoptUsage,
    CheckIntegrity,
    FromWorker,
    Hello,
    LoadModel,
    ModelSpec,
    RefusalCode,
    Refused,
    Restart,
    SetCatalog,
    StepOutput,
    Submit,
    TokenDelta,
    ToWorker,
    UnloadModel,
    WarmModel,
    Welcome,
    common_version,
)
from engine.residency import LoadRequest
from engine.worker.worker_link import (
    Link,
    Peer,
    PeerRequest,
    RequestKey,
    UsageOutbox,
    WorkerCounters,
)
from engine.worker.worker_status import StatusBoard

logger = logging.getLogger(__name__)

BUSY_POLL_S = 0.002
"""Rest between ticks while the engine waits for something (a load, pages), not for a message."""
RESEND_BATCH = 512
"""Finishes in one StepOutput when they are sent again."""
ABORT_GRACE_S = 1.0
"""After the shutdown time-out: how long the aborts may take to be acknowledged."""

_REFUSAL_CODES: dict[str, RefusalCode] = {code: code for code in get_args(RefusalCode)}
_RETRYABLE: frozenset[RefusalCode] = frozenset({"not_resident", "overloaded", "draining"})


class Worker:
    """Serves one engine on one socket until it is told to end."""

    def __init__(
        self,
        config: WorkerConfig,
        engine: Engine,
        link: Link,
        *,
        epoch: str,
        device: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`epoch` names this process, `device` is for people."""
        self.config = config
        self.counters = WorkerCounters()
        self._epoch = epoch
        self._device = device
        self._engine = engine
        self._clock = clock
        self._link = link
        self._outbox = UsageOutbox(config.max_unacked_finishes)
        self._board = StatusBoard(config, epoch, engine, self._count, device)
        self._peers: dict[bytes, Peer] = {}
        self._requests: dict[RequestKey, PeerRequest] = {}
        self._next_integrity_s = 0.0
        self._dispatcher_epoch = 0
        self._stopping = False
        self._draining = False
        self._drain_deadline_s: float | None = None

    # The life of the process.

    def run(self) -> None:
        """Tick until `drain` is through or `stop` was called, then close the socket."""
        while not self.finished():
            self.tick()
        self.close()

    def drain(self) -> None:
        """Take nothing more in, let running requests end, then finish. For a signal handler."""
        self._draining = True

    def stop(self) -> None:
        """Finish after the tick in progress. For a signal handler or another thread."""
        self._stopping = True

    def finished(self) -> bool:
        """Nothing is left to do: stopped, or drained with every usage acknowledged, or too late."""
        if self._stopping or self._drain_deadline_s is None:
            return self._stopping
        waited_for = any(self._outbox.unacked(p.gateway_id) for p in self._peers.values())
        if not self._requests and not waited_for:
            return True
        return self._clock() >= self._drain_deadline_s + ABORT_GRACE_S

    def close(self) -> None:
        """Close the socket; what is queued gets a second to leave."""
        self._link.close(linger_s=1.0)

    @property
    def num_unacked(self) -> int:
        """Finishes that no gateway has acknowledged."""
        return len(self._outbox)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless requests, peers and the engine's own books agree."""
        for key, request in self._requests.items():
            if key in self._outbox or request.peer.connected != (
                self._peers.get(request.peer.identity) is request.peer
            ):
                raise IntegrityError(f"request {key} has ended, or its peer is not listed")
        for identity, peer in self._peers.items():
            if not peer.connected or peer.identity != identity:
                raise IntegrityError(f"peer {peer.gateway_id} is listed but not connected")
        self._engine.check_integrity()

    def tick(self) -> None:
        """One round: messages, one engine step, outputs, statuses, rest."""
        now_s = self._clock()
        for identity, message in self._link.receive(self.config.max_messages_per_tick):
            self._handle(identity, message, now_s)
        if self._draining:
            self._advance_drain(now_s)
        now_s = self.tell(self._engine.step(now_s))
        if self._engine.has_work():
            return
        if self._requests or self._engine.in_transition:
            self._link.wait(min(BUSY_POLL_S, self._board.rest_s(now_s)))
        else:
            self._check_when_idle(now_s)
            self._link.wait(self._board.rest_s(now_s))

    def tell(self, deltas: list[TokenDelta]) -> float:
        """Send what steps have brought, and a status if one is due. Returns the time."""
        self._route(deltas)
        now_s = self._clock()
        self._publish(now_s)
        return now_s

    @property
    def quiet_until_s(self) -> float:
        """Until then no status has to go out, as far as is known now."""
        now_s = self._clock()
        return now_s + self._board.rest_s(now_s)

    # Messages in.

    def _handle(self, identity: bytes, message: ToWorker, now_s: float) -> None:
        if isinstance(message, Hello):
            self._hello(identity, message, now_s)
            return
        peer = self._peers.get(identity)
        if peer is None:
            self._without_hello(identity, message)
            return
        match message:
            case Submit():
                self._submit(peer, message, now_s)
            case Abort():
                if self._is_of(peer, (message.request_id, message.attempt)):
                    self._engine.abort(message.request_id, message.attempt)
            case AckUsage():
                self._outbox.ack(peer.gateway_id, message.requests)
            case AdoptUsage():
                self._adopt_usage(peer, message)
            case CheckIntegrity():
                self._check_for(peer, message.call, now_s)
            case SetCatalog() | LoadModel() | WarmModel() | UnloadModel():
                if self._dispatcher_epoch and not peer.observes:
                    self.counters.controls_refused += 1
                    logger.warning("control by gateway=%s, not a dispatcher", peer.gateway_id)
                else:
                    self._control(message, now_s)
            case Restart():
                if peer.observes:
                    logger.info("told to restart by %s", peer.gateway_id)
                    self.drain()

    def _hello(self, identity: bytes, hello: Hello, now_s: float) -> None:
        peer = self._peers.get(identity)
        version = common_version(hello.protocol_version, hello.oldest_version)
        if not version:
            logger.error(
                "gateway=%s has protocol version %d, this worker %d to %d: run the same release",
                hello.gateway_id,
                hello.protocol_version,
                OLDEST_PROTOCOL_VERSION,
                PROTOCOL_VERSION,
            )
            if peer is not None:
                self._lose(peer, "another protocol version")
            self._link.send(identity, self._welcome(PROTOCOL_VERSION))
            return
        if hello.observes and not self._obeys(hello):
            return
        if peer is None or peer.gateway_id != hello.gateway_id:
            peer = self._join(identity, hello.gateway_id)
        if peer is None:
            return
        peer.observes, peer.taken = hello.observes, []
        self._send(peer, self._welcome(version))
        self._send_kept(peer, self._outbox.unacked(peer.gateway_id))
        status = self._board.greeting(now_s, draining=self._draining)
        self._send(peer, msgspec.structs.replace(peer.status(status), service=[]))

    def _send_kept(self, peer: Peer, kept: list[TokenDelta]) -> None:
        for start in range(0, len(kept), RESEND_BATCH):
            self._send(peer, StepOutput(self._epoch, kept[start : start + RESEND_BATCH]))

    def _adopt_usage(self, peer: Peer, message: AdoptUsage) -> None:
        """A gateway that is connected closes its own books."""
        gateway_id = message.gateway_id
        if any(other.gateway_id == gateway_id for other in self._peers.values()):
            logger.warning(
                "gateway=%s asks for the usage of %s, which is connected: it stays",
                peer.gateway_id,
                gateway_id,
            )
            return
        adopted = self._outbox.adopt(gateway_id, set(message.request_ids), peer.gateway_id)
        if adopted:
            about = peer.gateway_id, len(adopted), gateway_id
            logger.info("gateway=%s has taken over finishes=%d of %s", *about)
        self._send_kept(peer, adopted)

    def _obeys(self, hello: Hello) -> bool:
        """Whether it is the dispatcher to obey, instead of any before it. Another gets no answer:
        to one that was stopped, or cut off, while another took its place, this worker is lost."""
        if hello.epoch < self._dispatcher_epoch:
            self.counters.dispatchers_refused += 1
            about = hello.gateway_id, hello.epoch, self._dispatcher_epoch
            logger.warning("dispatcher=%s has epoch %d, this worker obeys epoch %d", *about)
            return False
        if hello.epoch > self._dispatcher_epoch:
            self._dispatcher_epoch = hello.epoch
            for other in [peer for peer in self._peers.values() if peer.observes]:
                self._lose(other, f"dispatcher of epoch {hello.epoch} is there")
        return True

    def _join(self, identity: bytes, gateway_id: str) -> Peer | None:
        """A new peer in place of those it stands for; None where there are too many."""
        for other in list(self._peers.values()):
            if other.identity == identity or other.gateway_id == gateway_id:
                self._lose(other, "said Hello anew")
        if len(self._peers) >= self.config.max_peers:
            self.counters.peers_refused += 1
            return None
        peer = self._peers[identity] = Peer(identity, gateway_id)
        logger.info("peer joined gateway=%s", gateway_id)
        return peer

    def _without_hello(self, identity: bytes, message: ToWorker) -> None:
        """A connection this process does not know, perhaps made to the process before it.

        Only a Submit needs an answer: without one the gateway would wait for tokens.
        """
        self.counters.messages_without_hello += 1
        if isinstance(message, Submit):
            text = "this worker process got no Hello on this connection: send Hello again"
            self._link.send(identity, self._refusal(message, "not_resident", text))

    def _submit(self, peer: Peer, request: Submit, now_s: float) -> None:
        key = (request.request_id, request.attempt)
        for other in self._peers.values():
            if other.observes:
                other.taken.append(key)
        if key in self._requests or key in self._outbox:
            self.counters.submits_duplicate += 1
            self._refuse_duplicate(peer, request)
            return
        try:
            if self._draining:
                raise RequestRefused("draining", "this worker is shutting down")
            self._engine.submit(request, now_s)
        except RequestRefused as error:
            self.counters.submits_refused += 1
            self._send(peer, self._refusal(request, error.code, str(error)))
            self._board.ask()
            return
        num_tokens = len(request.prompt_token_ids) + request.max_tokens
        self._requests[key] = PeerRequest(peer, self._board.taken(request.model_id, num_tokens))

    def _refuse_duplicate(self, peer: Peer, request: Submit) -> None:
        """Whoever submitted it hears of it anyway; another gateway would wait for ever. It is to
        try later, when the first one has its end."""
        key = (request.request_id, request.attempt)
        running = self._requests.get(key)
        owner = self._outbox.owner(key) if running is None else running.peer.gateway_id
        if owner != peer.gateway_id:
            text = "another gateway has a request with this id: try again when that has ended"
            refused = self._refusal(request, "overloaded", text)
            self._send(peer, msgspec.structs.replace(refused, retryable=False))
            self._board.ask()

    def _control(
        self, message: SetCatalog | LoadModel | WarmModel | UnloadModel, now_s: float
    ) -> None:
        try:
            match message:
                case SetCatalog():
                    self._engine.set_catalog([self._here(m) for m in message.models], now_s)
                case LoadModel() | WarmModel():
                    self._engine.load(message.model_id, now_s, LoadRequest.of(message))
                case UnloadModel():
                    self._engine.unload(message.model_id, now_s)
        except RequestRefused as error:  # the status that follows says the same in states
            self.counters.controls_refused += 1
            logger.warning("%s refused code=%s: %s", type(message).__name__, error.code, error)
        self._board.ask()

    def _here(self, spec: ModelSpec) -> ModelSpec:
        """The same with its pack where this machine has it."""
        if not self.config.packs_dir:
            return spec
        place = Path(self.config.packs_dir) / Path(spec.pack_dir).name
        return msgspec.structs.replace(spec, pack_dir=str(place))

    # Messages out.

    def _route(self, deltas: list[TokenDelta]) -> None:
        """Send one step's deltas, one StepOutput a peer, and keep the finishes."""
        outputs: dict[Peer, list[TokenDelta]] = {}
        for delta in deltas:
            key = (delta.request_id, delta.attempt)
            request = self._requests.get(key)
            if request is None:
                self.counters.deltas_unknown += 1
                logger.error("the engine reports an unknown request %s attempt %d", *key)
                continue
            peer = request.peer
            target: Peer | None = peer
            if delta.finish is not None:
                del self._requests[key]
                self._board.ended(request.kv_bytes)
                self._outbox.add(peer.gateway_id, key, delta.finish)
                if not peer.connected:
                    delta = msgspec.structs.replace(delta, token_ids=[], vectors=b"")
                    target = self._peer_of(peer.gateway_id)
            if target is not None and target.connected and (delta.token_ids or delta.finish):
                outputs.setdefault(target, []).append(delta)
        for peer, own in outputs.items():
            self._send(peer, StepOutput(self._epoch, own))

    def _publish(self, now_s: float) -> None:
        status = self._board.collect(now_s, draining=self._draining)
        if status is None:
            return
        for peer in list(self._peers.values()):
            self._send(peer, peer.status(status))

    def _send(self, peer: Peer, message: FromWorker) -> None:
        """Send, or lose the peer. Nothing is kept for later but finishes."""
        if peer.connected and not self._link.send(peer.identity, message):
            self._lose(peer, "gone or too slow")

    def _lose(self, peer: Peer, why: str) -> None:
        """Forget a connection and abort what it asked for; the next step ends those requests."""
        peer.connected = False
        del self._peers[peer.identity]
        self.counters.peers_lost += 1
        keys = {key for key in self._requests if self._is_of(peer, key)}
        logger.warning("peer lost gateway=%s requests=%d: %s", peer.gateway_id, len(keys), why)
        self._engine.abort_all(keys)

    def _is_of(self, peer: Peer, key: RequestKey) -> bool:
        """Whether the peer has submitted the request, and it has not ended."""
        request = self._requests.get(key)
        return request is not None and request.peer is peer

    def _peer_of(self, gateway_id: str) -> Peer | None:
        return next((p for p in self._peers.values() if p.gateway_id == gateway_id), None)

    # The rest.

    def _advance_drain(self, now_s: float) -> None:
        """First call: set the deadline and say so. From the deadline on: abort what still runs."""
        if self._drain_deadline_s is None:
            self._drain_deadline_s = now_s + self.config.shutdown_timeout_s
            self._board.ask()
            logger.info("draining requests=%d", len(self._requests))
        elif now_s >= self._drain_deadline_s:
            self._engine.abort_all(self._requests)

    def _check_when_idle(self, now_s: float) -> None:
        interval_s = self.config.integrity_interval_s
        if interval_s and now_s >= self._next_integrity_s:
            self._next_integrity_s = now_s + interval_s
            self.check_integrity()

    def _check_for(self, peer: Peer, call: int, now_s: float) -> None:
        """Raises IntegrityError, once the peer has been told."""
        try:
            self.check_integrity()
            peer.checked = (call, "")
        except IntegrityError as error:
            peer.checked = (call, str(error))
            raise
        finally:
            self._board.ask()
            self._publish(now_s)

    def _welcome(self, version: int) -> Welcome:
        return Welcome(version, self.config.worker_id, self._epoch, self._device)

    def _refusal(self, request: Submit, code: str, message: str) -> Refused:
        known = _REFUSAL_CODES.get(code)
        if known is None:
            raise IntegrityError(f"{code!r} is no refusal code of the protocol")
        return Refused(
            self._epoch, request.request_id, request.attempt, known, message, known in _RETRYABLE
        )

    def _count(self) -> dict[str, float]:
        """The worker's own counters, as WorkerStatus shows them."""
        counts: dict[str, float] = {
            f"worker_{name}": float(value) for name, value in asdict(self.counters).items()
        }
        counts["worker_frames_malformed"] = float(self._link.num_malformed)
        counts["usage_outbox_size"] = float(len(self._outbox))
        counts["usage_outbox_dropped"] = float(self._outbox.num_dropped)
        counts["worker_draining"] = float(self._draining)
        return counts
