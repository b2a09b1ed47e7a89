"""Parsers of the formats whose arguments stand each by itself between tags. Part of stage 9.

    <tool_call>                                  Qwen3-Coder, Qwen 3.5 and later
    <function=f>
    <parameter=a>
    some text
    </parameter>
    </function>
    </tool_call>

    <tool_call>f                                 GLM 4.5 and later
    <arg_key>a</arg_key>
    <arg_value>some text</arg_value>
    </tool_call>

Arguments become JSON. A text stands there without quotation marks, so what a value is depends on
the function's schema: where it says string, the text is told as it comes; any other value is told
when it is complete, as the JSON it is, or as a text where it is none.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.api.tools.cursor import MAX_HELD_CHARS, Cursor, NotACall, Step
from gateway.api.tools.output_parser import overlap

XML_OPEN = "<tool_call>"
XML_CLOSE = "</tool_call>"
FUNCTION_OPEN = "<function="

_NAME = re.compile(r"[A-Za-z0-9_.\-]*")
_KEY = re.compile(r"[^<>\n]*")
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode
_PYTHON_WORDS = {"True": True, "False": False, "None": None}


class _Broken(Exception):
    """What follows belongs to no argument."""


class _TaggedParser(Cursor):
    """What both have in common: how arguments are told."""

    def _call_or_content(self) -> Step[None]:
        """Behind the opening mark."""
        held = self._held()
        try:
            name = yield from self._start()
        except NotACall:
            self._back_to(held)
            return
        self._tell_start(name)
        num_told = 0
        try:
            while (yield from self._argument(name, num_told)):
                num_told += 1
        except (_Broken, NotACall):
            self._back_to(0)
            yield from self._tell_arguments_until((XML_CLOSE,))
            yield from self._read(XML_CLOSE)
            self._tell_end(whole=False)
            return
        self._tell_arguments("}" if num_told else "{}")
        yield from self._end()
        self._tell_end(whole=True)

    def _start(self) -> Step[str]:
        """The function's name, moved over. Raises NotACall."""
        raise NotImplementedError

    def _argument(self, name: str, num_told: int) -> Step[bool]:
        """Tell one argument; False where there is no other, with the end moved over. Raises
        _Broken."""
        raise NotImplementedError

    def _end(self) -> Step[None]:
        """Move over what may follow the end."""
        yield from ()

    def _tell_value(
        self, name: str, key: str, num_told: int, close: str, trims: bool
    ) -> Step[None]:
        """At the value of an argument, up to `close` and over it. `trims`: a line break before that
        belongs to the format. Raises _Broken, NotACall."""
        head = ("{" if num_told == 0 else ", ") + _encode(key).decode() + ": "
        schema = _property(self._schemas.get(name), key)
        if is_text(schema):
            self._tell_arguments(head + '"')
            yield from self._tell_text(close, trims)
            self._tell_arguments('"')
            return
        text = yield from self._held_value(close)
        if trims:
            text = text.removesuffix("\n")
        self._tell_arguments(head + _encode(_value(text, schema)).decode())

    def _tell_text(self, close: str, trims: bool) -> Step[None]:
        """A text as it comes, as the inside of a JSON string; `close` is read and held."""
        marks = ("\n" + close, close) if trims else (close,)
        pattern = re.compile("|".join(map(re.escape, marks)))
        while True:
            found = pattern.search(self._text, self._pos)
            keep = 0 if self._at_end else overlap(self._text[self._pos :], marks)
            self._pos = found.start() if found else len(self._text) - keep
            text = self._text[self._mark : self._pos]
            if text:
                self._tell_arguments(_encode(text).decode()[1:-1])
            if found:
                self._pos += len(found.group())
                return
            if self._at_end:
                raise _Broken
            yield

    def _held_value(self, close: str) -> Step[str]:
        """All of it; what was searched is not searched again."""
        start = searched = self._held()
        while True:
            at = self._text.find(close, self._mark + max(start, searched - len(close)))
            if at >= 0:
                text = self._text[self._mark + start : at]
                self._pos = at + len(close)
                return text
            searched = len(self._text) - self._mark
            if self._at_end:
                raise _Broken
            if searched > MAX_HELD_CHARS:
                raise NotACall
            yield


