"""The way a request goes: ten stages, top to bottom, and nowhere else is their order known. It is
written twice: for text that is generated, and for encoders, whose answer comes whole.

Comes in: a `Call` (headers as they arrived, the body when it is asked for). Goes out: an answer's
bytes, whole or as events, or an ApiError while nothing has been sent. Each stage's work is in the
module it names; what must be undone when a later stage fails is held by `exchange.Exchange`.
"""

import logging
from dataclasses import replace

import msgspec

from gateway.answer import encode_answer
from gateway.answer.answer import DONE, Chunks, WholeChoice, error_event, json_answer
from gateway.answer.answer_room import AnswerRoom
from gateway.answer.choice import Piece
from gateway.auth import authenticate
from gateway.cache.hits import CacheHits, Flight
from gateway.cache.lookup import AnswerCache, Hit
from gateway.cache.replay import Replay
from gateway.call import Answer, Call, EventAnswer, JsonAnswer
from gateway.dispatch.joint import choice_id
from gateway.encode_exchange import EncodeExchange
from gateway.errors import ApiError, ClientGone
from gateway.exchange import Exchange
from gateway.ledger.settlement import Clocks, Settlement, Surroundings, TaskSet
from gateway.limits.limits import Hold, Limiter
from gateway.metrics.cache_metrics import CacheMetrics
from gateway.metrics.metrics import Metrics
from gateway.prepare import encode_wire, wire
from gateway.prepare.encode_prepare import EncodePrepared, EncodePreparer, pieces_of
from gateway.prepare.prepare import SEED_MASK, Prepared, Preparer
from gateway.services import Services
from gateway.types import (
    EncodeKind,
    PreparedRequest,
    Principal,
    RunningRequest,
    Sink,
)

log = logging.getLogger(__name__)

_ID_PREFIX = {
    "chat": "chatcmpl-",
    "completion": "cmpl-",
    "embedding": "embd-",
    "classify": "classify-",
    "rerank": "rerank-",
}


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
    ) -> None:
        self._settings = services.settings
        self._directory = services.directory
        self._dispatcher = services.dispatcher
        self._ledger = services.ledger
        self._preparer = preparer
        self._encode_preparer = encode_preparer
        self._limiter = limiter
        self._metrics = metrics
        self._clocks = clocks
        self._answer_room = AnswerRoom(services.settings.max_encode_answer_bytes)
        self._around = Surroundings(
            self._ledger, metrics, TaskSet(), clocks, services.settings.ledger_checkpoint_tokens
        )
        tasks, settings = self._around.tasks, services.settings
        self._hits = CacheHits(
            cache,
            metrics,
            cache_metrics,
            tasks,
            settings.request_timeout_s,
            settings.cache_least_logprob,
        )
        self._replay = Replay(cache, self._ledger, clocks, tasks)

    async def handle(self, call: Call) -> Answer:
        """Serve one request. Raises ApiError, or ClientGone where nobody waits for the answer."""
        kind = call.kind
        if kind == "chat" or kind == "completion":
            return await self._generate(call, kind)
        return await self._encode(call, kind)

    async def _generate(self, call: Call, kind: wire.Kind) -> Answer:
        now_at = self._clocks.now_at()
        # 1 auth
        principal = call.principal or self._authenticate(call, now_at)
        # 2 prepare
        asked = wire.decode(kind, await call.receive_body())
        request_id = _ID_PREFIX[kind] + call.http_id
        prepared = await self._preparer.prepare(asked, principal, call.headers, request_id, now_at)
        # 3 limits
        hold = await self._limiter.reserve(principal, prepared.request, call.answer_headers)
        # 4 semantic cache
        found = await self._hits.find(call, prepared, principal, hold)
        if isinstance(found, Hit):
            return await self._replay.answer(call, prepared, principal, hold, found)
        # 5 fair queue; in the worker: 6 scheduler, 7 model runner, 8 kernels
        try:
            exchange = await self._dispatch(call, prepared, principal, hold)
        except BaseException:
            found.end(None)
            raise
        # 9 stream, 10 ledger
        if asked.stream:

            def close() -> None:
                exchange.abandon()
                found.end(None)

            return EventAnswer(lambda sink: self._events(exchange, prepared, found, sink), close)
        return JsonAnswer([await self._whole(exchange, prepared, found)])

    async def _encode(self, call: Call, kind: EncodeKind) -> Answer:
        """The same way for an encoder: its answer is whole before anything of it leaves."""
        now_at = self._clocks.now_at()
        # 1 auth
        principal = call.principal or self._authenticate(call, now_at)
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
        self._hits.note(call, prepared.cache.decision, None)
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

    def _authenticate(self, call: Call, now_at: float) -> Principal:
        return authenticate(call.headers, self._directory, now_at, call.client)

    async def drain(self, timeout_s: float) -> None:
        """At shutdown: wait until every request that ended is settled and posted."""
        await self._around.tasks.drain(timeout_s)

    async def _dispatch(
        self, call: Call, prepared: Prepared, principal: Principal, hold: Hold
    ) -> Exchange:
        """Queue it and wait for its first tokens: until then a refusal is an HTTP status. A stream
        begins without them where they take longer than `stream_heartbeat_s`."""
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
            wait_s = self._settings.stream_heartbeat_s if prepared.request.stream else 0.0
            if not wait_s or await exchange.ready(wait_s):
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
        self, exchange: Exchange, prepared: Prepared, flight: Flight, sink: Sink
    ) -> None:
        chunks = Chunks(exchange.request, prepared.codec.pieces)

        def send(piece: Piece) -> None:
            event = chunks.piece(piece)
            if event:
                sink.write(event)

        try:
            await exchange.push(send, sink)
            await exchange.close()
        except ApiError as error:
            await exchange.close()
            sink.write(error_event(error))
            return
        if exchange.is_gone:
            return
        flight.end(exchange.choices[0], exchange.usage.cached_tokens)
        ends = b"".join(chunks.last(c.index, c.finish_reason) for c in exchange.choices)
        sink.write(ends + chunks.usage(exchange.usage) + DONE)

    async def _whole(self, exchange: Exchange, prepared: Prepared, flight: Flight) -> bytes:
        request, pieces = exchange.request, prepared.codec.pieces
        whole = [WholeChoice(request, choice.index, pieces) for choice in exchange.choices]
        try:
            async for piece in exchange.pieces():
                whole[piece.index].add(piece)
            await exchange.close()
            if exchange.is_gone:
                raise ClientGone
            flight.end(exchange.choices[0], exchange.usage.cached_tokens)
        finally:
            exchange.abandon()
            flight.end(None)
        choices = [whole[c.index].body(c.finish_reason) for c in exchange.choices]
        return json_answer(request, choices, exchange.usage)


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
