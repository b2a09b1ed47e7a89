"""Token ids to text as they come, and stop strings. Part of stage 9.

Comes in: a request's tokens, in order. Goes out: text that never holds half a character, cut where
a stop string begins, how many tokens that took, and which tokens a piece of text is made of.

How. A token of a byte-level BPE, or of a sentencepiece model with byte fallback, stands for the
same bytes wherever it occurs, save that some decoders drop one space at the very beginning. So
`PieceTable` (pieces.py) has each token's bytes, and an incremental UTF-8 decoder joins them: exact,
no context, at most three bytes held back. Invalid sequences become U+FFFD one per maximal subpart,
as the `tokenizers` library does for byte-level models. (Its byte fallback replaces every byte of a
run as soon as one byte in it is bad, which no stream can do: characters of the run may have been
sent.) Other decoders (WordPiece, BPE with suffixes) look at neighbours; `_Windowed` decodes a short
window again for each of their tokens and takes what is new.
"""

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.protocol import TokenLogprobs
from gateway.text.pieces import PieceTable

# A window is held back while it ends in the middle of a character: four bytes at most.
_MAX_HELD_TOKENS = 4
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer(Protocol):
    """Text of one growing sequence of tokens."""

    def push(self, token_id: int) -> str:
        """The text that is certain now and was not before."""

    def push_all(self, token_ids: Sequence[int]) -> str | None:
        """The text of all of them, where it can be had at once; None: nothing was taken."""

    def flush(self) -> str:
        """What is still held back; nothing follows."""


def detokenizer(pieces: PieceTable, keep_leading_space: bool = False) -> Detokenizer:
    """For one request. `keep_leading_space`: the text continues another (a plain completion)."""
    if pieces.context_free:
        return _Bytewise(pieces, pieces.strip_start and not keep_leading_space)
    return _Windowed(pieces)


class _Bytewise:
    """Joins the bytes of context-free tokens."""

    def __init__(self, pieces: PieceTable, strip_space: bool) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_space = strip_space
        self._is_whole = True
        """No character is begun."""

    def push(self, token_id: int) -> str:
        if self._is_whole and not self._strip_space:
            text = self._pieces.text(token_id)
            if text is not None:
                return text
        piece = self._pieces.piece(token_id)
        if self._strip_space and piece:
            self._strip_space = False
            piece = piece.removeprefix(b" ")
        text = self._decoder.decode(piece)
        self._is_whole = not self._decoder.getstate()[0]
        return text

    def push_all(self, token_ids: Sequence[int]) -> str | None:
        if not self._is_whole or self._strip_space:
            return None
        return self._pieces.text_of(token_ids)

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _Windowed:
    """Decodes the last tokens again with each new one: `prefix` is sent already, `fresh` is not."""

    def __init__(self, pieces: PieceTable) -> None:
        self._pieces = pieces
        self._prefix: list[int] = []
        self._fresh: list[int] = []

    def push(self, token_id: int) -> str:
        if token_id in self._pieces.special_ids or not self._pieces.name(token_id):
            return ""
        self._fresh.append(token_id)
        text = self._pieces.decode(self._prefix + self._fresh)
        if text.endswith(_REPLACEMENT) and len(self._fresh) < _MAX_HELD_TOKENS:
            return ""
        return self._take(text)

    def push_all(self, token_ids: Sequence[int]) -> str | None:
        return None

    def flush(self) -> str:
        if not self._fresh:
            return ""
        return self._take(self._pieces.decode(self._prefix + self._fresh))

    def _take(self, text: str) -> str:
        sent = self._pieces.decode(self._prefix)
        self._prefix, self._fresh = self._fresh, []
        return text[len(sent) :]


