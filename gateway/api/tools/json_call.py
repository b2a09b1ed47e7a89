"""Objects that name a call, `{"name": "f", "arguments": {...}}`, read from text in pieces.

Arguments are checked as JSON while they pass and sent at once. Two things models do are mended on
the way: a line break or another control character inside a string is escaped, and a call without
arguments has `{}`. Whatever else is wrong with arguments that have been begun stays in them, word
for word: the caller's JSON parser will say so, and no text is lost.
"""

import re
from collections.abc import Callable, Collection
from typing import Literal, TypeAlias

import msgspec

from gateway.api.tools.cursor import Cursor, NotACall, Step

# As deep as any JSON parser reads without trouble.
MAX_DEPTH = 128
ARGUMENT_KEYS = ("arguments", "parameters")

# clean: the object's own `}` was read and is held; cut: the arguments are whole, the object is not;
# broken: they are not, and go on at the reader's position.
Outcome: TypeAlias = Literal["clean", "cut", "broken"]

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR = re.compile(r"(?:-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null)\Z")
_SCALAR_CHARS = frozenset("+-.0123456789Eaeflnrstu")
_MAX_SCALAR_CHARS = 4096
_HEX = frozenset("0123456789abcdefABCDEF")
_decode_text: Callable[[str], str] = msgspec.json.Decoder(str).decode


class _NotJson(Exception):
    """The character at the reader's position cannot stand there."""


class JsonCursor(Cursor):
    """A parser of a format whose calls are JSON."""

    def _call_object(self, keys: Collection[str] = ARGUMENT_KEYS) -> Step[Outcome]:
        """At a `{`: tell the call's start and arguments; its end is the caller's to tell.

        Raises NotACall where it is none, or one of a function that is not on offer.
        """
        name = ""
        arguments: tuple[int, int] | None = None
        is_told = False
        closing = "{"
        try:
            while closing != "}":
                self._pos += 1
                key = yield from self._key()
                start = self._held()
                char = yield from self._peek()
                if key == "name" and not name:
                    name = yield from self._name()
                    if arguments is not None:
                        self._tell_held_arguments(name, *arguments)
                        is_told = True
                elif key in keys and char == "{" and name and not is_told:
                    self._tell_start(name)
                    is_told = True
                    if not (yield from self._live_arguments()):
                        return "broken"
                elif key in keys and not is_told:
                    if char != "{":
                        raise NotACall
                    yield from self._value()
                    arguments = start, self._held()
                else:
                    yield from self._value()
                closing = yield from self._skip_spaces()
                if closing not in (",", "}"):
                    raise _NotJson
        except _NotJson as error:
            if is_told:
                return "cut"
            raise NotACall from error
        except NotACall:
            if is_told:  # too much is held
                self._back_to(0)
                return "cut"
            raise
        if not name:
            raise NotACall
        self._pos += 1
        if not is_told:
            self._tell_start(name)
            self._tell_arguments("{}")
        return "clean"

    def _live_arguments(self) -> Step[bool]:
        """At a `{`: tell arguments as they come. False where they break off or are no JSON."""
        self._is_live = True
        try:
            yield from self._value()
        except _NotJson:
            return False
        finally:
            self._is_live = False
            self._tell_arguments()
        return True

    def _tell_held_arguments(self, name: str, start: int, end: int) -> None:
        """Arguments that came before the name."""
        pos = self._pos
        self._tell_start(name, up_to=start)
        self._pos = self._mark + end - start
        self._tell_arguments()
        self._pos = pos

    def _key(self) -> Step[str]:
        """A key and its colon. Raises _NotJson, for `{}` too."""
        yield from self._skip_spaces()
        key = yield from self._held_string()
        yield from self._colon()
        yield from self._skip_spaces()
        return key

    def _name(self) -> Step[str]:
        name = yield from self._held_string()
        if name not in self._names:
            raise NotACall
        return name

    def _held_string(self) -> Step[str]:
        start = self._held()
        yield from self._string()
        try:
            return _decode_text(self._held_text(start))
        except (msgspec.DecodeError, UnicodeError) as error:  # half a surrogate pair
            raise _NotJson from error

    # JSON, checked while it passes. All raise _NotJson and stand where it is wrong.

    def _value(self) -> Step[None]:
        open_: list[str] = []
        while True:
            char = yield from self._skip_spaces()
            if char == "{" or char == "[":
                if len(open_) == MAX_DEPTH:
                    raise _NotJson
                self._pos += 1
                open_.append("}" if char == "{" else "]")
                if (yield from self._skip_spaces()) != open_[-1]:
                    yield from self._member(open_[-1])
                    continue
            elif char == '"':
                yield from self._string()
            else:
                yield from self._scalar()
            while open_:
                char = yield from self._skip_spaces()
                if char == ",":
                    self._pos += 1
                    yield from self._member(open_[-1])
                    break
                if char != open_[-1]:
                    raise _NotJson
                self._pos += 1
                open_.pop()
            else:
                return

    def _member(self, closing: str) -> Step[None]:
        """What comes before a value in an object or array."""
        if closing == "}":
            yield from self._skip_spaces()
            yield from self._string()
            yield from self._colon()

    def _colon(self) -> Step[None]:
        if (yield from self._skip_spaces()) != ":":
            raise _NotJson
        self._pos += 1

    def _scalar(self) -> Step[None]:
        chars: list[str] = []
        while (char := (yield from self._peek())) in _SCALAR_CHARS and char:
            chars.append(char)
            if len(chars) > _MAX_SCALAR_CHARS:
                raise _NotJson
            self._pos += 1
        if not _SCALAR.match("".join(chars)):
            raise _NotJson

    def _string(self) -> Step[None]:
        if (yield from self._peek()) != '"':
            raise _NotJson
        self._pos += 1
        while (char := (yield from self._skip(_PLAIN))) != '"':
            if char == "\\":
                yield from self._escape()
            elif char and self._is_live:
                self._tell_arguments()
                self._pos += 1
                self._tell_arguments(f"\\u{ord(char):04x}")
            else:
                raise _NotJson
        self._pos += 1

    def _escape(self) -> Step[None]:
        self._pos += 1
        char = yield from self._peek()
        if not char or char not in '"\\/bfnrtu':
            raise _NotJson
        self._pos += 1
        for _ in range(4 if char == "u" else 0):
            if (yield from self._peek()) not in _HEX:
                raise _NotJson
            self._pos += 1
