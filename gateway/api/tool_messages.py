"""Messages with calls and their results, as chat templates take them. Part of stage 2; pure.

Comes in: the calls a client sends back. Goes out: the same as templates know them. Templates differ
in two things. Most print `arguments` as JSON, so they want the value; a few glue it to other text,
so they want the text (`wants_text` finds out by rendering a sample). Mistral's raise for ids that
are not nine letters and digits; others' ids, from a chat begun with another model, are made into
such, always the same for the same id.
"""

import hashlib
import string
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from gateway.api.tool_types import ToolCall
from gateway.api.tools.formats import ToolFormat

_ALPHANUMERIC = string.ascii_letters + string.digits
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode
_SAMPLE_ID = "call00000"
_SAMPLE = {"city": "Zwolle"}


def calls_for_template(
    calls: Sequence[ToolCall], fmt: ToolFormat | None, as_text: bool
) -> list[dict[str, Any]]:
    """The `tool_calls` of a message. Arguments that are no JSON stay the text they are: a model may
    have written them, and the chat has to go on."""
    out: list[dict[str, Any]] = []
    for call in calls:
        text = call.function.arguments
        if not isinstance(text, str):
            text = _encode(text).decode()
        function = {"name": call.function.name, "arguments": text if as_text else _value(text)}
        out.append({"id": id_for_template(call.id, fmt), "type": "function", "function": function})
    return out


def id_for_template(call_id: str, fmt: ToolFormat | None) -> str:
    """The id of a call, or of the call that a result answers."""
    if fmt is None or fmt.takes_id(call_id):
        return call_id
    number = int.from_bytes(hashlib.blake2b(call_id.encode(), digest_size=8).digest(), "big")
    chars = []
    for _ in range(9):
        number, digit = divmod(number, len(_ALPHANUMERIC))
        chars.append(_ALPHANUMERIC[digit])
    return "".join(chars)


def wants_text(render: Callable[[list[dict[str, Any]]], str]) -> bool:
    """Does this template want arguments as text? `render` raises ValueError where it refuses."""
    return not _prints_json(render, _SAMPLE) and _prints_json(render, '{"city": "Zwolle"}')


def _prints_json(render: Callable[[list[dict[str, Any]]], str], arguments: Any) -> bool:
    function = {"name": "weather", "arguments": arguments}
    call = {"id": _SAMPLE_ID, "type": "function", "function": function}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "!", "name": "weather", "tool_call_id": _SAMPLE_ID},
    ]
    try:
        text = render(messages)
    except ValueError:
        return False
    return '"city"' in text or "city=" in text


def _value(text: str) -> Any:
    """An empty text is what some clients send for no arguments."""
    try:
        return _decode(text) if text.strip() else {}
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return text
