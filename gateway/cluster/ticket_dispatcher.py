"""The dispatcher as gateways see it, one or several: its tickets come from them, and its grants go
there.

`dispatch/dispatcher.py` decides. A grant is word to the gateway that has the request, and what
became of it is that gateway's word. The worker says the rest: what has reached it, what it still
takes, what runs there (`Hello.observes`).

Where the two disagree about a request, the gateway is right: it has the connection of the client
and the tokens. Where a worker's death was seen here first, a request waits here again while its
gateway still streams it; the grant of its next attempt takes the place of that stream. If it has
ended meanwhile, it leaves.

Knows no connections: `GatewayPeer` is one gateway as it is seen from here.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from engine.protocol import Finish, Refused, TokenLogprobs, Usage
from gateway.cluster.dispatcher_protocol import RunningSpec, TicketSpec
from gateway.dispatch.capacity import WorkerCapacity
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.policy.fair_share import TenantOrder
from gateway.dispatch.policy.fleet_sight import Placer
from gateway.dispatch.ticket_ends import ABORTED_UNUSED
from gateway.dispatch.tickets import IntegrityError, StreamEnd, Ticket
from gateway.errors import UNAVAILABLE, ApiError, model_gone, model_replaced
from gateway.settings.settings import Settings
from gateway.types import HostedModel

_PLACES = 1 << 20
"""So many requests may have come in one microsecond and keep places of their own."""


class GatewayPeer(Protocol):
    """A gateway. All of it is said over its connection."""

    def grant(self, ticket: Ticket, worker: WorkerCapacity, owes_load: bool) -> bool:
        """Submit it there. False: it is gone."""

    def recall(self, ticket: Ticket) -> None:
        """Abort this attempt; it waits again."""

    def deny(self, request_id: str, error: ApiError) -> None:
        """It will not be granted."""


class TicketRequest(msgspec.Struct, frozen=True):
    """A request without its prompt. Implements `types.Asked`."""

    request_id: str
    model: HostedModel
    num_prompt_tokens: int
    max_tokens: int
    continues: bool
    priority: int


class PeerStream(msgspec.Struct, frozen=True):
    """Implements `tickets.TicketStream`: only refusals are news to the gateway process."""

    peer: GatewayPeer
    request_id: str

    def retry(self, attempt: int) -> None:
        """Its next grant says so."""

    def put(
        self,
        token_ids: list[int],
        logprobs: Sequence[TokenLogprobs] = (),
        prompt_logprobs: Sequence[TokenLogprobs] = (),
    ) -> bool:
        """Tokens do not come this way."""
        raise NotImplementedError

    def finish(self, end: StreamEnd, vectors: bytes = b"") -> None:
        """Every other end is one that the gateway process has told, or sees itself: what silence
        here alone would end waits again (assignments.py, `lost`)."""
        if isinstance(end, ApiError):
            self.peer.deny(self.request_id, end)


def always() -> bool:
    """Of a dispatcher that nobody else can replace while its process lives."""
    return True


class TicketDispatcher(Dispatcher):
    """See the module."""

    def __init__(
        self,
        settings: Settings,
        clock: Callable[[], float] = time.monotonic,
        share: TenantOrder | None = None,
        placement: Placer | None = None,
    ) -> None:
        super().__init__(settings, self._send_grant, self._send_recall, clock, share, placement)
        self.may_grant: Callable[[], bool] = always
        """Whether this is the dispatcher, as far as can be known now (dispatcher_lease.py)."""
        self._peers: dict[str, GatewayPeer] = {}  # by request id, of live tickets

    def ask(self, peer: GatewayPeer, spec: TicketSpec, *, is_new: bool = True) -> None:
        """One more request waits, or (not new) one that another dispatcher had admitted. What lives
        of another gateway process is denied: a batch's line comes again under the same id."""
        if spec.request_id in self._running.live:
            if self._peers.get(spec.request_id) is not peer:  # else asked before: a ticket is one
                text = "another gateway process has a request with this id: try again later"
                peer.deny(spec.request_id, ApiError(UNAVAILABLE, text, retry_after_s=1.0))
            return
        ticket = self._ticket(peer, spec)
        if isinstance(ticket, ApiError):
            peer.deny(spec.request_id, ticket)
            return
        try:
            if is_new:
                self.check(ticket.request, ticket.tenant_id, is_batch=ticket.is_batch)
        except ApiError as error:
            peer.deny(spec.request_id, error)
            return
        self._peers[spec.request_id] = peer
        self._enter(ticket)

    def knows(self, spec: TicketSpec) -> bool:
        """Whether its model is hosted here in its revision, as far as has been read."""
        model = self._models.get(spec.model)
        return model is not None and model.revision == spec.revision

    def outlooks(self) -> tuple[dict[str, str], dict[str, float]]:
        """Models that are not served (quarantined), and when those waited for will be there."""
        now_s = self._clock()
        return dict(self._quarantine.reasons(now_s)), self._loads.etas(now_s)

    def adopt(self, peer: GatewayPeer, spec: RunningSpec) -> bool:
        """Another dispatcher granted it. False: its worker is not there (any more)."""
        worker = self._fleet.get(spec.worker_id, spec.worker_epoch)
        if worker is None or spec.ticket.request_id in self._running.live:
            return False
        ticket = self._ticket(peer, spec.ticket)
        if isinstance(ticket, ApiError):  # its model has gone meanwhile: it runs to its end
            return False
        self._running.live[spec.ticket.request_id] = ticket
        self._peers[spec.ticket.request_id] = peer
        self._running.adopt(ticket, worker, spec.num_tokens, self._clock())
        return True

    def leave(self, peer: GatewayPeer, request_id: str, *, is_lost: bool = False) -> None:
        """The gateway is through with it."""
        ticket = self._of(peer, request_id)
        if ticket is None:
            return
        if ticket.state == "waiting":
            self._end_waiting(ticket, ABORTED_UNUSED)
        else:
            self._running.reported_gone(ticket, self._clock(), is_lost=is_lost)

    def tokens(self, peer: GatewayPeer, counts: Sequence[tuple[str, int, int]]) -> None:
        """So many have come of each."""
        for request_id, attempt, num_tokens in counts:
            ticket = self._running.find(request_id, attempt)
            if ticket is not None and self._peers.get(request_id) is peer:
                self._running.reported_tokens(ticket, num_tokens)

    def ended(
        self, peer: GatewayPeer, request_id: str, attempt: int, finish: Finish, num_tokens: int
    ) -> float:
        """Its worker has ended it. Returns what it has borne of its model's load, in seconds."""
        ticket = self._of(peer, request_id)
        if ticket is not None and self._running.find(request_id, attempt) is ticket:
            self._running.reported_finish(ticket, finish, num_tokens, self._clock())
            return ticket.load_s
        self._running.counts.late += 1
        self._book.late((request_id, attempt), finish.usage)
        self.leave(peer, request_id)
        return 0.0

    def aborted(self, peer: GatewayPeer, request_id: str, attempt: int) -> None:
        """Its client wants it no more; its worker has been told, and its end follows."""
        ticket = self._running.find(request_id, attempt)
        if ticket is not None and self._peers.get(request_id) is peer:
            ticket.aborted = True

    def unclaimed(self, key: tuple[str, int], usage: Usage) -> None:
        """A worker's time for an attempt that nobody waited for."""
        self._book.late(key, usage)

    def returned(
        self,
        peer: GatewayPeer,
        request_id: str,
        attempt: int,
        refused: Refused | None,
        spec: TicketSpec,
    ) -> None:
        """Its worker did not take it, or was lost. Where it was not known to run, it waits from now
        on."""
        ticket = self._running.find(request_id, attempt)
        self._learn(peer, spec, is_over=ticket is None or refused is not None)
        if ticket is None or self._peers.get(request_id) is not peer:
            self.ask(peer, spec, is_new=False)
        elif refused is not None:
            self._running.refused(ticket.worker_id, refused, self._clock())
        else:
            self._running.reported_lost(
                ticket, "the gateway process cannot reach the worker", self._clock()
            )
            self._pump()

    def drop(self, peer: GatewayPeer) -> None:
        """A gateway is gone, with all its requests."""
        for request_id in [name for name, owner in self._peers.items() if owner is peer]:
            self.leave(peer, request_id)

    def check_integrity(self) -> None:
        """Raises IntegrityError too where a live ticket is nobody's, or a dead one somebody's."""
        super().check_integrity()
        if self._peers.keys() != self._running.live.keys():
            raise IntegrityError(
                f"{len(self._peers)} peers' tickets, {len(self._running.live)} live"
            )

    def _learn(self, peer: GatewayPeer, spec: TicketSpec, *, is_over: bool) -> None:
        """Tokens and losses that its gateway has counted. `is_over`: the attempt is over here, too;
        otherwise its tokens and its loss are among them and are yet to be counted."""
        ticket = self._of(peer, spec.request_id)
        if ticket is None:
            return
        ticket.num_losses = max(ticket.num_losses, spec.num_losses - (not is_over))
        if is_over:
            ticket.num_before = max(ticket.num_before, spec.num_before)
        else:
            ticket.num_tokens = max(ticket.num_tokens, spec.num_before - ticket.num_before)

    def _ticket(self, peer: GatewayPeer, spec: TicketSpec) -> Ticket | ApiError:
        model = self._models.get(spec.model)
        if model is None:
            return model_gone(spec.model)
        if model.revision != spec.revision:
            return model_replaced(spec.model)
        request = TicketRequest(
            spec.request_id,
            model,
            spec.num_prompt_tokens,
            spec.max_tokens,
            spec.continues,
            spec.priority,
        )
        now_s = self._clock()
        arrival_s = now_s - spec.age_s
        return Ticket(
            request=request,
            tenant_id=spec.tenant_id,
            weight=spec.weight,
            seq=self._place_of(arrival_s),
            arrival_s=arrival_s,
            deadline_s=now_s + spec.wait_left_s,
            ends_by_s=now_s + spec.left_s,
            prediction=self._predict(request, spec.tenant_id, is_batch=spec.is_batch),
            stream=PeerStream(peer, spec.request_id),
            attempt=spec.attempt,
            num_losses=spec.num_losses,
            queued_s=now_s - spec.queued_for_s,
            num_before=spec.num_before,
            marks=spec.marks,
            is_batch=spec.is_batch,
            batch_weight=spec.batch_weight,
            batch_window=spec.batch_window and spec.batch_window.shifted(now_s),
        )

    def _place_of(self, arrival_s: float) -> int:
        """The order of arrival of a request that came to another process, perhaps long ago."""
        self._last_seq += 1
        return int(arrival_s * 1e6) * _PLACES + self._last_seq % _PLACES

    def _of(self, peer: GatewayPeer, request_id: str) -> Ticket | None:
        return self._running.live.get(request_id) if self._peers.get(request_id) is peer else None

    def _match(self, now_s: float, workers: Iterable[WorkerCapacity] | None) -> None:
        if self.may_grant():
            super()._match(now_s, workers)

    def _place(self, now_s: float) -> None:
        if self.may_grant():
            super()._place(now_s)

    def _pass(self, ticket: Ticket, now_s: float) -> bool:
        return self.may_grant() and super()._pass(ticket, now_s)

    def _send_grant(self, ticket: Ticket, worker: WorkerCapacity) -> bool:
        owes_load = self._book.owes_load(worker.worker_id, ticket.model_name)
        return self._peers[ticket.request.request_id].grant(ticket, worker, owes_load)

    def _send_recall(self, ticket: Ticket) -> None:
        self._peers[ticket.request.request_id].recall(ticket)
        worker = self._fleet.get(ticket.worker_id, ticket.epoch)
        if worker is not None:  # nobody knows whether its Submit will ever be sent
            worker.withdraw(ticket.key)

    def _forget(self, ticket: Ticket) -> None:
        super()._forget(ticket)
        del self._peers[ticket.request.request_id]
