"""The way a request goes: ten stages, top to bottom, and nowhere else is their order known. It is
written twice: for text that is generated, and for encoders, whose answer comes whole.

Comes in: a `Call` (headers as they arrived, the body when it is asked for). Goes out: an answer's
bytes, whole or as events, or an ApiError while nothing has been sent. Each stage's work is in the
module it names; what must be undone when a later stage fails is held by `exchange.Exchange`.
"""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import msgspec

from gateway import encode_answer, encode_wire, wire
from gateway.answer import DONE, Chunks, UsageFigures, WholeChoice, error_event, json_answer
from gateway.answer_room import AnswerRoom
from gateway.auth import authenticate
from gateway.choice import Piece
from gateway.encode_exchange import EncodeExchange
from gateway.encode_prepare import EncodePrepared, EncodePreparer, pieces_of
from gateway.errors import ApiError, ClientGone
from gateway.exchange import Exchange
from gateway.joint import choice_id
from gateway.ledger import prices_of
from gateway.limits import Hold, Limiter
from gateway.metrics import Metrics
from gateway.policy.pricing import cost_nanos
from gateway.prepare import SEED_MASK, Prepared, Preparer
from gateway.semantic_cache import RESULT_HEADER, CachedAnswer, SemanticCache
from gateway.services import Services
from gateway.settlement import Clocks, Settlement, Surroundings, TaskSet
from gateway.tool_deltas import finish_reason
from gateway.types import EncodeKind, PreparedRequest, Principal, RequestKind, RunningRequest
from registry.ledger import Posting

log = logging.getLogger(__name__)

_ID_PREFIX = {
    "chat": "chatcmpl-",
    "completion": "cmpl-",
    "embedding": "embd-",
    "classify": "classify-",
    "rerank": "rerank-",
}


@dataclass(slots=True)
class Call:
    """One HTTP request. `answer_headers` is filled in on the way, for errors too.

    `receive_body` is called once, after auth: nobody without a key makes us hold a body.
    `client` is the caller's address, "" where there is none. `when_gone` takes what is to be called
    when the client goes away.
    """

    kind: RequestKind
    headers: Mapping[str, str]
    client: str
    receive_body: Callable[[], Awaitable[bytes]]
    http_id: str
    arrived_s: float
    when_gone: Callable[[Callable[[], None]], None]
    answer_headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JsonAnswer:
    """A whole answer, in parts. Whoever sends it calls `close` at the end, however it ends."""

    parts: Sequence[bytes]
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class EventAnswer:
    """A streamed answer. Whoever takes the events calls `close` at the end, however it ends."""

    events: AsyncGenerator[bytes, None]
    close: Callable[[], None]


Answer: TypeAlias = JsonAnswer | EventAnswer


