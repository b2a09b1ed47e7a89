"""Which tokens a message's text was made of: log-probabilities in Responses. Part of stage 9.

A choice's scored tokens are those of its whole text: marks, reasoning and calls too. Comes in: each
piece, with the model's text and the tokens whose text has begun to come out, and then the texts
that the parser made of it, in their order. Goes out: for a text of the message, the entries of its
tokens.

The parser drops marks and may hold a few characters back, but changes none. So its texts are parts
of the model's text in the same order, and are found there: the last one of a piece at its last
place, since what comes before it may be a mark with the same characters.
"""

from collections import deque
from typing import Any

from gateway.answer.answer import TokenScores
from gateway.answer.choice import Piece
from gateway.prepare.prepare import Prepared
from gateway.text.detokenize import ScoredToken


class MessageScores:
    """Of one answer. Places are characters of the model's text."""

    def __init__(self, prepared: Prepared) -> None:
        self._scores = TokenScores(prepared.request, prepared.codec.pieces)
        self._tokens: deque[ScoredToken] = deque()
        self._text, self._begin = "", 0
        """The model's text from the place `_begin` on: what no text of the parser was found in."""
        self._num_left = 0

    def take(self, piece: Piece, num_texts: int) -> None:
        """What is new; the parser made so many texts of it."""
        self._text += piece.text
        self._tokens.extend(piece.scored)
        self._num_left = num_texts

    def of(self, text: str) -> list[dict[str, Any]]:
        """The entries of the tokens that the parser's next text was made of, each told once."""
        self._num_left -= 1
        find = self._text.find if self._num_left else self._text.rfind
        at = max(0, find(text))
        begin, end = self._begin + at, self._begin + at + len(text)
        self._text, self._begin = self._text[at + len(text) :], end
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
