"""What a request says to the cache: what its headers ask for, and where in the cache it belongs.

    x-polyhost-cache-mode     off, exact, semantic, shadow
    x-polyhost-cache-sampled  true: also where answers are drawn without a seed; false: not
    cache-control             max-age=N, no-cache (do not answer from it), no-store (do not keep
                              the answer, nor answer from it); others are not ours to obey

A scope holds all that an answer depends on but the last thing the user said: tenant, model
revision, system prompt and tools, earlier turns, how tokens are drawn, form of the answer, length,
stops, the caller's own user where the request names one (`user`, `safety_identifier`: "what is my
balance?" has one answer for each), and the embedder by which meanings are compared. It is in the
name of every entry and is looked up first, so that neither an answer nor the time that a look-up
takes says anything about other tenants. The exact key adds the prompt's tokens: two requests with
one exact key are one.

What stays the same for the user is not told apart: whether the answer is streamed, with which of
the tenant's keys, at what priority.
"""

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast, get_args

import msgspec

from gateway.api.wire import WireRequest
from gateway.cache.policy.cache_rule import CacheHeaders
from gateway.cache.types import Scope
from gateway.errors import INVALID_REQUEST, UNSUPPORTED_PARAMETER, ApiError
from gateway.types import CacheMode, PreparedRequest

MODE_HEADER = "x-polyhost-cache-mode"
SAMPLED_HEADER = "x-polyhost-cache-sampled"
CONTROL_HEADER = "cache-control"
RESULT_HEADER = "x-polyhost-cache"
ENTRY_HEADER = "x-polyhost-cache-entry"

MODES: tuple[str, ...] = get_args(CacheMode)
NO_CACHE_HEADERS = CacheHeaders()
_SAMPLED = {"true": True, "false": False}
_MAX_CONTROL_CHARS = 256
_MAX_AGE_DIGITS = 12


def read_cache_headers(headers: Mapping[str, str], has_embedder: bool) -> CacheHeaders:
    """Raises ApiError for a mode that is not served, or a value that is none."""
    mode, control = headers.get(MODE_HEADER), headers.get(CONTROL_HEADER)
    sampled = headers.get(SAMPLED_HEADER)
    if mode is control is sampled is None:
        return NO_CACHE_HEADERS
    if mode is not None:
        _check_mode(mode, has_embedder)
    if sampled is not None and sampled not in _SAMPLED:
        message = f"{SAMPLED_HEADER} must be true or false, not {sampled!r}"
        raise ApiError(INVALID_REQUEST, message, SAMPLED_HEADER)
    max_age_s, reads, keeps = _control(control or "")
    return CacheHeaders(
        cast(CacheMode | None, mode),
        max_age_s,
        None if sampled is None else _SAMPLED[sampled],
        reads,
        keeps,
    )


def no_embedder(what: str) -> str:
    """How to set up what semantic and shadow mode need, in one sentence."""
    return (
        f"{what} needs an embedding model, and this server has none. Register one with "
        "`polyhost models add NAME --source DIR` and start the server with cache_embedder = "
        '"NAME" (POLYHOST_CACHE_EMBEDDER=NAME), or use the mode off or exact'
    )


def _check_mode(mode: str, has_embedder: bool) -> None:
    if mode not in MODES:
        message = f"{MODE_HEADER} must be one of {', '.join(MODES)}, not {mode!r}"
        raise ApiError(UNSUPPORTED_PARAMETER, message, MODE_HEADER)
    if mode in ("semantic", "shadow") and not has_embedder:
        message = no_embedder(f"{MODE_HEADER}: {mode}")
        raise ApiError(UNSUPPORTED_PARAMETER, message, MODE_HEADER)


def _control(text: str) -> tuple[float | None, bool, bool]:
    """(max-age, may be answered from it, may be kept). Directives of proxies' kinds are passed
    over, and so is a header that is longer than any honest one."""
    max_age_s: float | None = None
    reads = keeps = True
    for directive in text.split(",") if len(text) <= _MAX_CONTROL_CHARS else ():
        name, _, value = directive.strip().lower().partition("=")
        if name == "no-cache":
            reads = False
        elif name == "no-store":
            reads = keeps = False
        elif name == "max-age":
            digits = value.strip('"')
            if not (digits.isascii() and digits.isdigit() and len(digits) <= _MAX_AGE_DIGITS):
                message = (
                    f"{CONTROL_HEADER}: max-age must be a whole number of seconds, not {value!r}"
                )
                raise ApiError(INVALID_REQUEST, message, CONTROL_HEADER)
            max_age_s = float(digits)
    return max_age_s, reads, keeps


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
class CachePlace:
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
        asked.user,
        asked.reasoning,
        asked.template_values,
        time.strftime("%Y-%m-%d") if tells_date else "",
    )
    return Turn(question, _digest(around), asked.max_tokens is not None)


def place_of(
    tenant_id: str, request: PreparedRequest, turn: Turn, drawn: bool, embedder: str
) -> CachePlace:
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
    return CachePlace(scope, exact_key, turn.question, turn.names_length)


def _digest(parts: object) -> bytes:
    try:
        encoded = msgspec.msgpack.encode(parts)
    except OverflowError:  # of a caller's numbers, which JSON has of any size
        encoded = msgspec.json.encode(parts)
    return hashlib.blake2b(encoded, digest_size=_DIGEST_BYTES).digest()
