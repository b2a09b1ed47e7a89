"""Fields that have no effect here and are told: taken out of a body, and named. Part of stage 2.

Comes in: a body that the strict types of wire_body.py refuse for an unknown field. Goes out: the
same body without the unknown fields of its messages, their parts and their calls, and the names of
these, for the answer's header `x-polyhost-ignored`. Client libraries put fields of their own there
(`provider_specific_fields`, `cache_control`, `thinking_blocks`) and send them back with the next
turn; a model reads none of them. Unknown fields at the top stay, so that they are refused by name,
unless the setting `unknown_fields` says that they are told too.

Bodies without such fields never come here. Values are copied as they are and never read.
"""

import re
from collections.abc import Callable, Collection
from typing import Annotated, TypeAlias, TypeVar

import msgspec

from gateway.api.bodies import decode_body
from gateway.api.tool_types import CalledFunction, ToolCall
from gateway.api.wire_body import MAX_MESSAGES, MAX_PARTS, ContentPart, MessageBody
from gateway.errors import UNSUPPORTED_PARAMETER, ApiError

MAX_NAMES = 32
"""Of one request; a header must not become longer than clients read."""
MAX_FIELDS = 1 << 18
"""Of a body that is looked at: its names are made into objects."""
COUNTED = frozenset(
    {
        "store",
        "prediction",
        "prompt_cache_retention",
        "prompt_cache_options",
        "verbosity",
        "service_tier",
        "reasoning_effort",
        "thinking",
        "messages[].annotations",
        "messages[].cache_control",
        "messages[].content[].cache_control",
        "messages[].provider_specific_fields",
        "messages[].thinking_blocks",
        "messages[].reasoning_details",
        "tools[].cache_control",
    }
)
"""Names with a count of their own; others, which callers choose, are counted together."""

_T = TypeVar("_T")
_Object: TypeAlias = dict[str, msgspec.Raw]
_object_decoder = msgspec.json.Decoder(_Object)
_objects_decoder = msgspec.json.Decoder(
    Annotated[list[_Object], msgspec.Meta(max_length=max(MAX_MESSAGES, MAX_PARTS))]
)
_encode = msgspec.json.Encoder().encode
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NULL = msgspec.Raw(b"null")
_SAID = msgspec.Raw(b"true")
_Clean: TypeAlias = "Callable[[_Object, ToldFields], None]"


class ToldFields:
    """The names of one request, each once, in the order they were met."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}
        self.has_dropped = False

    def drop(self, item: _Object, known: Collection[str], place: str) -> None:
        """Take fields that are not `known` out of `item`, which lies at `place`."""
        for name in [name for name in item if name not in known]:
            value = item.pop(name)
            self.has_dropped = True
            if value != _NULL and len(self._names) < MAX_NAMES:
                # The name is the caller's: a header holds only plain ones.
                plain = name if _PLAIN_NAME.fullmatch(name) else "*"
                self._names[place + plain] = None

    def tell(self, name: str, value: msgspec.Raw = _SAID) -> None:
        """A field that is known, unless its value is null."""
        if value != _NULL and len(self._names) < MAX_NAMES:
            self._names[name] = None

    @property
    def names(self) -> tuple[str, ...]:
        """For the header."""
        return tuple(self._names)


def decode_telling(
    decoder: "msgspec.json.Decoder[_T]",
    body: bytes,
    fields: type[msgspec.Struct],
    tells_unknown: bool = False,
) -> tuple[_T, tuple[str, ...]]:
    """The body, and the names of its fields that are told. Raises ApiError."""
    try:
        return decode_body(decoder, body), ()
    except ApiError as error:
        if error.kind is not UNSUPPORTED_PARAMETER:
            raise
        told = without_told(body, fields.__struct_fields__, tells_unknown)
        if told is None:
            raise
    return decode_body(decoder, told[0]), told[1]


def without_told(
    body: bytes, known: Collection[str], tells_unknown: bool = False
) -> tuple[bytes, tuple[str, ...]] | None:
    """The body without what is told, and its names; None where there is nothing of the kind, or
    too much to look at. `known`: the fields of the top; with `tells_unknown` others are told."""
    if body.count(b":") > MAX_FIELDS:
        return None
    told = ToldFields()
    try:
        top = _object_decoder.decode(body)
        if tells_unknown:
            told.drop(top, known, "")
        for name, clean in _LISTS.items():
            if name in top and name in known:
                top[name] = _each(top[name], told, clean)
        return (_encode(top), told.names) if told.has_dropped else None
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return None  # The strict types say what is wrong with it.


def _each(raw: msgspec.Raw, told: ToldFields, clean: _Clean) -> msgspec.Raw:
    """The items of a list; what is none stays as it is."""
    if bytes(raw)[:1] != b"[":
        return raw
    items = _objects_decoder.decode(raw)
    for item in items:
        clean(item, told)
    return msgspec.Raw(_encode(items))


def _clean_message(message: _Object, told: ToldFields) -> None:
    told.drop(message, MessageBody.__struct_fields__, "messages[].")
    if "content" in message:
        message["content"] = _each(message["content"], told, _clean_part)
    if "tool_calls" in message:
        message["tool_calls"] = _each(message["tool_calls"], told, _clean_call)


def _clean_part(part: _Object, told: ToldFields) -> None:
    told.drop(part, ContentPart.__struct_fields__, "messages[].content[].")


def _clean_call(call: _Object, told: ToldFields) -> None:
    told.drop(call, ToolCall.__struct_fields__, "messages[].tool_calls[].")
    if "function" in call and bytes(call["function"])[:1] == b"{":
        function = _object_decoder.decode(call["function"])
        told.drop(function, CalledFunction.__struct_fields__, "messages[].tool_calls[].function.")
        call["function"] = msgspec.Raw(_encode(function))


def _clean_tool(tool: _Object, told: ToldFields) -> None:
    """Other unknown fields of a tool may be a schema's, misplaced: they are refused."""
    told.drop(tool, tool.keys() - {"cache_control"}, "tools[].")


_LISTS: dict[str, _Clean] = {"messages": _clean_message, "tools": _clean_tool}
