"""Ends that wait for what their requests have borne of their model's load (stages 5 and 10).

The worker's word of the end comes to the gateway that has the request, and the share of the load is
in the dispatcher's books. Comes in: ends
of requests whose grant said that something is owed. Goes out: the same ends to their streams, with
`load_s` filled in where it came in time.
"""

import logging
from dataclasses import dataclass

import msgspec

from engine.protocol import Finish
from gateway.cluster.dispatcher_protocol import LoadShare
from gateway.dispatch.tickets import Ticket

logger = logging.getLogger(__name__)

WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class _Kept:
    """An end, and until when it waits."""

    ticket: Ticket
    finish: Finish
    vectors: bytes
    until_s: float


class LoadShares:
    """A posting that is made cannot be changed. So the end is kept back for one message there and
    back, while tokens have gone to the client already. Where no answer comes (the dispatcher is
    gone, or is busy for WAIT_S) the load is billed to nobody: a doubt costs the client nothing.

    Bounded by what ended in the last WAIT_S.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], _Kept] = {}

    def wait(self, ticket: Ticket, finish: Finish, vectors: bytes, now_s: float) -> None:
        """The request has ended, and the dispatcher was asked."""
        self._kept[ticket.key] = _Kept(ticket, finish, vectors, now_s + WAIT_S)

    def report(self, share: LoadShare) -> None:
        """The answer. Nobody waits for one that comes late."""
        kept = self._kept.pop((share.request_id, share.attempt), None)
        if kept is not None:
            usage = msgspec.structs.replace(kept.finish.usage, load_s=share.load_s)
            finish = msgspec.structs.replace(kept.finish, usage=usage)
            kept.ticket.stream.finish(finish, kept.vectors)

    def tick(self, now_s: float) -> None:
        """Let go of those that have waited long enough."""
        if self._kept:
            self._give_up([key for key, kept in self._kept.items() if kept.until_s <= now_s])

    def give_up(self) -> None:
        """No answer will come any more."""
        self._give_up(list(self._kept))

    def _give_up(self, keys: list[tuple[str, int]]) -> None:
        for key in keys:
            kept = self._kept.pop(key)
            kept.ticket.stream.finish(kept.finish, kept.vectors)
        if keys:
            logger.warning(
                "load costs are not billed requests=%d: the dispatcher does not answer", len(keys)
            )
