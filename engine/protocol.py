"""The worker protocol: every message between a gateway (or dispatcher) and a worker.

Beside engine/objects all of the engine that the gateway imports: neither torch nor
transformers. Messages are tagged msgspec structs in msgpack, one a ZeroMQ frame. A worker binds a
ROUTER socket, every gateway process connects a DEALER. Token ids only: text never crosses this.

    gateway -> worker   Hello, SetCatalog, Submit, Abort, AckUsage, AdoptUsage,
                        LoadModel, WarmModel, UnloadModel, CheckIntegrity, Restart
    worker -> gateway   Welcome, StepOutput, Refused, WorkerStatus

A request is named by (request_id, attempt). A worker process is named by its `epoch`,
drawn anew at each start; a gateway that sees a new epoch knows that all it had running is lost.
"""

from typing import Literal, TypeAlias

import msgspec

ResidencyState: TypeAlias = Literal["cold", "warm", "loading", "resident", "draining", "failed"]

_Gone: TypeAlias = Literal["evicted", "drains"]
_Kept: TypeAlias = Literal["kept: pinned", "kept: floor", "kept: first use", "kept: residence"]
_Kept2: TypeAlias = Literal["kept: margin", "kept: busy", "kept: claimed", "kept: not needed"]
Outcome: TypeAlias = Literal[_Gone, _Kept, _Kept2]
"""What became of a model when somebody had to go; see SwapCandidate."""

MAX_CANDIDATES = 64
"""Rows of one SwapChoice at most."""
MAX_CELLS = 512
"""Stretches of one Layout at most: a picture is not much wider. Some 3 kB."""
PROTOCOL_VERSION, OLDEST_PROTOCOL_VERSION = 11, 10
"""The newest and the oldest that this build speaks: machines are upgraded one by one."""
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 500, 1500
"""Of ZeroMQ on tcp, at both ends: behind a cut link sends would succeed for half a minute."""
PACK_VERSION = 2
"""Of the packs' format (engine/pack.py): what workers of this build read."""
MAX_ENCODE_INPUTS = 2048
"""Inputs of one encoder request at most."""
FinishReason: TypeAlias = Literal["stop", "length", "abort", "timeout", "error", "refused"]
_NotNow: TypeAlias = Literal["not_resident", "overloaded", "draining"]
_Never: TypeAlias = Literal["unknown_model", "context_length_exceeded", "wrong_task"]
_Invalid: TypeAlias = Literal["invalid_sampling", "invalid_constraint"]
RefusalCode: TypeAlias = Literal[_NotNow, _Never, _Invalid]
ConstraintKind: TypeAlias = Literal["json_schema", "json_object", "regex", "grammar"]


class RequestService(msgspec.Struct, frozen=True, array_like=True):
    """What an unfinished request has used so far; see protocol.Usage for the two sums."""

    request_id: str
    attempt: int
    service_s: float
    device_s: float


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """A standing offer for one resident model.
    num_requests and kv_tokens (prompt plus output) are what may still be submitted for it, each
    request rounded up to whole blocks of `block_tokens`. Offers of several models share one memory:
    all grants together must also stay within the `WorkerStatus.free_*` figures, where a request
    takes `kv_bytes_per_token` for each token and `kv_bytes_per_sequence` beside that, for states
    that do not grow. Models of one pack have an offer each.
    """

    model_id: str
    num_requests: int
    kv_tokens: int
    kv_bytes_per_token: int
    block_tokens: int = 1
    kv_bytes_per_sequence: int = 0


class ModelStatus(msgspec.Struct, frozen=True, array_like=True):
    """Residency of one hosted model. Durations in seconds; -1 where not yet known. `num_batch`: of
    the requests that run or wait, those of class batch."""

    model_id: str
    state: ResidencyState
    weight_bytes: int
    kv_bytes_used: int
    num_running: int
    num_waiting: int
    load_s_estimate: float
    reason: str = ""
    num_batch: int = 0


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """The arena from its first page to its last, in the rough: for a picture.
    `stretches` are (owner, pages), neighbours first to last; all pages together are the arena's.
    `owner` counts in `owners`, which are named as in `WorkerStatus.pages`, "free" among them; pages
    that a step in flight may still touch count as free. An arena of more than MAX_CELLS pages is
    looked at in that many places only. `device`: whose memory it is, and what a step may hold, in
    words.
    """

    owners: list[str]
    stretches: list[tuple[int, int]]
    device: str = ""


