"""Stored responses: an object for the items and the answer, a row that makes it exist.

The order of writes is object first, row second, and the other way round to delete, so a row never
names what is not there; what a crash leaves in between is an object without a row, which the
sweeper deletes (sweeper.py). All of it blocks and runs in threads (state_threads.py).

An object is `{"input": [items], "response": {...}, "cuts": [...]}`: the request's own items, the
response as it was told, and in which pieces a background response's texts were told. Items, never
tokens: another revision of the model has other tokens.
"""

import hashlib
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from engine.objects.object_store import ObjectMissing, ObjectStore, new_name
from gateway.dialects.responses_answer import Cut
from gateway.dialects.responses_items import Item
from gateway.state.conversation_store import (
    ConversationStore,
    discard,
    with_own_ids,
)
from gateway.state.state_threads import Damaged
from registry.errors import NotFound
from registry.session import appending, reading
from registry.state import idempotency, responses
from registry.state.idempotency import IdempotencyRecord
from registry.state.responses import ACTIVE, MAX_DEPTH, ResponseRecord, Viewer

log = logging.getLogger(__name__)

ACTOR = "gateway"
KIND = "responses"
MAX_CHAIN_READ = 4
"""What the objects of a chain may have together, as a multiple of what its items may: each also
has the instructions, tools and schemas of its response, which agents send with every turn."""
_SCORES = b'"logprobs":[{'
_encode = msgspec.json.Encoder().encode


class ChainBroken(Exception):
    """A response cannot be followed: one before it is gone, or it has not ended well."""


class ChainTooLong(Exception):
    """A chain has too many responses or bytes."""


class StoredBody(msgspec.Struct):
    """An object, its items and response as JSON."""

    input: msgspec.Raw
    response: msgspec.Raw
    cuts: list[list[Cut]] = []
    """Of the output's items, in which pieces they were told (event_log.py)."""


class _Output(msgspec.Struct):
    output: list[Item]


class _Items(msgspec.Struct):
    input: list[Item]
    response: _Output


class _RawItems(msgspec.Struct):
    input: list[msgspec.Raw]
    response: "_RawOutput"


class _RawOutput(msgspec.Struct):
    output: list[msgspec.Raw]


_body_decoder = msgspec.json.Decoder(StoredBody)
_items_decoder = msgspec.json.Decoder(_Items)
_raw_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_raw_items_decoder = msgspec.json.Decoder(_RawItems)


@dataclass(frozen=True, slots=True)
class Earlier:
    """What a request follows: the items of all responses before it, the oldest first."""

    items: Sequence[Item] = ()
    depth: int = 0
    """Of a response that follows them."""
    num_bytes: int = 0


