"""The gateway's nouns: what the ten stages hand to one another. No behaviour, no I/O.

Times named `now_s` are monotonic seconds; wall-clock instants are `*_at` in UTC epoch seconds.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

import msgspec

from engine.protocol import (
    Constraint,
    EncodeInputs,
    Finish,
    SamplingParams,
    TokenLogprobs,
    Usage,
)
from gateway.errors import ErrorKind, Fault
from gateway.pricing.policy.pricing import FREE, Rates
from registry.accounts.quotas import UNLIMITED, Limits

SEED_MASK = (1 << 63) - 1
"""Seeds have so many bits."""

CacheMode: TypeAlias = Literal["off", "exact", "semantic", "shadow"]


class CachePolicy(msgspec.Struct, frozen=True):
    """What a key has. `max_age_s`, `false_hit_budget` None: the server's own."""

    mode: CacheMode = "off"
    max_age_s: float | None = None
    false_hit_budget: float | None = None
    sampled: bool = False
    """Also answers that are drawn without a seed."""


NO_CACHE = CachePolicy()

Task: TypeAlias = Literal["generate", "embed", "classify"]
EncodeKind: TypeAlias = Literal["embedding", "classify", "rerank", "score"]
RequestKind: TypeAlias = Literal["chat", "completion"] | EncodeKind
Outcome: TypeAlias = Literal["finished", "disconnected", "failed", "cache_hit"]


class BatchWindow(msgspec.Struct, frozen=True, array_like=True):
    """The time that a batch may take, in monotonic seconds, and how long what comes behind this
    request in it is expected to take."""

    began_s: float
    ends_s: float
    behind_s: float = 0.0

    def shifted(self, by_s: float) -> "BatchWindow":
        """In another clock's seconds, which are so many more."""
        return BatchWindow(self.began_s + by_s, self.ends_s + by_s, self.behind_s)


class Principal(msgspec.Struct, frozen=True):
    """What an API key resolves to. `limits` are the key's own.

    `is_batch`: all its requests are of class batch, which have `batch_weight`; whoever sends the
    lines of a batch sets it, with the `window`. A tenant's class and a request's are never
    multiplied: the lower one holds.
    """

    tenant_id: str
    key_id: str
    scopes: frozenset[str]
    limits: Limits
    weight: float = 1.0
    cache: CachePolicy = NO_CACHE
    allowed_models: frozenset[str] | None = None
    tenant_limits: Limits = UNLIMITED
    response_retention_days: int | None = None
    """The tenant's own, if it has one."""
    batch_weight: float = 0.05
    is_batch: bool = False
    window: BatchWindow | None = None


@dataclass(frozen=True, slots=True)
class HostedModel:
    """A `ready` entry of the catalog, as the request path needs it.

    `weight_bytes`: what it takes on a device, for workers say nothing of models that are cold.
    `dim`: how long an embedding is; `labels`: a classifier's classes, which exclude one another
    unless it is `multi_label`. `max_context` of an encoder is its longest input.
    `floors`: tenants whose model it is, and how many bytes of theirs stay on a worker.
    """

    name: str
    revision: str
    pack_dir: str
    max_context: int
    vocab_size: int
    created_at: int
    pinned: bool = False
    weight: float = 1.0
    weight_bytes: int = 0
    task: Task = "generate"
    dim: int = 0
    labels: tuple[str, ...] = ()
    multi_label: bool = False
    limits: Limits = UNLIMITED
    floors: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ModelOutlook:
    """Where a model is, and in how many seconds it could answer; None: nobody can say."""

    residency: str
    load_eta_s: float | None


