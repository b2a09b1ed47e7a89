"""Which tokens a message's text was made of: log-probabilities in Responses. Part of stage 9.

A choice's scored tokens are those of its whole text: marks, reasoning and calls too. Comes in: the
tokens of each piece, whose text has begun to come out, and then all of the parser's events, in
their order. Goes out: for an event of the message, the entries of the tokens that it was made of.

The parser may hold text back, so an event can be of earlier pieces. But events name the text that
they stand for (`raw`), and all of them together are the model's text: their lengths say where each
one is.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any

from gateway.answer.answer import TokenScores
from gateway.api.tools.output_parser import ContentDelta, Event
from gateway.prepare.prepare import Prepared
from gateway.text.detokenize import ScoredToken


class MessageScores:
    """Of one answer. Places are characters of the model's text."""

    def __init__(self, prepared: Prepared) -> None:
        self._scores = TokenScores(prepared.request, prepared.codec.pieces)
        self._tokens: deque[ScoredToken] = deque()
        self._end = 0
        """Of the events so far."""

    def take(self, tokens: Iterable[ScoredToken]) -> None:
        """What is new."""
        self._tokens.extend(tokens)

    def of(self, event: Event) -> list[dict[str, Any]]:
        """The entries of the tokens that the next event was made of, each told once. None of what
        is no message; a token that also begins the message behind it is the message's."""
        begin, end = self._end, self._end + len(event.raw)
        self._end = end
        if not isinstance(event, ContentDelta):
            return []
        taken: list[ScoredToken] = []
        tokens = self._tokens
        while tokens and tokens[0].start < end:
            token = tokens.popleft()
            if not tokens or tokens[0].start > begin or token.start >= begin:
                taken.append(token)
        body = self._scores.body(taken)
        assert body is not None
        return [_entry(entry) for entry in body["content"]]


def _entry(chat: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's type has bytes always."""
    tops = [{**top, "bytes": top["bytes"] or []} for top in chat["top_logprobs"]]
    return {**chat, "bytes": chat["bytes"] or [], "top_logprobs": tops}
