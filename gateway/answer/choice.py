"""One answer of a request that may ask for several (`n`), and their pieces in the order they come.

Part of stage 9. Comes in: a worker's events for one choice. Goes out: pieces: what a parser made of
the text, with the log-probabilities of its tokens. Who pays, and what becomes of a request whose
choices end differently, is exchange.py's; bytes are answer.py's.

The worker knows choices as requests of their own, named by `joint.choice_id`; they share the
prompt through its prefix cache.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from engine.protocol import Finish, Usage
from gateway.answer.detokenize import PieceTable, ScoredToken, TextStream
from gateway.answer.output_parser import Event, OutputParser
from gateway.answer.tool_deltas import finish_reason
from gateway.errors import (
    DEADLINE_EXCEEDED,
    SERVER_ERROR,
    UNAVAILABLE,
    ApiError,
    WorkerLost,
    unenforceable,
)
from gateway.types import PreparedRequest, RunningRequest, TokenEvent

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""What a client is told to wait whose worker was lost; the queue holds it until the restart."""


class Piece(msgspec.Struct, frozen=True):
    """What is new of one choice. `prompt` comes once, where the prompt's scores were asked for."""

    index: int
    events: Sequence[Event] = ()
    scored: Sequence[ScoredToken] = ()
    prompt: Sequence[ScoredToken] = ()


class Choice:
    """Used by one consumer. `before_tokens()` is awaited before the first are used, `on_tokens
    (choice, count)` is told of all."""

    def __init__(
        self,
        index: int,
        request: PreparedRequest,
        running: RunningRequest,
        pieces: PieceTable,
        parser: OutputParser,
        before_tokens: Callable[[], Awaitable[None]],
        on_tokens: Callable[["Choice", int], None],
    ) -> None:
        self.index = index
        self.running = running
        self.finish: Finish | None = None
        self.failure: ApiError | None = None
        self.last_token_s: float | None = None
        self._request = request
        self._pieces = pieces
        self._parser = parser
        self._before_tokens = before_tokens
        self._on_tokens = on_tokens
        self._events = aiter(running)
        self._texts: list[str] = []
        self._prompt_told = False
        self._sum_logprobs, self._num_judged = 0.0, 0
        self._text = TextStream(
            pieces,
            request.stop_strings,
            request.stop_token_ids,
            keep_leading_space=request.kind == "completion" or request.continues_text,
            min_tokens=request.sampling.min_tokens,
            shown_ids=request.shown_token_ids,
        )

    @property
    def text(self) -> str:
        """The model's text so far, before any parser."""
        return "".join(self._texts)

    @property
    def num_tokens(self) -> int:
        """Tokens up to the stop, as they are told and billed."""
        return self._text.num_tokens

    @property
    def mean_logprob(self) -> float | None:
        """How sure the model was of its tokens, those behind a stop string included; None where
        nobody asked."""
        return self._sum_logprobs / self._num_judged if self._num_judged else None

    @property
    def has_ended(self) -> bool:
        """Nothing more will be said."""
        return self._text.stopped or self.finish is not None or self.failure is not None

    @property
    def is_complete(self) -> bool:
        """The whole text has been made."""
        if self._text.stopped:
            return True
        if self.failure is not None or self.running.overflowed:
            return False
        return self.finish is not None and self.finish.reason in ("stop", "length")

    @property
    def has_spent_form(self) -> bool:
        """It ended because its form cannot be held, or no longer."""
        return self.finish is not None and self.finish.reason == "refused"

    @property
    def finish_reason(self) -> str:
        """OpenAI's word for how the text ended."""
        stopped = self._text.stopped or (self.finish is not None and self.finish.reason == "stop")
        if self._request.only_prompt or not stopped:
            return "length"
        return finish_reason("stop", self._parser.num_calls)

    @property
    def usage(self) -> Usage:
        """The worker's word on what was used; our own count where there is none."""
        if self.finish is not None:
            return self.finish.usage
        return Usage(len(self._request.prompt_token_ids), 0, self.num_tokens, 0.0)

    async def next(self, is_gone: Callable[[], bool]) -> Piece:
        """What comes next. Raises ApiError where we fail it."""
        try:
            event = await anext(self._events)
            if event.token_ids:
                await self._before_tokens()
            return self._take(event, is_gone)
        except ApiError as error:
            self.failure = error
            raise
        except (WorkerLost, StopAsyncIteration) as error:
            self.failure = worker_was_lost()
            raise self.failure from error

    def take(self, is_gone: Callable[[], bool]) -> Piece | None:
        """What comes next if it is there, after a first `next`. Raises as that does."""
        try:
            event = self.running.take()
            return None if event is None else self._take(event, is_gone)
        except ApiError as error:
            self.failure = error
            raise
        except WorkerLost as error:
            self.failure = worker_was_lost()
            raise self.failure from error

    async def take_last_event(self) -> None:
        """Wait for the finish, so that what was used is known. A lost worker leaves our count."""
        if self.finish is not None:
            return
        self.running.abort()
        try:
            async for event in self._events:
                self.finish = event.finish or self.finish
        except (ApiError, WorkerLost) as error:
            log.info("request %s: no last event: %s", self._request.request_id, error)

    def let_go(self) -> None:
        """No event comes any more. Whoever was told of them has this choice: a circle, which keeps
        its prompt until the collector finds it."""
        self._before_tokens, self._on_tokens = _never_again, _untold

    def _take(self, event: TokenEvent, is_gone: Callable[[], bool]) -> Piece:
        text = ""
        if event.token_ids:
            self._on_tokens(self, len(event.token_ids))
            if not self._request.only_prompt:
                shown = event.logprobs if self._request.logprobs >= 0 else ()
                text = self._text.push(event.token_ids, shown)
        if self._request.is_judged:
            self._sum_logprobs += sum(score.logprob for score in event.logprobs)
            self._num_judged += len(event.logprobs)
        if event.finish is not None:
            self.finish = event.finish
            if not self._text.stopped and event.finish.reason not in ("stop", "length"):
                check_end(event.finish, self._request, is_gone(), self.running.overflowed)
            text += self._text.finish()
        elif self._text.stopped:
            self.running.abort()
        self._texts.append(text)
        events = self._parser.feed(text) if text else []
        has_ended = self.has_ended
        if has_ended:
            events = [*events, *self._parser.flush()]
        if self._request.logprobs < 0:
            return Piece(self.index, events)
        scored = self._text.take_scored(has_ended)
        return Piece(self.index, events, scored, self._prompt(event))

    def _prompt(self, event: TokenEvent) -> Sequence[ScoredToken]:
        """With the first tokens. A prompt of one token has no scores and is told all the same."""
        if self._prompt_told or self._request.prompt_logprobs < 0 or not event.token_ids:
            return ()
        self._prompt_told = True
        return score_prompt(self._pieces, self._request.prompt_token_ids, event)


