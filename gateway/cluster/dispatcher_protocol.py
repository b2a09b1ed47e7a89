"""Between gateways, of one server or several, and their dispatcher: every message.

Stage 5. A gateway holds its clients' connections, the prompts and the workers' answers; the
dispatcher holds tickets. A ticket says what a request takes and whose it is, never what it asks.
With one gateway both are in one process, and the messages pass as objects (local_dispatcher.py);
with several the dispatcher is a process of its own.

    gateway -> dispatcher   Hello, Ask, Leave, Tokens, Aborted, Ended, Unclaimed, Returned, Ping
                            of limits: Reserve, Close, Figure, Carry, Restore, Add
    dispatcher -> gateway   Welcome, Granted, Moved, Denied, LoadShare, State, Done
    between servers         ForwardedQuestion, ForwardedAnswer

    gateway                      dispatcher                    worker
       |-- Ask ------------------>| waits in the fair queue
       |<----------- Granted -----|
       |-- Submit ----------------------------------------------->|
       |<------------------------------------------- tokens ------|
       |-- Tokens, Ended -------->| leases, shares, quarantine    |
       |<--------- (LoadShare) ---|                               |
                                  |<-- status (it observes) ------|

**One connection is one life.** Whatever was said on a connection ends with it. A gateway that is
gone (its process died: the kernel closes the connection at once) has no ticket any more: those that
wait vanish, those that run come off the books, and their workers abort them by themselves. A
gateway whose dispatcher is gone connects to the next one and says in its Hello all that is true of
it: what waits, what runs where, which reservations of limits are open. What it had asked for and
got no answer to, it asks again on the new connection. Both sides do the same if only the connection
was cut.

**Fencing.** Dispatchers are numbered by `epoch`, which rises each time one takes over (it is kept
in the lock file, under the lock that makes one of them the active one, and with several servers in
the row by which they elect one). A gateway that has seen an
epoch speaks to no smaller one. Grants are named by (request id, attempt); a gateway takes one only
for a request that waits for just that, or whose earlier attempt it then gives up, and says Leave or
Returned to any other. Tokens never pass the dispatcher, so what streams does not notice when it
dies: how many there were is said, and which ones only their gateway knows.

Bounded: a frame, what may lie unsent (the connection ends beyond it), and the queue by its own
settings. Frames are described in ipc.py.
"""

from typing import TypeAlias

import msgspec

from engine.protocol import Finish, Refused, Usage
from gateway.errors import ApiError, ErrorKind
from gateway.limits.policy.rate_limit import Draw, LimitFigures, Reservation, UsedAmounts
from gateway.limits.store import LimitDecision, Past
from gateway.types import BatchWindow

PROTOCOL_VERSION = 8
HEARTBEAT_S = 0.25
"""How often each side says something."""
TOKENS_EVERY_S = 0.1
"""How often a gateway tells how many tokens came; a request's first ones are reported at once."""


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base: tagged arrays on the wire."""


class TicketSpec(msgspec.Struct, frozen=True, array_like=True):
    """A request that waits. Times are how long ago, or how long from now, when it is sent: no clock
    of one machine means anything on another.

    age_s         since it arrived
    wait_left_s   until it may wait
    left_s        until it has to have ended
    queued_for_s  since it began to wait as this attempt

    `num_before`, `num_losses`, `is_batch`, `batch_weight`: as the ticket's
    (gateway/dispatch/tickets.py); `batch_window` too, from the moment of sending. `marks`: how its
    prompt begins (policy/prefix_places.py), where there are several workers."""

    request_id: str
    attempt: int
    tenant_id: str
    weight: float
    priority: int
    model: str
    revision: str
    num_prompt_tokens: int
    max_tokens: int
    age_s: float
    wait_left_s: float
    left_s: float
    continues: bool
    queued_for_s: float
    num_before: int = 0
    num_losses: int = 0
    marks: list[int] = []
    is_batch: bool = False
    batch_weight: float = 1.0
    batch_window: BatchWindow | None = None


class RunningSpec(msgspec.Struct, frozen=True, array_like=True):
    """A request that some dispatcher granted and that has not ended. `num_tokens`: of this
    attempt."""

    ticket: TicketSpec
    worker_id: str
    worker_epoch: str
    num_tokens: int


class Hello(_Message, frozen=True):
    """First message of a connection: who speaks, and all that is true of it. `epoch`: of the
    dispatcher that it spoke to last. `settled`: what was spent a moment ago, as that one was sent;
    another one may not find it in the database yet."""

    version: int
    gateway_id: str
    waiting: list[TicketSpec]
    running: list[RunningSpec]
    reservations: list[Reservation]
    epoch: int = 0
    settled: list[Reservation] = []


class Ask(_Message, frozen=True):
    """One more request waits."""

    ticket: TicketSpec


class Leave(_Message, frozen=True):
    """The request is over, in whatever state it was: its client left, it lost its worker
    (`is_lost`) for the last time, or the gateway does not know it."""

    request_id: str
    is_lost: bool = False


class Tokens(_Message, frozen=True):
    """(request id, attempt, tokens of this attempt so far) of requests that run."""

    counts: list[tuple[str, int, int]]


class Ended(_Message, frozen=True):
    """A worker ended it; the gateway has had all of it. `asks_load`: it waits for a LoadShare."""

    request_id: str
    attempt: int
    finish: Finish
    num_tokens: int
    asks_load: bool = False


class Aborted(_Message, frozen=True):
    """Its worker was told to end it: it waits for no other worker any more. Ended follows."""

    request_id: str
    attempt: int


class Unclaimed(_Message, frozen=True):
    """A worker has ended an attempt that no request here waits for, or says so again."""

    request_id: str
    attempt: int
    usage: Usage


class Returned(_Message, frozen=True):
    """This attempt is over and the request waits again: its worker refused it, or (None) was lost,
    perhaps after tokens. `ticket`: as it waits now, also for a dispatcher that did not know that it
    ran."""

    request_id: str
    attempt: int
    refused: Refused | None
    ticket: TicketSpec


class Reserve(_Message, frozen=True):
    """See LimitStore.reserve. Answered by Done; `call` is the gateway's number for that."""

    call: int
    reservation_id: str
    draws: list[Draw]


