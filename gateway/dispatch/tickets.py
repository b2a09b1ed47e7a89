"""A ticket: one request as the dispatcher sees it, its states, and the stream of its events (stage
5).

                 grant     token       refuse    worker_lost   move      finish   give_up
    waiting      granted                                                          ended
    granted                streaming   waiting   waiting       waiting   ended    ended
    streaming              streaming             waiting       waiting   ended    ended
    ended

A worker refuses a ticket, is lost, or is to be emptied (`move`): the ticket waits again, after a
refusal as the same attempt, otherwise as the next one. What it has streamed stays with its client:
the next attempt goes on behind it (`generated`). `give_up` is every end that no worker tells: an
abort, a time-out, an error for the client. A ticket changes its state only through `Ticket.on`.

`RequestStream` is what the pipeline holds meanwhile. The queue is ticket_queue.py's.
"""

import asyncio
import math
from array import array
from collections.abc import (
    AsyncIterator,
    Callable,
    Mapping,
    Sequence,
)
from typing import Final, Literal, Protocol, TypeAlias

import msgspec

from engine.protocol import Finish, Submit, TokenLogprobs
from gateway.dispatch.policy.fair_share import NOTHING, UsedService
from gateway.dispatch.policy.service_costs import Prediction
from gateway.errors import (
    SERVER_ERROR,
    UNAVAILABLE,
    ApiError,
    IllegalTransition,
    model_gone,
    model_replaced,
)
from gateway.settings.settings import Settings
from gateway.types import (
    Asked,
    BatchWindow,
    HostedModel,
    PreparedRequest,
    Principal,
    TokenEvent,
)

StreamEnd: TypeAlias = Finish | Exception

RESTART_WAIT_S = 5.0
"""What a client is told to wait where a worker, or the server, has to come back first."""


class RequestStream:
    """The events of one request, in order: from the dispatcher (stage 5) to the pipeline (stage 9).

    Implements `types.RunningRequest`. The dispatcher puts tokens in by plain calls on the event
    loop; one consumer takes them out by `async for`. No task and no lock per token: a consumer that
    waits holds one future, and tokens that came in while it was busy are handed over as one event.

    Bounded: once more than `max_buffer_tokens` wait for a consumer that does not read, `put` says
    so and takes no more tokens (the dispatcher aborts the request); the finish always gets in.
    """

    def __init__(
        self,
        max_buffer_tokens: int,
        on_abort: Callable[[], None],
        queue_s: Callable[[], float],
    ) -> None:
        self._max_buffer_tokens = max_buffer_tokens
        self._on_abort: Callable[[], None] | None = on_abort
        self._queue_s: Callable[[], float] | None = queue_s
        self._queued_s = 0.0
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: Sequence[TokenLogprobs] = ()
        self._vectors = b""
        self._end: StreamEnd | None = None
        self._handed_over = False
        self._waiter: asyncio.Future[None] | None = None
        self._on_event: Callable[[], None] | None = None
        self._attempt = 1
        self.overflowed = False
        """Whether tokens were dropped because nobody read them."""

    @property
    def attempt(self) -> int:
        """Which try the events belong to."""
        return self._attempt

    @property
    def queue_s(self) -> float:
        """Seconds in the fair queue, up to now or to the (latest) grant."""
        return self._queued_s if self._queue_s is None else self._queue_s()

    def abort(self) -> None:
        """Stop within one step; the last event follows. Harmless after the end."""
        if self._on_abort is not None:
            self._on_abort()

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        return self

    async def __anext__(self) -> TokenEvent:
        """The next tokens, or the finish with what was left. Raises what ended the request."""
        while (event := self.take()) is None:
            if self._handed_over:
                raise StopAsyncIteration
            await self._wait()
        return event

    @property
    def has_event(self) -> bool:
        """Something may be taken."""
        return bool(self._tokens) or (self._end is not None and not self._handed_over)

    def take(self) -> TokenEvent | None:
        """The next event if there is one, in order as by iteration. Raises what ended the request.

        None after the last one, too.
        """
        if self._end is None:
            return self._take() if self._tokens else None
        if isinstance(self._end, Exception) and self._tokens:
            return self._take()
        if self._handed_over:
            return None
        self._handed_over = True
        if isinstance(self._end, Exception):
            raise self._end
        return self._take(self._end)

    def listen(self, on_event: Callable[[], None] | None) -> None:
        """Be called whenever something may be taken, now if so: for a consumer without a task.
        None: no longer."""
        self._on_event = on_event
        if on_event is not None and (self._tokens or self._end is not None):
            on_event()

    # The dispatcher's side.

    def retry(self, attempt: int) -> None:
        """The events from now on are those of another try, which goes on where this one ended."""
        self._attempt = attempt

    def put(
        self,
        token_ids: list[int],
        logprobs: Sequence[TokenLogprobs] = (),
        prompt_logprobs: Sequence[TokenLogprobs] = (),
    ) -> bool:
        """Add tokens. False: the consumer is too slow, they were dropped."""
        if self.overflowed or self._end is not None:
            return False
        if len(self._tokens) + len(token_ids) > self._max_buffer_tokens:
            self.overflowed = True
            return False
        self._tokens.extend(token_ids)
        self._logprobs.extend(logprobs)
        self._prompt_logprobs = prompt_logprobs or self._prompt_logprobs
        self._wake()
        return True

    def finish(self, end: StreamEnd, vectors: bytes = b"") -> None:
        """The last event, or what is raised in its place. The first one counts."""
        if self._end is None:
            self._queued_s = self.queue_s
            # The ticket's, which has this stream: a circle, which keeps the prompt until the
            # collector finds it.
            self._on_abort = self._queue_s = None
            self._end, self._vectors = end, vectors
            self._wake()

    def _take(self, finish: Finish | None = None) -> TokenEvent:
        event = TokenEvent(
            self._tokens,
            finish,
            tuple(self._logprobs),
            tuple(self._prompt_logprobs),
            b"" if finish is None else self._vectors,
        )
        self._tokens, self._logprobs, self._prompt_logprobs = [], [], ()
        if finish is not None:
            self._vectors = b""
        return event

    async def _wait(self) -> None:
        if self._waiter is not None:
            raise RuntimeError("a request's events have one consumer")
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self._on_event is not None:
            self._on_event()


