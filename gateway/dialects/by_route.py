"""The dialects, and which of them a request is in.

The route says so, also for errors that are raised before there is a body.

    /v1/messages and below                              Anthropic's Messages
    /v1/models with the header `anthropic-version`      the same
    /api/ and below                                     Ollama's
    all others                                          OpenAI's
"""

from collections.abc import Sequence
from dataclasses import replace

from gateway.dialects import messages_wire, ollama_wire, responses_wire
from gateway.dialects.dialect import CHAT, COMPLETION, Dialect
from gateway.dialects.field_names import (
    MESSAGES_NAMES,
    OLLAMA_CHAT_NAMES,
    OLLAMA_GENERATE_NAMES,
    RESPONSES_NAMES,
)
from gateway.dialects.messages_answer import (
    HEARTBEAT,
    MessagesFormat,
    messages_error,
    messages_headers,
)
from gateway.dialects.messages_models import VERSION_HEADER
from gateway.dialects.ollama_answer import LINES, OllamaFormat, ollama_error
from gateway.dialects.responses_answer import ResponsesFormat

MESSAGES = Dialect(
    "messages",
    "msg_",
    messages_wire.decode,
    MessagesFormat(),
    messages_error,
    messages_headers,
    heartbeat=HEARTBEAT,
    names=MESSAGES_NAMES,
)
RESPONSES = Dialect(
    "responses",
    responses_wire.ID_PREFIX,
    responses_wire.decode,
    ResponsesFormat(),
    names=RESPONSES_NAMES,
)
OLLAMA_CHAT = Dialect(
    "ollama_chat",
    "ollama-",
    ollama_wire.decode_chat,
    OllamaFormat(is_chat=True),
    ollama_error,
    media_type=LINES,
    heartbeat=b"",  # its readers take nothing but objects
    names=OLLAMA_CHAT_NAMES,
    takes_any_media=True,  # `curl -d` says that it is a form
)
OLLAMA_GENERATE = replace(
    OLLAMA_CHAT,
    name="ollama_generate",
    decode=ollama_wire.decode_generate,
    format=OllamaFormat(is_chat=False),
    names=OLLAMA_GENERATE_NAMES,
)
OLLAMA_EMBEDDINGS = replace(OLLAMA_GENERATE, name="ollama_embeddings")
"""Of the older route; its answers are encoders'."""
DIALECTS = {
    dialect.name: dialect
    for dialect in (CHAT, COMPLETION, MESSAGES, RESPONSES, OLLAMA_CHAT, OLLAMA_GENERATE)
}
_VERSION = VERSION_HEADER.encode()


def dialect_of(path: str, headers: Sequence[tuple[bytes, bytes]]) -> Dialect:
    """`headers`: as ASGI has them, names in small letters."""
    if path.startswith("/v1/messages"):
        return MESSAGES
    if path.startswith("/v1/models") and any(name == _VERSION for name, _ in headers):
        return MESSAGES
    if path.startswith("/api/"):
        return OLLAMA_CHAT
    return CHAT
