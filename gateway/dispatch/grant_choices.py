"""Why a request was granted where it was: what each worker would have cost it (stage 5).

affinity.py chooses and notes it here. Kept are the last MAX_CHOICES requests for which there was a
choice, each with the chosen worker and MAX_OTHERS others, the best ones. Where one worker came into
question nothing is kept. Read by operators (`polyhost why`); nothing reads it to decide.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from gateway.dispatch.capacity import WorkerCapacity
from gateway.dispatch.policy.reasons import GrantOutcome, GrantReason
from gateway.dispatch.tickets import Ticket
from gateway.dispatch.worker_room import lacks

MAX_CHOICES = 2048
"""About 1 KB each."""
MAX_OTHERS = 3


class WorkerCost(NamedTuple):
    """One worker as it was when the request was granted. Its cost is `delay_s` and `read_s`.

    delay_s        what the requests there delay it by
    cached_tokens  of its prompt, of which KV is likely to be there
    read_s         what reading the rest of its prompt takes
    """

    worker_id: str
    outcome: GrantOutcome
    num_running: int
    delay_s: float
    cached_tokens: int
    read_s: float


class GrantChoice(NamedTuple):
    """The latest grant of one request. `at_s`: on the dispatcher's clock. `workers`: the chosen one
    first; `num_workers`: how many had the model and came into question."""

    request_id: str
    attempt: int
    at_s: float
    tenant_id: str
    model: str
    reason: GrantReason
    num_prompt_tokens: int
    num_workers: int
    workers: tuple[WorkerCost, ...]


class GrantChoices:
    """The last ones, by request."""

    def __init__(self, most: int = MAX_CHOICES) -> None:
        self._most = most
        self._kept: OrderedDict[str, GrantChoice] = OrderedDict()

    def note(
        self,
        ticket: Ticket,
        chosen: WorkerCapacity,
        ranked: Sequence[WorkerCapacity],
        hits: Mapping[str, int],
        delay_share: float,
        unit_s: float,
        now_s: float,
    ) -> None:
        """It is granted to `chosen`, of `ranked` (the best one first), and not booked there yet.
        `hits`: tokens of its prompt of which each is likely to have KV."""

        def cost(worker: WorkerCapacity, outcome: GrantOutcome) -> WorkerCost:
            cached_tokens = hits.get(worker.worker_id, 0)
            read_s = unit_s * (ticket.request.num_prompt_tokens - cached_tokens)
            delay_s = delay_share * worker.ahead_s
            running = worker.num_running()
            return WorkerCost(worker.worker_id, outcome, running, delay_s, cached_tokens, read_s)

        place = ranked.index(chosen)
        first = cost(chosen, "chosen")
        others: list[WorkerCost] = []
        for worker in ranked[: MAX_OTHERS + 1]:
            if worker is chosen or len(others) == MAX_OTHERS:
                continue
            if len(others) < place:  # it would have been better
                others.append(cost(worker, _missing(worker, ticket, now_s)))
            else:
                other = cost(worker, "equal")
                others.append(other._replace(outcome=_behind(first, other, bool(hits))))
        reason: GrantReason = "lowest cost" if hits else "fewest requests"
        request_id = ticket.request.request_id
        self._kept.pop(request_id, None)
        self._kept[request_id] = GrantChoice(
            request_id,
            ticket.attempt,
            now_s,
            ticket.tenant_id,
            ticket.model_name,
            "first with room" if place else reason,
            ticket.request.num_prompt_tokens,
            len(ranked),
            (first, *others),
        )
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)

    def find(self, request_id: str) -> list[GrantChoice]:
        """A request's own, or those of its choices and pieces (`ID#0`, `ID#1`, ...)."""
        own = self._kept.get(request_id)
        if own is not None:
            return [own]
        parts = [key for key in self._kept if key.startswith(f"{request_id}#")]
        return [self._kept[key] for key in sorted(parts, key=lambda key: (len(key), key))]

    def recent(self, model: str = "", limit: int = 100) -> list[GrantChoice]:
        """The last ones, the latest first; of one model, or of all."""
        found = (one for one in reversed(self._kept.values()) if model in ("", one.model))
        return list(islice(found, limit))


def _missing(worker: WorkerCapacity, ticket: Ticket, now_s: float) -> GrantOutcome:
    """Why it did not go to a worker that was looked at before."""
    room = worker.room(ticket, now_s)
    if room is None or worker.lacks_kv(ticket, now_s):  # one request may go without, where alone
        return "not enough KV memory"
    return lacks(room) or "capacity reserved"


def _behind(first: WorkerCost, other: WorkerCost, by_cost: bool) -> GrantOutcome:
    if by_cost and other.delay_s + other.read_s > first.delay_s + first.read_s:
        return "higher cost"
    return "more requests" if other.num_running > first.num_running else "equal"