class PreparedRequest(msgspec.Struct, frozen=True):
    """A validated request in token ids. Nothing has been reserved for it yet.

    `num_choices` answers are wanted; towards workers each is a request of its own. Several prompts
    lie in `prompt_token_ids` end to end, with their `prompt_lengths`, and have as many answers
    each, in their order. `logprobs`, `prompt_logprobs`: -1 none, k the token's own and the k
    likeliest; `shown_prompt_logprobs`: the same of those that the answer has in a field of their
    own. `echoes`: the prompts as the answers repeat them, or none. `only_prompt`: nothing is
    to be generated. `continues_text`: the answer goes on where the prompt's text ends, in a chat
    too. `shown_token_ids`: control tokens that the answer's parser has to see. `is_judged`: its
    tokens' own log-probabilities are asked for though the caller does not see them.

    `include_usage`, `continuous_usage`, `obfuscates`: the last event of a stream has the usage,
    every event has it, events are padded so that their sizes tell nothing. `service_tier`: told
    back, "" where none was asked for. `reasoning_fields`: what an answer calls its reasoning.

    `encode`: the inputs for an encoder, which lie in `prompt_token_ids`; `max_tokens` is 0 then.
    `continues`: a later piece of a request that was admitted, which a full queue does not refuse.
    `priority`: among its tenant's waiting requests the lowest goes first.
    `is_batch`: it asks for class batch, and runs only where requests of other classes leave room.
    `rates`: what it is billed by, as of its arrival.
    """

    request_id: str
    kind: RequestKind
    model: HostedModel
    prompt_token_ids: list[int]
    max_tokens: int
    sampling: SamplingParams
    stop_token_ids: list[int]
    stop_strings: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    obfuscates: bool = False
    service_tier: str = ""
    reasoning_fields: tuple[str, ...] = ("reasoning", "reasoning_content")
    cache_mode: CacheMode = "off"
    created_at: int = 0
    num_choices: int = 1
    logprobs: int = -1
    prompt_logprobs: int = -1
    shown_prompt_logprobs: int = -1
    constraint: Constraint | None = None
    echoes: tuple[str, ...] = ()
    prompt_lengths: tuple[int, ...] = ()
    only_prompt: bool = False
    continues_text: bool = False
    shown_token_ids: frozenset[int] = frozenset()
    is_judged: bool = False
    encode: EncodeInputs | None = None
    continues: bool = False
    rates: Rates = FREE
    priority: int = 0
    is_batch: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        """How long the prompt is."""
        return len(self.prompt_token_ids)

    @property
    def num_per_prompt(self) -> int:
        """Choices of each prompt."""
        return self.num_choices // (len(self.prompt_lengths) or 1)

    def echo_of(self, index: int) -> str:
        """What the answer of this choice begins with."""
        return self.echoes[index // self.num_per_prompt] if self.echoes else ""


class Asked(Protocol):
    """What the dispatcher has to know of a request: a `PreparedRequest`, or a ticket from another
    process, which has no prompt."""

    @property
    def request_id(self) -> str:
        """Its name towards workers."""

    @property
    def model(self) -> HostedModel:
        """As it was hosted when the request was prepared."""

    @property
    def num_prompt_tokens(self) -> int:
        """How long the prompt is."""

    @property
    def max_tokens(self) -> int:
        """Tokens generated at most."""

    @property
    def continues(self) -> bool:
        """A full queue does not refuse it."""

    @property
    def priority(self) -> int:
        """Among its tenant's waiting requests the lowest goes first."""


class TokenEvent(msgspec.Struct, frozen=True):
    """Tokens as they come from the worker; the last event carries `finish`.

    `logprobs`: one a token where the request asked for them. `prompt_logprobs`: with the first
    event, one a prompt token but the first. `vectors`: with the finish, an encoder's rows.
    """

    token_ids: list[int]
    finish: Finish | None = None
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    vectors: bytes = b""


class RunningRequest(Protocol):
    """A request in the dispatcher's hands: queued, running or ended."""

    @property
    def attempt(self) -> int:
        """Which try the events belong to: one more for each worker that was lost or emptied. A
        later one goes on where the one before ended."""

    @property
    def queue_s(self) -> float:
        """Seconds it has waited in the fair queue, up to now or to its (latest) grant."""

    @property
    def overflowed(self) -> bool:
        """Tokens were dropped because nobody read them; the request is being aborted."""

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        """Events until one carries `finish`. Raises errors.ApiError if it is refused before any
        token, and errors.WorkerLost if workers died with it too often after some."""

    @property
    def has_event(self) -> bool:
        """Something may be taken."""

    def take(self) -> TokenEvent | None:
        """The next event if there is one, without waiting; raises as iteration does."""

    def listen(self, on_event: Callable[[], None] | None) -> None:
        """Call `on_event` whenever something may be taken, now if so; None: no longer."""

    def abort(self) -> None:
        """Stop within one step; the last event follows (at once if it was still queued)."""


class PartsEnd(msgspec.Struct, frozen=True):
    """What became of the requests to workers that one request is made of.

    `is_complete`: the whole answer has been made. `is_spent`: it ended, after tokens, because its
    form cannot be held any longer. `overflowed`: the client did not read. `num_tokens`: generated,
    as they are told and billed; `num_generated`: with those behind what the client was told;
    `num_sent`: in pieces of the answer that were handed on.
    `queue_s`: of the part that waited longest. `finish_reasons`: of a complete answer.
    """

    is_complete: bool
    usage: Usage
    queue_s: float
    finish_reasons: Sequence[str]
    num_tokens: int = 0
    num_generated: int = 0
    num_sent: int = 0
    is_spent: bool = False
    overflowed: bool = False


class Sink(Protocol):
    """Where the events of a streamed answer go, by plain calls."""

    @property
    def is_full(self) -> bool:
        """The client does not read: write no more for now."""

    def write(self, event: bytes) -> None:
        """Send an event; kept where the client does not read."""

    def when_drained(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever the client reads again, or is gone."""

    async def drained(self) -> None:
        """Returns when it is not full."""


@dataclass(slots=True)
class AnswerNote:
    """How one HTTP request was answered, for metrics: written on the way, counted at the end.

    model    the hosted model that was asked for; "": none, or none that is hosted
    code     `ok`, an error's code (of an error event in a stream, too), `status_404` and the like
             of the operator's pages, or `client_gone`
    """

    model: str = ""
    code: str = "ok"
    fault: Fault = "none"
    status: int = 0

    def has_status(self, status: int) -> None:
        """Its answer begins."""
        self.status = status
        if status >= 400 and self.code == "ok":
            self.code, self.fault = f"status_{status}", ErrorKind(status, "", "").fault

    def fail(self, kind: ErrorKind) -> None:
        """It is answered by this error."""
        self.code, self.fault = kind.code, kind.fault

    def client_gone(self) -> None:
        """Nobody waited for the end of it."""
        self.code, self.fault = "client_gone", "client"


@dataclass(slots=True)
class Call:
    """One HTTP request. `answer_headers` is filled in on the way, for errors too.

    `receive_body` is called once, after auth: nobody without a key makes us hold a body.
    `client` is the caller's address, "" where there is none. `when_gone` takes what is to be called
    when the client goes away. `principal`: whose request it is, where an operator asks for a tenant
    and has shown the right to; then no key is looked for. `is_repeated`: what does not come to its
    end is made again under the same id, so nothing is owed for it and it is not posted.
    """

    kind: RequestKind
    headers: Mapping[str, str]
    client: str
    receive_body: Callable[[], Awaitable[bytes]]
    http_id: str
    arrived_s: float
    when_gone: Callable[[Callable[[], None]], None]
    answer_headers: dict[str, str] = field(default_factory=dict)
    principal: Principal | None = None
    dialect: str = ""
    """By its name; "": the one of its kind."""
    note: AnswerNote = field(default_factory=AnswerNote)
    is_repeated: bool = False

    def tell_ignored(self, names: Sequence[str]) -> None:
        """These fields had no effect."""
        self.answer_headers["x-polyhost-ignored"] = ", ".join(names)


@dataclass(frozen=True, slots=True)
class JsonAnswer:
    """A whole answer, in parts. Whoever sends it calls `close` at the end, however it ends."""

    parts: Sequence[bytes]
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class EventAnswer:
    """A streamed answer. Whoever calls `run` calls `close` at the end, however it ends."""

    run: Callable[[Sink], Awaitable[None]]
    close: Callable[[], None] = lambda: None


Answer: TypeAlias = JsonAnswer | EventAnswer
