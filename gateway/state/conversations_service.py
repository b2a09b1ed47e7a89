"""/v1/conversations: lists of items that callers keep here, and that responses read and extend.

Comes in: whose key it is, and a body or query. Goes out: OpenAI's objects as JSON. The items are
those of responses; a response with `conversation` reads all of them before its own input, and
appends its input and output (responses_service.py).
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from gateway.api.bodies import invalid
from gateway.api.told_fields import Shape, ToldFields, decode_telling
from gateway.dialects.responses_items import (
    MAX_ID_CHARS,
    Item,
    Part,
    is_usable_id,
    kept_items,
    messages_of,
    refuse_sealed,
)
from gateway.dialects.responses_wire import metadata_of
from gateway.errors import (
    CONFLICT,
    INSUFFICIENT_QUOTA,
    INVALID_REQUEST,
    NOT_FOUND,
    UNSUPPORTED_PARAMETER,
    ApiError,
)
from gateway.state.conversation_store import (
    ConversationBusy,
    ConversationFull,
    ConversationStore,
    Items,
    id_of,
)
from gateway.state.item_pages import item_page, page_of
from gateway.state.state_threads import RETRY_S, StateThreads
from gateway.types import Principal
from registry.errors import NotFound
from registry.state.conversations import ConversationRecord
from registry.state.responses import Viewer

MAX_ITEMS = 20
"""Of one request, as OpenAI has it."""
ID_PREFIX = "conv_"
NONE_STORED = "nothing is stored for this tenant: send the whole input with each request"
_NOTHING = msgspec.Raw(b"null")
_T = TypeVar("_T")
_encode = msgspec.json.Encoder().encode


class ConversationBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/conversations."""

    items: Annotated[list[Item], msgspec.Meta(max_length=MAX_ITEMS)] | None = None
    metadata: msgspec.Raw = _NOTHING


class MetadataBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/conversations/{conversation_id}."""

    metadata: msgspec.Raw


class ItemsBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/conversations/{conversation_id}/items."""

    items: Annotated[list[Item], msgspec.Meta(min_length=1, max_length=MAX_ITEMS)]


_PART = Shape(Part.__struct_fields__)
_SHAPE = Shape((), {"items": Shape(Item.__struct_fields__, {"content": _PART, "output": _PART})})
_new_decoder = msgspec.json.Decoder(ConversationBody)
_metadata_body_decoder = msgspec.json.Decoder(MetadataBody)
_items_decoder = msgspec.json.Decoder(ItemsBody)


