"""A hit becomes an answer: as an object, or as a stream in the shapes that a model's would have.

Comes in: a Hit of hits.py and the request that it answers. Goes out: an Answer whose posting is
durable. It takes a request and the price of reading its tokens, and no tokens of any limit. Nothing
of it reaches the fair queue, so no model becomes more popular by it.
"""

from collections.abc import Iterator

from gateway.answer.answer import DONE, Chunks, UsageFigures, WholeChoice, json_answer
from gateway.answer.choice import Piece
from gateway.answer.output_parser import OutputParser
from gateway.answer.tool_deltas import finish_reason
from gateway.cache.lookup import AnswerCache, Hit
from gateway.call import Answer, Call, EventAnswer, JsonAnswer
from gateway.ledger.settlement import Clocks, TaskSet
from gateway.limits.limits import Hold
from gateway.policy.pricing import Consumption, cost_of
from gateway.prepare.prepare import Prepared
from gateway.services import UsageLedger
from gateway.types import PreparedRequest, Principal, Sink
from registry.ledger import Posting

CHUNK_CHARS = 24
MAX_CHUNKS = 256
"""A longer answer is replayed in larger pieces."""


class Replay:
    """One object per gateway process."""

    def __init__(
        self, cache: AnswerCache, ledger: UsageLedger, clocks: Clocks, tasks: TaskSet
    ) -> None:
        self._cache = cache
        self._ledger = ledger
        self._clocks = clocks
        self._tasks = tasks

    async def answer(
        self, call: Call, prepared: Prepared, principal: Principal, hold: Hold, hit: Hit
    ) -> Answer:
        """Posted before it is sent, so it needs no open record."""
        request, pieces = prepared.request, prepared.codec.pieces
        posting = self._posting(call, request, principal, hit)
        try:
            await self._ledger.post(posting)
        except Exception:  # Refused: it is not served, and nothing is owed.
            await hold.release()
            raise
        finally:  # Who is cancelled here is posted all the same.
            await hold.settle(0, 0, posting.cost_nanos, posting.posted_at)
        if hit.entry is not None:
            saved = max(0, hit.entry.cost_nanos - posting.cost_nanos)
            self._tasks.spawn(self._cache.used(hit.entry, saved))
        usage = UsageFigures(len(request.prompt_token_ids), hit.answer.completion_tokens)
        parser = prepared.new_parser()
        if not request.stream:
            whole = WholeChoice(request, 0, pieces)
            for piece in _pieces(parser, [hit.answer.text]):
                whole.add(piece)
            reason = finish_reason(hit.answer.finish_reason, parser.num_calls)
            return JsonAnswer([json_answer(request, [whole.body(reason)], usage)])
        chunks = Chunks(request, pieces)
        events = [chunks.piece(piece) for piece in _pieces(parser, _cut(hit.answer.text))]
        reason = finish_reason(hit.answer.finish_reason, parser.num_calls)
        body = b"".join(events) + chunks.last(0, reason) + chunks.usage(usage) + DONE

        async def run(sink: Sink) -> None:
            sink.write(body)

        return EventAnswer(run)

    def _posting(
        self, call: Call, request: PreparedRequest, principal: Principal, hit: Hit
    ) -> Posting:
        num_prompt = len(request.prompt_token_ids)
        duration_s = self._clocks.now_s() - call.arrived_s
        used = Consumption(num_prompt, 0, hit.answer.completion_tokens)
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
            completion_tokens=hit.answer.completion_tokens,
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


def _cut(text: str) -> Iterator[str]:
    size = max(CHUNK_CHARS, -(-len(text) // MAX_CHUNKS))
    return (text[at : at + size] for at in range(0, len(text), size))


def _pieces(parser: OutputParser, texts: "Iterator[str] | list[str]") -> Iterator[Piece]:
    """As the model's text comes: piece by piece through the parser, and what it held back."""
    for text in texts:
        yield Piece(0, parser.feed(text))
    yield Piece(0, parser.flush())
