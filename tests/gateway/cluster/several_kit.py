"""Several gateway processes, a dispatcher and a worker, all in this one: messages wait until told.

`Several` has the product's own parts; what stands in for sockets are lists, through which every
message goes encoded. `deliver` moves them; a test that does not call it has them on their way.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from engine.protocol import (
    Abort,
    Finish,
    FinishReason,
    Lease,
    ModelStatus,
    Refused,
    Submit,
    SwapRecord,
    TokenDelta,
    ToWorker,
    Usage,
    WorkerStatus,
    encode,
)
from gateway.cluster.dispatcher_protocol import (
    PROTOCOL_VERSION,
    Hello,
    ToDispatcher,
    ToGateway,
    Welcome,
    to_dispatcher,
    to_gateway,
)
from gateway.cluster.dispatcher_proxy import DispatcherProxy
from gateway.cluster.dispatcher_server import DispatcherServer
from gateway.cluster.remote_limits import RemoteStore
from gateway.cluster.ticket_dispatcher import TicketDispatcher
from gateway.dispatch.policy.fair_share import FairShare
from gateway.dispatch.tickets import RequestStream
from gateway.ipc.ipc import Channel
from gateway.limits.store import MemoryStore
from gateway.settings.settings import Settings
from gateway.types import HostedModel
from gateway.workers.worker_client import LossCause, WorkerListener, WorkerUnavailable
from tests.gateway.scripted_worker import KV_BYTES, Clock, hosted, prepared, principal

PEER = "dispatcher"
AHEAD_S = (0.0, 1e5, 5e3)
"""Of the dispatchers' clocks, one after the other."""


@dataclass(eq=False)
class Peer:
    """One process' connection to the worker. Implements WorkerClient."""

    worker: "SharedWorker"
    name: str
    listener: WorkerListener | None = None
    taken: list[tuple[str, int]] = field(default_factory=list)

    @property
    def worker_id(self) -> str:
        return "w"

    @property
    def heard(self) -> WorkerListener:
        assert self.listener is not None
        return self.listener

    def start(self, listener: WorkerListener) -> None:
        self.listener = listener
        self.worker.peers[self.name] = self

    def send(self, message: ToWorker) -> None:
        if self.worker.epoch == "" or self.worker.peers.get(self.name) is not self:
            raise WorkerUnavailable("w")
        encode(message)
        self.worker.receive(self, message)

    def lose(self, reason: str, cause: LossCause) -> None:
        self.heard.on_lost("w", self.worker.epoch, reason, cause)

    def close(self) -> None:
        self.worker.leave(self)


