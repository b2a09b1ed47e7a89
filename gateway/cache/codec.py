"""An entry as bytes, for a store outside this process. The layout is in cache/answers.lua,
which reads all but the body.

The body begins with LAYOUT, and one of another layout, or of none, is nobody's: gateways of two
versions share a Redis, its state and its purges, and each misses what the other has kept.

Answers are deflated (on the event loop: some 30 us each way and kilobyte): of English prose of 256
bytes 73 % is left, of a kilobyte 58 %.
"""

import struct
import zlib
from hashlib import blake2b
from typing import Literal

import msgspec
import numpy as np

from gateway.cache.policy.cache_confidence import Confidence
from gateway.cache.types import CachedAnswer, Entry, Epoch, Scope, Vector

ID_BYTES = 16
LAYOUT: Literal[2] = 2
"""Of the body, to be raised with every change of it. The first had no number."""
VALID_BYTES = 16
"""Of an epoch: what an entry is found by."""
NO_SET = bytes(ID_BYTES)
DEFLATED_BYTES = range(128, 1 << 16)
"""Shorter answers gain nothing, longer ones would hold up the event loop."""
UNREADABLE = (msgspec.MsgspecError, struct.error, UnicodeDecodeError, zlib.error)
"""What `decode` raises for an entry of another version, or of nobody's."""
_LENGTH = _SIZE = struct.Struct(">I")
_PARTS_AT = VALID_BYTES + ID_BYTES + _SIZE.size


class _Names(msgspec.Struct, array_like=True, frozen=True):
    entry_id: str
    key_id: str
    model_name: str
    question: str


class _Body(msgspec.Struct, array_like=True, frozen=True):
    layout: Literal[2]
    scope_digest: bytes
    key_rest: bytes
    text: str
    finish_reason: str
    completion_tokens: int
    cost_nanos: int
    made_at: float
    expires_at: float
    deflated: bytes = b""
    """The answer, where `text` is empty."""


_names = msgspec.msgpack.Decoder(_Names)
_body = msgspec.msgpack.Decoder(_Body)
_confidence = msgspec.msgpack.Decoder(Confidence)


def id_of(exact_key: bytes) -> bytes:
    """An entry's name within its tenant."""
    return exact_key[:ID_BYTES]


def set_of(scope: Scope, epoch: Epoch) -> bytes:
    """The name of a scope's vectors in its present epoch."""
    return blake2b(scope.digest + epoch[:VALID_BYTES], digest_size=ID_BYTES).digest()


def encode(entry: Entry, with_vector: bool, overhead_bytes: int) -> bytes:
    """`with_vector`: the vector lies with the entry, as float16, and not in a vector set.
    `overhead_bytes`: what it is counted beside these bytes."""
    scope, answer = entry.scope, entry.answer
    deflated = _deflated(answer.text)
    names = _Names(entry.entry_id, entry.key_id, scope.model_name, entry.question)
    body = _Body(
        LAYOUT,
        scope.digest,
        entry.exact_key[ID_BYTES:],
        "" if deflated else answer.text,
        answer.finish_reason,
        answer.completion_tokens,
        entry.cost_nanos,
        entry.made_at,
        entry.expires_at,
        deflated,
    )
    vector = b""
    if with_vector and entry.vector is not None:
        vector = entry.vector.astype(np.float16).tobytes()
    set_id = NO_SET if entry.vector is None else set_of(entry.scope, entry.epoch)
    parts = (encode_confidence(entry.confidence), vector, msgspec.msgpack.encode(names))
    tail = b"".join(_LENGTH.pack(len(part)) + part for part in parts)
    tail += msgspec.msgpack.encode(body)
    size = _SIZE.pack(_PARTS_AT + len(tail) + overhead_bytes)
    return entry.epoch[:VALID_BYTES] + set_id + size + tail


def decode(value: bytes, name: bytes, tenant_id: str, epoch: Epoch) -> Entry:
    """`name`: what `id_of` gave. `epoch`: the one in which it was found; in the
    store only `valid` of it is kept."""
    at, parts = _PARTS_AT, list[bytes]()
    for _ in range(3):
        begin = at + _LENGTH.size
        at = begin + _LENGTH.unpack_from(value, at)[0]
        parts.append(value[begin:at])
    confidence, names, body = (
        _confidence.decode(parts[0]) if parts[0] else Confidence(),
        _names.decode(parts[2]),
        _body.decode(value[at:]),
    )
    text = _inflated(body.deflated) if body.deflated else body.text
    return Entry(
        entry_id=names.entry_id,
        key_id=names.key_id,
        scope=Scope(tenant_id, names.model_name, body.scope_digest),
        exact_key=name + body.key_rest,
        question=names.question,
        vector=None,
        answer=CachedAnswer(text, body.finish_reason, body.completion_tokens),
        cost_nanos=body.cost_nanos,
        made_at=body.made_at,
        expires_at=body.expires_at,
        epoch=epoch,
        confidence=confidence,
    )


def encode_confidence(confidence: Confidence) -> bytes:
    """Equal ones to equal bytes; what is known of most, nothing, to none."""
    return b"" if confidence == Confidence() else msgspec.msgpack.encode(confidence)


def decode_vector(vector: bytes) -> Vector:
    """As it lies with an entry; of length 1 again."""
    wide = np.frombuffer(vector, np.float16).astype(np.float32)
    return wide / np.linalg.norm(wide)


def _deflated(text: str) -> bytes:
    """Empty where that is not shorter."""
    raw = text.encode()
    if len(raw) not in DEFLATED_BYTES:
        return b""
    packed = zlib.compress(raw, 1)
    return packed if len(packed) < len(raw) else b""


def _inflated(packed: bytes) -> str:
    """Of what a foreign hand wrote, no more than could have been deflated."""
    reader = zlib.decompressobj()
    raw = reader.decompress(packed, DEFLATED_BYTES.stop)
    if not reader.eof:
        raise zlib.error("longer than any answer that is deflated")
    return raw.decode()