class ResponseStore:
    """One object per gateway process. Raises SQLAlchemyError and OSError where database or objects
    fail, NotFound of what the viewer may not see."""

    def __init__(
        self,
        engine: Engine,
        objects: ObjectStore,
        max_responses: int,
        max_chain_bytes: int,
        wall_clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._objects = objects
        self._max_responses = max_responses
        self._max_chain_bytes = max_chain_bytes
        self._wall_clock = wall_clock
        self.conversations = ConversationStore(
            engine, objects, max_responses, max_chain_bytes, wall_clock
        )

    def close(self) -> None:
        """When nothing more is asked."""
        self._engine.dispose()

    def add(
        self, record: ResponseRecord, items: Sequence[Any], response: bytes
    ) -> ResponseRecord | None:
        """Store a response; a key that was claimed for it is kept, unless it may still be refused,
        as one that is queued. Returns the record with its object; None where its tenant has as many
        as it may."""
        record = self.put(record, _encode(items), response)
        is_active = record.state in ACTIVE

        def insert(session: Session) -> bool:
            is_stored = responses.add(session, record, self._max_responses)
            if is_stored and not is_active:
                idempotency.keep(session, record.tenant_id, record.id)
            return is_stored

        if self._write(record, insert, None if is_active else (_encode(items), response)):
            return record
        discard(self._objects, record.object_name)
        return None

    def get(self, viewer: Viewer, response_id: str) -> ResponseRecord:
        """Its row alone."""
        with reading(self._engine) as session:
            return responses.get(session, viewer, response_id)

    def read(self, viewer: Viewer, response_id: str) -> tuple[ResponseRecord, StoredBody]:
        """One response."""
        for is_last in (False, True):
            record = self.get(viewer, response_id)
            try:
                return record, _body_decoder.decode(self._bytes(record))
            except NotFound:
                if is_last:  # it did not end between row and object
                    raise
        raise AssertionError

    def items(self, viewer: Viewer, response_id: str) -> list[msgspec.Raw]:
        """Its own input, then what came out."""
        _, body = self.read(viewer, response_id)
        output = msgspec.json.decode(body.response, type=_RawOutput).output
        return [*_raw_decoder.decode(body.input), *output]

    def earlier(self, viewer: Viewer, response_id: str) -> Earlier:
        """What is before a request that follows this one. Raises ChainBroken, ChainTooLong."""
        with reading(self._engine) as session:
            chain = responses.chain(session, viewer, response_id)
        for record in chain:
            if record.state not in ("completed", "incomplete"):
                raise ChainBroken(f"response {record.id!r} is {record.state.replace('_', ' ')}")
            if record.conversation_id is not None:
                raise ChainBroken(f"it is of the conversation {record.conversation_id!r}")
        if chain[-1].parent_id is not None and len(chain) <= MAX_DEPTH:
            raise ChainBroken("a response before it has been deleted or has expired")
        if chain[0].depth + 1 >= MAX_DEPTH:
            raise ChainTooLong(f"{MAX_DEPTH} responses follow one another, which is the maximum")
        num_bytes = sum(record.items_bytes for record in chain)
        if num_bytes > self._max_chain_bytes:
            raise ChainTooLong(
                f"the responses before it have {num_bytes} bytes, the maximum is "
                f"{self._max_chain_bytes}"
            )
        items: list[Item] = []
        for data in self._objects_of(chain):
            found = _items_decoder.decode(data)
            items += [*found.input, *found.response.output]
        return Earlier(items, chain[0].depth + 1, num_bytes)

    def input_items(self, viewer: Viewer, response_id: str) -> list[msgspec.Raw]:
        """All that the response was made of: the items of those before it, as far as they are
        there, and its own input; the oldest first, each with an id of its own, by which a list goes
        on. Raises ChainTooLong."""
        with reading(self._engine) as session:
            chain = responses.chain(session, viewer, response_id)
        if sum(record.items_bytes for record in chain) > 2 * self._max_chain_bytes:
            raise ChainTooLong("its items are too many to be listed")
        items: list[msgspec.Raw] = []
        output: list[msgspec.Raw] = []
        for data in self._objects_of(chain):
            found = _raw_items_decoder.decode(data)
            items += [*output, *found.input]
            output = found.response.output
        return with_own_ids([], items)

    def remove(self, viewer: Viewer, response_id: str) -> None:
        """Delete one response."""
        with appending(self._engine, ACTOR) as session:
            record = responses.remove(session, viewer, response_id)
        discard(self._objects, record.object_name)

    def begin(self, response_id: str, owner: str) -> bool:
        """A background response runs. False where it is not this owner's any more."""
        with appending(self._engine, ACTOR) as session:
            return responses.begin(session, response_id, owner)

    def finish(
        self,
        record: ResponseRecord,
        response: bytes | None,
        cuts: Sequence[Sequence[Cut]] = (),
    ) -> bool:
        """A background response ends, with another answer than was stored for it where one is
        given. False, changing nothing, where it has ended or was deleted meanwhile."""
        ended, parts = record, None
        if response is not None:
            body = _body_decoder.decode(self._bytes(record))
            parts = bytes(body.input), response
            ended = self.put(record, *parts, cuts)
        is_mine = self._write(
            record, lambda session: responses.finish(session, record.owner, ended), parts
        )
        if response is not None:
            over = record if is_mine else ended
            discard(self._objects, over.object_name)
        return is_mine

    def cancel(self, viewer: Viewer, response_id: str) -> None:
        """A background response that has not ended is cancelled."""
        with appending(self._engine, ACTOR) as session:
            responses.cancel(session, viewer, response_id)

    def beat(self, owner: str, response_ids: Collection[str]) -> set[str]:
        """The owner lives, and runs these. Returns the ids of those that it still has to run."""
        with appending(self._engine, ACTOR) as session:
            return responses.beat(session, owner, response_ids, now_at=self._wall_clock())

    def fail_lost(self, message: str, owner: str) -> int:
        """Those that an earlier life of the owner was running have failed. Returns how many."""
        with appending(self._engine, ACTOR) as session:
            now_at = self._wall_clock()
            return responses.fail_lost(
                session, "server_error", message, owner=owner, before_at=now_at
            )

    def claim(self, wanted: IdempotencyRecord, claim_s: float) -> IdempotencyRecord | None:
        """See idempotency.claim."""
        with appending(self._engine, ACTOR) as session:
            return idempotency.claim(session, wanted, claim_s=claim_s)

    def keep_key(self, record: ResponseRecord) -> None:
        """A queued response is not refused any more: its key stands for it."""
        with appending(self._engine, ACTOR) as session:
            idempotency.keep(session, record.tenant_id, record.id)

    def withdraw(self, record: ResponseRecord) -> None:
        """Nothing of it stays, if anything was stored: no response, and no key."""
        viewer = Viewer(record.tenant_id, None, 0.0)
        with appending(self._engine, ACTOR) as session:
            idempotency.release(session, record.tenant_id, record.id)
            try:
                object_name = responses.remove(session, viewer, record.id).object_name
            except NotFound:
                return
        discard(self._objects, object_name)

    def _write(
        self,
        record: ResponseRecord,
        write: Callable[[Session], bool],
        parts: tuple[bytes, bytes] | None,
    ) -> bool:
        """Write the row, and append the items of `parts` (own input, response) to the conversation
        that they belong to, if there is one. What `write` says. Where this raises, a commit may
        have come through: the object stays, for the sweeper."""
        if record.conversation_id is None or parts is None:
            with appending(self._engine, ACTOR) as session:
                return write(session)
        items: list[msgspec.Raw] = _raw_decoder.decode(parts[0])
        items += _unscored(msgspec.json.decode(parts[1], type=_RawOutput).output)
        viewer = Viewer(record.tenant_id, None, 0.0)
        about = viewer, record.conversation_id, items, record.model, write
        return self.conversations.append(*about) is not None

    def put(
        self,
        record: ResponseRecord,
        items: bytes,
        response: bytes,
        cuts: Sequence[Sequence[Cut]] = (),
    ) -> ResponseRecord:
        """Store the object. Returns the record with it."""
        data = b'{"input":%b,"response":%b,"cuts":%b}' % (items, response, _encode(cuts))
        found = _raw_items_decoder.decode(data)
        stored = self._objects.put(new_name(record.tenant_id, KIND), data)
        return replace(
            record,
            object_name=stored.name,
            sha256=stored.sha256,
            items_bytes=len(items) + sum(map(len, _unscored(found.response.output))),
        )

    def _objects_of(self, chain: Sequence[ResponseRecord]) -> Iterator[bytes]:
        """The oldest first, one at a time in memory. Raises ChainTooLong when they are more than a
        request may cause to be read."""
        most = MAX_CHAIN_READ * self._max_chain_bytes
        num_bytes = 0
        for record in reversed(chain):
            data = self._bytes(record)
            num_bytes += len(data)
            if num_bytes > most:
                raise ChainTooLong(
                    f"the responses before it have more than {most} bytes with their instructions "
                    "and tools, which is the maximum"
                )
            yield data

    def _bytes(self, record: ResponseRecord) -> bytes:
        """Raises NotFound, Damaged."""
        try:
            data = self._objects.get(record.object_name)
        except ObjectMissing as error:
            # It was replaced or deleted since the row was read; or this server has another folder.
            log.warning("the object of response %s is not there", record.id)
            raise NotFound(f"response {record.id!r} does not exist") from error
        if hashlib.sha256(data).hexdigest() != record.sha256:
            raise Damaged(record.id)
        return data


def _unscored(items: Sequence[msgspec.Raw]) -> list[msgspec.Raw]:
    """Items without log-probabilities, which no model reads: hundreds of bytes a token."""
    return [_without_scores(item) if _SCORES in bytes(item) else item for item in items]


def _without_scores(item: msgspec.Raw) -> msgspec.Raw:
    body = msgspec.json.decode(item)
    for part in body.get("content") or ():
        if "logprobs" in part:
            part["logprobs"] = []
    return msgspec.Raw(_encode(body))


def is_active(record: ResponseRecord) -> bool:
    """It has not ended."""
    return record.state in ACTIVE
