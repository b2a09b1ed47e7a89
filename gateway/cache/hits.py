"""Stage 4 of what is generated: answers from the cache, and from requests that are under way.

Comes in: an admitted request. Goes out: a Hit, which replay.py serves, or a `Flight` with which the
request goes on to the queue and in the end tells what became of it.

Coalescing. Only requests that asked for the cache take part (key or header), and of them those that
the cache would answer: the same tenant, the same of everything an answer depends on, greedy or with
a seed. The first of them that is not in the cache goes to the queue and leads; whoever asks the
same meanwhile, and not as a stream, waits for its answer and is billed a hit: what it would have
got a moment later. Where the leader comes to nothing (refused, failed, its client gone) the others
go on by themselves, each once: nobody is answered with another's failure, and nobody waits twice. A
stream may lead, but does not wait: its first token would come later than alone. Each gateway
process coalesces what came to it. Nobody follows a leader that set out before an invalidation that
it comes after itself.
"""

import asyncio

from gateway.answer.choice import Choice
from gateway.cache.asks import ENTRY_HEADER, RESULT_HEADER
from gateway.cache.lookup import AnswerCache, Hit, Made, Miss
from gateway.cache.scope import Place, place_of
from gateway.cache.types import CachedAnswer
from gateway.call import Call
from gateway.errors import DEADLINE_EXCEEDED, ApiError, ClientGone
from gateway.ledger.settlement import TaskSet
from gateway.limits.limits import Hold
from gateway.metrics.cache_metrics import CacheMetrics
from gateway.metrics.metrics import Metrics
from gateway.policy.cache_rule import OFF, CacheDecision, CachePlan
from gateway.policy.pricing import Consumption, cost_of
from gateway.prepare.prepare import Prepared
from gateway.types import PreparedRequest, Principal

MAX_LANDINGS = 256
"""Answers being compared and kept at a time; beyond it they are not."""


class Flight:
    """A request on its way whose answer may be worth keeping. Without a cache to keep it in, none
    of it does anything."""

    def __init__(
        self,
        hits: "CacheHits | None" = None,
        request: PreparedRequest | None = None,
        principal: Principal | None = None,
        place: Place | None = None,
        plan: CachePlan = OFF,
        miss: Miss | None = None,
    ) -> None:
        self._hits = hits
        self._waiting: dict[asyncio.Future[Hit | None], None] = {}
        self.request = request
        self.principal = principal
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
        self._flights: dict[bytes, Flight] = {}

    async def find(
        self, call: Call, prepared: Prepared, principal: Principal, hold: Hold
    ) -> Hit | Flight:
        """The answer, where there is one or somebody is just being given it. Raises ClientGone,
        or ApiError where that takes too long; the hold is released then."""
        if prepared.turn is None:
            self.note(call, prepared.cache.decision, None)
            return Flight()
        try:
            found = await self._find(call, prepared, principal)
        except BaseException:
            await hold.release()
            raise
        self.note(call, "lookup", found if isinstance(found, Hit) else None)
        return found

    def note(self, call: Call, decision: CacheDecision, hit: Hit | None) -> None:
        """Tell the client, and count."""
        if decision == "off":
            return
        result = "bypass" if decision == "bypass" else "hit" if hit else "miss"
        call.answer_headers[RESULT_HEADER] = result
        if hit is not None:
            call.answer_headers[ENTRY_HEADER] = hit.entry_id
        self._metrics.cache_requests.labels(result).inc()

    def landed(self, flight: Flight, choice: Choice | None, cached_tokens: int) -> Hit | None:
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
            flight.principal.key_id if flight.principal is not None else "",
            _cost_nanos(request, cached_tokens, answer),
        )
        if self._num_landing < MAX_LANDINGS:
            self._num_landing += 1
            self._tasks.spawn(self._land(flight, flight.place, made))
        return Hit(answer, request.request_id) if flight.plan.keeps else None

    async def _land(self, flight: Flight, place: Place, made: Made) -> None:
        try:
            await self._cache.landed(place, flight.plan, flight.miss, made)
        finally:
            self._num_landing -= 1

    async def _find(self, call: Call, prepared: Prepared, principal: Principal) -> Hit | Flight:
        request, plan = prepared.request, prepared.cache
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
            hit = None if leader is None else await self._follow(leader, call)
            if hit is None:
                flight = Flight(self, request, principal, place, plan, found)
                self._flights.setdefault(place.exact_key, flight)
                return flight
            found, kind = hit, "coalesced"
            self._metrics.coalesced.inc()
        self._cache_metrics.hits.labels(kind).inc()
        return found

    def _leader(self, place: Place, prepared: Prepared, miss: Miss) -> Flight | None:
        plan = prepared.cache
        if prepared.request.stream or not plan.reads or plan.mode == "shadow":
            return None
        leader = self._flights.get(place.exact_key)
        fits = leader is not None and leader.plan.keeps and leader.miss.epoch == miss.epoch
        return leader if fits else None

    async def _follow(self, leader: Flight, call: Call) -> Hit | None:
        waiter = leader.wait()

        def gone() -> None:
            waiter.cancel()

        call.when_gone(gone)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await waiter
        except TimeoutError as error:
            message = "the request took longer than this server allows: ask for fewer tokens"
            raise ApiError(DEADLINE_EXCEEDED, message) from error
        except asyncio.CancelledError:
            if waiter.cancelled() and not _is_being_cancelled():
                raise ClientGone from None
            raise

    def _worth_keeping(self, choice: Choice, place: Place) -> CachedAnswer | None:
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
    num_prompt = len(request.prompt_token_ids)
    used = Consumption(num_prompt, min(cached_tokens, num_prompt), answer.completion_tokens)
    return cost_of(request.rates, "finished", used).cost_nanos


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