class SharedWorker:
    """A worker with several peers that keeps true books. Refuses what is beyond its capacity.

    A request's tokens are FIRST_TOKEN, the next number and so on: what its client gets shows
    whether attempts have gone on where the one before ended. `made`: tokens of what runs.
    """

    def __init__(self, num_requests: int) -> None:
        self.num_requests = num_requests
        self.peers: dict[str, Peer] = {}
        self.running: dict[tuple[str, int], Peer] = {}
        self.made: dict[tuple[str, int], int] = {}
        self.submits: dict[tuple[str, int], Submit] = {}
        self.submitted: list[tuple[str, int]] = []
        self.num_refused = 0
        self.refusals: list[tuple[Peer, Refused]] = []
        self.most_running = 0
        self.swaps: list[SwapRecord] = []
        self.epoch = ""
        self._num_epochs = 0

    def start(self) -> None:
        """A process answers every peer."""
        self._num_epochs += 1
        self.epoch = f"e{self._num_epochs}"
        for peer in list(self.peers.values()):
            peer.heard.on_connected("w", self.epoch)
        self.status()

    def greet(self, peer: Peer) -> None:
        """One peer connects."""
        if self.epoch:
            peer.heard.on_connected("w", self.epoch)
            peer.heard.on_status("w", self.make_status(peer))

    def die(self, *first: str) -> None:
        """The process ends; these peers see it first."""
        epoch, self.epoch = self.epoch, ""
        self.running.clear()
        names = [*first, *(name for name in self.peers if name not in first)]
        for name in names:
            self.peers[name].taken.clear()
            self.peers[name].heard.on_lost("w", epoch, "killed", "process")

    def leave(self, peer: Peer) -> None:
        """A connection is gone: what it asked for is aborted."""
        if self.peers.get(peer.name) is peer:
            del self.peers[peer.name]
        self.running = {key: who for key, who in self.running.items() if who is not peer}

    def receive(self, peer: Peer, message: ToWorker) -> None:
        if isinstance(message, Submit):
            key = (message.request_id, message.attempt)
            for other in self.peers.values():
                other.taken.append(key)
            if len(self.running) >= self.num_requests:
                self.num_refused += 1
                refused = Refused(self.epoch, *key, "overloaded", "full", True)
                self.refusals.append((peer, refused))
                return
            self.submitted.append(key)
            self.submits[key] = message
            self.running[key] = peer
            self.made[key] = len(message.generated)
            assert message.generated == tokens_upto(len(message.generated))
            assert len(message.generated) < message.max_tokens
            self.most_running = max(self.most_running, len(self.running))
        elif isinstance(message, Abort):
            key = (message.request_id, message.attempt)
            if self.running.get(key) is peer:
                self.finish(*key, reason="abort", generated=0)

    def load(self, seconds: float) -> None:
        """The model was loaded; the next heartbeat says so."""
        self.swaps.append(SwapRecord("m", "load", "disk", 1000, seconds))

    def refuse(self) -> None:
        """Those that it has to are told."""
        refusals, self.refusals = self.refusals, []
        for peer, refused in refusals:
            if self.peers.get(peer.name) is peer and refused.epoch == self.epoch:
                peer.heard.on_refused("w", refused)

    def status(self) -> None:
        """A heartbeat to everybody."""
        self.refuse()
        if self.epoch:
            for peer in list(self.peers.values()):
                peer.heard.on_status("w", self.make_status(peer))

    def make_status(self, peer: Peer) -> WorkerStatus:
        free = self.num_requests - len(self.running)
        taken, peer.taken = (peer.taken if peer.name == PEER else []), []
        swaps = self.swaps if peer.name == PEER else []
        self.swaps = self.swaps[len(swaps) :]
        return WorkerStatus(
            epoch=self.epoch,
            worker_id="w",
            free_requests=free,
            free_kv_bytes=10_000 * KV_BYTES,
            lease_ttl_s=2.0,
            page_bytes=1,
            num_pages=10**6,
            pages={},
            models=[ModelStatus("m", "resident", 1000, 0, len(self.running), 0, 0.5)],
            leases=[Lease("m", free, 10_000, KV_BYTES, 1)],
            swaps=swaps,
            counters={},
            taken=taken,
        )

    def tokens(self, request_id: str, attempt: int = 1) -> None:
        """One more token, which ends it where it is the last one that was asked for."""
        key = request_id, attempt
        if self.made[key] + 1 >= self.submits[key].max_tokens:
            self.finish(*key, reason="length")
            return
        self.made[key] += 1
        delta = TokenDelta(*key, tokens_upto(self.made[key])[-1:])
        self.running[key].heard.on_deltas("w", self.epoch, [delta])

    def finish(
        self,
        request_id: str,
        attempt: int = 1,
        reason: FinishReason = "stop",
        generated: int = 1,
        service_s: float = 0.1,
    ) -> None:
        """It has ended, with so many tokens more."""
        key = request_id, attempt
        made = self.made[key] = self.made[key] + generated
        finish = Finish(reason, Usage(4, 0, made, service_s))
        delta = TokenDelta(*key, tokens_upto(made)[made - generated :], finish)
        peer = self.running.pop(key)
        peer.heard.on_deltas("w", self.epoch, [delta])


FIRST_TOKEN = 7


def tokens_upto(count: int) -> list[int]:
    """The first tokens of any request."""
    return list(range(FIRST_TOKEN, FIRST_TOKEN + count))


class MemoryLink:
    """Implements what `DispatcherLink` is to its users."""

    def __init__(self) -> None:
        self.epoch = 0
        self.is_up = False
        self.hello: Callable[[], Hello]
        self.on_message: list[Callable[[ToGateway], None]] = []
        self.on_up: list[Callable[[bool], None]] = []
        self.on_down: list[Callable[[], None]] = []
        self.outbox: list[bytes] = []
        self.inbox: list[bytes] = []
        self.channel: Channel[ToDispatcher, ToGateway] | None = None

    def send(self, message: ToDispatcher) -> None:
        if self.channel is not None:
            self.outbox.append(msgspec.msgpack.encode([message]))

    def connect(self, server: DispatcherServer) -> None:
        """A new connection; what was on its way on the old one is gone."""
        self.cut()
        channel = self.channel = server.new_channel()
        inbox = self.inbox = []

        def say(message: ToGateway) -> None:
            if not channel.closed:
                inbox.append(msgspec.msgpack.encode([message]))

        channel.send = say  # type: ignore[method-assign]
        self.send(self.hello())

    def cut(self, *, tell_dispatcher: bool = True) -> None:
        """The connection ends for both."""
        channel, self.channel = self.channel, None
        self.outbox, self.inbox = [], []
        if channel is None:
            return
        channel.closed = True
        if tell_dispatcher:
            channel.on_lost("cut")
        self.is_up = False
        for hear in self.on_down:
            hear()

    def deliver_out(self) -> bool:
        """One message to the dispatcher."""
        if not self.outbox or self.channel is None:
            return False
        (message,) = to_dispatcher.decode(self.outbox.pop(0))
        self.channel.on_message(message)
        return True

    def deliver_in(self) -> bool:
        """One message to the gateway."""
        if not self.inbox:
            return False
        (message,) = to_gateway.decode(self.inbox.pop(0))
        if isinstance(message, Welcome):
            assert message.version == PROTOCOL_VERSION
            is_other, self.epoch = message.epoch != self.epoch, message.epoch
            self.is_up = True
            for hear_up in self.on_up:
                hear_up(is_other)
        else:
            for hear in self.on_message:
                hear(message)
        return True