class SwapRecord(msgspec.Struct, frozen=True, array_like=True):
    """One finished load or eviction, for metrics and the operator's pages."""

    model_id: str
    kind: Literal["load", "evict"]
    tier: Literal["disk", "host", "none"]
    size_bytes: int
    duration_s: float
    reason: str = ""


class SwapCandidate(msgspec.Struct, frozen=True, array_like=True):
    """A model that held pages when somebody had to go, and what became of it.
    `score` is `demand` (device seconds a second) x `reload_s` x `weight` over `size_bytes`, or what
    else the worker's policy goes by; `num_pages` would come free. `outcome`:
    evicted               idle, left at once
    drains                leaves when what it runs has ended, or its time-out has come
    kept: pinned          never leaves
    kept: floor           its tenant would fall below its floor
    kept: first use       just loaded: its first request has not been served
    kept: residence       not resident for long enough
    kept: margin          worth more than the incoming model, or not clearly less
    kept: busy            runs something, and what is asked for is not worth that
    kept: claimed         KV of a request that has waited for long will need its room
    kept: not needed      others made the room, or not even all made it
    """

    model_id: str
    outcome: Outcome
    score: float
    demand: float
    reload_s: float
    weight: float
    size_bytes: int
    num_pages: int


class SwapChoice(msgspec.Struct, frozen=True, array_like=True):
    """One decision about who leaves the device. `incoming`: the model that room is made for.
    `reason`: for its weights because somebody waits ("load") or may soon ("prefetch"), for its KV
    ("kv"), or an operator asked for the unload ("operator"). `waited_s`: of the incoming model;
    `score` as the candidates'. `candidates`: at most MAX_CANDIDATES, who leaves first, by score.
    """

    incoming: str
    reason: Literal["load", "kv", "prefetch", "operator"]
    num_pages_short: int
    waited_s: float
    score: float
    candidates: list[SwapCandidate]


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base: tagged arrays on the wire (smaller and quicker than maps)."""


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """How a row's next token is chosen; docs of engine/sampling/sampler.py give the order of
    operations.
    temperature          0 is greedy
    top_p                the likeliest tokens whose probability reaches it; 1 for all
    seed                 always explicit; any 64 bits
    top_k                the k likeliest tokens; 0 for all
    min_p                tokens at least this many times as likely as the likeliest; 0 for all
    frequency_penalty    taken from the logit once for each time the token was generated
    presence_penalty     taken from the logit once if the token was generated
    repetition_penalty   above 0; divides positive logits, multiplies negative ones, of tokens that
                         occur in the prompt or the output; 1 for none
    logit_bias           token id -> what is added to its logit
    min_tokens           the request's stop ids cannot be sampled before so many tokens
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    min_tokens: int = 0


class Constraint(msgspec.Struct, frozen=True, array_like=True):
    """What the generated text has to be. The worker compiles it for the model's tokenizer.
    json_schema      text is the schema, as JSON
    json_object      any JSON object; text is empty
    regex            text is a regular expression that the whole output matches (no lookaround, no
                     references back)
    grammar          text is a context-free grammar in llguidance's variant of Lark, where
                     `%json {...}` is a schema and `<[id]>` a special token
    """

    kind: ConstraintKind
    text: str = ""


class EncodeInputs(msgspec.Struct, frozen=True, array_like=True):
    """What an encoder request is computed on.
    Its inputs' tokens lie end to end in the Submit's `prompt_token_ids`, each input with its
    special tokens; `lengths` says how many each has. `type_ids` (the segments of a pair) is as long
    as all tokens, or empty for zeros. `states`: behind the inputs' rows come the tokens' own, in
    the order of the tokens: their last hidden states, each as wide as a row.
    """

    lengths: list[int]
    type_ids: list[int] = []
    states: bool = False


class ModelSpec(msgspec.Struct, frozen=True, array_like=True):
    """A hosted model as a worker needs it. `weight` is its fair-share weight in eviction. `floors`:
    (tenant, bytes) of each tenant with a floor whose model this is: so many bytes of the tenant's
    models are left on the worker by loads of models that are not the tenant's."""

    model_id: str
    pack_dir: str
    pinned: bool = False
    weight: float = 1.0
    floors: tuple[tuple[str, int], ...] = ()


