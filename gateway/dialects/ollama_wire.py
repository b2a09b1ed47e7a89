"""What callers may send to Ollama's /api/chat, /api/generate, /api/embed. Part of stage 2.

Comes in: a body. Goes out: a `WireRequest` or an `EncodeAsk` as OpenAI's routes make one, or an
ApiError that names the field. What differs:

    stream      is on unless it is switched off
    model       may end in `:latest`
    options     hold what others have at the top; those that load a model are told
    calls       have no ids: results answer them in their order

Answers are written by ollama_answer.py.
"""

from collections import deque
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from engine.protocol import SamplingParams
from gateway.api.bodies import decode_body, invalid, unsupported
from gateway.api.encode_wire import EncodeAsk, read_inputs
from gateway.api.reasoning_types import Effort, Reasoning, reasoning_of
from gateway.api.told_fields import Shape, ToldFields, decode_telling
from gateway.api.tool_types import (
    MAX_CALLS,
    CalledFunction,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    ResponseFormat,
    TextFormat,
    ToolCall,
    Tools,
)
from gateway.api.wire import Message, WireRequest
from gateway.api.wire_body import MAX_MESSAGES, MAX_STOP_CHARS
from gateway.errors import UNSUPPORTED_PARAMETER, ApiError
from gateway.sealing.seals import TenantSeal

LATEST = ":latest"
_NOTHING = msgspec.Raw(b"null")
_EMPTY = msgspec.Raw(b"[]")
_SMALLEST_TOP_P = 1e-9
_Model: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Share: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Stop: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_STOP_CHARS)]


