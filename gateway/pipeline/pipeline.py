"""The way a request goes: ten stages, top to bottom, and nowhere else is their order known.

Comes in: a `Call` (headers as they arrived, the body when it is asked for). Goes out: an answer's
bytes, whole or as events, or an ApiError while nothing has been sent. Each stage's work is in the
module it names. What a request comes to hold on its way, and how it ends, is active_request.py's.

The server builds one `Services` and hands it to `create_app`; its parts change inside, the
references never do.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from gateway.answer import encode_answer
from gateway.answer.choice import Piece
from gateway.answer.encode_answer import AnswerMemory, RowParts
from gateway.answer.encoder import AnswerFormat, ends_of, usage_of
from gateway.answer.text_parts import TextParts
from gateway.api import encode_wire
from gateway.api.told_fields import COUNTED
from gateway.api.wire import WireRequest
from gateway.auth.auth import authenticate
from gateway.auth.directory import Directory
from gateway.cache.embedder import EmbeddingWorker
from gateway.cache.lookup import AnswerCache
from gateway.dialects import ollama_wire
from gateway.dialects.by_route import DIALECTS, OLLAMA_EMBEDDINGS
from gateway.dialects.dialect import CHAT
from gateway.errors import ApiError, ClientGone
from gateway.limits.limits import Limiter
from gateway.limits.store import LimitStore, MemoryStore
from gateway.metrics.cache_metrics import CacheMetrics
from gateway.metrics.families import MetricsRegistry
from gateway.metrics.metrics import Metrics
from gateway.pipeline.active_request import ActiveRequest, Clocks, Dependencies, TaskSet
from gateway.pipeline.coalesce import CacheHits, InFlight
from gateway.prepare.encode_prepare import EncodePrepared, EncodePreparer
from gateway.prepare.prepare import Prepared, Preparer
from gateway.protocols import RequestDispatcher, UsageLedger
from gateway.sealing.seals import Seals
from gateway.settings.settings import Settings
from gateway.types import Answer, Call, EventAnswer, JsonAnswer, Principal, Sink

_ID_PREFIX = {
    "embedding": "embd-",
    "classify": "classify-",
    "rerank": "rerank-",
    "score": "score-",
}


@dataclass(frozen=True, slots=True)
class Services:
    """Everything the HTTP side may use."""

    settings: Settings
    """As they were at the start."""
    directory: Directory
    """Keys, tenants' limits and hosted models, kept fresh by the supervisor's registry poll."""
    dispatcher: RequestDispatcher
    """The fair queue, in this process or another."""
    ledger: UsageLedger
    metrics_registry: MetricsRegistry
    limit_store: LimitStore = field(default_factory=MemoryStore)
    """Counts of limits; the registry poll fills in what a restart has lost."""
    embedding_worker: EmbeddingWorker | None = None
    """Of the model `cache_embedder`; None where the server is set up without."""
    cache_socket: Path | None = None
    """Where the operator asks about cached answers; None: nowhere."""
    owner: str = ""
    """What background responses of this process name; its next life has the same."""
    scrape: Callable[[], Awaitable[bytes]] | None = None
    """What /metrics answers where this process is one of several; None: `metrics_registry`."""


class Pipeline:
    """One object per gateway process."""

    def __init__(
        self,
        services: Services,
        preparer: Preparer,
        encode_preparer: EncodePreparer,
        limiter: Limiter,
        cache: AnswerCache,
        metrics: Metrics,
        cache_metrics: CacheMetrics,
        clocks: Clocks,
        seals: Seals,
    ) -> None:
        settings = self._settings = services.settings
        self._tells_unknown = settings.unknown_fields == "tell"
        self._metrics = metrics
        self._directory = services.directory
        self._dispatcher = services.dispatcher
        self._preparer = preparer
        self._encode_preparer = encode_preparer
        self._limiter = limiter
        self._clocks = clocks
        self._seals = seals
        self._answer_memory = AnswerMemory(settings.max_encode_answer_bytes)
        self._tasks = TaskSet()
        self._dependencies = Dependencies(
            services.ledger, metrics, self._tasks, clocks, settings.ledger_checkpoint_tokens
        )
        bounds = settings.request_timeout_s, settings.cache_least_logprob
        self._hits = CacheHits(cache, metrics, cache_metrics, self._tasks, *bounds)

    async def handle(self, call: Call, wanted: WireRequest | None = None) -> Answer:
        """Serve one request, of a text that is `wanted` already or else is read of its body. Raises
        ApiError, or ClientGone where nobody waits for the answer."""
        now_at = self._clocks.now_at()
        # 1 auth
        principal = call.principal or authenticate(
            call.headers, self._directory, now_at, call.client
        )
        # 2 prepare
        prepared = await self._prepare(call, principal, now_at, wanted)
        if prepared.ignored:
            self._tell_ignored(call, prepared.ignored)
        active = ActiveRequest(call, prepared.request, principal, self._dependencies)
        try:
            # 3 limits
            if prepared.answer_bytes:
                memory = self._answer_memory.hold(principal.tenant_id, prepared.answer_bytes)
                active.at_end.callback(memory)
            await active.reserve(self._limiter)
            # 4 semantic cache
            spelled = _format(call)
            found = await self._hits.find(active, prepared, spelled)
            if not isinstance(found, InFlight):
                return found
            # 5 fair queue; in the worker: 6 scheduler, 7 model runner, 8 kernels
            parts = self._parts(active, prepared)
            active.submit(parts)
            # 10 ledger: opened now, closed before the answer ends
            active.open()
            # 9 stream
            if isinstance(parts, TextParts):
                return await self._text(active, parts, found, spelled)
            return await self._rows(active, parts)
        except Exception as error:
            await active.fail(error)
            raise
        except BaseException:  # The task is cancelled.
            active.abandon()
            raise

    def _tell_ignored(self, call: Call, names: Sequence[str]) -> None:
        call.tell_ignored(names)
        for name in names:
            self._metrics.ignored_fields.add(1, name if name in COUNTED else "other")

    def _note_model(self, call: Call, name: str) -> None:
        if self._directory.find_model(name) is not None:
            call.note.model = name

    async def drain(self, timeout_s: float) -> None:
        """At shutdown: wait until every request that ended is settled and posted."""
        await self._tasks.drain(timeout_s)

    async def _prepare(
        self, call: Call, principal: Principal, now_at: float, wanted: WireRequest | None
    ) -> Prepared | EncodePrepared:
        """Nobody without a key makes us read a body."""
        kind, body = call.kind, b"" if wanted is not None else await call.receive_body()
        if kind == "chat" or kind == "completion":
            dialect = DIALECTS[call.dialect or kind]
            if wanted is None:
                seal = self._seals.of(principal.tenant_id)
                wanted = dialect.decode(body, self._tells_unknown, seal)
            self._note_model(call, wanted.model)
            about = principal, call.headers, dialect.id_prefix + call.http_id, now_at
            return await self._preparer.prepare(wanted, *about)
        about = principal, call.headers, _ID_PREFIX[kind] + call.http_id, now_at
        most = self._settings.max_encode_inputs
        if kind == "embedding" and call.dialect == OLLAMA_EMBEDDINGS.name:
            asked = ollama_wire.decode_embeddings(body, self._tells_unknown)
        elif kind == "embedding" and call.dialect:
            asked = ollama_wire.decode_embed(body, most, self._tells_unknown)
        else:
            asked = encode_wire.decode(kind, body, most, self._tells_unknown)
        self._note_model(call, asked.model)
        return await self._encode_preparer.prepare(asked, *about)

    def _parts(
        self, active: ActiveRequest, prepared: Prepared | EncodePrepared
    ) -> TextParts | RowParts:
        run = partial(self._dispatcher.run, principal=active.principal)
        if isinstance(prepared, Prepared):
            return TextParts(prepared, run, active)
        return RowParts(prepared, self._settings.encode_piece_tokens, run, active)

    async def _text(
        self, active: ActiveRequest, parts: TextParts, flight: InFlight, spelled: AnswerFormat
    ) -> Answer:
        """A stream begins without tokens where they take longer than `stream_heartbeat_s`; until
        then a refusal is an HTTP status."""
        request = parts.prepared.request
        await parts.begin(self._settings.stream_heartbeat_s if request.stream else 0.0)
        if active.is_gone:
            raise ClientGone
        if request.stream:
            run = partial(self._events, active, parts, flight, spelled)
            return EventAnswer(run, active.abandon)
        encoder = spelled.whole(parts.prepared)
        async for piece in parts.pieces():
            encoder.add(piece)
        await active.close()
        if active.is_gone:
            raise ClientGone
        flight.end(parts.choices[0], parts.cached_tokens)
        body = encoder.whole(ends_of(parts), usage_of(parts, active.times_s))
        return JsonAnswer([body], active.abandon)

    async def _events(
        self,
        active: ActiveRequest,
        parts: TextParts,
        flight: InFlight,
        spelled: AnswerFormat,
        sink: Sink,
    ) -> None:
        encoder = spelled.stream(parts.prepared, partial(usage_of, parts))
        write = encoder.piece

        def send(piece: Piece) -> None:
            event = write(piece)
            if event:
                sink.write(event)

        try:
            await parts.push(send, sink)
            await active.close()
        except Exception as error:  # A bug is not the client's to pay for, either.
            await active.fail(error)
            if not isinstance(error, ApiError):
                raise
            active.call.note.fail(error.kind)
            sink.write(encoder.error(error))
            return
        if active.is_gone:
            active.call.note.client_gone()
            return
        flight.end(parts.choices[0], parts.cached_tokens)
        sink.write(encoder.end(ends_of(parts), usage_of(parts, active.times_s)))

    async def _rows(self, active: ActiveRequest, parts: RowParts) -> Answer:
        """An encoder's answer is whole before anything of it leaves."""
        rows = await parts.rows(self._settings.request_timeout_s)
        await active.close()
        if active.is_gone:
            raise ClientGone
        return JsonAnswer(await encode_answer.answer(parts.prepared, rows), active.abandon)


def _format(call: Call) -> AnswerFormat:
    """Of texts; encoders' answers are spelled in one way."""
    return DIALECTS.get(call.dialect or call.kind, CHAT).format
