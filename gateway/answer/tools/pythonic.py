"""Calls as a list of Python calls with keyword arguments: Llama 3.2 and 4, and others.

    [f(a=1, b="x"), g()]

The list is the whole answer, or stands between marks (`<|python_start|>`, `<|tool_call_start|>`),
which may follow other text. An argument is told as JSON when it is complete.
"""

import json
import re

from gateway.answer.tools.cursor import Cursor, NotACall, Step
from gateway.answer.tools.python_text import to_json

MARKS = ("<|python_start|>", "<|tool_call_start|>")
END_MARKS = ("<|python_end|>", "<|tool_call_end|>")

_NAME = re.compile(r"[A-Za-z0-9_.\-]*")
_KEYWORD = re.compile(r"\w*")
_PLAIN = re.compile(r"[^\[\](){},'\"]*")
_IN_STRING = {quote: re.compile(rf"[^{quote}\\]*") for quote in "'\""}
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class _Broken(Exception):
    """What follows the last argument told is none."""


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

        Raises NotACall before anything is told.
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
