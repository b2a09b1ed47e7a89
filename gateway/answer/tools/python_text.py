"""Literals as Python writes them, and JSON's, which differ in three words. No I/O, no evaluation.

Not `ast.literal_eval`: what a model writes may be nested to the interpreter's limits, holds escapes
that make it warn, and has `true` and `null` in it as often as not.
"""

import json
import re
from typing import Any

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