class QwenXmlParser(_TaggedParser):
    """See the module. Some models leave out the outer mark."""

    def _run(self) -> Step[None]:
        yield
        while (yield from self._content_until((XML_OPEN, FUNCTION_OPEN))):
            yield from self._call_or_content()

    def _start(self) -> Step[str]:
        if not self._text.endswith(FUNCTION_OPEN, self._mark, self._pos):
            yield from self._skip_spaces()
            if not (yield from self._read(FUNCTION_OPEN)):
                raise NotACall
        start = self._held()
        yield from self._skip(_NAME)
        name = self._held_text(start)
        if name not in self._names or not (yield from self._read(">")):
            raise NotACall
        return name

    def _argument(self, name: str, num_told: int) -> Step[bool]:
        yield from self._skip_spaces()
        if not (yield from self._read("<parameter=")):
            if (yield from self._read("</function>")):
                return False
            raise _Broken
        start = self._held()
        yield from self._skip(_KEY)
        key = self._held_text(start).strip()
        if not key or not (yield from self._read(">")):
            raise _Broken
        yield from self._read("\n")
        yield from self._tell_value(name, key, num_told, "</parameter>", trims=True)
        return True

    def _end(self) -> Step[None]:
        held = self._held()
        try:
            yield from self._skip_spaces()
            if not (yield from self._read(XML_CLOSE)):
                self._back_to(held)
        except NotACall:
            self._back_to(held)


class GlmXmlParser(_TaggedParser):
    """See the module."""

    def _run(self) -> Step[None]:
        yield
        while (yield from self._content_until((XML_OPEN,))):
            yield from self._call_or_content()

    def _start(self) -> Step[str]:
        yield from self._skip_spaces()
        start = self._held()
        yield from self._skip(_NAME)
        name = self._held_text(start)
        if name not in self._names or (yield from self._skip_spaces()) != "<":
            raise NotACall
        return name

    def _argument(self, name: str, num_told: int) -> Step[bool]:
        yield from self._skip_spaces()
        if not (yield from self._read("<arg_key>")):
            if (yield from self._read(XML_CLOSE)):
                return False
            raise _Broken
        start = self._held()
        yield from self._skip(_KEY)
        key = self._held_text(start).strip()
        if not key or not (yield from self._read("</arg_key>")):
            raise _Broken
        yield from self._skip_spaces()
        if not (yield from self._read("<arg_value>")):
            raise _Broken
        yield from self._tell_value(name, key, num_told, "</arg_value>", trims=False)
        return True


def _property(schema: Any, key: str) -> Any:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def is_text(schema: Mapping[str, Any]) -> bool:
    """Nothing but a text may stand there."""
    return schema.get("type") == "string" or (
        "type" not in schema
        and bool(schema.get("enum"))
        and all(isinstance(value, str) for value in schema["enum"])
    )


def _value(text: str, schema: Mapping[str, Any]) -> Any:
    """What a value stands for: JSON, a word of Python's, or a text."""
    try:
        value = _decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return _PYTHON_WORDS.get(text.strip(), text)
    types = schema.get("type")
    if isinstance(types, list) and "string" in types and not _fits(value, types):
        return text
    return value


def _fits(value: Any, types: list[Any]) -> bool:
    """Whether a value that JSON was read as is of a type that may be here."""
    if value is None:
        return "null" in types
    if isinstance(value, bool):
        return "boolean" in types
    if isinstance(value, int | float):
        return "number" in types or ("integer" in types and isinstance(value, int))
    return ("object" if isinstance(value, dict) else "array") in types
