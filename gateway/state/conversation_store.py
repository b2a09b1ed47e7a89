"""Conversations: a mutable list of items, kept as one object, changed under a version check.

The order of writes is that of responses: the new object first, then the row, then the old object
goes. A change that finds that another one came first begins anew with what is there now, a bounded
number of times. A response is stored in the transaction that appends its items, so that both are
there or neither. All of it blocks and runs in threads.
"""

import hashlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import msgspec
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from engine.objects.object_store import ObjectMissing, ObjectStore, new_name
from gateway.dialects.responses_items import Item
from gateway.state.state_threads import Damaged
from registry.errors import NotFound
from registry.session import appending, reading
from registry.state import conversations
from registry.state.conversations import ConversationRecord
from registry.state.responses import Viewer

log = logging.getLogger(__name__)

ACTOR = "gateway"
KIND = "conversations"
MAX_TRIES = 20
MAX_READS = 5
NUM_LOCKS = 64
Items: TypeAlias = list[msgspec.Raw]
"""As JSON, each with an id; the oldest first."""
Also: TypeAlias = Callable[[Session], bool]
"""What belongs to a change, in its transaction. False: the change is not to be."""
_encode = msgspec.json.Encoder().encode
_raw_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_items_decoder = msgspec.json.Decoder(list[Item])


class ConversationRefused(Exception):
    """It cannot be changed so. The message is for the caller."""


class ConversationBusy(ConversationRefused):
    """Others changed it every time."""


class ConversationFull(ConversationRefused):
    """It has as many bytes of items as it may."""


class _Unwanted(Exception):
    """A change is taken back."""


class _Named(msgspec.Struct):
    id: str


