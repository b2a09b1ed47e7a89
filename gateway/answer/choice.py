"""One choice of a request for text: the worker's events become pieces.

Part of stage 9. Comes in: the workers' events. Goes out: pieces: what a parser made of the text,
with the log-probabilities of its tokens. All choices of a request are text_parts.py's; bytes are
answer.py's.
"""

import logging
from collections.abc import Sequence
from typing import Protocol

import msgspec

from engine.protocol import Finish, Usage
from gateway.api.tools.output_parser import Event, OutputParser
from gateway.errors import (
    DEADLINE_EXCEEDED,
    SERVER_ERROR,
    UNAVAILABLE,
    ApiError,
    WorkerLost,
    unenforceable,
)
from gateway.text.detokenize import ScoredToken, TextStream, score_prompt
from gateway.text.pieces import PieceTable
from gateway.types import PreparedRequest, RunningRequest, TokenEvent

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""What a client is told to wait whose worker was lost; the queue holds it until the restart."""


class Piece(msgspec.Struct, frozen=True):
    """What is new of one choice. `prompt` comes once, where the prompt's scores were asked for.
    `text`: the model's, before any parser, where scores were."""

    index: int
    events: Sequence[Event] = ()
    scored: Sequence[ScoredToken] = ()
    prompt: Sequence[ScoredToken] = ()
    text: str = ""


class PartsOwner(Protocol):
    """The request that choices belong to (`active_request.ActiveRequest`)."""

    @property
    def is_gone(self) -> bool:
        """The client went away."""

    async def opened(self) -> None:
        """Awaited before the first tokens are used. Raises ApiError."""

    def on_tokens(self, num_tokens: int, last_s: float | None) -> float:
        """Called with all tokens of a choice that had its last at `last_s`. Returns when."""

    def streamed(self, num_tokens: int) -> None:
        """Called with what the client has been sent."""


class Choice:
    """One of them. Used by one consumer."""

    def __init__(
        self,
        index: int,
        request: PreparedRequest,
        running: RunningRequest,
        pieces: PieceTable,
        parser: OutputParser,
        owner: PartsOwner,
    ) -> None:
        self.index = index
        self.running = running
        self.finish: Finish | None = None
        self.failure: ApiError | None = None
        self.num_sent = 0
        """Of `num_tokens`, those in pieces that were handed on."""
        self._last_token_s: float | None = None
        self._request = request
        self._pieces = pieces
        self._parser = parser
        self._owner = owner
        self._events = aiter(running)
        self._texts: list[str] = []
        self.num_reasoning_tokens = 0
        """Of `num_tokens`, those of the reasoning and of the marks around it."""
        self._prompt_reported = False
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
        """Tokens up to the stop, as they are reported and billed."""
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
    def stop_string(self) -> str:
        """The stop string that ended the text, or ""."""
        return self._text.stop_string

    @property
    def usage(self) -> Usage:
        """The worker's word on what was used; our own count where there is none."""
        if self.finish is not None:
            return self.finish.usage
        return Usage(len(self._request.prompt_token_ids), 0, self.num_tokens, 0.0)

    async def next(self) -> Piece:
        """What comes next. Raises ApiError where we fail it."""
        try:
            event = await anext(self._events)
            if event.token_ids:
                await self._owner.opened()
            return self._take(event)
        except ApiError as error:
            self.failure = error
            raise
        except (WorkerLost, StopAsyncIteration) as error:
            self.failure = worker_was_lost()
            raise self.failure from error

    def take(self) -> Piece | None:
        """What comes next if it is there, after a first `next`. Raises as that does."""
        try:
            event = self.running.take()
            return None if event is None else self._take(event)
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

    def _take(self, event: TokenEvent) -> Piece:
        text, num_before = "", len(self._texts)
        reasoned: list[Event] = []
        if event.token_ids:
            num_tokens = len(event.token_ids)
            self._last_token_s = self._owner.on_tokens(num_tokens, self._last_token_s)
            if self._parser.reasoning_state != "done":
                reasoned = self._reason(event)
            elif not self._request.only_prompt:
                shown = event.logprobs if self._request.logprobs >= 0 else ()
                text = self._text.push(event.token_ids, shown)
        if self._request.is_judged:
            self._sum_logprobs += sum(score.logprob for score in event.logprobs)
            self._num_judged += len(event.logprobs)
        if event.finish is not None:
            self.finish = event.finish
            if not self._text.stopped and event.finish.reason not in ("stop", "length"):
                overflowed = self.running.overflowed
                check_end(event.finish, self._request, self._owner.is_gone, overflowed)
            text += self._text.finish()
        elif self._text.stopped:
            self.running.abort()
        self._texts.append(text)
        events = self._parser.feed(text) if text else []
        if reasoned:
            events = [*reasoned, *events]
        has_ended = self.has_ended
        if has_ended:
            events = [*events, *self._parser.flush()]
        if self._request.logprobs < 0 and self._request.prompt_logprobs < 0:
            return Piece(self.index, events)
        scored = self._text.take_scored(has_ended)
        new = "".join(self._texts[num_before:])
        return Piece(self.index, events, scored, self._prompt(event), new)

    def _reason(self, event: TokenEvent) -> list[Event]:
        """Token by token, so that those of the reasoning are counted one by one."""
        events: list[Event] = []
        wants_scores = self._request.logprobs >= 0
        for at, token_id in enumerate(event.token_ids):
            was_inside = self._parser.reasoning_state == "inside"
            before = self._text.num_tokens
            text = self._text.push([token_id], event.logprobs[at : at + 1] if wants_scores else ())
            self._texts.append(text)
            if text:
                events += self._parser.feed(text)
            if was_inside or self._parser.reasoning_state == "inside":
                self.num_reasoning_tokens += self._text.num_tokens - before
        return events

    def _prompt(self, event: TokenEvent) -> Sequence[ScoredToken]:
        """With the first tokens. A prompt of one token has no scores and is reported all the
        same."""
        if self._prompt_reported or self._request.prompt_logprobs < 0 or not event.token_ids:
            return ()
        self._prompt_reported = True
        return score_prompt(self._pieces, self._request.prompt_token_ids, event.prompt_logprobs)


def finish_reason(reason: str, num_calls: int) -> str:
    """An answer that ended by itself with calls in it asks for their results."""
    return "tool_calls" if reason == "stop" and num_calls else reason


def check_end(
    finish: Finish, request: PreparedRequest, is_gone: bool, overflowed: bool = False
) -> None:
    """Raises ApiError where the end is neither the model's nor the client's doing."""
    if finish.reason == "error":
        name = request.model.name
        log.error("request %s: model %s failed: %s", request.request_id, name, finish.error)
        raise ApiError(SERVER_ERROR, "the model failed while answering: retry the request")
    if finish.reason == "refused":
        raise unenforceable(f"it became too expensive to enforce ({finish.error})")
    if finish.reason == "timeout":
        message = "the request exceeded the time limit of this server: ask for fewer tokens"
        raise ApiError(DEADLINE_EXCEEDED, message)
    if overflowed:
        message = "the answer was aborted because the client did not read it in time: read faster"
        raise ApiError(SERVER_ERROR, message)
    if not is_gone:
        raise ApiError(UNAVAILABLE, "the server is shutting down: retry the request")


def worker_was_lost() -> ApiError:
    """The answer to a request whose worker died at the wrong moment."""
    message = "the worker that ran the request stopped: retry the request"
    return ApiError(UNAVAILABLE, message, retry_after_s=RETRY_S)
