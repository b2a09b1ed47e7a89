"""What callers may send to /v1/chat/completions and /v1/completions, and what is made of it.

Comes in: a request body. Goes out: a `WireRequest`, typed and within range, or an ApiError that
names the field. Nothing here knows models, tenants or tokens; answers are written by stream.py.

Three sorts of fields. Served ones are in the structs with their types. Fields of the OpenAI API
that would change the answer and are not served yet are in the structs too, but only their neutral
values are let through (`_NEUTRAL`): a client that spells out a default gets its answer, one that
wants the feature gets `unsupported_parameter`, and nobody gets an answer that silently left out
what was asked for. Ignored are only fields that cannot change an answer: `user`, `metadata`,
`safety_identifier`, `prompt_cache_key`, and `parallel_tool_calls` (there are no tools).
Everything else is unknown, and refused by name.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec

from gateway.errors import INVALID_REQUEST, UNSUPPORTED_PARAMETER, ApiError

Kind: TypeAlias = Literal["chat", "completion"]
Message: TypeAlias = dict[str, str]

MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 1024

_Count = Annotated[int, msgspec.Meta(ge=1)]
_Model = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Stop = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_STOP_CHARS)]
_Stops = Annotated[list[_Stop], msgspec.Meta(max_length=MAX_STOP_STRINGS)]
_Temperature = Annotated[float, msgspec.Meta(ge=0, le=2)]
_TopP = Annotated[float, msgspec.Meta(ge=0, le=1)]
_T = TypeVar("_T")


class _TextPart(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[_TextPart], msgspec.Meta(min_length=1)]
    name: str | None = None
    # What an SDK's own assistant message carries when it is sent back: let through when empty.
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None
    tool_calls: Any = None


class _StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Common(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: _Model
    max_tokens: _Count | None = None
    temperature: _Temperature | None = None
    top_p: _TopP | None = None
    seed: int | None = None
    stop: _Stop | _Stops | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None


class _ChatBody(_Common, forbid_unknown_fields=True, kw_only=True):
    messages: Annotated[list[_Message], msgspec.Meta(min_length=1)]
    max_completion_tokens: _Count | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    parallel_tool_calls: bool | None = None
    service_tier: str | None = None
    store: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class _CompletionBody(_Common, forbid_unknown_fields=True, kw_only=True):
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    best_of: int | None = None
    logprobs: int | None = None
    suffix: str | None = None


# Fields that are not served, with the values that mean the same as leaving them out.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
}
_NEUTRAL_IN_COMPLETION = {**_NEUTRAL, "logprobs": ()}
_NEUTRAL_IN_MESSAGE: dict[str, tuple[Any, ...]] = {
    "refusal": ("",),
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "tool_calls": ([],),
}

_chat_decoder = msgspec.json.Decoder(_ChatBody)
_completion_decoder = msgspec.json.Decoder(_CompletionBody)

_AT = re.compile(r" - at `\$\.?(.*)`$")
_FIELD = re.compile(r"Object (missing required|contains unknown) field `(.*)`$")


@dataclass(frozen=True, slots=True)
class WireRequest:
    """A well-formed request. `messages` is set for chat, `prompt` for completions.

    `max_tokens` and `seed` are None where the caller left them out.
    """

    kind: Kind
    model: str
    messages: tuple[Message, ...] = ()
    prompt: str | tuple[int, ...] = ""
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False


def decode(kind: Kind, body: bytes) -> WireRequest:
    """Raises ApiError: malformed JSON, a wrong type or range (with `param`), an unserved field."""
    if kind == "chat":
        return _chat(_decode(_chat_decoder, body))
    return _completion(_decode(_completion_decoder, body))


def _decode(decoder: "msgspec.json.Decoder[_T]", body: bytes) -> _T:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _field_error(str(error)) from error
    except UnicodeDecodeError as error:
        raise ApiError(INVALID_REQUEST, "the request body is not valid UTF-8") from error
    except RecursionError as error:
        raise ApiError(INVALID_REQUEST, "the request body is nested too deeply") from error
    except msgspec.DecodeError as error:
        raise ApiError(
            INVALID_REQUEST, f"the request body could not be read as JSON: {error}"
        ) from error


def _field_error(text: str) -> ApiError:
    """msgspec says where: "... - at `$.messages[0].content`"."""
    at = _AT.search(text)
    param = at.group(1) if at else ""
    what = text[: at.start()] if at else text
    field = _FIELD.match(what)
    if field is None:
        return ApiError(INVALID_REQUEST, f"{param or 'request body'}: {what}", param or None)
    param = f"{param}.{field.group(2)}" if param else field.group(2)
    if field.group(1) == "missing required":
        return ApiError(INVALID_REQUEST, f"{param} is required", param)
    return unsupported(param)


def unsupported(param: str, wanted: str = "") -> ApiError:
    """The answer to a field this server does not serve."""
    return ApiError(UNSUPPORTED_PARAMETER, f"{param}{wanted} is not supported: leave it out", param)


def _chat(body: _ChatBody) -> WireRequest:
    _refuse_unserved(body, _NEUTRAL, "")
    for index, message in enumerate(body.messages):
        _refuse_unserved(message, _NEUTRAL_IN_MESSAGE, f"messages[{index}].")
    longest = body.max_completion_tokens
    if longest is not None and body.max_tokens not in (None, longest):
        raise ApiError(
            INVALID_REQUEST,
            "max_tokens and max_completion_tokens differ: send only max_completion_tokens",
            "max_tokens",
        )
    messages = tuple(_message(message) for message in body.messages)
    return _request(
        "chat", body, messages=messages, max_tokens=body.max_tokens if longest is None else longest
    )


def _completion(body: _CompletionBody) -> WireRequest:
    _refuse_unserved(body, _NEUTRAL_IN_COMPLETION, "")
    return _request("completion", body, prompt=_one_prompt(body.prompt), max_tokens=body.max_tokens)


def _request(
    kind: Kind,
    body: _Common,
    max_tokens: int | None,
    messages: tuple[Message, ...] = (),
    prompt: str | tuple[int, ...] = "",
) -> WireRequest:
    options = body.stream_options
    if options is not None and not body.stream:
        raise ApiError(
            INVALID_REQUEST, "stream_options is only allowed with stream: true", "stream_options"
        )
    if options is not None and options.include_obfuscation:
        raise unsupported("stream_options.include_obfuscation")
    return WireRequest(
        kind=kind,
        model=body.model,
        messages=messages,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        seed=body.seed,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
    )


def _refuse_unserved(
    part: msgspec.Struct, neutral: dict[str, tuple[Any, ...]], prefix: str
) -> None:
    for name in type(part).__struct_fields__:
        if name in neutral:
            value = getattr(part, name)
            if value is not None and value not in neutral[name]:
                raise unsupported(prefix + name, " with this value" if neutral[name] else "")


def _message(message: _Message) -> Message:
    """As chat templates know it: text parts joined by a line break, `developer` as `system`."""
    content = message.content
    text = content if isinstance(content, str) else "\n".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    fields = {"role": role, "content": text}
    if message.name is not None:
        fields["name"] = message.name
    return fields


def _one_prompt(prompt: str | list[str | int | list[int]]) -> str | tuple[int, ...]:
    """A text, token ids, or a list of exactly one of these."""
    if isinstance(prompt, str):
        return prompt
    ids = tuple(item for item in prompt if isinstance(item, int))
    if ids and len(ids) == len(prompt):
        return ids
    if len(prompt) > 1:
        raise unsupported("prompt", " with several prompts")
    if not prompt or prompt == [[]]:
        raise ApiError(INVALID_REQUEST, "prompt must not be empty", "prompt")
    only = prompt[0]
    return only if isinstance(only, str) else tuple(only) if isinstance(only, list) else (only,)