class Close(_Message, frozen=True):
    """See LimitStore.settle; without `used`, as LimitStore.release. Answered by Done. `spent`: told
    to another dispatcher before, the money of it; nobody knows whether this one has read of it."""

    call: int
    reservation: Reservation
    used: UsedAmounts | None
    spent: Reservation | None = None


class Figure(_Message, frozen=True):
    """See LimitStore.figures. Answered by Done."""

    call: int
    draws: list[Draw]


class Carry(_Message, frozen=True):
    """See LimitStore.carry: more than the Hello said. Answered by Done."""

    call: int
    reservations: list[Reservation]


class Restore(_Message, frozen=True):
    """See LimitStore.restore. Answered by Done."""

    call: int
    pasts: list[Past]


class Add(_Message, frozen=True):
    """See LimitStore.add. Answered by Done."""

    call: int
    pasts: list[Past]


class ForwardedQuestion(_Message, frozen=True):
    """An operator's, from another server; the connection is for this alone.
    Answered by ForwardedAnswer."""

    line: bytes


class Ping(_Message, frozen=True):
    """Nothing else to say."""


class Welcome(_Message, frozen=True):
    """Answer to Hello; another version ends the connection."""

    version: int
    epoch: int


class Granted(_Message, frozen=True):
    """Submit it there, now, behind the tokens that it has; an earlier attempt that still runs is
    aborted first. `owes_load`: its model's load is not paid back yet, so the request may have to
    bear a share of it. `num_losses`: as counted here. `is_batch`: the class that it has now."""

    request_id: str
    attempt: int
    worker_id: str
    worker_epoch: str
    owes_load: bool = False
    num_losses: int = 0
    is_batch: bool = False


class Moved(_Message, frozen=True):
    """Its worker is to be emptied: abort this attempt there. It waits here as the next one."""

    request_id: str
    attempt: int


class LoadShare(_Message, frozen=True):
    """Answer to an Ended that asks: of its model's load the request has borne so much."""

    request_id: str
    attempt: int
    load_s: float


class Denied(_Message, frozen=True):
    """It will not be granted: this is the answer."""

    request_id: str
    status: int
    kind: str
    code: str
    message: str
    param: str | None
    retry_after_s: float | None

    @classmethod
    def of(cls, request_id: str, error: ApiError) -> "Denied":
        """An error as it goes over the line."""
        kind = error.kind
        return cls(
            request_id,
            kind.status,
            kind.type,
            kind.code,
            error.message,
            error.param,
            error.retry_after_s,
        )

    def error(self) -> ApiError:
        """As it is raised."""
        kind = ErrorKind(self.status, self.kind, self.code)
        return ApiError(kind, self.message, self.param, self.retry_after_s)


class State(_Message, frozen=True):
    """Heartbeat, and whether a worker answers the dispatcher; `failures`: model -> why it cannot be
    served now; `etas_s`: seconds until a model that somebody waits for is there; `gateways`: who is
    connected, None from a dispatcher that is new and may not have met all of them."""

    ready: bool
    failures: dict[str, str]
    etas_s: dict[str, float]
    gateways: list[str] | None = None


class Done(_Message, frozen=True):
    """Answer to a call about limits: of a Reserve its decision, of a Figure its figures."""

    call: int
    decision: LimitDecision | None = None
    figures: list[LimitFigures] = []


class ForwardedAnswer(_Message, frozen=True):
    """To a ForwardedQuestion: JSON."""

    text: bytes


ToDispatcher: TypeAlias = (
    Hello
    | Ask
    | Leave
    | Tokens
    | Aborted
    | Ended
    | Unclaimed
    | Returned
    | Reserve
    | Close
    | Figure
    | Carry
    | Restore
    | Add
    | ForwardedQuestion
    | Ping
)
ToGateway: TypeAlias = (
    Welcome | Granted | Moved | Denied | LoadShare | State | Done | ForwardedAnswer
)
LimitCall: TypeAlias = Reserve | Close | Figure | Carry | Restore | Add

to_dispatcher: "msgspec.msgpack.Decoder[list[ToDispatcher]]" = msgspec.msgpack.Decoder(
    list[ToDispatcher]
)
to_gateway: "msgspec.msgpack.Decoder[list[ToGateway]]" = msgspec.msgpack.Decoder(list[ToGateway])
