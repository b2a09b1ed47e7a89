"""What a dialect is: how one API spells requests, answers and errors. Pure.

    decode    a body becomes a `WireRequest`, or an ApiError that names the field
    format    pieces of choices become bytes, whole or as events (answer/encoder.py)
    error     an ApiError becomes a status and a body; also those raised before a body is read

The route picks the dialect. Nothing between stage 2 and stage 9 knows which it is: limits, queue,
cache, ledger and request ids are the same for all.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from gateway.answer.answer import OpenAiFormat
from gateway.answer.encoder import AnswerFormat
from gateway.api import wire
from gateway.api.wire import WireRequest
from gateway.dialects.field_names import Names, renamed
from gateway.errors import ApiError
from gateway.sealing.seals import TenantSeal

Decode: TypeAlias = Callable[[bytes, bool, TenantSeal], WireRequest]
"""From a body; the flag says that unknown fields at the top are told and not refused. The seal is
the caller's."""
HEARTBEAT = b": still here\n\n"
SERVER_SENT_EVENTS = b"text/event-stream; charset=utf-8"


def plain_headers(headers: Mapping[str, str], http_id: str, now_at: float) -> dict[str, str]:
    """As the pipeline wrote them."""
    del http_id, now_at
    return dict(headers)


def openai_error(error: ApiError, http_id: str) -> tuple[int, bytes]:
    """OpenAI's error object."""
    del http_id
    return error.kind.status, msgspec.json.encode(error.body())


@dataclass(frozen=True, slots=True)
class Dialect:
    """`id_prefix`: of a request's id. `error`: status and body. `headers`: what an answer carries,
    from what the pipeline wrote, the request's id and the time. `heartbeat`: what a silent stream
    sends, nothing where its readers take nothing but events."""

    name: str
    id_prefix: str
    decode: Decode
    format: AnswerFormat
    error: Callable[[ApiError, str], tuple[int, bytes]] = openai_error
    headers: Callable[[Mapping[str, str], str, float], dict[str, str]] = plain_headers
    media_type: bytes = SERVER_SENT_EVENTS
    heartbeat: bytes = HEARTBEAT
    names: Names = ()
    """Of fields, where they are not those of chats."""
    takes_any_media: bool = False
    """Whatever a body calls itself, it is read as JSON."""

    def renamed(self, error: ApiError) -> ApiError:
        """The error with the dialect's own names of fields."""
        return renamed(error, self.names)


def _decode_chat(body: bytes, tells_unknown: bool, seal: TenantSeal) -> WireRequest:
    del seal
    return wire.decode("chat", body, tells_unknown)


def _decode_completion(body: bytes, tells_unknown: bool, seal: TenantSeal) -> WireRequest:
    del seal
    return wire.decode("completion", body, tells_unknown)


CHAT = Dialect("chat", "chatcmpl-", _decode_chat, OpenAiFormat())
COMPLETION = Dialect("completion", "cmpl-", _decode_completion, OpenAiFormat())
