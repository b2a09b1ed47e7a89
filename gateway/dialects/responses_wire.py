"""What callers may send to /v1/responses, OpenAI's Responses, and what is made of it. Stage 2.

Comes in: a body. Goes out: a `WireRequest` as chat completions make one, or an ApiError that names
the field. The input is a text or items; reasoning, text and calls of the assistant that follow one
another are one message for the chat template:

    message                 of any role; text parts
    reasoning               its `content`, as an earlier answer of this server had it
    function_call           a call; what `function_call_output` answers
    item_reference, ...     refused by name

No response is kept here: `previous_response_id`, `conversation` and `background` are refused, and a
caller sends the whole input. Answers are written by responses_answer.py.
"""

from collections.abc import Iterator, Sequence
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
    CalledFunction,
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
    ToolCall,
    ToolChoice,
)
from gateway.api.wire import Message, WireRequest, small_field
from gateway.api.wire_body import MAX_PARTS, TIER_PRIORITIES, TOLD_TIERS
from gateway.errors import UNSUPPORTED_PARAMETER, ApiError

MAX_ITEMS = 8192
MAX_USER_CHARS = 4096
_NOTHING = msgspec.Raw(b"null")
_EMPTY = msgspec.Raw(b"[]")
_SMALLEST_TOP_P = 1e-9
_LOGPROBS = "message.output_text.logprobs"
_KEPT = ("previous_response_id", "conversation", "prompt")


# What answers repeat, three times in a stream, is bounded where no prompt bounds it.
_UserName: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_USER_CHARS)]