TicketState: TypeAlias = Literal["waiting", "granted", "streaming", "ended"]
TicketEvent: TypeAlias = Literal[
    "grant", "token", "refuse", "worker_lost", "move", "finish", "give_up"
]

TRANSITIONS: Final[Mapping[TicketState, Mapping[TicketEvent, TicketState]]] = {
    "waiting": {"grant": "granted", "give_up": "ended"},
    "granted": {
        "token": "streaming",
        "refuse": "waiting",
        "worker_lost": "waiting",
        "move": "waiting",
        "finish": "ended",
        "give_up": "ended",
    },
    "streaming": {
        "token": "streaming",
        "worker_lost": "waiting",
        "move": "waiting",
        "finish": "ended",
        "give_up": "ended",
    },
    "ended": {},
}


class Unsendable(Exception):
    """A request that no message to a worker can hold (a bug, or a model with absurd numbers)."""


class IntegrityError(Exception):
    """An invariant of the dispatcher does not hold (a bug)."""


class TicketStream(Protocol):
    """Where a ticket's events go: `RequestStream`, or another process."""

    def retry(self, attempt: int) -> None:
        """The events from now on are those of another try, which goes on where this one ended."""

    def put(
        self,
        token_ids: list[int],
        logprobs: Sequence[TokenLogprobs] = (),
        prompt_logprobs: Sequence[TokenLogprobs] = (),
    ) -> bool:
        """Add tokens. False: the consumer is too slow, they were dropped."""

    def finish(self, end: StreamEnd, vectors: bytes = b"") -> None:
        """The last event, or what is raised in its place."""


