"""Pages of items, as OpenAI's lists have them: by the id of the item before, never by an offset.

Comes in: all items of a response or conversation as JSON, the oldest first, and a query. Goes out:
a list object. Which items there are is the stores'.
"""

from collections.abc import Mapping, Sequence

import msgspec

from gateway.api.bodies import invalid
from gateway.errors import UNSUPPORTED_PARAMETER, ApiError
from gateway.state.conversation_store import id_of

MAX_PAGE, USUAL_PAGE = 100, 20
_KNOWN = frozenset({"limit", "order", "after", "include", "include[]"})


def page_of(params: Mapping[str, Sequence[str]]) -> tuple[int, str, str]:
    """A query's limit, order and `after` ("": from the first). Raises ApiError."""
    for name in params.keys() - _KNOWN:
        raise ApiError(UNSUPPORTED_PARAMETER, f"{name} is not supported: remove it", name)
    limit = params.get("limit", [str(USUAL_PAGE)])[-1]
    if not (limit.isascii() and limit.isdecimal() and len(limit) <= 3 and 1 <= int(limit) <= 100):
        raise invalid("limit", f"limit must be a whole number from 1 to {MAX_PAGE}")
    order = params.get("order", ["desc"])[-1]
    if order not in ("asc", "desc"):
        raise invalid("order", "order must be asc or desc")
    return int(limit), order, params.get("after", [""])[-1]


def item_page(items: list[msgspec.Raw], limit: int, order: str, after: str) -> bytes:
    """OpenAI's list object. Raises ApiError where no item has the id `after`."""
    if order == "desc":
        items = items[::-1]
    ids = [id_of(item) for item in items]
    if after and after not in ids:
        raise invalid("after", f"after: no item has the id {after[:80]!r}")
    begin = ids.index(after) + 1 if after else 0
    shown = ids[begin : begin + limit]
    return msgspec.json.encode(
        {
            "object": "list",
            "data": items[begin : begin + limit],
            "first_id": shown[0] if shown else None,
            "last_id": shown[-1] if shown else None,
            "has_more": begin + limit < len(items),
        }
    )
