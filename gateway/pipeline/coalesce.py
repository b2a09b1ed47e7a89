"""Stage 4 of what is generated: answers from the cache, and from requests that are under way.

Comes in: an active request that has its limits. Goes out: a Hit,
or an `InFlight` with which the request goes on to the queue and in the end tells what became of it.

Coalescing. Only requests that asked for the cache take part (key or header), and of them those that
the cache would answer: the same tenant, the same of everything an answer depends on, greedy or with
a seed. The first of them that is not in the cache goes to the queue and leads; whoever asks the
same meanwhile, and not as a stream, waits for its answer and is billed a hit: what it would have
got a moment later. Where the leader comes to nothing (refused, failed, its client gone) the others
go on by themselves, each once: nobody is answered with another's failure, and nobody waits twice. A
stream may lead, but does not wait: its first token would come later than alone. Each gateway
process coalesces what came to it. Nobody follows a leader that set out before an invalidation that
it comes after itself.

A hit is an object, or a stream in the shapes that a model's would have. It takes a request and the
price of reading its tokens, and no tokens of any limit. Nothing of it reaches the fair queue, so no
model becomes more popular by it.
"""

import asyncio
from collections.abc import Iterable, Iterator

from gateway.answer.choice import Choice, Piece, finish_reason
from gateway.answer.encoder import AnswerFormat, ChoiceEnd, UsageFigures
from gateway.api.tools.output_parser import OutputParser
from gateway.cache.cache_request import ENTRY_HEADER, RESULT_HEADER, CachePlace, place_of
from gateway.cache.lookup import AnswerCache, Hit, Made, Miss
from gateway.cache.policy.cache_rule import OFF, CacheDecision, CachePlan
from gateway.cache.types import CachedAnswer
from gateway.errors import DEADLINE_EXCEEDED, ApiError, ClientGone
from gateway.metrics.cache_metrics import CacheMetrics
from gateway.metrics.metrics import Metrics
from gateway.pipeline.active_request import ActiveRequest, TaskSet
from gateway.prepare.encode_prepare import EncodePrepared
from gateway.prepare.prepare import Prepared
from gateway.pricing.policy.pricing import Consumption, cost_of
from gateway.types import Answer, Call, EventAnswer, JsonAnswer, PreparedRequest, Sink

MAX_LANDINGS = 256
"""Answers being compared and kept at a time; beyond it they are not."""
CHUNK_CHARS = 24
MAX_CHUNKS = 256
"""Of a hit as a stream. A longer answer is replayed in larger pieces."""


class InFlight:
    """A request on its way whose answer may be worth keeping. Without a cache to keep it in, none
    of it does anything."""

    def __init__(
        self,
        hits: "CacheHits | None" = None,
        request: PreparedRequest | None = None,
        key_id: str = "",
        place: CachePlace | None = None,
        plan: CachePlan = OFF,
        miss: Miss | None = None,
    ) -> None:
        self._hits = hits
        self._waiting: dict[asyncio.Future[Hit | None], None] = {}
        self.request = request
        self.key_id = key_id
        self.place = place
        self.plan = plan
        self.miss = miss or Miss()

    def wait(self) -> "asyncio.Future[Hit | None]":
        """Done when it has ended. Who cancels it is forgotten."""
        waiter: asyncio.Future[Hit | None] = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = None
        waiter.add_done_callback(self._waiting.pop)
        return waiter

    def end(self, choice: Choice | None, cached_tokens: int = 0) -> None:
        """What it came to: its one choice, which has ended and of whose prompt so many tokens cost
        less; None: nothing for others. The first word counts."""
        hits, self._hits = self._hits, None
        if hits is None:
            return
        hit = hits.landed(self, choice, cached_tokens)
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(hit)


