"""Items of /v1/responses: what a model reads of them, and what is kept of them. Pure.

An item is what a caller sends and an answer holds: a message, reasoning, a call of a function or
its output. Comes in: items, of a body or of stored responses. Goes out: messages for the chat
template, in which reasoning, text and calls of the assistant that follow one another are one:

    message                 of any role; text parts
    reasoning               its `content`, as an earlier answer of this server had it, or the text
                            that it sealed as `encrypted_content` (`opened`)
    function_call           a call; what `function_call_output` answers
    item_reference          of a stored item: gateway/state/item_references.py; others are refused

or the items as they are stored and shown, each with an id and its content as a list of parts.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from gateway.api.bodies import invalid
from gateway.api.told_fields import ToldFields
from gateway.api.tool_types import CalledFunction, ToolCall
from gateway.api.wire import Message
from gateway.api.wire_body import MAX_PARTS
from gateway.errors import UNSUPPORTED_PARAMETER, ApiError
from gateway.sealing.seals import SEALED, SealBroken, TenantSeal

MAX_ID_CHARS = 128
_NOTHING = msgspec.Raw(b"null")
_EMPTY = msgspec.Raw(b"[]")
ID_PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
}


class Part(msgspec.Struct, forbid_unknown_fields=True, gc=False):
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


ItemParts: TypeAlias = Annotated[list[Part], msgspec.Meta(max_length=MAX_PARTS)]


class Item(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """An item of the input: a message, unless `type` says otherwise."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | ItemParts | None = None
    call_id: Annotated[str, msgspec.Meta(min_length=1, max_length=256)] | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | ItemParts | None = None
    id: str | None = None
    status: str | None = None
    phase: msgspec.Raw = _NOTHING
    summary: msgspec.Raw = _NOTHING
    encrypted_content: msgspec.Raw = _NOTHING
    caller: msgspec.Raw = _NOTHING
    namespace: msgspec.Raw = _NOTHING
    created_by: msgspec.Raw = _NOTHING


_TOLD_IN_ITEM = ("phase", "encrypted_content", "caller", "namespace")


def opened(item: Item, place: str, model: str, seal: TenantSeal) -> Item:
    """Reasoning that this server sealed, with its text as content; all else as it is. Raises
    ApiError where it does not open."""
    param = f"{place}.encrypted_content"
    sealed = _sealed(item, param)
    if not sealed:
        return item
    try:
        text = seal.open(sealed, model)
    except SealBroken as error:
        raise invalid(
            param,
            f"{param} does not open for this key and model: send the item as it was received, or "
            "leave it out",
        ) from error
    content = [Part("reasoning_text", text)]
    return msgspec.structs.replace(item, content=content, encrypted_content=_NOTHING)


def refuse_sealed(item: Item, place: str) -> None:
    """Of items that are kept for any model, while a seal is one model's: reasoning would be kept
    without its text. Raises ApiError."""
    param = f"{place}.encrypted_content"
    if not item.content and _sealed(item, param):
        message = f"{param} opens in requests to its model only: send it in the input of a response"
        raise invalid(param, message)


def _sealed(item: Item, param: str) -> str:
    """What this server sealed of it, or "". Raises ApiError where it is no text."""
    if item.type != "reasoning":
        return ""
    try:
        sealed = msgspec.json.decode(item.encrypted_content, type=str | None) or ""
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(param, f"{param} must be a string in UTF-8, or left out") from error
    return sealed if sealed.startswith(SEALED) else ""


def messages_of(
    items: Iterable[Item],
    told: ToldFields | None = None,
    num_earlier: int = 0,
    field: str = "input",
) -> Iterator[Message]:
    """As the chat template has them. The first `num_earlier` are of stored responses; the fields
    of the others that have no effect are told. Raises ApiError that names the item in `field`."""
    turn: _Turn | None = None
    for number, item in enumerate(items):
        place = f"{field}[{number - num_earlier}]"
        if told is not None and number >= num_earlier:
            _tell(item, told, field)
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


