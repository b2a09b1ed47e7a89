"""The dispatcher's end of the connections from gateways (stage 5).

One `ConnectedGateway` a connection: messages become calls of the `TicketDispatcher` and of the
limit store, grants and refusals become messages. Here is also what happens to a gateway process
that is gone, and what the next dispatcher takes in from those that connect to it.

    asked for a model not known here   held until the registry has been read again: a gateway
                                       process may have read of it a moment earlier
    reservations of a process that     places at one time are given back at once, for its requests
    is gone                            end with it; money is held until ORPHAN_HOLD_S after the
                                       process in its place has come, which has posted by then what
                                       was used
    a reservation asked for before     held, at most GATHER_S: what the others have open is not
    all gateway processes have come    counted yet, and a budget could be overrun by it
"""

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from gateway.cluster.dispatcher_protocol import (
    HEARTBEAT_S,
    PROTOCOL_VERSION,
    Aborted,
    Add,
    Ask,
    Carry,
    Close,
    Denied,
    Done,
    Ended,
    Figure,
    ForwardedAnswer,
    ForwardedQuestion,
    Granted,
    Hello,
    Leave,
    LoadShare,
    Moved,
    Reserve,
    Restore,
    Returned,
    State,
    TicketSpec,
    ToDispatcher,
    ToGateway,
    Tokens,
    Unclaimed,
    Welcome,
    to_dispatcher,
)
from gateway.cluster.ticket_dispatcher import TicketDispatcher
from gateway.dispatch.capacity import WorkerCapacity
from gateway.dispatch.tickets import Ticket
from gateway.errors import SERVER_ERROR, ApiError
from gateway.ipc.control_socket import ControlHandler
from gateway.ipc.ipc import Channel, MessageChannel
from gateway.limits.policy.rate_limit import Reservation
from gateway.limits.store import LimitStore

logger = logging.getLogger(__name__)

ORPHAN_HOLD_S = 30.0
ADOPTED_KEEP_S = 600.0
"""A gateway that was lost, and whose books another one has closed, may come back so much later."""
MAX_QUESTIONS = 8
"""Of operators on other servers, at a time."""
MEET_S = 10.0
"""After so long a dispatcher knows every gateway that can reach it."""
GATHER_S = 2.0
"""A gateway process that lives connects within a fraction of it."""
LOOK_S = 1.0
"""How often it is looked when models that somebody waits for will be there."""

T = TypeVar("T")


@dataclass(slots=True)
class _Orphan:
    """Money of a gateway process that is gone. `until_s`: once another is in its place. Or
    (`is_settled`) what was spent while dispatchers changed: until the ledger has been read again.
    Or (`is_read`) what the ledger had as open when this dispatcher began.
    """

    gateway_id: str
    reservation: Reservation
    until_s: float = math.inf
    is_settled: bool = False
    is_read: bool = False


