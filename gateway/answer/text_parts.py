"""All choices of a request for text, and their pieces in the order they come. Part of stage 9.

Comes in: a prepared request. Goes out: the pieces of its choices (choice.py), first come first
served. Workers know choices as requests of their own, named by `choices.choice_id`, each with a
seed of its own; they share the prompt through its prefix cache. Who pays, and what becomes of a
request whose choices end differently, is active_request.py's.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import islice

import msgspec

from engine.protocol import Usage
from gateway.answer.choice import Choice, PartsOwner, Piece
from gateway.prepare.prepare import Prepared
from gateway.types import SEED_MASK, PartsEnd, PreparedRequest, RunningRequest, Sink
from gateway.workers.choices import choice_id, summed_usage


class TextParts:
    """All choices of a request: their pieces first come first served, each choice's own in order.

    One choice is read directly. Several are waited for by a task each, and a choice is read again
    only when its piece was taken: a client that does not read fills the worker's streams, where the
    bound is.
    """

    def __init__(
        self,
        prepared: Prepared,
        run: Callable[[PreparedRequest], RunningRequest],
        owner: PartsOwner,
    ) -> None:
        """`run` queues a request."""
        self.prepared = prepared
        self.choices: list[Choice] = []
        self._run = run
        self._owner = owner
        self._first: Piece | None = None
        self._waiting: dict[int, asyncio.Task[Piece]] = {}
        self._ready: deque[asyncio.Task[Piece]] = deque()

    # What their owner asks (active_request.Parts).

    @property
    def is_queued(self) -> bool:
        """The dispatcher has at least one of them."""
        return bool(self.choices)

    @property
    def has_ended(self) -> bool:
        """Nothing more will be said."""
        return all(choice.has_ended for choice in self.choices)

    @property
    def num_tokens(self) -> int:
        """Up to each choice's stop."""
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def num_reasoning_tokens(self) -> int:
        """Of these, the reasoning's."""
        return sum(choice.num_reasoning_tokens for choice in self.choices)

    @property
    def cached_tokens(self) -> int:
        """Of each prompt, as every choice of it found it."""
        return sum(
            min(choice.usage.cached_tokens for choice in group) for group in self._by_prompt()
        )

    def start(self) -> None:
        """Queue all of them. Raises ApiError where one is refused."""
        prepared = self.prepared
        for index, request in enumerate(_choices(prepared.request)):
            running, parser = self._run(request), prepared.new_parser()
            self.choices.append(
                Choice(index, request, running, prepared.codec.pieces, parser, self._owner)
            )

    def abort(self) -> None:
        """Stop the workers within one step."""
        for choice in self.choices:
            choice.running.abort()

    async def end(self) -> PartsEnd:
        """Read no more; stop the workers and take what each says last."""
        tasks = [*self._waiting.values(), *self._ready]
        self._waiting.clear()
        self._ready.clear()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)
        self.abort()
        choices = self.choices
        for choice in choices:
            await choice.take_last_event()
        usages = [choice.usage for choice in choices]
        return PartsEnd(
            is_complete=all(choice.is_complete for choice in choices),
            usage=_of_prompts(
                [summed_usage([c.usage for c in group]) for group in self._by_prompt()]
            ),
            queue_s=max(choice.running.queue_s for choice in choices),
            finish_reasons=[choice.finish_reason for choice in choices],
            num_tokens=self.num_tokens,
            num_sent=self._num_sent,
            num_generated=sum(
                max(choice.num_tokens, usage.generated_tokens)
                for choice, usage in zip(choices, usages, strict=True)
            ),
            is_spent=any(choice.num_tokens and choice.has_spent_form for choice in choices),
            overflowed=any(choice.running.overflowed for choice in choices),
        )

    def _by_prompt(self) -> list[list[Choice]]:
        size = self.prepared.request.num_per_prompt
        return [self.choices[at : at + size] for at in range(0, len(self.choices), size)]

    # How they are read.

    async def begin(self, wait_s: float) -> None:
        """Wait for the first tokens, which until then can be refused by an HTTP status; at most
        `wait_s`, 0: as long as it takes. Raises ApiError."""
        if not wait_s or await self._has_event(wait_s):
            self._first = await self._next()

    async def pieces(self) -> AsyncIterator[Piece]:
        """The answer as it is made; ends early for a client that is gone. Raises ApiError."""
        if self._first is not None:
            yield self._first
        while not self._is_over:
            if self.prepared.request.stream:  # What was yielded before has been sent.
                self._owner.streamed(self._num_sent)
            yield await self._next()

    async def push(self, send: Callable[[Piece], None], sink: Sink) -> None:
        """Hand the pieces on as they are made, while the client reads: what it does not read waits
        in the dispatcher's streams, where the bound is. Ends as `pieces` does. Raises ApiError.

        One choice is handed on by plain calls, as far as from the worker's message to the socket:
        they run inside the dispatcher, to which nothing is raised.
        """
        if len(self.choices) > 1:
            async for piece in self.pieces():
                send(piece)
                await sink.drained()
            return
        send(self._first or await self._next())
        if self._is_over:
            return
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        choice = self.choices[0]
        is_busy = False

        def on_event() -> None:
            nonlocal is_busy
            if is_busy or over.done():  # busy: an abort from within may bring the last event
                return
            is_busy = True
            try:
                self._hand_on(choice, send, sink)
            except Exception as error:  # noqa: BLE001  carried to who awaits below
                over.set_exception(error)
            else:
                if choice.has_ended:
                    over.set_result(None)
            is_busy = False

        sink.when_drained(on_event)
        choice.running.listen(on_event)
        try:
            await over
        finally:
            choice.running.listen(None)

    def _hand_on(self, choice: Choice, send: Callable[[Piece], None], sink: Sink) -> None:
        """All there is, unless the client does not read."""
        while choice.running.has_event and not sink.is_full:
            piece = choice.take()
            if piece is None:
                return
            send(piece)
            choice.num_sent = choice.num_tokens
            if choice.has_ended:
                return
            self._owner.streamed(choice.num_sent)  # of the only one

    @property
    def _is_over(self) -> bool:
        """Every choice has ended and been read."""
        return not self._ready and not self._waiting and self.has_ended

    async def _has_event(self, timeout_s: float) -> bool:
        """Whether there is something to begin with within the time. Takes nothing."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()

        def tell(is_ready: bool = True) -> None:
            if not waiter.done():
                waiter.set_result(is_ready)

        timer = loop.call_later(timeout_s, tell, False)
        try:
            for choice in self.choices:
                choice.running.listen(tell)
            return await waiter
        finally:
            timer.cancel()
            for choice in self.choices:
                choice.running.listen(None)

    @property
    def _num_sent(self) -> int:
        return sum(choice.num_sent for choice in self.choices)

    async def _next(self) -> Piece:
        """The next piece there is, to be handed on. Raises ApiError when a choice fails."""
        piece = await self._next_piece()
        choice = self.choices[piece.index]
        choice.num_sent = choice.num_tokens  # it is not read again before this piece was taken
        return piece

    async def _next_piece(self) -> Piece:
        if len(self.choices) == 1:
            return await self.choices[0].next()
        if not self._ready:
            for choice in self.choices:
                if choice.index not in self._waiting and not choice.has_ended:
                    self._waiting[choice.index] = asyncio.create_task(choice.next())
            await asyncio.wait(self._waiting.values(), return_when=asyncio.FIRST_COMPLETED)
            for index in sorted(i for i, task in self._waiting.items() if task.done()):
                self._ready.append(self._waiting.pop(index))
        return self._ready.popleft().result()


def _choices(request: PreparedRequest) -> list[PreparedRequest]:
    """The request's choices as workers get them: each with a name and a seed of its own."""
    num, seed = request.num_choices, request.sampling.seed
    if num == 1:
        return [request]
    prompts, size = _prompts(request), request.num_per_prompt
    return [
        msgspec.structs.replace(
            request,
            request_id=choice_id(request.request_id, index, num),
            prompt_token_ids=prompts[index // size],
            sampling=msgspec.structs.replace(
                request.sampling, seed=(seed + index % size) & SEED_MASK
            ),
        )
        for index in range(num)
    ]


def _prompts(request: PreparedRequest) -> list[list[int]]:
    """Each by itself."""
    if not request.prompt_lengths:
        return [request.prompt_token_ids]
    ids = iter(request.prompt_token_ids)
    return [list(islice(ids, length)) for length in request.prompt_lengths]


def _of_prompts(usages: Sequence[Usage]) -> Usage:
    """Of all prompts together."""
    if len(usages) == 1:
        return usages[0]
    return Usage(
        *(sum(getattr(usage, name) for usage in usages) for name in Usage.__struct_fields__)
    )
