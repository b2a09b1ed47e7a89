"""Where in the cache a request belongs: its scope, its exact key, and what the user said last.

A scope holds all that an answer depends on but the last thing the user said: tenant, model
revision, system prompt and tools, earlier turns, how tokens are drawn, form of the answer, length,
stops, and the embedder by which meanings are compared. It is in the name of every entry and is
looked up first, so that neither an answer nor the time that a look-up takes says anything about
other tenants. The exact key adds the prompt's tokens: two requests with one exact key are one.

What stays the same for the user is not told apart: whether the answer is streamed, who within the
tenant asks, at what priority.
"""

import hashlib
import time
from dataclasses import dataclass

import msgspec

from gateway.cache.types import Scope
from gateway.prepare.wire import WireRequest
from gateway.types import PreparedRequest

# What changes nothing where the likeliest token is taken.
_UNUSED = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class Turn:
    """A request as the cache sees it before its tokens. `question`: what the user said last, ""
    where that is no text of the user's; `around`: digest of what stands around it; `names_length`:
    the caller says how long the answer may be."""

    question: str
    around: bytes
    names_length: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request belongs."""

    scope: Scope
    exact_key: bytes
    question: str
    names_length: bool = False


def question_of(asked: WireRequest) -> str:
    """What the user said last: in a chat the last message, if it is the user's and ends the
    prompt; the whole prompt of a completion, if it is a text. Else ""."""
    if asked.kind == "completion":
        return asked.prompt if isinstance(asked.prompt, str) else ""
    last = asked.messages[-1]
    ends = asked.add_generation_prompt and not asked.continue_final_message
    return str(last["content"]) if last["role"] == "user" and ends else ""


def turn_of(asked: WireRequest, longest: int, tells_date: bool) -> Turn:
    """`longest`: the tokens that an answer may have where the caller does not say. `tells_date`:
    the model's template may show today's date, which then counts."""
    question = question_of(asked)
    messages = asked.messages
    if question and asked.kind == "chat":
        messages = (*messages[:-1], {**messages[-1], "content": ""})
    around = (
        messages,
        asked.tools,
        asked.tool_choice,
        asked.parallel_tool_calls,
        asked.response_format,
        asked.add_generation_prompt,
        asked.continue_final_message,
        longest if asked.max_tokens is None else asked.max_tokens,
        asked.max_tokens is None,
        time.strftime("%Y-%m-%d") if tells_date else "",
    )
    return Turn(question, _digest(around), asked.max_tokens is not None)


def place_of(
    tenant_id: str, request: PreparedRequest, turn: Turn, drawn: bool, embedder: str
) -> Place:
    """`drawn`: any of the answers will do, whatever the seed. `embedder`: its revision."""
    sampling = request.sampling
    if sampling.temperature == 0:
        sampling = msgspec.structs.replace(sampling, seed=0, **_UNUSED)
    elif drawn:
        sampling = msgspec.structs.replace(sampling, seed=0)
    around = (
        tenant_id,
        request.model.name,
        request.model.revision,
        embedder,
        request.kind,
        turn.around,
        sampling,
        drawn,
        request.constraint,
        sorted(request.shown_token_ids),
        request.stop_token_ids,
        request.stop_strings,
    )
    digest = _digest(around)
    scope = Scope(tenant_id, request.model.name, digest)
    exact_key = _digest((digest, request.prompt_token_ids, request.max_tokens))
    return Place(scope, exact_key, turn.question, turn.names_length)


def _digest(parts: object) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(parts), digest_size=_DIGEST_BYTES).digest()