class Ticket(msgspec.Struct, eq=False):
    """One request as the dispatcher sees it, over all its attempts.

    `seq` is the order of arrival; `kv_tokens` the most it may hold (prompt plus max_tokens).
    `deadline_s` bounds its wait in the queue, which began at `queued_s`; `ends_by_s` bounds the
    whole request, over all its attempts. `num_losses` counts workers that died while they had it.
    `worker_id` and `epoch` name the worker process that has it, while it is granted or streaming.
    """

    request: Asked
    tenant_id: str
    weight: float
    seq: int
    arrival_s: float
    deadline_s: float
    prediction: Prediction
    stream: TicketStream
    ends_by_s: float = math.inf
    state: TicketState = "waiting"
    attempt: int = 1
    num_losses: int = 0
    queued_s: float = math.nan
    """Its arrival, if nothing else is said."""
    waited_s: float = 0.0
    """In the queue, for earlier attempts."""
    granted_s: float | None = None
    worker_id: str = ""
    epoch: str = ""
    kv_bytes: int = 0
    """What it counts there against what is kept free for others."""
    aborted: bool = False
    num_tokens: int = 0
    """Tokens delivered so far (of this attempt)."""
    num_before: int = 0
    """Those of earlier attempts: the client has them."""
    generated: "array[int]" = msgspec.field(default_factory=lambda: array("I"))
    """All of them, in the process that has the client's connection; elsewhere it is empty."""
    cached_tokens: int = 0
    """Of the prompt, as the attempt with the first token found it."""
    reported: UsedService = NOTHING
    reported_device_s: float = 0.0
    """What its worker has reported of this attempt, and has been charged."""
    load_s: float = 0.0
    """Of its model's load, what this attempt has paid back, whoever is paid: it may be billed."""
    owes_load: bool = False
    """At its gateway: whether the dispatcher will have a `load_s` to tell at the end."""
    expected: UsedService = NOTHING
    """What is left of its prediction."""
    queued_in: object = None
    """The TicketQueue that it waits in: that of its lane."""
    refused_by: frozenset[str] = frozenset()
    """Workers that will never take it, as they have said."""
    kept_on: str = ""
    """While it waits: the worker that is kept for it, because it fits nowhere yet."""
    marks: Sequence[int] = ()
    """How its prompt begins (policy/prefix_places.py); none where there is one worker."""
    ahead_s: float = 0.0
    """Of its device, what it was predicted to use when it was granted, less what was there."""
    is_batch: bool = False
    batch_weight: float = 1.0
    """Of class batch (lanes.py), where its tenant has this weight."""
    batch_window: BatchWindow | None = None
    """Of the batch that it is a line of."""

    def __post_init__(self) -> None:
        """It waits from its arrival on."""
        if math.isnan(self.queued_s):
            self.queued_s = self.arrival_s

    @property
    def model_name(self) -> str:
        """The hosted model's public name, which is its id on the workers."""
        return self.request.model.name

    @property
    def kv_tokens(self) -> int:
        """Positions it takes at most."""
        return self.request.num_prompt_tokens + self.request.max_tokens

    @property
    def lane_weight(self) -> float:
        """Its tenant's weight in the lane that it waits in."""
        return self.batch_weight if self.is_batch else self.weight

    @property
    def is_on_worker(self) -> bool:
        """Granted or streaming."""
        return self.state == "granted" or self.state == "streaming"

    @property
    def has_tokens(self) -> bool:
        """Some attempt has made some."""
        return self.num_before + self.num_tokens > 0

    @property
    def place(self) -> tuple[int, int]:
        """Its place among its tenant's."""
        return self.request.priority, self.seq

    @property
    def key(self) -> tuple[str, int]:
        """The name under which a worker's messages speak of it."""
        return self.request.request_id, self.attempt

    def misfit(self, model: HostedModel | None) -> ApiError | None:
        """As the function below."""
        return misfit(self.request, model)

    def queue_s(self, now_s: float) -> float:
        """Seconds in the queue, for all attempts."""
        until_s = now_s if self.granted_s is None else self.granted_s
        return self.waited_s + until_s - self.queued_s

    def timeout_s(self, now_s: float) -> float:
        """What is left of its time, as a Submit says it: 0 none, negative: it is over."""
        return time_left_s(self.ends_by_s, now_s)

    def on(self, event: TicketEvent) -> None:
        """Change the state by the table. Raises IllegalTransition, and then changes nothing."""
        state = TRANSITIONS[self.state].get(event)
        if state is None:
            raise IllegalTransition(f"request {self.key}: {event!r} while {self.state}")
        self.state = state

    def grant(self, worker_id: str, epoch: str, now_s: float) -> None:
        """This worker process has it from now on. Raises IllegalTransition."""
        self.on("grant")
        self.granted_s = now_s
        self.worker_id, self.epoch = worker_id, epoch

    def next_attempt(self, now_s: float, attempt: int = 0) -> None:
        """It is tried once more, behind the tokens that it has, and may wait in the queue as long
        as at first. `attempt`: as another process counts them."""
        self.attempt = attempt or self.attempt + 1
        self.num_before += self.num_tokens
        self.num_tokens = 0
        self.waited_s = self.queue_s(now_s)
        self.granted_s = None
        if self.batch_window is None:
            self.deadline_s = now_s + (self.deadline_s - self.queued_s)
        self.queued_s = now_s
        self.stream.retry(self.attempt)