class Hello(_Message, frozen=True):
    """First message of a peer; answered by Welcome and by every unacknowledged Finish.
    `observes`: a dispatcher of several gateways, which submits nothing and gets reports of what all
    of them have submitted. `epoch`: which dispatcher of the installation it is. A worker obeys the
    highest that it has seen: one that was stopped, or cut off, and comes back is not heard again.
    Versions from `oldest_version` (0: the same) to `protocol_version` are spoken.
    """

    protocol_version: int
    gateway_id: str
    observes: bool = False
    epoch: int = 0
    oldest_version: int = 0


class SetCatalog(_Message, frozen=True):
    """The whole list of models this worker may serve; models not named are unloaded."""

    models: list[ModelSpec]


class Submit(_Message, frozen=True):
    """Run one request. The model must be resident (the dispatcher holds a lease for it).
    `stop_token_ids` end the request and are counted as generated but are the last token sent.
    `logprobs`, `prompt_logprobs`: -1 for none, k for the token's own and the k likeliest's.
    `timeout_s` after its arrival the request ends with reason `timeout`, waiting or running, within
    one step; 0: no bound of its own (EngineConfig.request_timeout_s holds anyhow).
    `encode`: for a model that embeds or classifies; then `max_tokens` is 0, and the answer is one
    delta with `vectors`.
    `generated`: tokens that earlier attempts have made, fewer than `max_tokens`, which counts them.
    The request goes on behind them; `cached_tokens` is what the first attempt found of its prompt.
    `is_batch`: it takes only what requests of no such class leave, and gives way to them at once.
    """

    request_id: str
    attempt: int
    tenant_id: str
    model_id: str
    prompt_token_ids: list[int]
    max_tokens: int
    sampling: SamplingParams
    stop_token_ids: list[int]
    logprobs: int = -1
    prompt_logprobs: int = -1
    constraint: Constraint | None = None
    timeout_s: float = 0.0
    encode: EncodeInputs | None = None
    generated: list[int] = []
    cached_tokens: int = 0
    is_batch: bool = False


class Abort(_Message, frozen=True):
    """End a request within one step; answered by a Finish with reason `abort`."""

    request_id: str
    attempt: int


class AckUsage(_Message, frozen=True):
    """These finishes are durably recorded; the worker forgets them."""

    requests: list[tuple[str, int]]


class AdoptUsage(_Message, frozen=True):
    """What is kept of these (and of their choices) for a gateway that is gone is the sender's."""

    gateway_id: str
    request_ids: list[str]


class LoadModel(_Message, frozen=True):
    """Make the model resident. Idempotent: the newer figures hold (docs/worker-protocol.md)."""

    model_id: str
    waited_s: float = 0.0
    backlog_s: float = 0.0
    prefetch: bool = False
    forced: bool = False
    is_batch: bool = False


class WarmModel(_Message, frozen=True):
    """Bring a cold model into the host tier, if its policy has room. Idempotent."""

    model_id: str


class UnloadModel(_Message, frozen=True):
    """Drain the model and give its pages back. Idempotent."""

    model_id: str


class Restart(_Message, frozen=True):
    """Drain and end the process: what keeps it alive starts it again."""


class CheckIntegrity(_Message, frozen=True):
    """Compare all books, between two steps; `WorkerStatus.checked` answers. A finding is fatal."""

    call: int


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """What a request consumed, as far as it got.

    device_s: seconds of the device charged to it. service_s, what fair shares count: these, or the
    time of the device multiplied by the share of the arena it held, where that is the larger.
    cached_tokens: prompt tokens whose KV was already there when it was first admitted; at most
    prompt_tokens - 1. What it finds after a preemption or in a later attempt is not.
    generated_tokens: those of earlier attempts (Submit.generated) among them.
    prefill_s: of device_s, the part for prompt tokens; the rest is for those generated.
    load_s: of its model's load, what it has paid; known to the dispatcher, 0 from a worker.
    """

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    service_s: float
    device_s: float = 0.0
    prefill_s: float = 0.0
    load_s: float = 0.0


