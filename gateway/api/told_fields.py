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
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias, TypeVar

import msgspec

from gateway.api.bodies import decode_body
from gateway.api.tool_types import CalledFunction, ToolCall
from gateway.api.wire_body import MAX_MESSAGES, MAX_PARTS, ChatBody, ContentPart, MessageBody
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


@dataclass(frozen=True, slots=True)
class Shape:
    """The fields of an object, and of the objects in its lists and in itself. What is not `known`
    is taken out and told; with `only`, nothing but these names is."""

    known: Collection[str] = ()
    lists: "Mapping[str, Shape]" = field(default_factory=dict)
    objects: "Mapping[str, Shape]" = field(default_factory=dict)
    only: Collection[str] = ()


CHAT = Shape(
    ChatBody.__struct_fields__,
    {
        "messages": Shape(
            MessageBody.__struct_fields__,
            {
                "content": Shape(ContentPart.__struct_fields__),
                "tool_calls": Shape(
                    ToolCall.__struct_fields__,
                    objects={"function": Shape(CalledFunction.__struct_fields__)},
                ),
            },
        ),
        # Other unknown fields of a tool may be a schema's, misplaced: they are refused.
        "tools": Shape(only={"cache_control"}),
    },
)


def shape_of(fields: type[msgspec.Struct]) -> Shape:
    """Of a body of which only unknown fields at the top can be told."""
    return Shape(fields.__struct_fields__)


def decode_telling(
    decoder: "msgspec.json.Decoder[_T]", body: bytes, shape: Shape, tells_unknown: bool = False
) -> tuple[_T, ToldFields]:
    """The body, and its fields that are told: unknown ones below the top, and with `tells_unknown`
    at the top as well. Raises ApiError."""
    told = ToldFields()
    try:
        return decode_body(decoder, body), told
    except ApiError as error:
        if error.kind != UNSUPPORTED_PARAMETER:
            raise
        rest = without_told(body, shape, told, tells_unknown)
        if rest is None:
            raise
    return decode_body(decoder, rest), told


def without_told(
    body: bytes, shape: Shape, told: ToldFields, tells_unknown: bool = False
) -> bytes | None:
    """The body without what is told; None where there is nothing of the kind, or too much to look
    at."""
    if body.count(b":") > MAX_FIELDS:
        return None
    try:
        top = _object_decoder.decode(body)
        if tells_unknown:
            told.drop(top, shape.known, "")
        _look_into(top, shape, told, "")
        return _encode(top) if told.has_dropped else None
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return None  # The strict types say what is wrong with it.


def _look_into(item: _Object, shape: Shape, told: ToldFields, place: str) -> None:
    for name, inner in shape.lists.items():
        # Only what the strict types read: below an unknown field nothing is looked at.
        if name in item and bytes(item[name])[:1] == b"[":
            items = _objects_decoder.decode(item[name])
            for one in items:
                _clean(one, inner, told, f"{place}{name}[].")
            item[name] = msgspec.Raw(_encode(items))
    for name, inner in shape.objects.items():
        if name in item and bytes(item[name])[:1] == b"{":
            found = _object_decoder.decode(item[name])
            _clean(found, inner, told, f"{place}{name}.")
            item[name] = msgspec.Raw(_encode(found))


def _clean(item: _Object, shape: Shape, told: ToldFields, place: str) -> None:
    told.drop(item, item.keys() - shape.only if shape.only else shape.known, place)
    _look_into(item, shape, told, place)