class StopStrings:
    """Finds the stop string that is complete first, however the text is cut into pieces.

    Text that may yet turn out to be part of a stop string is held back.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.found = ""
        """The one that was complete first."""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that is certain, found). Once found, nothing may be pushed."""
        if not self._stops:
            return text, False
        text = self._held + text
        found = [(at + len(s), at, s) for s in self._stops if (at := text.find(s)) >= 0]
        if found:
            self._held = ""
            _, at, self.found = min(found)
            return text[:at], True
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """The text is at its end: what was held back is no stop string."""
        held, self._held = self._held, ""
        return held


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of a text with its log-probability. `start`: characters of text before it.

    `scores` is None for a prompt's first token, which nothing precedes.
    """

    token_id: int
    start: int
    scores: TokenLogprobs | None


class TextStream:
    """A request's text. `num_tokens` counts the tokens up to the end or to the stop string, the one
    that completes it included: later ones are cut and not billed.

    The text of the first `min_tokens` tokens is not searched for stop strings. `shown_ids` are
    control tokens that come out by their names: what a parser of tool calls looks for.
    """

    def __init__(
        self,
        pieces: PieceTable,
        stop_strings: tuple[str, ...],
        stop_token_ids: list[int],
        keep_leading_space: bool = False,
        min_tokens: int = 0,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._pieces = pieces
        self._shown_ids = shown_ids
        self._detokenizer = detokenizer(pieces, keep_leading_space)
        self._stop_strings = StopStrings(stop_strings)
        self._is_plain = not stop_strings and not shown_ids
        self._stop_token_ids = frozenset(stop_token_ids)
        self._min_tokens = min_tokens
        self._num_decoded = 0
        self._num_out = 0
        self._scored: deque[ScoredToken] = deque()
        self.num_tokens = 0
        self.stopped = False

    @property
    def stop_string(self) -> str:
        """The one that ended the text, or ""."""
        return self._stop_strings.found

    def push(self, token_ids: list[int], scores: Sequence[TokenLogprobs] = ()) -> str:
        """Text for the client. A stop token has none. After `stopped` nothing is taken.

        `scores`: one for each token, or none.
        """
        if self._is_plain and not scores:
            if len(token_ids) == 1:
                return self._push_plain(token_ids[0])
            return self._push_all_plain(token_ids)
        out: list[str] = []
        for n, token_id in enumerate(token_ids):
            if self.stopped:
                break
            self.num_tokens += 1
            if token_id in self._stop_token_ids:
                continue
            if scores:
                self._scored.append(ScoredToken(token_id, self._num_decoded, scores[n]))
            text = (
                self._name(token_id)
                if token_id in self._shown_ids
                else self._detokenizer.push(token_id)
            )
            self._num_decoded += len(text)
            if self.num_tokens > self._min_tokens:
                text, self.stopped = self._stop_strings.push(text)
            out.append(text)
        return self._out("".join(out))

    def _push_plain(self, token_id: int) -> str:
        """One token that can only be text or the end, as most events bring."""
        if self.stopped:
            return ""
        self.num_tokens += 1
        if token_id in self._stop_token_ids:
            return ""
        text = self._detokenizer.push(token_id)
        self._num_decoded += len(text)
        self._num_out += len(text)
        return text

    def _push_all_plain(self, token_ids: list[int]) -> str:
        """Many at once: what waited for its reader, or was made in one step."""
        text = None
        if not self.stopped and self._stop_token_ids.isdisjoint(token_ids):
            text = self._detokenizer.push_all(token_ids)
        if text is None:
            return "".join([self._push_plain(token_id) for token_id in token_ids])
        self.num_tokens += len(token_ids)
        self._num_decoded += len(text)
        self._num_out += len(text)
        return text

    def finish(self) -> str:
        """The rest of the text, when the last token has been pushed."""
        if self.stopped:
            return ""
        text, self.stopped = self._stop_strings.push(self._detokenizer.flush())
        return self._out(text if self.stopped else text + self._stop_strings.flush())

    def take_scored(self, ended: bool = False) -> list[ScoredToken]:
        """Tokens whose text has begun to come out and that were not taken before.

        `ended`: all that are left; a token wholly behind the cut of a stop string is none of them.
        """
        taken: list[ScoredToken] = []
        everything = ended and not self.stopped
        while self._scored and (everything or self._scored[0].start < self._num_out):
            taken.append(self._scored.popleft())
        return taken

    def _name(self, token_id: int) -> str:
        return self._detokenizer.flush() + self._pieces.name(token_id)

    def _out(self, text: str) -> str:
        self._num_out += len(text)
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def score_prompt(
    pieces: PieceTable, token_ids: Sequence[int], prompt_logprobs: Sequence[TokenLogprobs]
) -> list[ScoredToken]:
    """A prompt's tokens with their places in its text. Nothing precedes the first."""
    stream = TextStream(pieces, (), [])
    places = []
    at = 0
    for token_id in token_ids:
        places.append((token_id, at))
        at += len(stream.push([token_id]))
    scores = [None, *prompt_logprobs]
    return [
        ScoredToken(token_id, start, score)
        for (token_id, start), score in zip(places, scores, strict=True)
    ]
