"""What callers may send to /v1/responses, OpenAI's Responses, and what is made of it. Stage 2.

Comes in: a body. Goes out: a `WireRequest` as chat completions make one, or an ApiError that names
the field. The input is a text or items; what is made of these is responses_items.py's.

What is stored of a request, and what it follows, is here as it was asked for (`AskedResponse`);
gateway/state/ does it. Answers are written by responses_answer.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from engine.protocol import SamplingParams
from gateway.api.bodies import invalid, unsupported
from gateway.api.reasoning_types import Effort, reasoning_of
from gateway.api.told_fields import Shape, ToldFields, decode_telling
from gateway.api.tool_types import (
    MAX_TOOLS,
    AllowedChoice,
    AllowedTools,
    Description,
    FunctionName,
    FunctionSpec,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    NamedChoice,
    NamedFunction,
    NamedTool,
    ResponseFormat,
    TextFormat,
    Tool,
    ToolChoice,
)
from gateway.api.wire import Message, WireRequest, small_field
from gateway.api.wire_body import TIER_PRIORITIES, TOLD_TIERS, TopLogprobs
from gateway.dialects.responses_items import Item, Part, messages_of, needed, opened
from gateway.errors import UNSUPPORTED_PARAMETER, ApiError
from gateway.sealing.seals import TenantSeal

ID_PREFIX = "resp_"
MAX_ITEMS = 8192
MAX_USER_CHARS = 4096
_NOTHING = msgspec.Raw(b"null")
MAX_METADATA, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512
"""Of what answers repeat and lists show: pairs, and the characters of each."""
_SMALLEST_TOP_P = 1e-9
_LOGPROBS = "message.output_text.logprobs"
_SEALED = "reasoning.encrypted_content"


# What answers repeat, three times in a stream, is bounded where no prompt bounds it.
_UserName: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_USER_CHARS)]


class _FunctionTool(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    name: FunctionName | None = None
    description: Description | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: msgspec.Raw = _NOTHING
    allowed_callers: msgspec.Raw = _NOTHING
    output_schema: msgspec.Raw = _NOTHING


class _ChoiceTool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    name: FunctionName


class _Choice(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    name: FunctionName | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[_ChoiceTool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None


class _Format(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    name: FunctionName | None = None
    schema: Any = None
    description: Description | None = None
    strict: bool | None = None


class _Text(msgspec.Struct, forbid_unknown_fields=True):
    format: _Format | None = None
    verbosity: msgspec.Raw = _NOTHING


class _ReasoningBody(msgspec.Struct, forbid_unknown_fields=True):
    effort: Effort | None = None
    summary: msgspec.Raw = _NOTHING
    generate_summary: msgspec.Raw = _NOTHING


class _StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None


_ConversationId: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class _ConversationRef(msgspec.Struct, forbid_unknown_fields=True):
    id: _ConversationId


class ResponsesBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/responses."""

    model: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    input: str | Annotated[list[Item], msgspec.Meta(min_length=1, max_length=MAX_ITEMS)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    tools: Annotated[list[_FunctionTool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | _Choice | None = None
    parallel_tool_calls: bool | None = None
    text: _Text | None = None
    reasoning: _ReasoningBody | None = None
    include: list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    service_tier: Literal["auto", "default", "priority", "flex", "scale"] | None = None
    user: _UserName | None = None
    safety_identifier: _UserName | None = None
    prompt_cache_key: str | None = None
    metadata: msgspec.Raw = _NOTHING
    store: bool | None = None
    background: bool | None = None
    top_logprobs: TopLogprobs | None = None
    max_tool_calls: int | None = None
    previous_response_id: Annotated[str, msgspec.Meta(max_length=64)] | None = None
    conversation: _ConversationId | _ConversationRef | None = None
    prompt: msgspec.Raw = _NOTHING
    prompt_cache_options: msgspec.Raw = _NOTHING
    prompt_cache_retention: msgspec.Raw = _NOTHING
    context_management: msgspec.Raw = _NOTHING
    moderation: msgspec.Raw = _NOTHING


_TOLD = ("prompt_cache_options", "prompt_cache_retention", "context_management")
_TOLD_IN_TOOL = ("defer_loading", "allowed_callers", "output_schema")
_decoder = msgspec.json.Decoder(ResponsesBody)
_metadata_decoder = msgspec.json.Decoder(dict[str, str] | None)
_PART = Shape(Part.__struct_fields__)
_SHAPE = Shape(
    ResponsesBody.__struct_fields__,
    {"input": Shape(Item.__struct_fields__, {"content": _PART, "output": _PART})},
)


@dataclass(frozen=True, slots=True)
class AskedResponse:
    """A body, read. `wire`: its request, with its own input alone. `input`: that as items.
    `instructions`: the message that comes first, whatever is before the input."""

    wire: WireRequest
    input: Sequence[Item]
    instructions: tuple[Message, ...]
    store: bool
    """Nothing said is true, as OpenAI has it."""
    is_store_said: bool
    previous_response_id: str | None
    is_background: bool
    conversation_id: str | None

    @property
    def is_stateless(self) -> bool:
        """Nothing is read or written for it."""
        return not (self.store or self.previous_response_id or self.is_background)

    def after(self, earlier: Sequence[Item], num_bytes: int) -> "AskedResponse":
        """The same behind the items of earlier responses, which have so many bytes. Their
        instructions are not carried over."""
        messages = messages_of([*earlier, *self.input], None, len(earlier))
        wire = msgspec.structs.replace(
            self.wire,
            messages=(*self.instructions, *messages),
            num_bytes=self.wire.num_bytes + num_bytes,
        )
        return replace(self, wire=wire)

    def showing(self, **fields: Any) -> "AskedResponse":
        """The same with these fields of the response."""
        return replace(
            self, wire=msgspec.structs.replace(self.wire, shown={**self.wire.shown, **fields})
        )

    def telling(self, name: str) -> "AskedResponse":
        """The same with one more field that has no effect."""
        return replace(
            self, wire=msgspec.structs.replace(self.wire, ignored=(*self.wire.ignored, name))
        )


def decode(body: bytes, tells_unknown: bool, seal: TenantSeal) -> WireRequest:
    """The request of a body alone. Raises ApiError."""
    return decode_asked(body, tells_unknown, seal).wire


def decode_asked(body: bytes, tells_unknown: bool, seal: TenantSeal) -> AskedResponse:
    """Raises ApiError."""
    asked, told = decode_telling(_decoder, body, _SHAPE, tells_unknown)
    _refuse_unserved(asked)
    _tell(asked, told)
    tools = tuple(_tool(index, tool, told) for index, tool in enumerate(asked.tools or ()))
    users = (asked.user or "", asked.safety_identifier or "")
    form = _form(asked)
    effort = asked.reasoning.effort if asked.reasoning is not None else None
    top_p = 1.0 if asked.top_p is None else max(asked.top_p, _SMALLEST_TOP_P)
    instructions = _instructions(asked)
    if isinstance(asked.input, str):
        items = [Item(role="user", content=asked.input)]
    else:
        items = [
            opened(item, f"input[{number}]", asked.model, seal)
            for number, item in enumerate(asked.input)
        ]
    wire = WireRequest(
        kind="chat",
        model=asked.model,
        messages=(*instructions, *messages_of(items, told)),
        max_tokens=asked.max_output_tokens,
        user=users if any(users) else (),
        sampling=SamplingParams(
            temperature=1.0 if asked.temperature is None else asked.temperature, top_p=top_p
        ),
        priority=TIER_PRIORITIES.get(asked.service_tier or "auto", 0),
        stream=bool(asked.stream),
        tools=tools,
        tool_choice=_choice(asked.tool_choice),
        parallel_tool_calls=asked.parallel_tool_calls is not False,
        response_format=form,
        reasoning=reasoning_of(effort, None),
        service_tier=TOLD_TIERS.get(asked.service_tier or "", ""),
        logprobs=_num_scores(asked),
        seal=seal if _SEALED in (asked.include or ()) else None,
        shown=_shown(asked, effort),
        num_bytes=len(body),
        ignored=told.names,
    )
    return AskedResponse(
        wire,
        items,
        instructions,
        store=asked.store is not False,
        is_store_said=bool(asked.store),
        previous_response_id=asked.previous_response_id or None,
        is_background=bool(asked.background),
        conversation_id=_conversation_id(asked),
    )


def _num_scores(asked: ResponsesBody) -> int:
    """See WireRequest.logprobs. The likeliest can be asked for alone, too."""
    if asked.top_logprobs or _LOGPROBS in (asked.include or ()):
        return asked.top_logprobs or 0
    return -1


def _conversation_id(asked: ResponsesBody) -> str | None:
    found = asked.conversation
    return found.id if isinstance(found, _ConversationRef) else found


def _instructions(asked: ResponsesBody) -> tuple[Message, ...]:
    text = asked.instructions
    return ({"role": "system", "content": text},) if text else ()


def _refuse_unserved(asked: ResponsesBody) -> None:
    for name in ("prompt", "moderation"):
        if getattr(asked, name) != _NOTHING:
            raise unsupported(name)
    for name in ("background", "conversation"):
        if getattr(asked, name) and asked.store is False:
            raise invalid("store", f"{name} needs a stored response: leave store out")
    if asked.conversation is not None and asked.previous_response_id:
        raise invalid(
            "previous_response_id",
            "previous_response_id and conversation exclude each other: send one of them",
        )


def _tell(asked: ResponsesBody, told: ToldFields) -> None:
    for name in _TOLD:
        told.tell(name, getattr(asked, name))
    text, reasoning = asked.text, asked.reasoning
    for name, is_told in (
        ("truncation", asked.truncation == "auto"),
        ("max_tool_calls", asked.max_tool_calls is not None),
        ("include", set(asked.include or ()) - {_SEALED, _LOGPROBS}),
        ("service_tier", asked.service_tier == "scale"),
        ("stream_options.include_obfuscation", asked.stream_options is not None
         and asked.stream_options.include_obfuscation),
        ("text.verbosity", text is not None and text.verbosity != _NOTHING),
        ("reasoning.summary", reasoning is not None
         and (reasoning.summary != _NOTHING or reasoning.generate_summary != _NOTHING)),
    ):  # fmt: skip
        if is_told:
            told.tell(name)


def _tool(index: int, tool: _FunctionTool, told: ToldFields) -> Tool:
    for name in _TOLD_IN_TOOL:
        told.tell(f"tools[].{name}", getattr(tool, name))
    if tool.type != "function":
        param = f"tools[{index}].type"
        raise ApiError(
            UNSUPPORTED_PARAMETER,
            f"{param}: tools of type {tool.type[:40]!r} are not supported: offer functions",
            param,
        )
    name = needed(f"tools[{index}]", "name", tool.name)
    function = FunctionSpec(
        name=name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return Tool(type="function", function=function)


def _choice(choice: Any) -> ToolChoice | None:
    if not isinstance(choice, _Choice):
        return choice  # type: ignore[no-any-return]
    if choice.type == "function":
        name = needed("tool_choice", "name", choice.name)
        return NamedChoice(function=NamedFunction(name=name))
    if choice.type != "allowed_tools":
        raise unsupported("tool_choice.type", f" of {choice.type[:40]!r}")
    tools = [
        NamedTool(type="function", function=NamedFunction(name=tool.name))
        for tool in choice.tools or ()
    ]
    if not tools:
        raise invalid("tool_choice.tools", "tool_choice.tools must have at least one function")
    return AllowedChoice(allowed_tools=AllowedTools(mode=choice.mode or "auto", tools=tools))


def _form(asked: ResponsesBody) -> ResponseFormat:
    form = asked.text.format if asked.text is not None else None
    if form is None or form.type == "text":
        return TextFormat()
    if form.type == "json_object":
        return JsonObjectFormat()
    name = needed("text.format", "name", form.name)
    return JsonSchemaFormat(json_schema=JsonSchema(name=name, schema=form.schema))


def _shown(asked: ResponsesBody, effort: str | None) -> dict[str, Any]:
    """What a response repeats of its request."""
    form = asked.text.format if asked.text is not None else None
    conversation_id = _conversation_id(asked)
    return {
        "conversation": None if conversation_id is None else {"id": conversation_id},
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": metadata_of(asked.metadata),
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": asked.previous_response_id or None,
        "reasoning": {"effort": effort, "summary": None},
        "safety_identifier": asked.safety_identifier,
        "temperature": 1.0 if asked.temperature is None else asked.temperature,
        "text": {"format": {"type": "text"} if form is None else _plain(form)},
        "tool_choice": "auto" if asked.tool_choice is None else _plain(asked.tool_choice),
        "tools": [
            {
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
                "strict": tool.strict,
            }
            for tool in asked.tools or ()
        ],
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": 1.0 if asked.top_p is None else asked.top_p,
        "user": asked.user,
    }


def metadata_of(raw: msgspec.Raw) -> dict[str, str]:
    """The caller's own notes, bounded as OpenAI has it. Raises ApiError."""
    found = small_field("metadata", raw, _metadata_decoder) or {}
    if len(found) > MAX_METADATA:
        message = f"metadata has {len(found)} keys, the maximum is {MAX_METADATA}"
        raise invalid("metadata", message)
    for key, value in found.items():
        if len(key) > MAX_KEY_CHARS:
            message = f"a key of metadata has {len(key)} characters, the maximum is {MAX_KEY_CHARS}"
            raise invalid("metadata", message)
        if len(value) > MAX_VALUE_CHARS:
            param = f"metadata.{key}"
            raise invalid(
                param, f"{param} has {len(value)} characters, the maximum is {MAX_VALUE_CHARS}"
            )
    return found


def _plain(value: Any) -> Any:
    """A struct as the caller wrote it, without what was left out."""
    if isinstance(value, msgspec.Struct):
        fields = msgspec.structs.asdict(value)
        return {name: found for name, found in fields.items() if found is not None}
    return value
