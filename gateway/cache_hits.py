"""Stage 4 of what is generated: answers from the cache, and from requests that are under way.

Comes in: an admitted request. Goes out: its answer, posted as a hit, or a `Flight` with which the
request goes on to the queue and in the end tells what became of it.

Coalescing. Only requests that asked for the cache take part (key or header), and of them those that
the cache would answer: the same tenant, the same of everything an answer depends on, greedy or with
a seed. The first of them that is not in the cache goes to the queue and leads; whoever asks the
same meanwhile, and not as a stream, waits for its answer and is billed a hit: what it would have
got a moment later. Where the leader comes to nothing (refused, failed, its client gone) the others
go on by themselves, each once: nobody is answered with another's failure, and nobody waits twice. A
stream may lead, but does not wait: its first token would come later than alone. Each gateway
process coalesces what came to it.
"""

import asyncio

from gateway.answer.answer import DONE, Chunks, UsageFigures, WholeChoice, json_answer
from gateway.answer.choice import Piece
from gateway.answer.tool_deltas import finish_reason
from gateway.call import Answer, Call, EventAnswer, JsonAnswer
from gateway.errors import DEADLINE_EXCEEDED, ApiError, ClientGone
from gateway.ledger.settlement import Clocks
from gateway.limits.limits import Hold
from gateway.metrics.metrics import Metrics
from gateway.policy.cache_rule import CacheDecision
from gateway.policy.pricing import Consumption, cost_of
from gateway.prepare.prepare import Prepared
from gateway.semantic_cache import RESULT_HEADER, CachedAnswer, SemanticCache, key_of
from gateway.services import UsageLedger
from gateway.types import PreparedRequest, Principal, Sink
from registry.ledger import Posting


class Flight:
    """A request on its way whose answer may be worth keeping. Without a cache to keep it in, none
    of it does anything."""

    def __init__(self, hits: "CacheHits | None" = None, key: bytes = b"") -> None:
        self._hits = hits
        self._key = key
        self._waiting: dict[asyncio.Future[CachedAnswer | None], None] = {}

    def wait(self) -> "asyncio.Future[CachedAnswer | None]":
        """Done when it has ended. Who cancels it is forgotten."""
        waiter: asyncio.Future[CachedAnswer | None] = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = None
        waiter.add_done_callback(self._waiting.pop)
        return waiter

    def end(self, answer: CachedAnswer | None) -> None:
        """What it came to, None: nothing for others. The first word counts."""
        hits, self._hits = self._hits, None
        if hits is None:
            return
        hits.landed(self._key, self, answer)
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(answer)


class CacheHits:
    """One object per gateway process."""

    def __init__(
        self,
        cache: SemanticCache,
        ledger: UsageLedger,
        metrics: Metrics,
        clocks: Clocks,
        timeout_s: float,
    ) -> None:
        """`timeout_s`: how long one may wait for another's answer."""
        self._timeout_s = timeout_s
        self._cache = cache
        self._ledger = ledger
        self._metrics = metrics
        self._clocks = clocks
        self._flights: dict[bytes, Flight] = {}

    async def find(
        self, call: Call, prepared: Prepared, principal: Principal, hold: Hold
    ) -> CachedAnswer | Flight:
        """The answer, where there is one or somebody is just being given it. Raises ClientGone,
        or ApiError where that takes too long."""
        if prepared.cache != "lookup":
            self.note(call, prepared.cache, None)
            return Flight()
        key = key_of(principal.tenant_id, prepared.request)
        hit = self._cache.find(key)
        leader = self._flights.get(key)
        if hit is None and leader is not None and not prepared.request.stream:
            hit = await self._follow(leader, call, hold)
        self.note(call, prepared.cache, hit)
        if hit is not None:
            return hit
        flight = Flight(self, key)
        self._flights.setdefault(key, flight)
        return flight

    def note(self, call: Call, decision: CacheDecision, hit: CachedAnswer | None) -> None:
        """Tell the client, and count."""
        if decision != "off":
            result = "bypass" if decision == "bypass" else "hit" if hit else "miss"
            call.answer_headers[RESULT_HEADER] = result
            self._metrics.cache_requests.labels(result).inc()

    def landed(self, key: bytes, flight: Flight, answer: CachedAnswer | None) -> None:
        """A flight has ended."""
        if self._flights.get(key) is flight:
            del self._flights[key]
        if answer is not None:
            self._cache.keep(key, answer)

    async def answer(
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
        posting = self._posting(call, request, principal, hit)
        try:
            await self._ledger.post(posting)
        except Exception:  # Refused: it is not served, and nothing is owed.
            await hold.release()
            raise
        finally:  # Who is cancelled here is posted all the same.
            await hold.settle(0, 0, posting.cost_nanos, posting.posted_at)
        usage = UsageFigures(len(request.prompt_token_ids), hit.completion_tokens)
        if not request.stream:
            whole = WholeChoice(request, 0, pieces)
            whole.add(piece)
            return JsonAnswer([json_answer(request, [whole.body(reason)], usage)])
        chunks = Chunks(request, pieces)
        body = chunks.piece(piece) + chunks.last(0, reason) + chunks.usage(usage) + DONE

        async def run(sink: Sink) -> None:
            sink.write(body)

        return EventAnswer(run)

    async def _follow(self, leader: Flight, call: Call, hold: Hold) -> CachedAnswer | None:
        waiter = leader.wait()

        def gone() -> None:
            waiter.cancel()

        call.when_gone(gone)
        try:
            async with asyncio.timeout(self._timeout_s):
                hit = await waiter
        except TimeoutError as error:
            await hold.release()
            message = "the request took longer than this server allows: ask for fewer tokens"
            raise ApiError(DEADLINE_EXCEEDED, message) from error
        except asyncio.CancelledError:
            await hold.release()
            if waiter.cancelled() and not _is_being_cancelled():
                raise ClientGone from None
            raise
        if hit is not None:
            self._metrics.coalesced.inc()
        return hit

    def _posting(
        self, call: Call, request: PreparedRequest, principal: Principal, hit: CachedAnswer
    ) -> Posting:
        num_prompt = len(request.prompt_token_ids)
        duration_s = self._clocks.now_s() - call.arrived_s
        used = Consumption(num_prompt, 0, hit.completion_tokens)
        cost = cost_of(request.rates, "cache_hit", used)
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
            cost_nanos=cost.cost_nanos,
            service_s=0.0,
            queue_s=0.0,
            ttft_s=duration_s,
            duration_s=duration_s,
            posted_at=self._clocks.now_at(),
            arrived_at=request.rates.at,
            cached_nanos=cost.cached_nanos,
            list_nanos=cost.list_nanos,
        )


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
