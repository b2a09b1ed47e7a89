"""Calls as a list of Python calls with keyword arguments: Llama 3.2 and 4, and others.

    [f(a=1, b="x"), g()]

The list is the whole answer, or stands between marks (`<|python_start|>`, `<|tool_call_start|>`),
which may follow other text. An argument is sent as JSON when it is complete. Literals may be as
Python writes them, or JSON's, which differ in three words. They are not read by `ast.literal_eval`:
what a model writes may be nested to the interpreter's limits, holds escapes that make it warn, and
has `true` and `null` in it as often as not.
"""

import json
import re
from typing import Any

from gateway.api.tools.cursor import Cursor, NotACall, Step

MARKS = ("<|python_start|>", "<|tool_call_start|>")
END_MARKS = ("<|python_end|>", "<|tool_call_end|>")

_NAME = re.compile(r"[A-Za-z0-9_.\-]*")
_KEYWORD = re.compile(r"\w*")
_PLAIN = re.compile(r"[^\[\](){},'\"]*")
_IN_STRING = {quote: re.compile(rf"[^{quote}\\]*") for quote in "'\""}
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class _Broken(Exception):
    """What follows the last argument sent is none."""


class PythonicParser(Cursor):
    """See OutputParser."""

    def _run(self) -> Step[None]:
        yield
        yield from self._calls_or_back(0)
        while (yield from self._content_until(MARKS)):
            yield from self._calls_or_back(self._held())

    def _calls_or_back(self, held: int) -> Step[None]:
        try:
            if (yield from self._skip_spaces()) != "[":
                raise NotACall
            char = "["
            while char != "]":
                self._pos += 1
                if not self._may_call():
                    raise NotACall
                if not (yield from self._call()):
                    return
                held = 0
                char = yield from self._skip_spaces()
                if char not in (",", "]"):
                    raise NotACall
        except NotACall:
            self._back_to(held)
            return
        self._pos += 1
        for mark in END_MARKS:
            yield from self._read(mark)
        self._tell_padding()

    def _call(self) -> Step[bool]:
        """Tell one call. False where its arguments are broken: they take all that follows.

        Raises NotACall before anything is sent.
        """
        yield from self._skip_spaces()
        start = self._held()
        yield from self._skip(_NAME)
        name = self._held_text(start)
        if name not in self._names or (yield from self._skip_spaces()) != "(":
            raise NotACall
        self._pos += 1
        seen: set[str] = set()
        try:
            while (yield from self._argument(name, seen)):
                pass
        except (_Broken, NotACall) as error:
            if not seen:
                raise NotACall from error
            self._back_to(0)
            yield from self._tell_arguments_until(END_MARKS)
            self._tell_end(whole=False)
            return False
        if not seen:
            self._tell_start(name)
        self._pos += 1
        self._tell_arguments("}" if seen else "{}")
        self._tell_end(whole=True)
        return True

    def _argument(self, name: str, seen: set[str]) -> Step[bool]:
        """Tell one argument, with the start of the call if it is the first; False at the `)`."""
        start = self._held()
        char = yield from self._skip_spaces()
        if seen and char == ",":
            self._pos += 1
            char = yield from self._skip_spaces()
        elif seen and char != ")":
            raise _Broken
        if char == ")":
            return False
        key_start = self._held()
        yield from self._skip(_KEYWORD)
        key = self._held_text(key_start)
        if not key or key in seen or (yield from self._skip_spaces()) != "=":
            raise _Broken
        self._pos += 1
        value_start = self._held()
        yield from self._expression()
        try:
            value = to_json(self._held_text(value_start))
        except ValueError as error:
            raise _Broken from error
        if not seen:
            self._tell_start(name, up_to=start)
        self._tell_arguments(f"{', ' if seen else '{'}{json.dumps(key)}: {value}")
        seen.add(key)
        return True

    def _expression(self) -> Step[None]:
        """Move to the `,` or `)` that ends the value. Raises _Broken."""
        open_: list[str] = []
        while True:
            char = yield from self._skip(_PLAIN)
            if not open_ and char in (",", ")") and char:
                return
            if char in _IN_STRING:
                yield from self._quoted(char)
                continue
            if char in _CLOSING:
                open_.append(_CLOSING[char])
            elif char != "," and (not open_ or open_.pop() != char):
                raise _Broken
            self._pos += 1

    def _quoted(self, quote: str) -> Step[None]:
        """Move over a string in this quote, or in three of it."""
        self._pos += 1
        end = quote
        if (yield from self._read(quote)):
            if not (yield from self._read(quote)):
                return
            end = quote * 3
        while not (yield from self._read(end)):
            char = yield from self._skip(_IN_STRING[quote])
            if char == "\\":
                self._pos += 1
                char = yield from self._peek()
                self._pos += len(char)
            elif char and end != quote:
                if (yield from self._read(end)):
                    return
                self._pos += 1
            if not char:
                raise _Broken