class Pipeline:
    """One object per gateway process."""

    def __init__(
        self,
        services: Services,
        preparer: Preparer,
        encode_preparer: EncodePreparer,
        limiter: Limiter,
        cache: SemanticCache,
        metrics: Metrics,
        clocks: Clocks,
    ) -> None:
        self._settings = services.settings
        self._directory = services.directory
        self._dispatcher = services.dispatcher
        self._ledger = services.ledger
        self._preparer = preparer
        self._encode_preparer = encode_preparer
        self._limiter = limiter
        self._cache = cache
        self._metrics = metrics
        self._clocks = clocks
        self._answer_room = AnswerRoom(services.settings.max_encode_answer_bytes)
        self._around = Surroundings(self._ledger, metrics, TaskSet(), clocks)

    async def handle(self, call: Call) -> Answer:
        """Serve one request. Raises ApiError, or ClientGone where nobody waits for the answer."""
        kind = call.kind
        if kind == "chat" or kind == "completion":
            return await self._generate(call, kind)
        return await self._encode(call, kind)

    async def _generate(self, call: Call, kind: wire.Kind) -> Answer:
        now_at = self._clocks.now_at()
        # 1 auth
        principal = authenticate(call.headers, self._directory, now_at, call.client)
        # 2 prepare
        asked = wire.decode(kind, await call.receive_body())
        request_id = _ID_PREFIX[kind] + call.http_id
        prepared = await self._preparer.prepare(asked, principal, call.headers, request_id, now_at)
        # 3 limits
        hold = await self._limiter.reserve(principal, prepared.request, call.answer_headers)
        # 4 semantic cache
        hit = self._look_up(call, prepared, principal)
        if hit is not None:
            return await self._answer_hit(call, prepared, principal, hold, hit)
        # 5 fair queue; in the worker: 6 scheduler, 7 model runner, 8 kernels
        exchange = await self._dispatch(call, prepared, principal, hold)
        # 9 stream, 10 ledger
        if asked.stream:
            return EventAnswer(self._events(exchange, prepared, principal), exchange.abandon)
        return JsonAnswer([await self._whole(exchange, prepared, principal)])

    async def _encode(self, call: Call, kind: EncodeKind) -> Answer:
        """The same way for an encoder: its answer is whole before anything of it leaves."""
        now_at = self._clocks.now_at()
        # 1 auth
        principal = authenticate(call.headers, self._directory, now_at, call.client)
        # 2 prepare
        body = await call.receive_body()
        asked = encode_wire.decode(kind, body, self._settings.max_encode_inputs)
        prepared = await self._encode_preparer.prepare(
            asked, principal, call.headers, _ID_PREFIX[kind] + call.http_id, now_at
        )
        release = self._answer_room.hold(principal.tenant_id, prepared.answer_bytes)
        try:
            parts = await self._encode_prepared(call, prepared, principal)
        except BaseException:
            release()
            raise
        return JsonAnswer(parts, release)

    async def _encode_prepared(
        self, call: Call, prepared: EncodePrepared, principal: Principal
    ) -> list[bytes]:
        # 3 limits
        hold = await self._limiter.reserve(principal, prepared.request, call.answer_headers)
        # 4 semantic cache
        self._look_up(call, prepared, principal)
        # 5 fair queue; in the worker: 6 scheduler, 7 model runner, 8 kernels
        exchange = await self._dispatch_pieces(call, prepared, principal, hold)
        try:
            rows = await exchange.rows()
            # 10 ledger
            await exchange.close()
        finally:
            exchange.abandon()
        if exchange.is_gone:
            raise ClientGone
        # 9 stream
        return await encode_answer.answer(prepared, rows)

    async def drain(self, timeout_s: float) -> None:
        """At shutdown: wait until every request that ended is settled and posted."""
        await self._around.tasks.drain(timeout_s)

    def _look_up(
        self, call: Call, prepared: Prepared | EncodePrepared, principal: Principal
    ) -> CachedAnswer | None:
        if prepared.cache == "off":
            return None
        hit = None
        if prepared.cache == "lookup":
            hit = self._cache.find(principal.tenant_id, prepared.request)
        result = "hit" if hit else "miss" if prepared.cache == "lookup" else "bypass"
        call.answer_headers[RESULT_HEADER] = result
        self._metrics.cache_requests.labels(result).inc()
        return hit

    async def _answer_hit(
        self,
        call: Call,
        prepared: Prepared,
        principal: Principal,
        hold: Hold,
        hit: CachedAnswer,
    ) -> Answer:
        """Posted before it is sent, so it needs no open record. Takes a request and its price, no
        tokens."""
        request, pieces = prepared.request, prepared.codec.pieces
        parser = prepared.new_parser()
        piece = Piece(0, [*parser.feed(hit.text), *parser.flush()])
        reason = finish_reason(hit.finish_reason, parser.num_calls)
        posting = self._hit_posting(call, request, principal, hit)
        await hold.settle(0, 0, posting.cost_nanos, posting.posted_at)
        await self._ledger.post(posting)
        usage = UsageFigures(len(request.prompt_token_ids), hit.completion_tokens)
        if not request.stream:
            whole = WholeChoice(request, 0, pieces)
            whole.add(piece)
            return JsonAnswer([json_answer(request, [whole.body(reason)], usage)])
        chunks = Chunks(request, pieces)
        body = chunks.piece(piece) + chunks.last(0, reason)
        return EventAnswer(_single(body + chunks.usage(usage) + DONE), lambda: None)

    async def _dispatch(
        self, call: Call, prepared: Prepared, principal: Principal, hold: Hold
    ) -> Exchange:
        """Queue it and wait for its first tokens: until then a refusal is an HTTP status."""
        runnings: list[RunningRequest] = []
        failure: Exception | None = None
        try:
            for request in _choices(prepared.request):
                runnings.append(self._dispatcher.run(request, principal))
        except Exception as error:
            if not runnings:
                await hold.release()
                raise
            failure = error
        exchange = Exchange(prepared, principal, hold, runnings, self._around, call.arrived_s)
        if failure is not None:
            exchange.fail()
            raise failure
        began = False
        try:
            call.when_gone(exchange.client_gone)
            await exchange.begin()
            began = not exchange.is_gone
        finally:
            if not began:
                exchange.abandon()
        if not began:
            raise ClientGone
        return exchange

    async def _dispatch_pieces(
        self, call: Call, prepared: EncodePrepared, principal: Principal, hold: Hold
    ) -> EncodeExchange:
        """Queue the first piece of it; the others follow."""
        pieces = pieces_of(prepared.request, self._settings.encode_piece_tokens)
        try:
            first = self._dispatcher.run(pieces[0], principal)
        except Exception:
            await hold.release()
            raise
        exchange = EncodeExchange(
            pieces,
            prepared.width,
            first,
            lambda piece: self._dispatcher.run(piece, principal),
            Settlement(prepared.request, principal, hold, self._around, call.arrived_s),
            self._around.tasks,
            self._settings.request_timeout_s,
        )
        call.when_gone(exchange.client_gone)
        return exchange

    async def _events(
        self, exchange: Exchange, prepared: Prepared, principal: Principal
    ) -> AsyncGenerator[bytes, None]:
        chunks = Chunks(exchange.request, prepared.codec.pieces)
        try:
            async for piece in exchange.pieces():
                event = chunks.piece(piece)
                if event:
                    yield event
            await exchange.close()
        except ApiError as error:
            await exchange.close()
            yield error_event(error)
            return
        if exchange.is_gone:
            return
        self._keep(exchange, principal)
        ends = b"".join(chunks.last(c.index, c.finish_reason) for c in exchange.choices)
        yield ends + chunks.usage(exchange.usage) + DONE

    async def _whole(self, exchange: Exchange, prepared: Prepared, principal: Principal) -> bytes:
        request, pieces = exchange.request, prepared.codec.pieces
        whole = [WholeChoice(request, choice.index, pieces) for choice in exchange.choices]
        try:
            async for piece in exchange.pieces():
                whole[piece.index].add(piece)
            await exchange.close()
        finally:
            exchange.abandon()
        if exchange.is_gone:
            raise ClientGone
        self._keep(exchange, principal)
        choices = [whole[c.index].body(c.finish_reason) for c in exchange.choices]
        return json_answer(request, choices, exchange.usage)

    def _keep(self, exchange: Exchange, principal: Principal) -> None:
        if exchange.request.cache_mode == "exact" and exchange.is_complete:
            only = exchange.choices[0]
            reason = "length" if only.finish_reason == "length" else "stop"
            answer = CachedAnswer(only.text, reason, exchange.usage.completion_tokens)
            self._cache.keep(principal.tenant_id, exchange.request, answer)

    def _hit_posting(
        self, call: Call, request: PreparedRequest, principal: Principal, hit: CachedAnswer
    ) -> Posting:
        num_prompt = len(request.prompt_token_ids)
        duration_s = self._clocks.now_s() - call.arrived_s
        return Posting(
            request_id=request.request_id,
            tenant_id=principal.tenant_id,
            key_id=principal.key_id,
            model=request.model.name,
            revision=request.model.revision,
            kind=request.kind,
            outcome="cache_hit",
            prompt_tokens=num_prompt,
            cached_tokens=0,
            completion_tokens=hit.completion_tokens,
            cost_nanos=cost_nanos(
                prices_of(request.model), "cache_hit", num_prompt, 0, hit.completion_tokens
            ),
            service_s=0.0,
            queue_s=0.0,
            ttft_s=duration_s,
            duration_s=duration_s,
            posted_at=self._clocks.now_at(),
        )


def _choices(request: PreparedRequest) -> list[PreparedRequest]:
    """The request's choices as workers get them: each with a name and a seed of its own."""
    if request.num_choices == 1:
        return [request]
    seed = request.sampling.seed
    return [
        replace(
            request,
            request_id=choice_id(request.request_id, index, request.num_choices),
            sampling=msgspec.structs.replace(request.sampling, seed=(seed + index) & SEED_MASK),
        )
        for index in range(request.num_choices)
    ]


async def _single(event: bytes) -> AsyncGenerator[bytes, None]:
    yield event
