"""The prompts of a completion, and how many texts a list has before it is read. Part of stage 2.

Comes in: the field as it came. Goes out: prompts, each a text or token ids, or an ApiError.
Decoding runs on the event loop, so items are counted before they are made into objects.
"""

import re
from collections.abc import Sequence
from itertools import islice
from typing import TypeAlias

import msgspec

from gateway.api.bodies import decode_body, invalid
from gateway.api.wire_body import MAX_PROMPT_IDS

Prompt: TypeAlias = str | tuple[int, ...]
MAX_PROMPTS = 2048
"""That are read at all; how many are served is the setting `max_prompts`."""

# The end of a text that another follows. Within a text a quotation mark has a backslash before it.
_BETWEEN_TEXTS = re.compile(rb'(?<!\\)"\s*,')
_decoder = msgspec.json.Decoder(str | list[str | int | list[int]])


def surely_more_texts(body: bytes, most: int) -> bool:
    """Whether a list has more texts. What is missed here (texts that end in a backslash) is counted
    once it is read."""
    if body.count(b'"') <= 2 * most:
        return False
    return sum(1 for _ in islice(_BETWEEN_TEXTS.finditer(body), most)) == most


def read_prompts(raw: msgspec.Raw) -> list[Prompt]:
    """A text, token ids, or a list of texts or of lists of token ids; at least one. Raises
    ApiError."""
    body = bytes(raw)
    if body[:256].lstrip(b" \t\r\n[").startswith(b'"'):
        if surely_more_texts(body, MAX_PROMPTS):
            raise _too_many()
    else:
        if body.count(b",") >= MAX_PROMPT_IDS:
            raise invalid("prompt", f"prompt has more than {MAX_PROMPT_IDS} token ids")
        if body.count(b"[") > MAX_PROMPTS + 1:
            raise _too_many()
    prompt = decode_body(_decoder, body, "prompt")
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [tuple(item for item in prompt if isinstance(item, int))]
    if len(kinds) > 1:
        message = "prompt must be a string, token ids, or a list of only strings or only token ids"
        raise invalid("prompt", message)
    if len(prompt) > MAX_PROMPTS:
        raise _too_many()
    return _each(prompt)


def _each(prompt: Sequence[str | int | list[int]]) -> list[Prompt]:
    found: list[Prompt] = []
    for item in prompt:
        if item == []:
            raise invalid("prompt", "prompt must not have an empty list of token ids")
        found.append(tuple(item) if isinstance(item, list) else str(item))
    if not found:
        raise invalid("prompt", "prompt must not be empty")
    return found


def _too_many() -> Exception:
    message = f"prompt has more than {MAX_PROMPTS} prompts: send several requests"
    return invalid("prompt", message)
