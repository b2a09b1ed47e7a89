"""Events of an answer as the API spells them: deltas of a stream, or one message. Stage 9; pure.

    ContentDelta      {"content": "..."}
    ReasoningDelta    {"reasoning_content": "..."}
    ToolCallStart     {"tool_calls": [{"index": 0, "id": ..., "type": "function",
                                       "function": {"name": ..., "arguments": ""}}]}
    ArgumentsDelta    {"tool_calls": [{"index": 0, "function": {"arguments": "..."}}]}

ToolCallEnd and Padding are nothing to a client.
"""

from collections.abc import Iterable
from typing import Any

from gateway.answer.output_parser import (
    ArgumentsDelta,
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallStart,
)


def delta(event: Event) -> dict[str, Any] | None:
    """The `delta` of one chunk, None where there is none to send."""
    match event:
        case ContentDelta():
            return {"content": event.text}
        case ReasoningDelta():
            return {"reasoning_content": event.text}
        case ToolCallStart():
            function = {"name": event.name, "arguments": ""}
            call = {"id": event.call_id, "type": "function", "function": function}
            return {"tool_calls": [{"index": event.index, **call}]}
        case ArgumentsDelta():
            function = {"arguments": event.text}
            return {"tool_calls": [{"index": event.index, "function": function}]}
    return None


def deltas(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Of all that a client is told."""
    return [found for event in events if (found := delta(event)) is not None]


def message(events: Iterable[Event]) -> dict[str, Any]:
    """The message of a whole answer. `content` is None where there are only calls."""
    content: list[str] = []
    reasoned: list[str] = []
    calls: list[dict[str, Any]] = []
    arguments: list[list[str]] = []
    for event in events:
        match event:
            case ContentDelta():
                content.append(event.text)
            case ReasoningDelta():
                reasoned.append(event.text)
            case ToolCallStart():
                calls.append({"id": event.call_id, "type": "function", "function": event.name})
                arguments.append([])
            case ArgumentsDelta():
                arguments[event.index].append(event.text)
    text = "".join(content)
    out: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if reasoned:
        out["reasoning_content"] = "".join(reasoned)
    if calls:
        out["content"] = text or None
        for call, pieces in zip(calls, arguments, strict=True):
            call["function"] = {"name": call["function"], "arguments": "".join(pieces)}
        out["tool_calls"] = calls
    return out


def finish_reason(reason: str, num_calls: int) -> str:
    """An answer that ended by itself with calls in it asks for their results."""
    return "tool_calls" if reason == "stop" and num_calls else reason
