"""Requests of a gateway in the workers' hands: what it submits, and what workers say of them
(stages 5 to 9).

Messages are matched by (request_id, attempt) and the worker's epoch; what matches nothing is late
and dropped, a late finish is acknowledged so that the worker forgets it. Tokens go into the
request's stream in the turn in which they come.

`UsageOutbox` has the finishes that the workers keep until the ledger says that they are durable.
"""

import logging
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from engine.protocol import Abort, AckUsage, Finish, TokenDelta, Usage
from gateway.cluster.gateway_workers import GatewayWorkers
from gateway.dispatch.live_tickets import LiveTickets
from gateway.dispatch.ticket_ends import failed_end
from gateway.dispatch.tickets import StreamEnd, Ticket, Unsendable, submit_of
from gateway.types import PreparedRequest
from gateway.workers.choices import base_id

logger = logging.getLogger(__name__)

MAX_UNACKED = 65_536
"""Requests; the oldest is forgotten beyond it; its worker keeps it, and its own bound."""


def nobodys(_request_id: str, _finish: Finish, _attempt: int) -> bool:
    """Of a finish that no request waits for, where no ledger could claim it."""
    return False


class GrantedRequests(LiveTickets):
    """The part of a gateway's fair queue that has to do with workers (dispatcher_proxy.py).

    `claim_orphan(request_id, finish, attempt)` is asked of a finish no request here waits for; True
    means that its usage will be posted and acknowledged through `unacked`.
    """

    def __init__(
        self, workers: GatewayWorkers, claim_orphan: Callable[[str, Finish, int], bool]
    ) -> None:
        super().__init__(workers.offering)
        self.unacked = UsageOutbox(workers)
        self._workers = workers
        self._claim_orphan = claim_orphan

    def abort(self, ticket: Ticket) -> None:
        """Ask the worker to stop it; its finish follows."""
        if not ticket.aborted:
            ticket.aborted = True
            self._workers.send(ticket.worker_id, Abort(*ticket.key))

    def deltas(
        self, worker_id: str, epoch: str, deltas: Sequence[TokenDelta], now_s: float
    ) -> None:
        """One step's output."""
        for delta in deltas:
            ticket = self.find(delta.request_id, delta.attempt)
            if ticket is None or (ticket.worker_id, ticket.epoch) != (worker_id, epoch):
                self._late(worker_id, epoch, delta)
                continue
            if delta.token_ids:
                try:
                    token_ids = array("I", delta.token_ids)
                except OverflowError:  # one request must not lose the step of all others
                    logger.error("token ids out of range request=%s", delta.request_id)
                    self._fail(ticket, failed_end(ticket), now_s)
                    continue
                ticket.generated.extend(token_ids)
                self._tokens(ticket, delta)
            if delta.finish is not None:
                self._finish(ticket, delta.finish, delta.vectors, now_s)

    def _submit(self, ticket: Ticket, worker_id: str, now_s: float) -> bool:
        """False: it cannot be reached. Raises Unsendable."""
        request = ticket.request
        assert isinstance(request, PreparedRequest)  # what waits in this process
        try:
            left_s = ticket.timeout_s(now_s)
            made = ticket.generated, ticket.cached_tokens
            submit = submit_of(
                request, ticket.tenant_id, ticket.attempt, left_s, *made, is_batch=ticket.is_batch
            )
            return self._workers.send(worker_id, submit)
        except Exception as error:  # one request must not end the round of all others
            logger.exception("cannot send request=%s", request.request_id)
            raise Unsendable from error

    def _tokens(self, ticket: Ticket, delta: TokenDelta) -> None:
        if ticket.state == "granted":
            ticket.on("token")
            if not ticket.has_tokens:
                ticket.cached_tokens = delta.cached_tokens
        ticket.num_tokens += len(delta.token_ids)
        taken = ticket.stream.put(delta.token_ids, delta.logprobs, delta.prompt_logprobs)
        if not taken and not ticket.aborted:
            self.counts.too_slow += 1
            logger.info(
                "aborted request=%s: the client reads too slowly", ticket.request.request_id
            )
            self.abort(ticket)

    def _finish(self, ticket: Ticket, finish: Finish, vectors: bytes, now_s: float) -> None:
        """Its worker has ended it."""
        raise NotImplementedError

    def _fail(self, ticket: Ticket, end: StreamEnd, now_s: float) -> None:
        """Its worker says what cannot be: it is aborted there and ends here."""
        raise NotImplementedError

    def _late(self, worker_id: str, epoch: str, delta: TokenDelta) -> None:
        """An earlier attempt, an earlier epoch, or a finish sent again after a Hello."""
        self.counts.late += 1
        if delta.finish is None or self.unacked.expects(delta.request_id, delta.attempt):
            return
        self._unclaimed((delta.request_id, delta.attempt), delta.finish.usage)
        if self._claim_orphan(delta.request_id, delta.finish, delta.attempt):
            self.unacked.expect(delta.request_id, delta.attempt, worker_id, epoch)
        else:
            self.unacked.ack_now(delta.request_id, delta.attempt, worker_id)

    def _unclaimed(self, key: tuple[str, int], usage: Usage) -> None:
        """What was used for nobody here."""
        raise NotImplementedError


class UsageOutbox:
    """Finishes whose posting is awaited: request id -> name at the worker -> (worker, epoch,
    attempt).

    A worker keeps every Finish until it is acknowledged. Those that owe nothing (no token was ever
    delivered) are acknowledged at once; the others when the ledger says that their posting is
    durable. Where several attempts of a request have ended, the last one stands for all of them,
    and the others are acknowledged at once. The ledger speaks of a request once, also where its
    choices were several requests to the workers.
    """

    def __init__(self, workers: GatewayWorkers) -> None:
        self._workers = workers
        self._entries: OrderedDict[str, dict[str, tuple[str, str, int]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def expect(self, request_id: str, attempt: int, worker_id: str, epoch: str) -> None:
        """The ledger will speak of this request."""
        names = self._entries.setdefault(base_id(request_id), {})
        place = (worker_id, epoch, attempt)
        other = names.get(request_id, place)
        if other[2] > attempt:
            place, other = other, place
        if other[2] != place[2]:
            self.ack_now(request_id, other[2], other[0])
        names[request_id] = place
        if len(self._entries) > MAX_UNACKED:
            self._entries.popitem(last=False)

    def expects(self, request_id: str, attempt: int) -> bool:
        """Whether this very finish waits for the ledger."""
        entry = self._entries.get(base_id(request_id), {}).get(request_id)
        return entry is not None and entry[2] == attempt

    def ack_now(self, request_id: str, attempt: int, worker_id: str) -> None:
        """Nothing is owed for it."""
        self._workers.send(worker_id, AckUsage([(request_id, attempt)]))

    def ack(self, request_ids: Iterable[str]) -> None:
        """Their usage is durable. Unknown ids have been acknowledged or never ran."""
        by_worker: dict[str, list[tuple[str, int]]] = {}
        for request_id in request_ids:
            for name, (worker_id, epoch, attempt) in self._entries.pop(request_id, {}).items():
                if self._workers.has(worker_id, epoch):
                    by_worker.setdefault(worker_id, []).append((name, attempt))
        for worker_id, keys in by_worker.items():
            self._workers.send(worker_id, AckUsage(keys))