def misfit(request: Asked, model: HostedModel | None) -> ApiError | None:
    """Why `model`, as hosted now under its name, is not the one it was prepared for."""
    if model is None:
        return model_gone(request.model.name)
    if model.revision != request.model.revision:
        return model_replaced(request.model.name)
    return None


def check_hosted(request: Asked, model: HostedModel | None, *, is_stopping: bool) -> None:
    """Raises ApiError where the server is stopping, or `model` is not what it was prepared for."""
    if is_stopping and not request.continues:
        message = "the server is shutting down: retry the request"
        raise ApiError(UNAVAILABLE, message, retry_after_s=RESTART_WAIT_S)
    error = misfit(request, model)
    if error is not None:
        raise error


def submit_of(
    request: PreparedRequest,
    tenant_id: str,
    attempt: int,
    timeout_s: float,
    generated: Sequence[int] = (),
    cached_tokens: int = 0,
    is_batch: bool = False,
) -> Submit:
    """`timeout_s` as `Ticket.timeout_s` says it; `generated`, `cached_tokens`: as the ticket's."""
    return Submit(
        request_id=request.request_id,
        attempt=attempt,
        tenant_id=tenant_id,
        model_id=request.model.name,
        prompt_token_ids=request.prompt_token_ids,
        max_tokens=request.max_tokens,
        sampling=request.sampling,
        stop_token_ids=request.stop_token_ids,
        logprobs=0 if request.is_judged else request.logprobs,
        prompt_logprobs=request.prompt_logprobs,
        constraint=request.constraint,
        timeout_s=timeout_s,
        encode=request.encode,
        generated=list(generated),
        cached_tokens=cached_tokens,
        is_batch=is_batch,
    )


def unsendable() -> ApiError:
    """How such a request ends."""
    return ApiError(SERVER_ERROR, "the request could not be sent to a worker: see the server's log")


def time_left_s(ends_by_s: float, now_s: float) -> float:
    """What is left of a request's time, as a Submit says it: 0 none, negative: it is over."""
    if ends_by_s == float("inf"):
        return 0.0
    left_s = ends_by_s - now_s
    return left_s if left_s > 0 else -1.0


def new_ticket(
    request: PreparedRequest,
    principal: Principal,
    seq: int,
    prediction: Prediction,
    settings: Settings,
    clock: Callable[[], float],
    abort: Callable[[Ticket], None],
) -> tuple[Ticket, RequestStream]:
    """A waiting ticket with its stream, in no queue yet. `abort` is what its reader may ask."""

    def queue_s() -> float:
        return ticket.queue_s(clock())

    now_s, window = clock(), principal.window
    stream = RequestStream(
        settings.max_stream_buffer_tokens, on_abort=lambda: abort(ticket), queue_s=queue_s
    )
    ticket = Ticket(
        request=request,
        tenant_id=principal.tenant_id,
        weight=principal.weight,
        seq=seq,
        arrival_s=now_s,
        deadline_s=now_s + settings.queue_timeout_s if window is None else window.ends_s,
        ends_by_s=now_s + settings.request_timeout_s if window is None else window.ends_s,
        prediction=prediction,
        stream=stream,
        is_batch=principal.is_batch or request.is_batch,
        batch_weight=principal.batch_weight,
        batch_window=window,
    )
    return ticket, stream
