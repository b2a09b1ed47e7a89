"""The way a request goes: ten stages, top to bottom, and nowhere else is their order known.

Comes in: a `Call` (headers as they arrived, the body when it is asked for). Goes out: an answer's
bytes, whole or as events, or an ApiError while nothing has been sent. Each stage's work is in the
module it names; what must be undone when a later stage fails is held by `exchange.Exchange`.
"""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from gateway import wire
from gateway.auth import authenticate
from gateway.errors import ApiError
from gateway.exchange import Clocks, Exchange, TaskSet
from gateway.ledger import prices_of
from gateway.limits import Hold, Limiter
from gateway.metrics import Metrics
from gateway.policy.pricing import cost_nanos
from gateway.prepare import Prepared, Preparer
from gateway.semantic_cache import RESULT_HEADER, CachedAnswer, SemanticCache
from gateway.services import Services
from gateway.stream import DONE, Chunks, UsageFigures, error_event, json_answer
from gateway.types import PreparedRequest, Principal
from registry.ledger import Posting

log = logging.getLogger(__name__)

_ID_PREFIX = {"chat": "chatcmpl-", "completion": "cmpl-"}


class ClientGone(Exception):
    """The client went away before its answer was ready; there is nobody to answer."""


@dataclass(slots=True)
class Call:
    """One HTTP request. `answer_headers` is filled in on the way, for errors too.

    `receive_body` is called once, after auth: nobody without a key makes us hold a body.
    `when_gone` takes what is to be called when the client goes away.
    """

    kind: wire.Kind
    headers: Mapping[str, str]
    receive_body: Callable[[], Awaitable[bytes]]
    http_id: str
    arrived_s: float
    when_gone: Callable[[Callable[[], None]], None]
    answer_headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JsonAnswer:
    """A whole answer."""

    body: bytes


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
        limiter: Limiter,
        cache: SemanticCache,
        metrics: Metrics,
        clocks: Clocks,
    ) -> None:
        self._directory = services.directory
        self._dispatcher = services.dispatcher
        self._ledger = services.ledger
        self._preparer = preparer
        self._limiter = limiter
        self._cache = cache
        self._metrics = metrics
        self._clocks = clocks
        self._closings = TaskSet()

    async def handle(self, call: Call) -> Answer:
        """Serve one request. Raises ApiError, or ClientGone where nobody waits for the answer."""
        now_at = self._clocks.now_at()
        # 1 auth
        principal = authenticate(call.headers, self._directory, now_at)
        # 2 prepare
        asked = wire.decode(call.kind, await call.receive_body())
        request_id = _ID_PREFIX[call.kind] + call.http_id
        prepared = await self._preparer.prepare(asked, principal, call.headers, request_id, now_at)
        # 3 limits
        hold = await self._limiter.reserve(principal, prepared.request, call.answer_headers)
        # 4 semantic cache
        hit = self._look_up(call, prepared, principal)
        if hit is not None:
            return await self._answer_hit(call, prepared.request, principal, hold, hit)
        # 5 fair queue; in the worker: 6 scheduler, 7 model runner, 8 kernels
        exchange = await self._dispatch(call, prepared, principal, hold)
        # 9 stream, 10 ledger
        if asked.stream:
            return EventAnswer(self._events(exchange, principal), exchange.abandon)
        return JsonAnswer(await self._whole(exchange, principal))

    async def drain(self, timeout_s: float) -> None:
        """At shutdown: wait until every request that ended is settled and posted."""
        await self._closings.drain(timeout_s)

    def _look_up(self, call: Call, prepared: Prepared, principal: Principal) -> CachedAnswer | None:
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
        request: PreparedRequest,
        principal: Principal,
        hold: Hold,
        hit: CachedAnswer,
    ) -> Answer:
        """Posted before it is sent, so it needs no open record. Takes a request, no tokens."""
        await hold.settle(0)
        await self._ledger.post(self._hit_posting(call, request, principal, hit))
        usage = UsageFigures(len(request.prompt_token_ids), hit.completion_tokens)
        if not request.stream:
            return JsonAnswer(json_answer(request, hit.text, hit.finish_reason, usage))
        chunks = Chunks(request)
        body = chunks.first() + chunks.text(hit.text) + chunks.last(hit.finish_reason)
        return EventAnswer(_single(body + chunks.usage(usage) + DONE), lambda: None)

    async def _dispatch(
        self, call: Call, prepared: Prepared, principal: Principal, hold: Hold
    ) -> Exchange:
        """Queue it and wait for its first tokens: until then a refusal is an HTTP status."""
        try:
            running = self._dispatcher.run(prepared.request, principal)
        except BaseException:
            await hold.release()
            raise
        exchange = Exchange(
            prepared,
            principal,
            hold,
            running,
            self._ledger,
            self._metrics,
            self._closings,
            self._clocks,
            call.arrived_s,
        )
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

    async def _events(
        self, exchange: Exchange, principal: Principal
    ) -> AsyncGenerator[bytes, None]:
        chunks = Chunks(exchange.request)
        head = chunks.first()
        try:
            async for text in exchange.texts():
                if head or text:
                    yield head + (chunks.text(text) if text else b"")
                    head = b""
            await exchange.close()
        except ApiError as error:
            await exchange.close()
            yield error_event(error)
            return
        if exchange.is_gone:
            return
        self._keep(exchange, principal)
        yield chunks.last(exchange.finish_reason) + chunks.usage(exchange.usage) + DONE

    async def _whole(self, exchange: Exchange, principal: Principal) -> bytes:
        try:
            async for _ in exchange.texts():
                pass
            await exchange.close()
        finally:
            exchange.abandon()
        if exchange.is_gone:
            raise ClientGone
        self._keep(exchange, principal)
        return json_answer(exchange.request, exchange.text, exchange.finish_reason, exchange.usage)

    def _keep(self, exchange: Exchange, principal: Principal) -> None:
        if exchange.request.cache_mode == "exact" and exchange.is_complete:
            answer = CachedAnswer(
                exchange.text, exchange.finish_reason, exchange.usage.completion_tokens
            )
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


async def _single(event: bytes) -> AsyncGenerator[bytes, None]:
    yield event