class Gateway:
    """One gateway process."""

    def __init__(self, name: str, settings: Settings, worker: SharedWorker, clock: Clock) -> None:
        self.name = name
        self.link = MemoryLink()
        self.store = RemoteStore(self.link)  # type: ignore[arg-type]
        self.dispatcher = DispatcherProxy(
            settings,
            self.link,  # type: ignore[arg-type]
            clock,
        )
        self.link.hello = lambda: Hello(
            PROTOCOL_VERSION,
            name,
            self.dispatcher.waiting_specs(),
            self.dispatcher.running_specs(),
            self.store.open_reservations(),
            self.link.epoch,
            self.store.settled(),
        )
        self.streams: dict[str, RequestStream] = {}
        self.peer = Peer(worker, name)
        self.dispatcher.set_catalog([hosted("m")])
        self.dispatcher.add_worker(self.peer)
        worker.greet(self.peer)

    def ask(self, request_id: str, tenant: str = "a", max_tokens: int = 6) -> RequestStream:
        """A request of the tenant."""
        request = prepared(request_id, max_tokens=max_tokens)
        stream = self.streams[request_id] = self.dispatcher.run(request, principal(tenant))
        return stream


class ElsewhereClock:
    """The same time on another machine, whose monotonic clock began at another moment."""

    def __init__(self, clock: Clock, ahead_s: float) -> None:
        self._clock = clock
        self._ahead_s = ahead_s

    def __call__(self) -> float:
        return self._clock.now_s + self._ahead_s


class Several:
    """All of it; dispatchers have clocks of their own. `deliver` until nothing is on its way."""

    def __init__(
        self, num_gateways: int = 2, num_requests: int = 4, settings: Settings | None = None
    ) -> None:
        self.settings = settings or Settings()
        self.clock = Clock()
        self.worker = SharedWorker(num_requests)
        self.models: list[HostedModel] = [hosted("m")]
        self.epoch = 0
        self.num_behind = 0
        self.num_gateways = num_gateways
        self.worker.start()
        self.new_dispatcher()
        self.gateways = [
            Gateway(f"gateway-{i}", self.settings, self.worker, self.clock)
            for i in range(num_gateways)
        ]
        for gateway in self.gateways:
            gateway.link.connect(self.server)
        self.deliver()

    def new_dispatcher(self, *, greeted: bool = True) -> None:
        """Another process becomes active. It has heard of no gateway, and of the worker if it was
        greeted."""
        self.epoch += 1
        self.store = MemoryStore()
        self.share = FairShare(self.settings.fair_share_max_lead_s)
        clock = ElsewhereClock(self.clock, AHEAD_S[self.epoch % len(AHEAD_S)])
        self.dispatcher = TicketDispatcher(self.settings, clock, self.share)
        self.server = DispatcherServer(
            self.dispatcher,
            self.store,
            self.epoch,
            1e9,
            clock,
            self._behind,
            self.num_gateways,
        )
        self.dispatcher.set_catalog(self.models)
        peer = Peer(self.worker, PEER)
        self.dispatcher.add_worker(peer)
        if greeted:
            self.worker.greet(peer)

    def kill_dispatcher(self) -> None:
        """What was on its way to it and from it is gone."""
        self.worker.leave(self.worker.peers[PEER])
        for gateway in self.gateways:
            gateway.link.cut(tell_dispatcher=False)

    def take_over(self) -> None:
        """The standby is active and everybody has connected to it."""
        self.new_dispatcher()
        for gateway in self.gateways:
            gateway.link.connect(self.server)
        self.deliver()

    def kill_gateway(self, index: int) -> Gateway:
        """A process is gone with its connections; another one takes its place."""
        old = self.gateways[index]
        old.link.cut()
        self.worker.leave(old.peer)
        new = Gateway(old.name, self.settings, self.worker, self.clock)
        self.gateways[index] = new
        new.link.connect(self.server)
        return new

    def ask(
        self, gateway: Gateway, request_id: str, tenant: str = "a", max_tokens: int = 6
    ) -> RequestStream:
        """A request of the tenant comes to this gateway; everything is delivered."""
        stream = gateway.ask(request_id, tenant, max_tokens)
        self.deliver()
        return stream

    def deliver(self) -> None:
        """All messages, and those that they lead to."""
        self.worker.refuse()
        links = [gateway.link for gateway in self.gateways]
        while any([link.deliver_out() for link in links] + [link.deliver_in() for link in links]):
            pass
        self.check()

    def settle(self) -> None:
        """A heartbeat of the worker, and what comes of it."""
        self.worker.status()
        self.deliver()

    def advance(self, seconds: float) -> None:
        """Time passes for everybody."""
        self.clock.now_s += seconds
        self.dispatcher.tick()
        self.server.tick()
        for gateway in self.gateways:
            gateway.dispatcher.tick()
        self.deliver()

    def check(self) -> None:
        """Everybody's books agree."""
        self.dispatcher.check_integrity()
        self.store.check_integrity()
        for gateway in self.gateways:
            gateway.dispatcher.check_integrity()

    def _behind(self) -> None:
        self.num_behind += 1