class DispatcherServer:
    """All gateway processes of one dispatcher. `on_behind` is asked for a new look at the registry;
    `caught_up` says that it was taken. `num_expected`: how many gateway processes there are.
    `orphans_wait_s`: for so long the money of a gateway that is gone waits for one in its place."""

    def __init__(
        self,
        dispatcher: TicketDispatcher,
        store: LimitStore,
        epoch: int,
        silence_s: float,
        clock: Callable[[], float],
        on_behind: Callable[[], None],
        num_expected: int = 0,
        orphans_wait_s: float = math.inf,
    ) -> None:
        self.dispatcher = dispatcher
        self.store = store
        self.epoch = epoch
        self.clock = clock
        self._silence_s = silence_s
        self._on_behind = on_behind
        self._peers: dict[str, ConnectedGateway] = {}
        self._channels: set[MessageChannel[ToDispatcher, ToGateway]] = set()
        self._held: list[tuple[int, ConnectedGateway, TicketSpec, bool]] = []
        self.num_behind = 0
        """Tickets that ever had to be held."""
        self._orphans: dict[str, _Orphan] = {}
        self._orphans_wait_s = orphans_wait_s
        self._adopted: dict[str, tuple[str, float]] = {}
        """Reservations of lost gateways: whose they are now, and since when."""
        self._num_expected = num_expected
        self._gathers = num_expected > 0
        self._gather_until_s = math.inf
        self._met_s = clock() + MEET_S
        self._early: list[tuple[ConnectedGateway, Reserve]] = []
        self._next_beat_s = 0.0
        self._next_look_s = 0.0
        self.handler: ControlHandler | None = None
        """Of operators' questions that come to another server."""
        self._answering: set[asyncio.Task[None]] = set()
        self.on_later: Callable[[int], None] = lambda epoch: None
        """Told of an epoch that a gateway has spoken to and that is later than this one."""
        self._outlooks: tuple[dict[str, str], dict[str, float]] = ({}, {})

    @property
    def num_held(self) -> int:
        """Tickets that wait for a new look at the registry."""
        return len(self._held)

    @property
    def num_gateways(self) -> int:
        """Gateway processes that said Hello."""
        return len(self._peers)

    def new_channel(self) -> Channel[ToDispatcher, ToGateway]:
        """For a connection that is being made."""
        channel: Channel[ToDispatcher, ToGateway] = Channel(to_dispatcher)
        self._hear(channel)
        channel.on_made = lambda: self._channels.add(channel)
        return channel

    def attach(self, channel: MessageChannel[ToDispatcher, ToGateway]) -> None:
        """Hear a gateway that will say Hello there. The connection is made."""
        self._hear(channel)
        self._channels.add(channel)

    def _hear(self, channel: MessageChannel[ToDispatcher, ToGateway]) -> None:
        peer = ConnectedGateway(self, channel)
        channel.on_message = peer.receive

        def lost(reason: str) -> None:
            self._channels.discard(channel)
            self._lost(peer, reason)

        channel.on_lost = lost

    def close(self) -> None:
        """Let go of everybody; what was said gets out."""
        for channel in list(self._channels):
            channel.close()

    def tick(self) -> None:
        """Heartbeats, silences, and money that nobody claims any more."""
        now_s = self.clock()
        if now_s < self._next_beat_s:
            return
        self._next_beat_s = now_s + HEARTBEAT_S
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + LOOK_S
            self._outlooks = self.dispatcher.outlooks()
        met = sorted(self._peers) if now_s >= self._met_s else None
        state = State(self.dispatcher.ready, *self._outlooks, met)
        for peer in list(self._peers.values()):
            if peer.channel.silent_s > self._silence_s:
                peer.channel.lose(f"silent for {self._silence_s:.0f} s")
            else:
                peer.channel.send(state)
        for name in [name for name, orphan in self._orphans.items() if orphan.until_s <= now_s]:
            self.claim(name)
        kept_s = now_s - ADOPTED_KEEP_S
        for name in [name for name, (_, since_s) in self._adopted.items() if since_s < kept_s]:
            del self._adopted[name]
        if self._gathers:
            self._gather_until_s = min(self._gather_until_s, now_s + GATHER_S)
            self._gather(now_s)

    def caught_up(self, num_behind: int) -> None:
        """The registry has been read: what was held when that began, the first `num_behind` that
        ever were, is asked again, and this time answered."""
        held, self._held = self._held, []
        for entry in held:
            number, peer, spec, is_new = entry
            if number > num_behind:
                self._held.append(entry)
            elif not peer.channel.closed:
                self._ask(peer, spec, is_new=is_new)

    def read_again(self) -> None:
        """Counts have been compared with the ledger: it knows of all that was spent before."""
        for name in [name for name, orphan in self._orphans.items() if orphan.is_settled]:
            self.claim(name)

    def question(self, channel: MessageChannel[ToDispatcher, ToGateway], line: bytes) -> None:
        """An operator asks on another server. Nobody who cannot be answered waits."""
        if self.handler is None or len(self._answering) >= MAX_QUESTIONS:
            channel.lose("too many questions at a time")
            return
        task = asyncio.create_task(self._answer(self.handler, channel, line))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(
        self,
        handler: ControlHandler,
        channel: MessageChannel[ToDispatcher, ToGateway],
        line: bytes,
    ) -> None:
        found = handler.answer(line)
        answer = found if isinstance(found, dict) else await found
        channel.send(ForwardedAnswer(msgspec.json.encode(answer)))

    # Of peers.

    def hello(self, peer: "ConnectedGateway", hello: Hello) -> None:
        """A gateway process and all that is true of it."""
        if hello.version != PROTOCOL_VERSION:
            peer.channel.lose(f"it speaks version {hello.version}, not {PROTOCOL_VERSION}")
            return
        before = self._peers.get(hello.gateway_id)
        if before is not None and before is not peer:
            before.channel.lose("it has connected anew")
            self._lost(before, "it has connected anew")
        peer.gateway_id = hello.gateway_id
        self._peers[hello.gateway_id] = peer
        peer.channel.send(Welcome(PROTOCOL_VERSION, self.epoch))
        if hello.epoch > self.epoch:
            self.on_later(hello.epoch)
        self.carry(peer, hello.reservations)
        if hello.epoch != self.epoch:
            for spent in hello.settled:
                self.hold_spent(peer, spent)
        for name, orphan in list(self._orphans.items()):
            if orphan.gateway_id == hello.gateway_id:
                orphan.until_s = self.clock() + ORPHAN_HOLD_S
                if orphan.is_read and hello.epoch:  # It has lived on and says all.
                    self.claim(name)
        num_adopted = sum(self.dispatcher.adopt(peer, spec) for spec in hello.running)
        for spec in hello.waiting:
            self.ask(peer, spec, is_new=False)
        logger.info(
            "gateway connected gateway=%s waiting=%d running=%d of %d",
            hello.gateway_id,
            len(hello.waiting),
            num_adopted,
            len(hello.running),
        )
        self._gather(self.clock())

    def ask(self, peer: "ConnectedGateway", spec: TicketSpec, *, is_new: bool = True) -> None:
        """A ticket, held where its model is not known yet."""
        if self.dispatcher.knows(spec):
            self._ask(peer, spec, is_new=is_new)
            return
        self.num_behind += 1
        self._held.append((self.num_behind, peer, spec, is_new))
        self._on_behind()

    def _ask(self, peer: "ConnectedGateway", spec: TicketSpec, *, is_new: bool) -> None:
        """One request that cannot be taken in must not wait for its time-out."""
        try:
            self.dispatcher.ask(peer, spec, is_new=is_new)
        except Exception:
            logger.exception("cannot take in request=%s", spec.request_id)
            text = "the request could not be queued: see the server's log"
            peer.deny(spec.request_id, ApiError(SERVER_ERROR, text))

    def leave(self, peer: "ConnectedGateway", request_id: str, *, is_lost: bool) -> None:
        """A request is over at its gateway."""
        self._held = [entry for entry in self._held if entry[2].request_id != request_id]
        self.dispatcher.leave(peer, request_id, is_lost=is_lost)

    def carry(self, peer: "ConnectedGateway", reservations: list[Reservation]) -> None:
        """What the gateway process holds, and perhaps the one before it held. What another one has
        taken over while this one was lost, it counts there."""
        now_s = self.clock()
        own = [one for one in reservations if not self.is_anothers(peer, one.id)]
        for reservation in own:
            orphan = self._orphans.get(reservation.id)
            if orphan is not None and orphan.gateway_id != peer.gateway_id:
                self._adopted[reservation.id] = peer.gateway_id, now_s
            self.claim(reservation.id)
            peer.open[reservation.id] = reservation
        run_now(self.store.carry(own, now_s))

    def is_anothers(self, peer: "ConnectedGateway", reservation_id: str) -> bool:
        """Whether another gateway has adopted it and counts it."""
        adopter = self._adopted.get(reservation_id)
        return adopter is not None and adopter[0] != peer.gateway_id

    def claim(self, reservation_id: str) -> None:
        """Whoever has it says from here on what it holds."""
        orphan = self._orphans.pop(reservation_id, None)
        if orphan is not None:
            run_now(self.store.release(orphan.reservation))

    def hold_spent(self, peer: "ConnectedGateway", spent: Reservation) -> None:
        """Counted from here on, be it a second time for a while: see `read_again`."""
        self.claim(spent.id)
        run_now(self.store.carry([spent], self.clock()))
        until_s = self.clock() + ORPHAN_HOLD_S
        self._orphans[spent.id] = _Orphan(peer.gateway_id, spent, until_s, is_settled=True)

    def hold_open(self, left: Iterable[tuple[str, Reservation]]) -> None:
        """What the ledger has as open, by gateway id, before anybody has connected: held until its
        gateway says what it holds, or another one that has adopted it."""
        now_s = self.clock()
        for gateway_id, one in left:
            run_now(self.store.carry([one], now_s))
            until_s = now_s + self._orphans_wait_s
            self._orphans[one.id] = _Orphan(gateway_id, one, until_s, is_read=True)

    def reserve(self, peer: "ConnectedGateway", message: Reserve) -> None:
        """Answered when everybody's open reservations are counted."""
        if self._gathers:
            self._early.append((peer, message))
        else:
            peer.reserve(message)

    def forget_early(self, peer: "ConnectedGateway", reservation_id: str) -> None:
        """Nobody waits for it any more."""
        self._early = [
            (owner, message)
            for owner, message in self._early
            if owner is not peer or message.reservation_id != reservation_id
        ]

    def _gather(self, now_s: float) -> None:
        if not self._gathers:
            return
        if len(self._peers) < self._num_expected:
            if now_s < self._gather_until_s:
                return
            logger.warning(
                "%d of %d gateways are connected: reservations of the others are not counted yet",
                len(self._peers),
                self._num_expected,
            )
        self._gathers = False
        early, self._early = self._early, []
        for peer, message in early:
            peer.reserve(message)

    def _lost(self, peer: "ConnectedGateway", reason: str) -> None:
        if self._peers.get(peer.gateway_id) is not peer:
            return
        del self._peers[peer.gateway_id]
        logger.warning("gateway lost gateway=%s: %s", peer.gateway_id, reason)
        self._held = [entry for entry in self._held if entry[1] is not peer]
        self._early = [entry for entry in self._early if entry[0] is not peer]
        self.dispatcher.drop(peer)
        now_s = self.clock()
        for reservation in peer.open.values():
            run_now(self.store.release(reservation))
            money = tuple(taken for taken in reservation.taken if taken.meter == "cost")
            if money:
                kept = replace(reservation, taken=money)
                run_now(self.store.carry([kept], now_s))
                until_s = now_s + self._orphans_wait_s
                self._orphans[reservation.id] = _Orphan(peer.gateway_id, kept, until_s)


