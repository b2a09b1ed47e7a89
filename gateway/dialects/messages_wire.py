"""What callers may send to /v1/messages, Anthropic's API, and what is made of it. Part of stage 2.

Comes in: a body. Goes out: a `WireRequest` as chat completions make one, or an ApiError that names
the field. What differs from chats:

    system         a field of its own, becomes the first message
    content        blocks: text, thinking, tool_use of the assistant's; text, tool_result of the
                   user's. Results become messages of the role `tool`, before the user's text
    max_tokens     is required; more than the context has room for is no error
    last message   of the assistant's is continued

Reasoning that this server wrote is told by its signature (gateway/sealing/seals.py), which says
that the text is as this tenant was given it; that of other providers is left out and told. Answers
are written by messages_answer.py.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias, get_args

import msgspec

from engine.protocol import SamplingParams
from gateway.api.bodies import invalid, unsupported
from gateway.api.reasoning_types import Effort, Reasoning, ThinkingBody, reasoning_of
from gateway.api.told_fields import Shape, ToldFields, decode_telling
from gateway.api.tool_types import (
    MAX_TOOLS,
    CalledFunction,
    Description,
    FunctionName,
    FunctionSpec,
    JsonSchema,
    JsonSchemaFormat,
    NamedChoice,
    NamedFunction,
    ResponseFormat,
    TextFormat,
    Tool,
    ToolCall,
    ToolChoice,
)
from gateway.api.wire import Message, WireRequest
from gateway.api.wire_body import MAX_MESSAGES, MAX_PARTS, MAX_STOP_CHARS
from gateway.errors import UNSUPPORTED_PARAMETER, ApiError
from gateway.sealing.seals import SIGNED, SealBroken, TenantSeal

MAX_STOP_SEQUENCES = 16
THREAD = "thread"
_NOTHING = msgspec.Raw(b"null")
_SMALLEST_TOP_P = 1e-9
Check: TypeAlias = Callable[[str, str], None]
"""Of a signature and its text, for the model of the request. Raises SealBroken."""


class _Base(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    cache_control: msgspec.Raw = _NOTHING


class _Text(_Base, tag="text"):
    text: str
    citations: msgspec.Raw = _NOTHING


class _Thinking(_Base, tag="thinking"):
    thinking: str
    signature: str = ""


class _RedactedThinking(_Base, tag="redacted_thinking"):
    data: str


class _ToolUse(_Base, tag="tool_use"):
    id: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    name: str
    input: dict[str, Any]
    caller: msgspec.Raw = _NOTHING
    toolset_name: msgspec.Raw = _NOTHING


class _ToolResult(_Base, tag="tool_result"):
    tool_use_id: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    content: str | Annotated[list["_Block"], msgspec.Meta(max_length=MAX_PARTS)] = ""
    is_error: bool | None = None
    toolset_name: msgspec.Raw = _NOTHING


class _Image(_Base, tag="image"):
    source: msgspec.Raw = _NOTHING


class _Document(_Base, tag="document"):
    source: msgspec.Raw = _NOTHING
    title: msgspec.Raw = _NOTHING
    context: msgspec.Raw = _NOTHING
    citations: msgspec.Raw = _NOTHING


_Block: TypeAlias = (
    _Text | _Thinking | _RedactedThinking | _ToolUse | _ToolResult | _Image | _Document
)
_Blocks: TypeAlias = Annotated[list[_Block], msgspec.Meta(max_length=MAX_PARTS)]


class _MessageBody(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    role: Literal["user", "assistant", "system"]
    content: str | _Blocks


class _ToolBody(_Base):
    name: FunctionName
    input_schema: dict[str, Any] | None = None
    description: Description | None = None
    type: str | None = None
    strict: bool | None = None
    input_examples: msgspec.Raw = _NOTHING
    defer_loading: msgspec.Raw = _NOTHING
    eager_input_streaming: msgspec.Raw = _NOTHING
    allowed_callers: msgspec.Raw = _NOTHING


class _Choice(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Metadata(msgspec.Struct):
    user_id: str | None = None


class _FormatBody(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: Any


class _OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    effort: Effort | None = None
    format: _FormatBody | None = None


class MessagesBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/messages."""

    model: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    messages: Annotated[list[_MessageBody], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    system: str | _Blocks | None = None
    stop_sequences: (
        Annotated[
            list[Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_STOP_CHARS)]],
            msgspec.Meta(max_length=MAX_STOP_SEQUENCES),
        ]
        | None
    ) = None
    stream: bool | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    tools: Annotated[list[_ToolBody], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: _Choice | None = None
    thinking: ThinkingBody | None = None
    output_config: _OutputConfig | None = None
    output_format: _FormatBody | None = None
    metadata: _Metadata | None = None
    mcp_servers: list[Any] | None = None
    service_tier: msgspec.Raw = _NOTHING
    context_management: msgspec.Raw = _NOTHING
    container: msgspec.Raw = _NOTHING
    inference_geo: msgspec.Raw = _NOTHING
    speed: msgspec.Raw = _NOTHING
    cache_control: msgspec.Raw = _NOTHING
    diagnostics: msgspec.Raw = _NOTHING
    user_profile_id: msgspec.Raw = _NOTHING
    workspace_id: msgspec.Raw = _NOTHING
    thread: msgspec.Raw = _NOTHING


_TOLD = (
    "diagnostics",
    "user_profile_id",
    "workspace_id",
    "service_tier",
    "context_management",
    "container",
    "inference_geo",
    "speed",
    "cache_control",
)
_TOLD_IN_TOOL = (
    "cache_control",
    "input_examples",
    "defer_loading",
    "eager_input_streaming",
    "allowed_callers",
)
_decoder = msgspec.json.Decoder(MessagesBody)
# A field of one sort of block is known in all: what stands in the wrong one is refused.
_BLOCK_FIELDS = {"type", *(name for block in get_args(_Block) for name in block.__struct_fields__)}
_BLOCK = Shape(_BLOCK_FIELDS, {"content": Shape(_BLOCK_FIELDS)})
_SHAPE = Shape(
    MessagesBody.__struct_fields__,
    {
        "messages": Shape(_MessageBody.__struct_fields__, {"content": _BLOCK}),
        "system": Shape(_BLOCK_FIELDS),
    },
)
_encode = msgspec.json.Encoder().encode


def decode(
    body: bytes, tells_unknown: bool, seal: TenantSeal, needs_length: bool = True
) -> WireRequest:
    """Raises ApiError. `needs_length`: False where tokens are only counted."""
    asked, told = decode_telling(_decoder, body, _SHAPE, tells_unknown)
    if asked.max_tokens is None and needs_length:
        raise invalid("max_tokens", "max_tokens is required")
    if asked.mcp_servers:
        raise unsupported("mcp_servers")
    if asked.thread != _NOTHING:
        message = "thread is not supported, no conversation is kept: send all messages without it"
        raise ApiError(UNSUPPORTED_PARAMETER, message, THREAD)
    for name in _TOLD:
        told.tell(name, getattr(asked, name))
    if asked.thinking is not None and asked.thinking.display is not None:
        told.tell("thinking.display")
    check = partial(seal.check, model=asked.model)
    messages = list(_messages(asked, check, told))
    keeps_open = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    if keeps_open and not messages[-1]["content"]:
        raise invalid("messages", "the last message of the assistant has no text to continue")
    choice = asked.tool_choice
    user = asked.metadata.user_id if asked.metadata is not None else None
    top_p = 1.0 if asked.top_p is None else max(asked.top_p, _SMALLEST_TOP_P)
    tools = tuple(_tool(index, tool, told) for index, tool in enumerate(asked.tools or ()))
    return WireRequest(
        kind="chat",
        model=asked.model,
        messages=tuple(messages),
        max_tokens=asked.max_tokens,
        caps_max_tokens=True,
        user=(user, "") if user else (),
        sampling=SamplingParams(
            temperature=1.0 if asked.temperature is None else asked.temperature,
            top_p=top_p,
            top_k=asked.top_k or 0,
        ),
        stop=tuple(asked.stop_sequences or ()),
        stream=bool(asked.stream),
        continue_final_message=keeps_open,
        add_generation_prompt=not keeps_open,
        tools=tools,
        tool_choice=_choice(choice, bool(tools)),
        parallel_tool_calls=not (choice is not None and choice.disable_parallel_tool_use),
        response_format=_format(asked),
        reasoning=_reasoning(asked),
        seal=seal,
        num_bytes=len(body),
        ignored=told.names,
    )


def _messages(asked: MessagesBody, check: Check, told: ToldFields) -> Iterator[Message]:
    if asked.system:
        yield {"role": "system", "content": _texts("system", asked.system, told)}
    last: Message | None = None
    texts: list[str] = []
    for index, message in enumerate(asked.messages):
        for made in _of_message(f"messages[{index}].content", message, check, told):
            # Turns of one side that follow each other are one. Thousands are joined once.
            if last is not None and last["role"] == made["role"] == "user":
                texts.append(made["content"])
                continue
            if last is not None:
                yield _turn(last, texts)
            last, texts = made, [made["content"]]
    if last is None:
        raise invalid("messages", "messages must have content")
    yield _turn(last, texts)


def _turn(message: Message, texts: Sequence[str]) -> Message:
    return message if len(texts) == 1 else {**message, "content": "\n\n".join(texts)}


def _of_message(
    place: str, message: _MessageBody, check: Check, told: ToldFields
) -> Iterator[Message]:
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
    elif message.role == "assistant":
        yield _assistant(place, message.content, check, told)
    else:
        texts: list[str] = []
        for index, block in enumerate(message.content):
            told.tell("messages[].content[].cache_control", block.cache_control)
            if isinstance(block, _ToolResult):
                if block.is_error:
                    told.tell("messages[].content[].is_error")
                told.tell("messages[].content[].toolset_name", block.toolset_name)
                text = _texts(f"{place}[{index}].content", block.content, told)
                yield {"role": "tool", "content": text, "tool_call_id": block.tool_use_id}
            else:
                texts.append(_text(f"{place}[{index}]", block, told))
        if texts or not message.content:
            yield {"role": message.role, "content": "\n".join(texts)}


def _check_signed(param: str, block: _Thinking, check: Check) -> None:
    """Raises ApiError."""
    try:
        check(block.signature, block.thinking)
    except SealBroken as error:
        raise invalid(
            param,
            f"{param} does not belong to this thinking and model: send the block as it was "
            "received, or leave it out",
        ) from error


def _assistant(place: str, blocks: Sequence[_Block], check: Check, told: ToldFields) -> Message:
    texts: list[str] = []
    reasoned: list[str] = []
    calls: list[ToolCall] = []
    for index, block in enumerate(blocks):
        told.tell("messages[].content[].cache_control", block.cache_control)
        if isinstance(block, _ToolUse):
            told.tell("messages[].content[].caller", block.caller)
            told.tell("messages[].content[].toolset_name", block.toolset_name)
            arguments = _encode(block.input).decode()
            function = CalledFunction(name=block.name, arguments=arguments)
            calls.append(ToolCall(id=block.id, function=function))
        elif isinstance(block, _Thinking):
            if block.signature.startswith(SIGNED):
                _check_signed(f"{place}[{index}].signature", block, check)
                reasoned.append(block.thinking)
            else:
                told.tell("messages[].content[].thinking")
        elif isinstance(block, _RedactedThinking):
            told.tell("messages[].content[].redacted_thinking")
        else:
            texts.append(_text(f"{place}[{index}]", block, told))
    made: Message = {"role": "assistant", "content": "\n".join(texts)}
    if reasoned:
        made["reasoning_content"] = "\n".join(reasoned)
    if calls:
        made["tool_calls"] = calls
    return made


def _texts(place: str, content: str | Sequence[_Block], told: ToldFields) -> str:
    if isinstance(content, str):
        return content
    for block in content:
        told.tell(f"{place.partition('[')[0]}[].cache_control", block.cache_control)
    return "\n".join(_text(f"{place}[{n}]", block, told) for n, block in enumerate(content))


def _text(place: str, block: _Block, told: ToldFields) -> str:
    if not isinstance(block, _Text):
        kind = type(block).__struct_config__.tag
        raise ApiError(
            UNSUPPORTED_PARAMETER,
            f"{place}.type: a block of type {kind!r} is not supported here, models read text only: "
            "send text blocks",
            f"{place}.type",
        )
    told.tell("messages[].content[].citations", block.citations)
    return block.text


def _tool(index: int, tool: _ToolBody, told: ToldFields) -> Tool:
    for name in _TOLD_IN_TOOL:
        told.tell(f"tools[].{name}", getattr(tool, name))
    if tool.type not in (None, "custom"):
        raise ApiError(
            UNSUPPORTED_PARAMETER,
            f"tools[{index}].type: tools of type {tool.type[:40]!r} run on Anthropic's servers and "
            "are not supported: offer a tool with input_schema",
            f"tools[{index}].type",
        )
    if tool.input_schema is None:
        param = f"tools[{index}].input_schema"
        raise invalid(param, f"{param} is required")
    function = FunctionSpec(
        name=tool.name,
        description=tool.description,
        parameters=tool.input_schema,
        strict=tool.strict,
    )
    return Tool(type="function", function=function)


def _choice(choice: _Choice | None, has_tools: bool) -> ToolChoice | None:
    if choice is None or not has_tools:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise invalid("tool_choice.name", "tool_choice.name is required with type tool")
        return NamedChoice(function=NamedFunction(name=choice.name))
    return "required" if choice.type == "any" else choice.type


def _format(asked: MessagesBody) -> ResponseFormat:
    config = asked.output_config.format if asked.output_config is not None else None
    found = config or asked.output_format
    if found is None:
        return TextFormat()
    return JsonSchemaFormat(json_schema=JsonSchema(name="answer", schema=found.schema))


def _reasoning(asked: MessagesBody) -> Reasoning | None:
    """An effort bounds thinking where there is any, and does not switch it on."""
    effort = asked.output_config.effort if asked.output_config is not None else None
    if asked.thinking is not None and asked.thinking.type == "disabled":
        effort = None
    return reasoning_of(effort, asked.thinking)
