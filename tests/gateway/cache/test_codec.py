"""An entry comes back from its bytes as it went in."""

import zlib
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from gateway.cache.codec import (
    DEFLATED_BYTES,
    NO_SET,
    UNREADABLE,
    decode,
    decode_vector,
    encode,
    encode_confidence,
    id_of,
    set_of,
)
from gateway.cache.policy.cache_confidence import Confidence
from gateway.cache.types import CachedAnswer
from tests.gateway.cache.answers_kit import entry_of, scope_of, vector_of

EPOCH = b"01234567" + bytes(12)
SCOPE = scope_of("tenant", "model")


@pytest.mark.parametrize("with_vector", [True, False])
@pytest.mark.parametrize("confidence", [Confidence(), Confidence("group", 3.5, 1.0)])
@pytest.mark.parametrize("question", ["", "why?", "\0ü" * 70_000])
def test_an_entry_comes_back(with_vector: bool, confidence: Confidence, question: str) -> None:
    vector = vector_of(question)
    entry = replace(entry_of(SCOPE, question, EPOCH, vector), confidence=confidence)
    value = encode(entry, with_vector, 100)
    back = decode(value, id_of(entry.exact_key), "tenant", EPOCH)
    assert back == replace(entry, vector=None)
    assert int.from_bytes(value[32:36]) == len(value) + 100
    assert value[16:32] == set_of(SCOPE, EPOCH)


class FirstBody(msgspec.Struct, array_like=True, frozen=True):
    """As it was before it had a number."""

    scope_digest: bytes
    key_rest: bytes
    text: str
    finish_reason: str
    completion_tokens: int
    cost_nanos: int
    made_at: float
    expires_at: float


def body_of(value: bytes) -> tuple[bytes, bytes]:
    """What comes before the body, and the body."""
    at = 36
    for _ in range(3):
        at += 4 + int.from_bytes(value[at : at + 4])
    return value[:at], value[at:]


@pytest.mark.parametrize("text", ["Paris.", "Paris. " * 1000])
def test_an_older_gateway_cannot_read_an_entry(text: str) -> None:
    entry = replace(entry_of(SCOPE, "why?", EPOCH), answer=CachedAnswer(text, "stop", 3))
    _, body = body_of(encode(entry, False, 0))
    with pytest.raises(msgspec.MsgspecError):
        msgspec.msgpack.decode(body, type=FirstBody)


@pytest.mark.parametrize("layout", [None, 1, 3])
def test_an_entry_of_another_layout_is_refused(layout: int | None) -> None:
    entry = entry_of(SCOPE, "why?", EPOCH)
    before, body = body_of(encode(entry, False, 0))
    _, *rest = msgspec.msgpack.decode(body)
    other = rest if layout is None else [layout, *rest]
    with pytest.raises(UNREADABLE):
        decode(before + msgspec.msgpack.encode(other), id_of(entry.exact_key), "tenant", EPOCH)


def test_without_a_vector_there_is_no_set() -> None:
    assert encode(entry_of(SCOPE, "why?", EPOCH), True, 0)[16:32] == NO_SET


def test_a_vector_loses_little() -> None:
    vector = vector_of("why?")
    back = decode_vector(vector.astype(np.float16).tobytes())
    assert float(back @ vector) > 0.99999
    assert float(np.linalg.norm(back)) == pytest.approx(1)


def test_a_set_is_of_one_scope_in_one_epoch() -> None:
    other = scope_of("tenant", "model", "system")
    later, purged = b"01234567" + b"\0\0\0\1" + bytes(8), EPOCH[:-1] + b"\1"
    assert len({set_of(SCOPE, EPOCH), set_of(other, EPOCH), set_of(SCOPE, later)}) == 3
    assert set_of(SCOPE, purged) == set_of(SCOPE, EPOCH)


def test_equal_confidence_is_equal_bytes() -> None:
    assert encode_confidence(Confidence(agreed=1.0)) == encode_confidence(Confidence("", 1.0, 0.0))


PROSE = "The answer to that is found where questions of this kind are answered. "
LENGTHS = (0, 1, 127, 128, 129, 2000, DEFLATED_BYTES.stop - 1, DEFLATED_BYTES.stop, 200_000)


@pytest.mark.parametrize("num_chars", LENGTHS)
def test_an_answer_of_any_length_comes_back(num_chars: int) -> None:
    text = (PROSE * (1 + num_chars // len(PROSE)))[:num_chars]
    entry = replace(entry_of(SCOPE, "why?", EPOCH), answer=CachedAnswer(text, "stop", 3))
    value = encode(entry, False, 0)
    assert decode(value, id_of(entry.exact_key), "tenant", EPOCH).answer.text == text
    assert (len(value) < num_chars) == (num_chars in DEFLATED_BYTES and num_chars > 1000)


def test_a_body_that_grows_beyond_bounds_is_not_read() -> None:
    """Whoever may write to that Redis may write anything."""
    answer = CachedAnswer("a" * 4000, "stop", 3)
    entry = replace(entry_of(SCOPE, "why?", EPOCH), answer=answer)
    value, huge = encode(entry, False, 0), zlib.compress(bytes(10 * DEFLATED_BYTES.stop))
    packed = msgspec.msgpack.encode(zlib.compress(answer.text.encode(), 1))
    assert packed in value
    for body in (huge, huge[:-9], b"no stream"):
        forged = value.replace(packed, msgspec.msgpack.encode(body))
        with pytest.raises(UNREADABLE):
            decode(forged, id_of(entry.exact_key), "tenant", EPOCH)