def check_end(
    finish: Finish, request: PreparedRequest, is_gone: bool, overflowed: bool = False
) -> None:
    """Raises ApiError where the end is neither the model's nor the client's doing."""
    if finish.reason == "error":
        name = request.model.name
        log.error("request %s: model %s failed: %s", request.request_id, name, finish.error)
        raise ApiError(SERVER_ERROR, "the model failed while answering: send it again")
    if finish.reason == "refused":
        raise unenforceable(f"from here on it costs too much to hold ({finish.error})")
    if finish.reason == "timeout":
        message = "the request took longer than this server allows: ask for fewer tokens"
        raise ApiError(DEADLINE_EXCEEDED, message)
    if overflowed:
        raise ApiError(SERVER_ERROR, "the answer was broken off: it was not read in time")
    if not is_gone:
        raise ApiError(UNAVAILABLE, "the server is stopping: send the request again")


def worker_was_lost() -> ApiError:
    """The answer to a request whose worker died at the wrong moment."""
    message = "the worker that was answering was lost: send the request again"
    return ApiError(UNAVAILABLE, message, retry_after_s=RETRY_S)


def score_prompt(
    pieces: PieceTable, token_ids: Sequence[int], event: TokenEvent
) -> list[ScoredToken]:
    """A prompt's tokens with their places in its text. Nothing precedes the first."""
    stream = TextStream(pieces, (), [])
    places = []
    at = 0
    for token_id in token_ids:
        places.append((token_id, at))
        at += len(stream.push([token_id]))
    scores = [None, *event.prompt_logprobs]
    return [
        ScoredToken(token_id, start, score)
        for (token_id, start), score in zip(places, scores, strict=True)
    ]


class Merged:
    """The pieces of all choices, first come first served; each choice's own in their order.

    One choice is read directly. Several are waited for by a task each, and a choice is read again
    only when its piece was taken: a client that does not read fills the worker's streams, where the
    bound is.
    """

    def __init__(self, choices: Sequence[Choice], is_gone: Callable[[], bool]) -> None:
        self._choices = choices
        self._is_gone = is_gone
        self._waiting: dict[int, asyncio.Task[Piece]] = {}
        self._ready: deque[asyncio.Task[Piece]] = deque()

    @property
    def is_over(self) -> bool:
        """Every choice has ended and been read."""
        untaken = self._ready or self._waiting
        return not untaken and all(choice.has_ended for choice in self._choices)

    async def next(self) -> Piece:
        """The next piece there is. Raises ApiError when a choice fails."""
        if len(self._choices) == 1:
            return await self._choices[0].next(self._is_gone)
        if not self._ready:
            await self._wait()
        return self._ready.popleft().result()

    async def stop(self) -> None:
        """Read no more; the choices' events are free for others afterwards."""
        tasks = [*self._waiting.values(), *self._ready]
        if not tasks:
            return
        self._waiting.clear()
        self._ready.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def let_go(self) -> None:
        """As `Choice.let_go`, of all of them."""
        self._is_gone = _gone
        for choice in self._choices:
            choice.let_go()

    async def _wait(self) -> None:
        for choice in self._choices:
            if choice.index not in self._waiting and not choice.has_ended:
                task = asyncio.create_task(choice.next(self._is_gone))
                self._waiting[choice.index] = task
        await asyncio.wait(self._waiting.values(), return_when=asyncio.FIRST_COMPLETED)
        for index in sorted(index for index, task in self._waiting.items() if task.done()):
            self._ready.append(self._waiting.pop(index))


async def _never_again() -> None:
    raise RuntimeError("tokens of an exchange that is closed")


def _untold(choice: Choice, num_tokens: int) -> None:
    pass


def _gone() -> bool:
    return True