def kept_items(items: Iterable[Item], unique: str) -> list[dict[str, Any]]:
    """The items as they are stored and shown. Who sent no id, or one that no address can have, gets
    one with `unique` in it."""
    return [_kept(item, f"{unique}i{number}") for number, item in enumerate(items)]


def is_usable_id(item_id: str) -> bool:
    """It can be part of an address: clients shorten paths with `.` and `..`."""
    return (
        0 < len(item_id) <= MAX_ID_CHARS
        and item_id.isprintable()
        and not {".", ".."}.intersection(item_id.split("/"))
    )


def _kept(item: Item, name: str) -> dict[str, Any]:
    own_id = item.id or ""
    if not is_usable_id(own_id):
        own_id = ID_PREFIXES.get(item.type, "item_") + name
    kept: dict[str, Any] = {"id": own_id, "type": item.type, "status": item.status or "completed"}
    if item.type == "message":
        is_own = item.role == "assistant"
        content = _kept_parts(item.content, "output_text" if is_own else "input_text")
        return {**kept, "role": item.role, "content": content}
    if item.type == "reasoning":
        return {**kept, "summary": [], "content": _kept_parts(item.content, "reasoning_text")}
    kept["call_id"] = item.call_id
    if item.type == "function_call":
        return {**kept, "name": item.name, "arguments": item.arguments or ""}
    is_text = isinstance(item.output, str)
    return {**kept, "output": item.output if is_text else _kept_parts(item.output, "input_text")}


def _kept_parts(content: "str | Sequence[Part] | None", kind: str) -> list[dict[str, Any]]:
    texts = [content] if isinstance(content, str) else [part.text for part in content or ()]
    more: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    return [{"type": kind, "text": text, **more} for text in texts]


def _tell(item: Item, told: ToldFields, field: str) -> None:
    for name in _TOLD_IN_ITEM:
        told.tell(f"{field}[].{name}", getattr(item, name))
    if item.summary not in (_NOTHING, _EMPTY):
        told.tell(f"{field}[].summary")


class _Turn:
    """What the assistant said in its turn. Thousands of items are joined once."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._reasoned: list[str] = []
        self._calls: list[ToolCall] = []

    def add(self, place: str, item: Item) -> None:
        """More of it. Raises ApiError."""
        if item.type == "reasoning":
            text = _text(f"{place}.content", item.content or "")
            if text:
                self._reasoned.append(text)
        elif item.type == "function_call":
            call_id = needed(place, "call_id", item.call_id)
            name = needed(place, "name", item.name)
            function = CalledFunction(name=name, arguments=item.arguments or "")
            self._calls.append(ToolCall(id=call_id, function=function))
        else:
            text = _text(f"{place}.content", needed(place, "content", item.content))
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


def _message(place: str, item: Item) -> Message:
    if item.type == "function_call_output":
        call_id = needed(place, "call_id", item.call_id)
        output = _text(f"{place}.output", needed(place, "output", item.output))
        return {"role": "tool", "content": output, "tool_call_id": call_id}
    if item.type != "message":
        param = f"{place}.type"
        raise ApiError(
            UNSUPPORTED_PARAMETER,
            f"{param}: items of type {item.type[:40]!r} are not supported: send messages, "
            "reasoning, function calls and their outputs",
            param,
        )
    role = needed(place, "role", item.role)
    text = _text(f"{place}.content", needed(place, "content", item.content))
    return {"role": "system" if role == "developer" else role, "content": text}


def needed(place: str, name: str, value: Any) -> Any:
    """Raises ApiError where it is missing."""
    if value is None:
        raise invalid(f"{place}.{name}", f"{place}.{name} is required")
    return value


def _text(place: str, content: str | Sequence[Part]) -> str:
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
        texts.append(needed(f"{place}[{index}]", "text", part.text))
    return "\n".join(texts)
