"""The base of all parsers of tool calls: text that arrives in pieces, read as if it were all there.

A parser is written as one generator, `_run`, that reads forward and waits wherever the text is not
there yet; `feed` brings more and runs it on. So every decision is taken on characters alone and
cannot depend on how the text was cut. What is read but belongs to no event yet is held between
`_mark` and `_pos`; every event takes it as its `raw`, so no text can be lost, and `_back_to` reads
it again where what looked like a call is none.
"""

import re
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from gateway.api.tools.output_parser import (
    MAX_HELD_SPACES,
    SPACES,
    ArgumentsDelta,
    ContentDelta,
    Event,
    Padding,
    ReasoningState,
    ToolCallEnd,
    ToolCallStart,
    overlap,
)

# Text that is held because it may become a call. A model that goes on longer writes no call, or one
# with its arguments before its name, which nobody does at such a length.
MAX_HELD_CHARS = 65536

_T = TypeVar("_T")
Step: TypeAlias = Generator[None, None, _T]

_SPACES_RUN = re.compile(rf"[{SPACES}]*")


class NotACall(Exception):
    """What was being read is no call. Raised only while nothing of it has been sent."""


class Cursor:
    """Reads a text in pieces. Subclasses write `_run`; the outside calls `feed` and `flush`."""

    reasoning_state: ReasoningState = "done"

    def __init__(
        self,
        names: Collection[str],
        new_id: Callable[[], str],
        max_calls: int | None = None,
        schemas: Mapping[str, Any] | None = None,
    ) -> None:
        """`names`: the functions on offer. After `max_calls` calls all text is content. `schemas`:
        of the functions' arguments, for formats that do not say what a value is."""
        self._schemas: Mapping[str, Any] = schemas or {}
        self.num_calls = 0
        self._names = frozenset(names)
        self._new_id = new_id
        self._max_calls = max_calls
        self._text = ""
        self._mark = 0
        self._pos = 0
        self._at_end = False
        self._events: list[Event] = []
        # Arguments are sent as they come: nothing read in this state is ever read again.
        self._is_live = False
        # Nothing was said since the last call: white space that follows it is the format's.
        self._is_behind_call = False
        self._machine = self._run()
        next(self._machine)

    def feed(self, text: str) -> list[Event]:
        """See OutputParser."""
        if text:
            self._text = self._text[self._mark :] + text
            self._pos -= self._mark
            self._mark = 0
            next(self._machine)
        return self._taken()

    def flush(self) -> list[Event]:
        """See OutputParser."""
        if not self._at_end:
            self._at_end = True
            next(self._machine, None)
        return self._taken()

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _run(self) -> Step[None]:
        """Reads to the end of the text. Begins with a bare `yield`."""
        raise NotImplementedError

    # Reading: `_pos` moves forward and nothing is sent, save live arguments.

    def _peek(self) -> Step[str]:
        """The next character, "" at the end of the text. Raises NotACall if too much is held."""
        while True:
            if self._pos - self._mark > MAX_HELD_CHARS and not self._is_live:
                raise NotACall
            if self._pos < len(self._text):
                return self._text[self._pos]
            if self._at_end:
                return ""
            if self._is_live:
                self._tell_arguments()
            yield

    def _skip(self, run: re.Pattern[str]) -> Step[str]:
        """Move over all that `run` matches, any number of single characters; the one behind."""
        while True:
            found = run.match(self._text, self._pos)
            self._pos = found.end() if found else self._pos
            char = yield from self._peek()
            if not char or not run.fullmatch(char):
                return char

    def _skip_spaces(self) -> Step[str]:
        """Move over white space. The character behind it."""
        return (yield from self._skip(_SPACES_RUN))

    def _read(self, word: str) -> Step[bool]:
        """Move over `word` if that is what follows."""
        held = self._pos - self._mark
        for char in word:
            if (yield from self._peek()) != char:
                self._back_to(held)
                return False
            self._pos += 1
        return True

    def _held(self) -> int:
        """How many characters are held: a place to go back to, as long as nothing is sent."""
        return self._pos - self._mark

    def _held_text(self, start: int) -> str:
        return self._text[self._mark + start : self._pos]

    def _back_to(self, held: int) -> None:
        """Read again from `held` characters behind the mark."""
        self._pos = self._mark + held

    # Telling: each event takes the held text as its `raw`.

    def _raw(self) -> str:
        raw = self._text[self._mark : self._pos]
        self._mark = self._pos
        return raw

    def _tell_content(self) -> None:
        raw = self._raw()
        if raw:
            self._events.append(ContentDelta(raw, raw))

    def _tell_padding(self) -> None:
        raw = self._raw()
        if raw:
            self._events.append(Padding(raw))

    def _tell_start(self, name: str, up_to: int | None = None) -> None:
        """`up_to`: where the envelope ends; what is held behind it stays held."""
        pos = self._pos
        if up_to is not None:
            self._back_to(up_to)
        self._events.append(ToolCallStart(self.num_calls, self._new_id(), name, self._raw()))
        self._pos = pos
        self.num_calls += 1

    def _tell_arguments(self, text: str | None = None) -> None:
        """`text` where it is not what the model wrote; it is never empty then."""
        raw = self._raw()
        text = raw if text is None else text
        if text:
            self._events.append(ArgumentsDelta(self.num_calls - 1, text, raw))

    def _tell_end(self, whole: bool) -> None:
        self._events.append(ToolCallEnd(self.num_calls - 1, whole, self._raw()))
        self._is_behind_call = True

    def _tell_arguments_until(self, marks: Sequence[str]) -> Step[None]:
        """What cannot be read as arguments is theirs all the same, up to a mark or the end."""
        pattern = _any_of(marks)
        while True:
            found = pattern.search(self._text, self._pos)
            keep = 0 if self._at_end else overlap(self._text[self._pos :], marks)
            self._pos = found.start() if found else len(self._text) - keep
            self._tell_arguments()
            if found or self._at_end:
                return
            yield

    # The content around calls.

    def _may_call(self) -> bool:
        return self._max_calls is None or self.num_calls < self._max_calls

    def _content_until(self, marks: Sequence[str]) -> Step[bool]:
        """Tell content up to the first of `marks` and move over it. False at the end of the text.

        The white space before a mark stays held: before a call it is the format's, not the user's.
        """
        pattern = _any_of(marks)
        while True:
            may_call = self._may_call()
            found = pattern.search(self._text, self._pos) if may_call else None
            if found is not None:
                self._tell_words(found.start())
                self._pos = found.end()
                return True
            is_last = self._at_end
            keep = overlap(self._text[self._pos :], marks) if may_call and not is_last else 0
            self._pos = len(self._text) - keep
            self._tell_words(self._pos)
            if is_last:
                self._tell_padding() if self._is_behind_call else self._tell_content()
                return False
            yield

    def _tell_words(self, end: int) -> None:
        """Content up to `end`, but for white space there, and for white space behind a call."""
        pos = max(self._pos, end)
        held = self._text[self._mark : end]
        words = held.rstrip(SPACES)
        if words and self._is_behind_call:
            self._is_behind_call = False
            num_front = len(words) - len(words.lstrip(SPACES))
            self._back_to(num_front)
            self._tell_padding()
            held = held[num_front:]
        num_told = max(len(held.rstrip(SPACES)), len(held) - MAX_HELD_SPACES)
        if num_told > 0:
            self._back_to(num_told)
            self._tell_padding() if self._is_behind_call else self._tell_content()
        self._pos = pos


def _any_of(marks: Sequence[str]) -> re.Pattern[str]:
    """Without marks: a pattern that matches nothing."""
    return re.compile("|".join(re.escape(mark) for mark in marks) or r"(?!)")