class ConversationStore:
    """One object per gateway process. Raises SQLAlchemyError and OSError where database or objects
    fail, NotFound of what the viewer may not see."""

    def __init__(
        self,
        engine: Engine,
        objects: ObjectStore,
        max_responses: int,
        max_bytes: int,
        wall_clock: Callable[[], float],
    ) -> None:
        """`max_bytes`: of a conversation's items."""
        self._engine = engine
        self._objects = objects
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._wall_clock = wall_clock
        self._locks = tuple(threading.Lock() for _ in range(NUM_LOCKS))

    def create(
        self, conversation_id: str, tenant_id: str, items: Items, details: dict[str, str]
    ) -> ConversationRecord | None:
        """A new one. None where its tenant has as many responses and conversations as it may.
        Raises ConversationFull."""
        now_at = self._wall_clock()
        about = ConversationRecord(
            conversation_id, tenant_id, 0, [], details, "", "", 0, now_at, now_at
        )
        record = self._put(about, with_own_ids([], items))
        with appending(self._engine, ACTOR) as session:
            if conversations.add(session, record, self._max_responses):
                return record
        discard(self._objects, record.object_name)
        return None

    def get(self, viewer: Viewer, conversation_id: str) -> ConversationRecord:
        """Without its items."""
        with reading(self._engine) as session:
            return conversations.get(session, viewer, conversation_id)

    def items(self, viewer: Viewer, conversation_id: str) -> Items:
        """All of it."""
        return self._read(viewer, conversation_id)[1]

    def decoded(self, viewer: Viewer, conversation_id: str) -> tuple[Sequence[Item], int]:
        """Its items as a request follows them, and their bytes."""
        record, items = self._read(viewer, conversation_id)
        return _items_decoder.decode(_encode(items)), record.items_bytes

    def append(
        self,
        viewer: Viewer,
        conversation_id: str,
        items: Items,
        model: str = "",
        also: Also = lambda session: True,
    ) -> Items | None:
        """Returns the items as they were added: one whose id is taken has another one. `model`:
        whose answer is in them. None where `also` would not. Raises as `change`."""
        added: list[Items] = []

        def edit(record: ConversationRecord, before: Items) -> tuple[ConversationRecord, Items]:
            new = with_own_ids(before, items)
            added.append(new)
            models = sorted({*record.models, model} - {""})
            return replace(record, models=models), [*before, *new]

        return added[-1] if self._change(viewer, conversation_id, edit, also) else None

    def describe(
        self, viewer: Viewer, conversation_id: str, details: dict[str, str]
    ) -> ConversationRecord:
        """Replace the caller's metadata. Raises as `change`."""
        self._change(viewer, conversation_id, lambda r, i: (replace(r, details=details), i))
        return self.get(viewer, conversation_id)

    def remove_item(self, viewer: Viewer, conversation_id: str, item_id: str) -> None:
        """Raises as `change`, and NotFound where there is no such item."""

        def edit(record: ConversationRecord, before: Items) -> tuple[ConversationRecord, Items]:
            left = [item for item in before if id_of(item) != item_id]
            if len(left) == len(before):
                raise NotFound(f"item {item_id[:80]!r} does not exist")
            return record, left

        self._change(viewer, conversation_id, edit)

    def remove(self, viewer: Viewer, conversation_id: str) -> None:
        """Delete it. Responses that were made in it stay."""
        with appending(self._engine, ACTOR) as session:
            record = conversations.remove(session, viewer, conversation_id)
        discard(self._objects, record.object_name)

    def _change(
        self,
        viewer: Viewer,
        conversation_id: str,
        edit: Callable[[ConversationRecord, Items], tuple[ConversationRecord, Items]],
        also: Also = lambda session: True,
    ) -> bool:
        """False where `also` would not. Raises ConversationBusy, ConversationFull. Threads of this
        process take turns, so only other processes make a change begin anew."""
        with self._locks[hash(conversation_id) % NUM_LOCKS]:
            for _ in range(MAX_TRIES):
                before, items = self._read(viewer, conversation_id)
                edited, items = edit(before, items)
                moved = replace(edited, version=before.version + 1, updated_at=self._wall_clock())
                after = self._put(moved, items)
                is_moved = is_wanted = False
                try:
                    with appending(self._engine, ACTOR) as session:
                        is_moved = conversations.move(session, after)
                        is_wanted = is_moved and also(session)
                        if not is_wanted:
                            raise _Unwanted
                except _Unwanted:
                    pass
                discard(self._objects, (before if is_wanted else after).object_name)
                if is_moved:
                    return is_wanted
            raise ConversationBusy("others are changing this conversation: try again")

    def _read(self, viewer: Viewer, conversation_id: str) -> tuple[ConversationRecord, Items]:
        for tries_left in reversed(range(MAX_READS)):
            record = self.get(viewer, conversation_id)
            try:
                data = self._objects.get(record.object_name)
            except ObjectMissing as error:  # another change came between row and object
                if not tries_left:
                    log.warning("the object of conversation %s is not there", record.id)
                    raise NotFound(f"conversation {record.id!r} does not exist") from error
                continue
            if hashlib.sha256(data).hexdigest() != record.sha256:
                raise Damaged(record.id)
            return record, _raw_decoder.decode(data)
        raise AssertionError

    def _put(self, record: ConversationRecord, items: Items) -> ConversationRecord:
        data = _encode(items)
        if len(data) > self._max_bytes:
            raise ConversationFull(
                f"the conversation would have {len(data)} bytes of items, the maximum is "
                f"{self._max_bytes}"
            )
        stored = self._objects.put(new_name(record.tenant_id, KIND), data)
        return replace(
            record, object_name=stored.name, sha256=stored.sha256, items_bytes=stored.size_bytes
        )


def discard(objects: ObjectStore, name: str) -> None:
    """Delete an object that no row names any more. What was asked for is done by then: where the
    store fails, or cannot tell whether it is the right one, the object is left to the sweeper."""
    try:
        objects.delete(name)
    except (OSError, SQLAlchemyError) as error:
        log.warning("the object %s is left to the sweeper, it cannot be deleted: %s", name, error)


def id_of(item: msgspec.Raw) -> str:
    """Of an item as JSON."""
    return msgspec.json.decode(item, type=_Named).id


def with_own_ids(before: Items, items: Items) -> Items:
    """The items, each with an id that no other has: those that were in a conversation or a response
    before may come again. Thousands of one id cost no more than others."""
    taken = {id_of(item) for item in before}
    numbers: dict[str, int] = {}
    made: Items = []
    for item in items:
        given = item_id = id_of(item)
        while item_id in taken:
            numbers[given] = numbers.get(given, 1) + 1
            item_id = f"{given}_{numbers[given]}"
        if item_id != given:
            item = msgspec.Raw(_encode({**msgspec.json.decode(item), "id": item_id}))
        taken.add(item_id)
        made.append(item)
    return made