class CacheHits:
    """One object per gateway process."""

    def __init__(
        self,
        cache: AnswerCache,
        metrics: Metrics,
        cache_metrics: CacheMetrics,
        tasks: TaskSet,
        timeout_s: float,
        least_logprob: float = 0.0,
    ) -> None:
        """`timeout_s`: how long one may wait for another's answer; `least_logprob`: the setting."""
        self._timeout_s = timeout_s
        self._least_logprob = least_logprob
        self._cache = cache
        self._metrics = metrics
        self._cache_metrics = cache_metrics
        self._tasks = tasks
        self._num_landing = 0
        self._flights: dict[bytes, InFlight] = {}

    async def find(
        self, active: ActiveRequest, prepared: Prepared | EncodePrepared, spelled: AnswerFormat
    ) -> Answer | InFlight:
        """The answer, where there is one or somebody is just being given it. Raises ClientGone,
        or ApiError where that takes too long."""
        if isinstance(prepared, EncodePrepared) or prepared.turn is None:
            self._note(active.call, prepared.cache.decision, None)
            return InFlight()
        found = await self._find(active, prepared)
        if isinstance(found, Hit):
            self._note(active.call, "lookup", found)
            return await self._serve(active, prepared, found, spelled)
        self._note(active.call, "lookup", None)
        active.at_end.callback(found.end, None)
        return found

    async def _serve(
        self, active: ActiveRequest, prepared: Prepared, hit: Hit, spelled: AnswerFormat
    ) -> Answer:
        """The answer of a hit; its posting is durable. Raises ApiError."""
        request = prepared.request
        cost_nanos = await active.post_hit(hit.answer.completion_tokens)
        if hit.entry is not None:
            saved = max(0, hit.entry.cost_nanos - cost_nanos)
            self._tasks.spawn(self._cache.used(hit.entry, saved))
        parser = prepared.new_parser()
        # What was kept is text, which does not say how many of its tokens were reasoning.
        reasoned = 0 if parser.reasoning_state == "done" else None
        answer = hit.answer
        usage = UsageFigures(request.num_prompt_tokens, answer.completion_tokens, 0, reasoned)
        if not request.stream:
            whole = spelled.whole(prepared)
            for piece in _pieces(parser, [answer.text]):
                whole.add(piece)
            end = ChoiceEnd(0, finish_reason(answer.finish_reason, parser.num_calls))
            return JsonAnswer([whole.whole([end], usage)])
        stream = spelled.stream(prepared, lambda: usage)
        events = [stream.piece(piece) for piece in _pieces(parser, _cut(answer.text))]
        end = ChoiceEnd(0, finish_reason(answer.finish_reason, parser.num_calls))
        body = b"".join(events) + stream.end([end], usage)

        async def run(sink: Sink) -> None:
            sink.write(body)

        return EventAnswer(run)

    def _note(self, call: Call, decision: CacheDecision, hit: Hit | None) -> None:
        """Tell the client, and count."""
        if decision == "off":
            return
        result = "bypass" if decision == "bypass" else "hit" if hit else "miss"
        call.answer_headers[RESULT_HEADER] = result
        if hit is not None:
            call.answer_headers[ENTRY_HEADER] = hit.entry_id
        self._metrics.cache_requests.labels(result).inc()

    def landed(self, flight: InFlight, choice: Choice | None, cached_tokens: int) -> Hit | None:
        """A flight has ended. Returns what those who wait for it get."""
        assert flight.place is not None
        assert flight.request is not None
        key = flight.place.exact_key
        if self._flights.get(key) is flight:
            del self._flights[key]
        answer = None if choice is None else self._worth_keeping(choice, flight.place)
        if choice is None or answer is None:
            return None
        request = flight.request
        made = Made(
            answer,
            choice.finish_reason != "tool_calls",
            request.request_id,
            flight.key_id,
            _cost_nanos(request, cached_tokens, answer),
        )
        if self._num_landing < MAX_LANDINGS:
            self._num_landing += 1
            self._tasks.spawn(self._land(flight, flight.place, made))
        return Hit(answer, request.request_id) if flight.plan.keeps else None

    async def _land(self, flight: InFlight, place: CachePlace, made: Made) -> None:
        try:
            await self._cache.landed(place, flight.plan, flight.miss, made)
        finally:
            self._num_landing -= 1

    async def _find(self, active: ActiveRequest, prepared: Prepared) -> Hit | InFlight:
        request, plan, principal = prepared.request, prepared.cache, active.principal
        assert prepared.turn is not None
        embedder = self._cache.embedder.revision
        place = place_of(principal.tenant_id, request, prepared.turn, plan.drawn, embedder)
        found = await self._cache.exact(place, plan)
        kind = "exact"
        if isinstance(found, Miss) and not self._leader(place, prepared, found):
            found = await self._cache.alike(place, plan, found)
            kind = "semantic"
        if isinstance(found, Miss):
            leader = self._leader(place, prepared, found)
            hit = None if leader is None else await self._follow(leader, active)
            if hit is None:
                flight = InFlight(self, request, principal.key_id, place, plan, found)
                self._flights.setdefault(place.exact_key, flight)
                return flight
            found, kind = hit, "coalesced"
            self._metrics.coalesced.inc()
        self._cache_metrics.hits.labels(kind).inc()
        return found

    def _leader(self, place: CachePlace, prepared: Prepared, miss: Miss) -> InFlight | None:
        plan = prepared.cache
        if prepared.request.stream or not plan.reads or plan.mode == "shadow":
            return None
        leader = self._flights.get(place.exact_key)
        if leader is None or not leader.plan.keeps or leader.miss.epoch != miss.epoch:
            return None
        # Who is of another class does not wait for one of class batch.
        waits = leader.request is not None and leader.request.is_batch
        return None if waits and not prepared.request.is_batch else leader

    async def _follow(self, leader: InFlight, active: ActiveRequest) -> Hit | None:
        waiter = leader.wait()

        def gone() -> None:
            waiter.cancel()

        active.call.when_gone(gone)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await waiter
        except TimeoutError as error:
            message = "the request exceeded the time limit of this server: ask for fewer tokens"
            raise ApiError(DEADLINE_EXCEEDED, message) from error
        except asyncio.CancelledError:
            if waiter.cancelled() and not _is_being_cancelled():
                raise ClientGone from None
            raise

    def _worth_keeping(self, choice: Choice, place: CachePlace) -> CachedAnswer | None:
        """Its answer, if it is whole and nothing about it is doubtful."""
        why = doubt(choice, place.names_length, self._least_logprob)
        if why:
            self._cache_metrics.not_kept.labels(why).inc()
            return None
        reason = "length" if choice.finish_reason == "length" else "stop"
        return CachedAnswer(choice.text, reason, choice.num_tokens)


