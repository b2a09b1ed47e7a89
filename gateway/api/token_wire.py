"""What callers may send to /tokenize and /detokenize, as vLLM spells it. Part of stage 2.

Comes in: a body. Goes out: a `WireRequest` as completions and chats make one, or token ids, or an
ApiError that names the field.
"""

from dataclasses import replace
from typing import Annotated

import msgspec

from gateway.api.bodies import decode_body, invalid
from gateway.api.told_fields import CHAT, decode_telling, shape_of
from gateway.api.wire import WireRequest, chat_request
from gateway.api.wire_body import MAX_PROMPT_IDS, ChatBody
from gateway.errors import UNSUPPORTED_PARAMETER, ApiError

_Model = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class _Peek(msgspec.Struct):
    messages: msgspec.Raw = msgspec.Raw(b"null")


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A prompt."""

    model: _Model
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatBody(ChatBody, forbid_unknown_fields=True, kw_only=True):
    """Messages, with the fields of a chat that the template reads."""

    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Token ids."""

    model: _Model
    tokens: list[int]


_peek_decoder = msgspec.json.Decoder(_Peek)
_prompt_decoder = msgspec.json.Decoder(TokenizeBody)
_chat_decoder = msgspec.json.Decoder(TokenizeChatBody)
_ids_decoder = msgspec.json.Decoder(DetokenizeBody)
_PROMPT, _IDS = shape_of(TokenizeBody), shape_of(DetokenizeBody)
_CHAT = replace(CHAT, known=TokenizeChatBody.__struct_fields__)


def decode_tokenize(body: bytes, tells_unknown: bool = False) -> tuple[WireRequest, bool]:
    """The request, and whether the tokens' texts are wanted. Raises ApiError."""
    if decode_body(_peek_decoder, body).messages == msgspec.Raw(b"null"):
        asked, told = decode_telling(_prompt_decoder, body, _PROMPT, tells_unknown)
        request = WireRequest(
            kind="completion",
            model=asked.model,
            prompt=asked.prompt,
            is_bare=asked.add_special_tokens is False,
            num_bytes=len(body),
            ignored=told.names,
        )
        return request, bool(asked.return_token_strs)
    chat, told = decode_telling(_chat_decoder, body, _CHAT, tells_unknown)
    if chat.add_special_tokens:
        raise ApiError(
            UNSUPPORTED_PARAMETER,
            "add_special_tokens: true is not supported with messages, whose template writes its "
            "own special tokens: remove it",
            "add_special_tokens",
        )
    return chat_request(chat, len(body), told.names), bool(chat.return_token_strs)


def decode_detokenize(
    body: bytes, tells_unknown: bool = False
) -> tuple[DetokenizeBody, tuple[str, ...]]:
    """The body, and the names of fields that are told. Raises ApiError."""
    if body.count(b",") > MAX_PROMPT_IDS:
        raise invalid("tokens", f"tokens has more than {MAX_PROMPT_IDS} token ids")
    asked, told = decode_telling(_ids_decoder, body, _IDS, tells_unknown)
    return asked, told.names