class Finish(msgspec.Struct, frozen=True, array_like=True):
    """The end of a request.

    `error` is set with the reasons `error`, for operators, and `refused`, for the client: its
    constraint turned out to be one that cannot be had, or, after tokens, that costs too much to
    be followed any further.
    """

    reason: FinishReason
    usage: Usage
    error: str = ""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms of probabilities at one position, of the model's own distribution.

    `top` is the k likeliest, likeliest first, whether or not the token is among them. -inf is
    possible where the model itself rules a token out.
    """

    logprob: float
    top: list[tuple[int, float]]


class TokenDelta(msgspec.Struct, frozen=True, array_like=True):
    """What one step produced for one request: zero to k tokens, perhaps the end.

    `logprobs`: one entry a token id where the request asked for them, else empty.
    `prompt_logprobs`: with the first delta only, one entry a prompt token but the first, which
    nothing precedes.
    `vectors`: with the finish (reason `stop`) of an encoder request, float32 little-endian, a row
    for each input in their order: the pooled vector, or a classifier's logits as they are.
    `cached_tokens`: with the first tokens, as in the Usage, which may never come.
    """

    request_id: str
    attempt: int
    token_ids: list[int]
    finish: Finish | None = None
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []
    vectors: bytes = b""
    cached_tokens: int = 0


class StepOutput(_Message, frozen=True):
    """All deltas of one step that belong to the receiving gateway."""

    epoch: str
    deltas: list[TokenDelta]


class Refused(_Message, frozen=True):
    """A Submit that was not taken; nothing ran. `retryable`: another moment may do."""

    epoch: str
    request_id: str
    attempt: int
    code: RefusalCode
    message: str
    retryable: bool


class WorkerStatus(_Message, frozen=True):
    """Heartbeat, and at once when leases or residency change.
    `pages` maps "model_id/weights", "model_id/kv" and "free" to pages. `swaps` lists those finished
    since the previous status. `models` has a row for each model that is not cold: a catalog may
    name thousands. Those without a row would be loaded from the disk at `cold_bytes_per_s` (0: not
    known). `choices` are decisions about who leaves, since the previous status: of those that found
    nobody who may, only the first of a kind. For a peer that observes alone: `service`, what
    running requests have had so far, so that they count while they run, and `taken`, which Submits
    have come since its previous status, so that it can subtract grants still under way.
    `layout` is sent to whoever connects, and then when it has changed, twice a second at most;
    None: as sent before. `started_at`: when the process began, epoch seconds. `checked`: the
    receiver's last CheckIntegrity: its `call`, and what was found; empty: nothing is wrong.
    Requests of class batch do not count in `free_*` and in leases: they give way. `batch_requests`
    and `batch_kv_bytes` are what they take of these, at their worst case.
    """

    epoch: str
    worker_id: str
    free_requests: int
    free_kv_bytes: int
    lease_ttl_s: float
    page_bytes: int
    num_pages: int
    pages: dict[str, int]
    models: list[ModelStatus]
    leases: list[Lease]
    swaps: list[SwapRecord]
    counters: dict[str, float]
    cold_bytes_per_s: float = 0.0
    choices: list[SwapChoice] = []
    service: list[RequestService] = []
    taken: list[tuple[str, int]] = []
    layout: Layout | None = None
    started_at: float = 0.0
    checked: tuple[int, str] | None = None
    batch_requests: int = 0
    batch_kv_bytes: int = 0


class Welcome(_Message, frozen=True):
    """Answer to Hello, with the version that is spoken from here on: the highest that both sides
    know. Where there is none, with the worker's own, and the connection ends."""

    protocol_version: int
    worker_id: str
    epoch: str
    device: str


_Order: TypeAlias = LoadModel | WarmModel | UnloadModel | CheckIntegrity | Restart
ToWorker: TypeAlias = Hello | SetCatalog | Submit | Abort | AckUsage | AdoptUsage | _Order
FromWorker: TypeAlias = Welcome | StepOutput | Refused | WorkerStatus


def common_version(newest: int, oldest: int) -> int:
    """The highest protocol version that this build and another speak; 0: there is none."""
    version = min(newest, PROTOCOL_VERSION)
    return version if version >= max(oldest or newest, OLDEST_PROTOCOL_VERSION) else 0


_encoder = msgspec.msgpack.Encoder()
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


def encode(message: ToWorker | FromWorker) -> bytes:
    """One message as one ZeroMQ frame."""
    return _encoder.encode(message)


def decode_to_worker(frame: bytes | memoryview) -> ToWorker:
    """Raises msgspec.DecodeError / ValidationError on anything but a message for a worker."""
    try:
        return _to_worker.decode(frame)
    except (UnicodeDecodeError, RecursionError) as error:  # msgspec lets these two through
        raise msgspec.DecodeError(str(error)) from error


def decode_from_worker(frame: bytes | memoryview) -> FromWorker:
    """Raises msgspec.DecodeError / ValidationError on anything but a message of a worker."""
    try:
        return _from_worker.decode(frame)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error