class ConnectedGateway:
    """One gateway process' connection. Implements `ticket_dispatcher.GatewayPeer`.

    `open`: its reservations that are not closed.
    """

    def __init__(
        self, server: DispatcherServer, channel: MessageChannel[ToDispatcher, ToGateway]
    ) -> None:
        self.channel = channel
        self.gateway_id = ""
        self.open: dict[str, Reservation] = {}
        self._server = server

    def grant(self, ticket: Ticket, worker: WorkerCapacity, owes_load: bool) -> bool:
        """See GatewayPeer."""
        if self.channel.closed:
            return False
        place = worker.worker_id, worker.epoch
        about = ticket.num_losses, ticket.is_batch
        self.channel.send(Granted(*ticket.key, *place, owes_load, *about))
        return True

    def recall(self, ticket: Ticket) -> None:
        """See GatewayPeer."""
        self.channel.send(Moved(*ticket.key))

    def deny(self, request_id: str, error: ApiError) -> None:
        """See GatewayPeer."""
        self.channel.send(Denied.of(request_id, error))

    def receive(self, message: ToDispatcher) -> None:
        """One message. What comes with every request is looked for first."""
        server, dispatcher = self._server, self._server.dispatcher
        if not self.gateway_id and not isinstance(message, Hello | ForwardedQuestion):
            self.channel.lose("it did not say Hello")
        elif isinstance(message, Tokens):
            dispatcher.tokens(self, message.counts)
        elif isinstance(message, Ended):
            key = (message.request_id, message.attempt)
            load_s = dispatcher.ended(self, *key, message.finish, message.num_tokens)
            if message.asks_load:
                self.channel.send(LoadShare(*key, load_s))
        elif isinstance(message, Ask):
            server.ask(self, message.ticket)
        elif isinstance(message, Leave):
            server.leave(self, message.request_id, is_lost=message.is_lost)
        elif isinstance(message, Reserve):
            server.reserve(self, message)
        elif isinstance(message, Close | Figure | Restore | Add):
            self.channel.send(run_now(self._limits(message)))
        elif isinstance(message, Aborted):
            dispatcher.aborted(self, message.request_id, message.attempt)
        elif isinstance(message, Unclaimed):
            dispatcher.unclaimed((message.request_id, message.attempt), message.usage)
        elif isinstance(message, Returned):
            key = (message.request_id, message.attempt)
            dispatcher.returned(self, *key, message.refused, message.ticket)
        elif isinstance(message, Hello):
            server.hello(self, message)
        elif isinstance(message, ForwardedQuestion):
            server.question(self.channel, message.line)
        elif isinstance(message, Carry):
            server.carry(self, message.reservations)
            self.channel.send(Done(message.call))

    def reserve(self, message: Reserve) -> None:
        """Decide it. What an earlier connection of this process was granted, and it was not told,
        is taken anew: of that only the money is still held."""
        name, now_s = message.reservation_id, self._server.clock()
        self._server.claim(name)
        decision = run_now(self._server.store.reserve(name, message.draws, now_s))
        if decision.reservation is not None:
            self.open[name] = decision.reservation
        self.channel.send(Done(message.call, decision))

    async def _limits(self, message: Close | Figure | Restore | Add) -> Done:
        store, now_s = self._server.store, self._server.clock()
        if isinstance(message, Figure):
            return Done(message.call, None, await store.figures(message.draws, now_s))
        if isinstance(message, Close):
            self.open.pop(message.reservation.id, None)
            self._server.forget_early(self, message.reservation.id)
            if message.used is None:
                await store.release(message.reservation)
            elif message.spent is None or self._server.is_anothers(self, message.reservation.id):
                await store.settle(message.reservation, message.used)
            else:
                await store.settle(message.reservation, replace(message.used, cost_nanos=0))
                self._server.hold_spent(self, message.spent)
        elif isinstance(message, Restore):
            await store.restore(message.pasts, now_s)
        else:
            await store.add(message.pasts, now_s)
        return Done(message.call)


def run_now(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits: a store in memory keeps to the order of calls."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise RuntimeError("a limit store that waits cannot be served from here")