class _Options(msgspec.Struct, forbid_unknown_fields=True):
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: _Share | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: _Share | None = None
    seed: int | None = None
    num_predict: Annotated[int, msgspec.Meta(ge=-2)] | None = None
    stop: _Stop | Annotated[list[_Stop], msgspec.Meta(max_length=16)] | None = None
    repeat_penalty: Annotated[float, msgspec.Meta(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] | None = None


class _CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: dict[str, Any]


class _Call(msgspec.Struct, forbid_unknown_fields=True):
    function: _CalledFunction
    id: str | None = None
    type: str | None = None


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: Annotated[list[_Call], msgspec.Meta(max_length=MAX_CALLS)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: msgspec.Raw = _NOTHING


class _Common(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: _Model
    stream: bool | None = None
    format: msgspec.Raw = _NOTHING
    options: _Options | None = None
    think: bool | Effort | None = None
    keep_alive: msgspec.Raw = _NOTHING
    logprobs: bool | None = None
    top_logprobs: int | None = None


class OllamaChatBody(_Common, forbid_unknown_fields=True, kw_only=True):
    """POST /api/chat."""

    messages: Annotated[list[_Message], msgspec.Meta(max_length=MAX_MESSAGES)] = []
    tools: Tools | None = None


class OllamaGenerateBody(_Common, forbid_unknown_fields=True, kw_only=True):
    """POST /api/generate."""

    prompt: str = ""
    system: str | None = None
    raw: bool | None = None
    images: msgspec.Raw = _NOTHING
    suffix: str | None = None
    template: str | None = None
    context: msgspec.Raw = _NOTHING


class OllamaEmbedBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /api/embed."""

    model: _Model
    input: msgspec.Raw
    truncate: bool | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    keep_alive: msgspec.Raw = _NOTHING
    options: msgspec.Raw = _NOTHING


class OllamaEmbeddingsBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /api/embeddings, which /api/embed has taken the place of."""

    model: _Model
    prompt: Annotated[str, msgspec.Meta(min_length=1)]
    keep_alive: msgspec.Raw = _NOTHING
    options: msgspec.Raw = _NOTHING


class ShowBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /api/show; it has had both names."""

    model: Annotated[str, msgspec.Meta(max_length=256)] = ""
    name: Annotated[str, msgspec.Meta(max_length=256)] = ""
    verbose: msgspec.Raw = _NOTHING


_OPTIONS = Shape(_Options.__struct_fields__)
_MESSAGES = Shape(
    _Message.__struct_fields__,
    {
        "tool_calls": Shape(
            _Call.__struct_fields__,
            objects={"function": Shape(_CalledFunction.__struct_fields__)},
        )
    },
)
_CHAT = Shape(OllamaChatBody.__struct_fields__, {"messages": _MESSAGES}, {"options": _OPTIONS})
_GENERATE = Shape(OllamaGenerateBody.__struct_fields__, objects={"options": _OPTIONS})
_EMBED = Shape(OllamaEmbedBody.__struct_fields__)
_EMBEDDINGS = Shape(OllamaEmbeddingsBody.__struct_fields__)
_SHOW = Shape(ShowBody.__struct_fields__)
_chat_decoder = msgspec.json.Decoder(OllamaChatBody)
_generate_decoder = msgspec.json.Decoder(OllamaGenerateBody)
_embed_decoder = msgspec.json.Decoder(OllamaEmbedBody)
_embeddings_decoder = msgspec.json.Decoder(OllamaEmbeddingsBody)
_show_decoder = msgspec.json.Decoder(ShowBody)
_NO_TIME = (b"0", b'"0"', b'"0s"', b'"0m"')
_any_decoder = msgspec.json.Decoder()
_encode = msgspec.json.Encoder().encode


def decode_chat(body: bytes, tells_unknown: bool, seal: TenantSeal) -> WireRequest:
    """Raises ApiError."""
    del seal
    asked, told = decode_telling(_chat_decoder, body, _CHAT, tells_unknown)
    if not asked.messages:
        return _load(asked, told, len(body))
    messages = tuple(_messages(asked))
    return WireRequest(
        kind="chat",
        messages=messages,
        tools=tuple(asked.tools or ()),
        num_bytes=len(body),
        **_common(asked, told),
    )


def decode_generate(body: bytes, tells_unknown: bool, seal: TenantSeal) -> WireRequest:
    """Raises ApiError."""
    del seal
    asked, told = decode_telling(_generate_decoder, body, _GENERATE, tells_unknown)
    for name in ("suffix", "template"):
        if getattr(asked, name):
            raise unsupported(name)
    for name in ("images", "context"):
        if getattr(asked, name) not in (_NOTHING, _EMPTY):
            raise unsupported(name)
    if not asked.prompt:
        return _load(asked, told, len(body))
    if asked.raw:
        if asked.system or asked.think is not None:
            name = "system" if asked.system else "think"
            raise invalid(name, f"{name} is not allowed with raw: true, which has no template")
        return WireRequest(
            kind="completion", prompt=asked.prompt, num_bytes=len(body), **_common(asked, told)
        )
    user: Message = {"role": "user", "content": asked.prompt}
    system: tuple[Message, ...] = ()
    if asked.system:
        system = ({"role": "system", "content": asked.system},)
    return WireRequest(
        kind="chat", messages=(*system, user), num_bytes=len(body), **_common(asked, told)
    )


def decode_embed(body: bytes, max_inputs: int, tells_unknown: bool = False) -> EncodeAsk:
    """Raises ApiError."""
    asked, told = decode_telling(_embed_decoder, body, _EMBED, tells_unknown)
    told.tell("keep_alive", asked.keep_alive)
    told.tell("options", asked.options)
    return EncodeAsk(
        "embedding",
        _name(asked.model),
        read_inputs(asked.input, max_inputs),
        cut=None if asked.truncate is False else -1,
        dimensions=asked.dimensions,
        ignored=told.names,
        style="ollama",
    )


def decode_embeddings(body: bytes, tells_unknown: bool = False) -> EncodeAsk:
    """Of the older route: one text, and one vector as its answer. Raises ApiError."""
    asked, told = decode_telling(_embeddings_decoder, body, _EMBEDDINGS, tells_unknown)
    told.tell("keep_alive", asked.keep_alive)
    told.tell("options", asked.options)
    return EncodeAsk(
        "embedding",
        _name(asked.model),
        (asked.prompt,),
        cut=-1,
        ignored=told.names,
        style="ollama_one",
    )


def decode_show(body: bytes, tells_unknown: bool = False) -> tuple[str, tuple[str, ...]]:
    """The model that /api/show asks for, and the fields that are told. Raises ApiError."""
    asked, told = decode_telling(_show_decoder, body, _SHOW, tells_unknown)
    told.tell("verbose", asked.verbose)
    name = asked.model or asked.name
    if not name:
        raise invalid("model", "model is required")
    return _name(name), told.names


def _load(asked: _Common, told: ToldFields, num_bytes: int) -> WireRequest:
    """Without a prompt or messages the model is to be loaded: a request of one token, whichever it
    is, that wants none. Raises ApiError where it is to be unloaded."""
    if bytes(asked.keep_alive) in _NO_TIME:
        message = "keep_alive: 0 unloads no model here, they make room by themselves: leave it out"
        raise ApiError(UNSUPPORTED_PARAMETER, message, "keep_alive")
    told.tell("keep_alive", asked.keep_alive)
    return WireRequest(
        kind="completion",
        model=_name(asked.model),
        prompt=(0,),
        max_tokens=0,
        stream=asked.stream is not False,
        num_bytes=num_bytes,
        ignored=told.names,
    )


def _name(name: str) -> str:
    return name.removesuffix(LATEST)


def _common(asked: _Common, told: ToldFields) -> dict[str, Any]:
    if asked.logprobs or asked.top_logprobs:
        raise unsupported("logprobs" if asked.logprobs else "top_logprobs")
    told.tell("keep_alive", asked.keep_alive)
    options = asked.options or _Options()
    length = options.num_predict
    if length == 0:
        raise invalid("options.num_predict", "options.num_predict must be at least 1, or -1")
    top_p = 1.0 if options.top_p is None else max(options.top_p, _SMALLEST_TOP_P)
    stop = options.stop or ()
    return {
        "model": _name(asked.model),
        "max_tokens": length if length is not None and length > 0 else None,
        "caps_max_tokens": True,
        "sampling": SamplingParams(
            temperature=1.0 if options.temperature is None else options.temperature,
            top_p=top_p,
            top_k=max(0, options.top_k or 0),
            min_p=options.min_p or 0.0,
            frequency_penalty=options.frequency_penalty or 0.0,
            presence_penalty=options.presence_penalty or 0.0,
            repetition_penalty=options.repeat_penalty or 1.0,
        ),
        "seed": options.seed,
        "stop": (stop,) if isinstance(stop, str) else tuple(stop),
        "stream": asked.stream is not False,
        "response_format": _form(asked.format),
        "reasoning": _reasoning(asked.think),
        "ignored": told.names,
    }


def _form(raw: msgspec.Raw) -> ResponseFormat:
    value = decode_body(_any_decoder, bytes(raw), "format")
    if value in (None, ""):
        return TextFormat()
    if value == "json":
        return JsonObjectFormat()
    if not isinstance(value, dict):
        raise invalid("format", 'format must be "json" or a JSON schema')
    return JsonSchemaFormat(json_schema=JsonSchema(name="answer", schema=value))


def _reasoning(think: bool | Effort | None) -> Reasoning | None:
    if think is None or isinstance(think, bool):
        return None if think is None else Reasoning(think)
    return reasoning_of(think, None)


def _messages(asked: OllamaChatBody) -> Iterator[Message]:
    waiting: deque[str] = deque()
    num_calls = 0
    for index, message in enumerate(asked.messages):
        place = f"messages[{index}]"
        if message.images not in (_NOTHING, _EMPTY):
            raise unsupported(f"{place}.images")
        made: Message = {"role": message.role, "content": message.content or ""}
        if message.role == "assistant" and message.thinking:
            made["reasoning_content"] = message.thinking
        if message.role == "assistant" and message.tool_calls:
            calls = []
            for call in message.tool_calls:
                call_id = call.id or f"call_{num_calls}"
                num_calls += 1
                waiting.append(call_id)
                arguments = _encode(call.function.arguments).decode()
                function = CalledFunction(name=call.function.name, arguments=arguments)
                calls.append(ToolCall(id=call_id, function=function))
            made["tool_calls"] = calls
        if message.role == "tool":
            if message.tool_call_id is not None:
                made["tool_call_id"] = message.tool_call_id
            elif waiting:
                made["tool_call_id"] = waiting.popleft()
            else:
                raise invalid(f"{place}.role", f"{place}: a result needs a call before it")
            if message.tool_name:
                made["name"] = message.tool_name
        yield made