class _Part(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """Of a message, of a call's output, or of reasoning. Parts that are no text are refused; what
    our own carry (annotations, log-probabilities) says nothing to a model."""

    type: str
    text: str | None = None
    annotations: msgspec.Raw = _NOTHING
    logprobs: msgspec.Raw = _NOTHING
    prompt_cache_breakpoint: msgspec.Raw = _NOTHING
    refusal: msgspec.Raw = _NOTHING
    image_url: msgspec.Raw = _NOTHING
    detail: msgspec.Raw = _NOTHING
    file_id: msgspec.Raw = _NOTHING
    file_data: msgspec.Raw = _NOTHING
    file_url: msgspec.Raw = _NOTHING
    filename: msgspec.Raw = _NOTHING
    input_audio: msgspec.Raw = _NOTHING


_Parts: TypeAlias = Annotated[list[_Part], msgspec.Meta(max_length=MAX_PARTS)]


class _Item(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """An item of the input: a message, unless `type` says otherwise."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | _Parts | None = None
    call_id: Annotated[str, msgspec.Meta(min_length=1, max_length=256)] | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | _Parts | None = None
    id: str | None = None
    status: str | None = None
    phase: msgspec.Raw = _NOTHING
    summary: msgspec.Raw = _NOTHING
    encrypted_content: msgspec.Raw = _NOTHING
    caller: msgspec.Raw = _NOTHING
    namespace: msgspec.Raw = _NOTHING
    created_by: msgspec.Raw = _NOTHING


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


class ResponsesBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/responses."""

    model: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    input: str | Annotated[list[_Item], msgspec.Meta(min_length=1, max_length=MAX_ITEMS)]
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
    top_logprobs: int | None = None
    max_tool_calls: int | None = None
    previous_response_id: str | None = None
    conversation: msgspec.Raw = _NOTHING
    prompt: msgspec.Raw = _NOTHING
    prompt_cache_options: msgspec.Raw = _NOTHING
    prompt_cache_retention: msgspec.Raw = _NOTHING
    context_management: msgspec.Raw = _NOTHING
    moderation: msgspec.Raw = _NOTHING


_TOLD = ("prompt_cache_options", "prompt_cache_retention", "context_management")
_TOLD_IN_ITEM = ("phase", "encrypted_content", "caller", "namespace")
_TOLD_IN_TOOL = ("defer_loading", "allowed_callers", "output_schema")
_decoder = msgspec.json.Decoder(ResponsesBody)
_metadata_decoder = msgspec.json.Decoder(dict[str, str] | None)
_PART = Shape(_Part.__struct_fields__)
_SHAPE = Shape(
    ResponsesBody.__struct_fields__,
    {"input": Shape(_Item.__struct_fields__, {"content": _PART, "output": _PART})},
)


def decode(body: bytes, tells_unknown: bool = False) -> WireRequest:
    """Raises ApiError."""
    asked, told = decode_telling(_decoder, body, _SHAPE, tells_unknown)
    _refuse_unserved(asked)
    _tell(asked, told)
    tools = tuple(_tool(index, tool, told) for index, tool in enumerate(asked.tools or ()))
    users = (asked.user or "", asked.safety_identifier or "")
    form = _form(asked)
    effort = asked.reasoning.effort if asked.reasoning is not None else None
    top_p = 1.0 if asked.top_p is None else max(asked.top_p, _SMALLEST_TOP_P)
    return WireRequest(
        kind="chat",
        model=asked.model,
        messages=tuple(_messages(asked, told)),
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
        shown=_shown(asked, effort),
        num_bytes=len(body),
        ignored=told.names,
    )


def _refuse_unserved(asked: ResponsesBody) -> None:
    for name in _KEPT:
        if getattr(asked, name) not in (None, _NOTHING):
            raise ApiError(
                UNSUPPORTED_PARAMETER,
                f"{name} is not supported, this server keeps no responses: send the whole input",
                name,
            )
    if asked.background:
        raise unsupported("background", " with true")
    if asked.moderation != _NOTHING:
        raise unsupported("moderation")
    if asked.top_logprobs or _LOGPROBS in (asked.include or ()):
        name = "top_logprobs" if asked.top_logprobs else "include"
        raise ApiError(
            UNSUPPORTED_PARAMETER,
            f"{name}: log-probabilities are not supported in /v1/responses: use "
            "/v1/chat/completions",
            name,
        )


def _tell(asked: ResponsesBody, told: ToldFields) -> None:
    for name in _TOLD:
        told.tell(name, getattr(asked, name))
    text, reasoning = asked.text, asked.reasoning
    for name, is_told in (
        ("store", asked.store),
        ("truncation", asked.truncation == "auto"),
        ("max_tool_calls", asked.max_tool_calls is not None),
        ("include", asked.include),
        ("service_tier", asked.service_tier == "scale"),
        ("stream_options.include_obfuscation", asked.stream_options is not None
         and asked.stream_options.include_obfuscation),
        ("text.verbosity", text is not None and text.verbosity != _NOTHING),
        ("reasoning.summary", reasoning is not None
         and (reasoning.summary != _NOTHING or reasoning.generate_summary != _NOTHING)),
    ):  # fmt: skip
        if is_told:
            told.tell(name)


def _messages(asked: ResponsesBody, told: ToldFields) -> Iterator[Message]:
    if asked.instructions:
        yield {"role": "system", "content": asked.instructions}
    if isinstance(asked.input, str):
        yield {"role": "user", "content": asked.input}
        return
    turn: _Turn | None = None
    for index, item in enumerate(asked.input):
        place = f"input[{index}]"
        for name in _TOLD_IN_ITEM:
            told.tell(f"input[].{name}", getattr(item, name))
        if item.summary not in (_NOTHING, _EMPTY):
            told.tell("input[].summary")
        if item.type in ("reasoning", "function_call") or item.role == "assistant":
            turn = turn or _Turn()
            turn.add(place, item)
            continue
        if turn is not None:
            yield turn.message()
            turn = None
        yield _message(place, item)
    if turn is not None:
        yield turn.message()


class _Turn:
    """What the assistant said in its turn. Thousands of items are joined once."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._reasoned: list[str] = []
        self._calls: list[ToolCall] = []

    def add(self, place: str, item: _Item) -> None:
        """More of it. Raises ApiError."""
        if item.type == "reasoning":
            text = _text(f"{place}.content", item.content or "")
            if text:
                self._reasoned.append(text)
        elif item.type == "function_call":
            call_id = _needed(place, "call_id", item.call_id)
            name = _needed(place, "name", item.name)
            function = CalledFunction(name=name, arguments=item.arguments or "")
            self._calls.append(ToolCall(id=call_id, function=function))
        else:
            text = _text(f"{place}.content", _needed(place, "content", item.content))
            if text or self._texts:
                self._texts.append(text)

    def message(self) -> Message:
        """All of it as one."""
        made: Message = {"role": "assistant", "content": "\n".join(self._texts)}
        if self._reasoned:
            made["reasoning_content"] = "\n".join(self._reasoned)
        if self._calls:
            made["tool_calls"] = self._calls
        return made


def _message(place: str, item: _Item) -> Message:
    if item.type == "function_call_output":
        call_id = _needed(place, "call_id", item.call_id)
        output = _text(f"{place}.output", _needed(place, "output", item.output))
        return {"role": "tool", "content": output, "tool_call_id": call_id}
    if item.type != "message":
        param = f"{place}.type"
        raise ApiError(
            UNSUPPORTED_PARAMETER,
            f"{param}: items of type {item.type[:40]!r} are not supported: send messages, "
            "reasoning, function calls and their outputs",
            param,
        )
    role = _needed(place, "role", item.role)
    text = _text(f"{place}.content", _needed(place, "content", item.content))
    return {"role": "system" if role == "developer" else role, "content": text}


def _needed(place: str, name: str, value: Any) -> Any:
    if value is None:
        raise invalid(f"{place}.{name}", f"{place}.{name} is required")
    return value


def _text(place: str, content: str | Sequence[_Part]) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for index, part in enumerate(content):
        if part.type not in ("input_text", "output_text", "text", "reasoning_text"):
            param = f"{place}[{index}].type"
            raise ApiError(
                UNSUPPORTED_PARAMETER,
                f"{param}: content of type {part.type[:40]!r} is not supported, models read text "
                "only: send text parts",
                param,
            )
        texts.append(_needed(f"{place}[{index}]", "text", part.text))
    return "\n".join(texts)


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
    name = _needed(f"tools[{index}]", "name", tool.name)
    function = FunctionSpec(
        name=name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return Tool(type="function", function=function)


def _choice(choice: Any) -> ToolChoice | None:
    if not isinstance(choice, _Choice):
        return choice  # type: ignore[no-any-return]
    if choice.type == "function":
        name = _needed("tool_choice", "name", choice.name)
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
    name = _needed("text.format", "name", form.name)
    return JsonSchemaFormat(json_schema=JsonSchema(name=name, schema=form.schema))


def _shown(asked: ResponsesBody, effort: str | None) -> dict[str, Any]:
    """What a response repeats of its request."""
    form = asked.text.format if asked.text is not None else None
    return {
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": small_field("metadata", asked.metadata, _metadata_decoder) or {},
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
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
        "top_p": 1.0 if asked.top_p is None else asked.top_p,
        "user": asked.user,
    }


def _plain(value: Any) -> Any:
    """A struct as the caller wrote it, without what was left out."""
    if isinstance(value, msgspec.Struct):
        fields = msgspec.structs.asdict(value)
        return {name: found for name, found in fields.items() if found is not None}
    return value