MAX_DEPTH = 64

_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_SPACE = re.compile(r"[ \t\r\n]*")
_WORD = re.compile(r"[A-Za-z]+")
_NUMBER = re.compile(r"[+-]?(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_STRING = re.compile(
    r'"""((?:[^\\]|\\.)*?)"""' r"|'''((?:[^\\]|\\.)*?)'''"
    r'|"((?:[^"\\]|\\.)*)"' r"|'((?:[^'\\]|\\.)*)'",
    re.DOTALL,
)  # fmt: skip
_ESCAPE = re.compile(
    r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|U([0-9a-fA-F]{8})|([0-7]{1,3})|(.))", re.DOTALL
)
_SIMPLE = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v",
    "\n": "", "\\": "\\", "'": "'", '"': '"', "/": "/",
}  # fmt: skip


def to_json(text: str) -> str:
    """A literal as JSON text. Raises ValueError where it is none, or has no JSON."""
    value, end = _value(text, _space(text, 0), MAX_DEPTH)
    if _space(text, end) != len(text):
        raise ValueError("text behind the value")
    plain = json.dumps(value, ensure_ascii=False, allow_nan=False)
    # Half of a surrogate pair has no UTF-8; escaped it is still what the model wrote.
    return plain if plain.isascii() or _is_utf8(plain) else json.dumps(value, allow_nan=False)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    if not depth:
        raise ValueError("nested too deeply")
    char = text[at : at + 1]
    if char == "{":
        return _items(text, at, "}", depth)
    if char == "[":
        return _items(text, at, "]", depth)
    if char == "(":
        return _items(text, at, ")", depth)
    if char in ('"', "'"):
        return _string(text, at)
    word = _WORD.match(text, at)
    if word is not None and word.group() in _WORDS:
        return _WORDS[word.group()], word.end()
    number = _NUMBER.match(text, at)
    if number is None:
        raise ValueError("not a literal")
    return _number(number.group()), number.end()


def _number(text: str) -> int | float:
    is_float = any(char in ".eE" for char in text)
    return float(text) if is_float else int(text)


def _items(text: str, at: int, closing: str, depth: int) -> tuple[Any, int]:
    """A dict, list or tuple. `(1)` is taken for a list of one: nobody calculates here."""
    array: list[Any] = []
    pairs: dict[str, Any] = {}
    at = _space(text, at + 1)
    while text[at : at + 1] != closing:
        value, at = _value(text, at, depth - 1)
        at = _space(text, at)
        if closing == "}":
            if text[at : at + 1] != ":" or not isinstance(value, str):
                raise ValueError("a dict needs keys that are strings")
            pairs[value], at = _value(text, _space(text, at + 1), depth - 1)
            at = _space(text, at)
        else:
            array.append(value)
        if text[at : at + 1] == ",":
            at = _space(text, at + 1)
        elif text[at : at + 1] != closing:
            raise ValueError("an item without a comma")
    return (pairs if closing == "}" else array), at + 1


def _string(text: str, at: int) -> tuple[str, int]:
    found = _STRING.match(text, at)
    if found is None:
        raise ValueError("a string without end")
    body = next(group for group in found.groups() if group is not None)
    plain = _ESCAPE.sub(_unescaped, body) if "\\" in body else body
    # JSON writes characters beyond the first plane as two escapes.
    if any("\ud800" <= char <= "\udbff" for char in plain):
        plain = plain.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    return plain, found.end()


def _unescaped(found: re.Match[str]) -> str:
    short, byte, long, octal, char = found.groups()
    code = short or byte or long
    if code is not None:
        if int(code, 16) > 0x10FFFF:
            raise ValueError("no such character")
        return chr(int(code, 16))
    if octal is not None:
        return chr(int(octal, 8))
    return _SIMPLE.get(char, "\\" + char)