def doubt(choice: Choice, names_length: bool, least_logprob: float) -> str:
    """Why an answer is not for others, "" where it is. One that is cut where its caller wanted it
    to be (`names_length`) is whole; one that is cut by our bounds is not. Where a `least_logprob`
    is set (< 0), one that says nothing of its own is doubtful, too."""
    if not choice.is_complete:
        return "broken off"
    if choice.finish_reason == "length" and not names_length:
        return "truncated"
    if not choice.num_tokens:
        return "empty"
    mean = choice.mean_logprob
    is_sure = mean is not None and mean >= least_logprob
    return "" if is_sure or not least_logprob else "doubtful"


def _cost_nanos(request: PreparedRequest, cached_tokens: int, answer: CachedAnswer) -> int:
    """What it costs to make it; seconds of service are not known here."""
    num_prompt = request.num_prompt_tokens
    used = Consumption(num_prompt, min(cached_tokens, num_prompt), answer.completion_tokens)
    return cost_of(request.rates, "finished", used).cost_nanos


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _cut(text: str) -> Iterator[str]:
    size = max(CHUNK_CHARS, -(-len(text) // MAX_CHUNKS))
    return (text[at : at + size] for at in range(0, len(text), size))


def _pieces(parser: OutputParser, texts: Iterable[str]) -> Iterator[Piece]:
    """As the model's text comes: piece by piece through the parser, and what it held back."""
    for text in texts:
        yield Piece(0, parser.feed(text))
    yield Piece(0, parser.flush())