class ConversationsService:
    """One object per gateway process. `viewer_of`: what a key may see; `retains`: whether anything
    is stored for it."""

    def __init__(
        self,
        store: ConversationStore,
        threads: StateThreads,
        viewer_of: Callable[[Principal], Viewer],
        retains: Callable[[Principal], bool],
    ) -> None:
        self._store = store
        self._threads = threads
        self._viewer_of = viewer_of
        self._retains = retains

    async def create(self, principal: Principal, body: bytes, told: ToldFields) -> bytes:
        """A new conversation. All of these raise ApiError."""
        asked = _decoded(_new_decoder, body or b"{}", told)
        if not self._retains(principal):
            raise ApiError(UNSUPPORTED_PARAMETER, NONE_STORED)
        items = _checked(asked.items or [], told)
        details = metadata_of(asked.metadata)
        name = ID_PREFIX + secrets.token_hex(16)
        record = await self._read(
            principal, lambda: self._store.create(name, principal.tenant_id, items, details)
        )
        if record is None:
            message = (
                "this tenant stores as many responses and conversations as it may: delete some"
            )
            raise ApiError(INSUFFICIENT_QUOTA, message)
        return shown(record)

    async def retrieve(self, principal: Principal, conversation_id: str) -> bytes:
        """The conversation without its items."""
        viewer = self._viewer_of(principal)
        return shown(await self._read(principal, lambda: self._store.get(viewer, conversation_id)))

    async def update(self, principal: Principal, conversation_id: str, body: bytes) -> bytes:
        """Other metadata."""
        asked = _decoded(_metadata_body_decoder, body, ToldFields())
        details = metadata_of(asked.metadata)
        viewer = self._viewer_of(principal)
        return shown(
            await self._read(
                principal, lambda: self._store.describe(viewer, conversation_id, details)
            )
        )

    async def remove(self, principal: Principal, conversation_id: str) -> bytes:
        """Delete it with all its items; responses that were made in it stay."""
        viewer = self._viewer_of(principal)
        await self._read(principal, lambda: self._store.remove(viewer, conversation_id))
        gone = {"id": conversation_id, "object": "conversation.deleted", "deleted": True}
        return _encode(gone)

    async def add_items(
        self, principal: Principal, conversation_id: str, body: bytes, told: ToldFields
    ) -> bytes:
        """A list of the items that were added."""
        items = _checked(_decoded(_items_decoder, body, told).items, told)
        viewer = self._viewer_of(principal)

        def work() -> Items | None:
            return self._store.append(viewer, conversation_id, items)

        added = await self._read(principal, work)
        return item_page(added or [], len(items), "asc", "")

    async def items(
        self, principal: Principal, conversation_id: str, params: Mapping[str, Sequence[str]]
    ) -> bytes:
        """A page of its items."""
        limit, order, after = page_of(params)
        viewer = self._viewer_of(principal)

        def work() -> bytes:
            return item_page(self._store.items(viewer, conversation_id), limit, order, after)

        return await self._read(principal, work)

    async def item(self, principal: Principal, conversation_id: str, item_id: str) -> bytes:
        """One item."""
        viewer = self._viewer_of(principal)

        def work() -> bytes:
            for item in self._store.items(viewer, conversation_id):
                if id_of(item) == item_id:
                    return bytes(item)
            raise NotFound(f"item {item_id[:80]!r} does not exist")

        return await self._read(principal, work)

    async def remove_item(self, principal: Principal, conversation_id: str, item_id: str) -> bytes:
        """The conversation without it."""
        viewer = self._viewer_of(principal)

        def work() -> ConversationRecord:
            self._store.remove_item(viewer, conversation_id, item_id)
            return self._store.get(viewer, conversation_id)

        return shown(await self._read(principal, work))

    async def _read(self, principal: Principal, work: Callable[[], _T]) -> _T:
        try:
            return await self._threads.read(principal.tenant_id, work)
        except NotFound as error:
            message = "no conversation, or no item of it, has this id: it may have expired"
            raise ApiError(NOT_FOUND, message) from error
        except ConversationFull as error:
            raise ApiError(INVALID_REQUEST, f"{error}: begin another one") from error
        except ConversationBusy as error:
            raise ApiError(CONFLICT, str(error), retry_after_s=RETRY_S) from error


def shown(record: ConversationRecord) -> bytes:
    """OpenAI's object."""
    return _encode(
        {
            "id": record.id,
            "object": "conversation",
            "created_at": int(record.created_at),
            "metadata": record.details,
        }
    )


def _decoded(decoder: "msgspec.json.Decoder[_T]", body: bytes, told: ToldFields) -> _T:
    asked, found = decode_telling(decoder, body, _SHAPE, False)
    for name in found.names:
        told.tell(name)
    return asked


def _checked(items: Sequence[Item], told: ToldFields) -> Items:
    """As they are stored. Raises ApiError for items that no model could read."""
    for _ in messages_of(items, told, field="items"):
        pass
    for number, item in enumerate(items):
        refuse_sealed(item, f"items[{number}]")
        if item.id and not is_usable_id(item.id):
            param = f"items[{number}].id"
            message = f"{param} must have at most {MAX_ID_CHARS} printable characters"
            raise invalid(param, f"{message}, and no part between slashes may be . or ..")
    kept: list[dict[str, Any]] = kept_items(items, secrets.token_hex(16))
    return [msgspec.Raw(_encode(item)) for item in kept]
