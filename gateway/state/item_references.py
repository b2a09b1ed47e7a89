"""Items that a body of /v1/responses names by their ids instead of repeating them.

AI SDK and others send `{"type": "item_reference", "id": "msg_..."}` for what an earlier answer
said. The id of an item has that of the response that it was stored with:

    msg_3f9c...00       the first item of the answer resp_3f9c...
    msg_3f9c...i0       the first item of its input, where the caller gave it no id

Each reference becomes the stored item, in its place, before the body is read as any other. Where a
response may not be read by this caller, its items are missing, in the same words.
"""

import re
from collections.abc import Callable, Iterable

import msgspec

from gateway.api.bodies import invalid
from gateway.dialects.responses_wire import ID_PREFIX
from gateway.errors import NOT_FOUND, ApiError
from registry.errors import NotFound

WORD = b'"item_reference"'
"""A body without it has none."""
MAX_RESPONSES = 256
"""That one body may name items of: each is a query and a file."""
_ID = re.compile(r"[a-z]{2,4}_([0-9a-f]{32})(?:[0-9]{2,4}|i[0-9]{1,6})")
_encode = msgspec.json.Encoder().encode


class _Named(msgspec.Struct):
    type: str = "message"
    id: str = ""


_body_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_items_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_named_decoder = msgspec.json.Decoder(_Named)


def resolved(body: bytes, max_bytes: int, read: Callable[[str], Iterable[msgspec.Raw]]) -> bytes:
    """The body with the items in the place of their ids. `read`: all items of a response, its own
    input and its output; raises NotFound. A body that is no request comes back as it is.

    Raises ApiError where an item is not there, or all of them are too large or too many.
    """
    try:
        fields = _body_decoder.decode(body)
        items = _items_decoder.decode(fields.get("input", b"[]"))
        named = [_named_decoder.decode(item) for item in items]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body
    stored: dict[str, msgspec.Raw] = {}
    seen: set[str] = set()
    num_bytes = len(body)
    for index, item in enumerate(named):
        if item.type != "item_reference":
            continue
        place = f"input[{index}].id"
        found = _ID.fullmatch(item.id)
        response_id = ID_PREFIX + found[1] if found else ""
        if found and response_id not in seen:
            if len(seen) == MAX_RESPONSES:
                raise invalid(
                    place, f"input names items of more than {MAX_RESPONSES} responses: send items"
                )
            seen.add(response_id)
            stored |= _by_id(response_id, read)
        if item.id not in stored:
            text = (
                f"no item has the id {item.id[:80]!r}: it may have expired, or it was not stored "
                "(store: false); send the item itself"
            )
            raise ApiError(NOT_FOUND, text, place)
        items[index] = stored[item.id]
        num_bytes += len(stored[item.id])
        if num_bytes > max_bytes:
            raise invalid(place, f"input has more than {max_bytes} bytes with the items it names")
    return _encode({**fields, "input": items})


def _by_id(
    response_id: str, read: Callable[[str], Iterable[msgspec.Raw]]
) -> dict[str, msgspec.Raw]:
    try:
        return {_named_decoder.decode(item).id: _plain(item) for item in read(response_id)}
    except NotFound:
        return {}


def _plain(item: msgspec.Raw) -> msgspec.Raw:
    """Stored reasoning has its text; what was sealed of it opens for its own model alone."""
    if b'"encrypted_content"' not in bytes(item):
        return item
    fields = _body_decoder.decode(item)
    fields.pop("encrypted_content", None)
    return msgspec.Raw(_encode(fields))
