"""A chat becomes a prompt, and a plan for reading its answer. Part of stage 2; runs in the pool.

Comes in: a chat as wire.py decoded it and the model's codec. Goes out: token ids, what binds the
worker, and what makes the parsers of the answer's text. What is checked on the way costs
milliseconds at its bounds, so none of it runs on the event loop.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.answer.output_plan import PLAIN, OutputPlan, plan
from gateway.prepare.structured_request import understand
from gateway.prepare.tokenization import TextCodec
from gateway.prepare.tool_messages import calls_for_template, id_for_template
from gateway.prepare.wire import Message, WireRequest, invalid


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the worker is given, and how its answer is read."""

    ids: list[int]
    plan: OutputPlan = PLAIN


def chat_prompt(codec: TextCodec, asked: WireRequest, check_text: Callable[[str], None]) -> Prompt:
    """`check_text` sees the rendered text before it is encoded and raises where it is too long.

    Raises ApiError, TemplateRefused, ValueError.
    """
    structured = understand(
        asked.tools, asked.tool_choice, asked.parallel_tool_calls, asked.response_format
    )
    encoded = codec.encode_chat(
        [for_template(message, codec) for message in asked.messages],
        tools=structured.shown,
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message,
        check_text=check_text,
    )
    planned = plan(structured, codec.formats, encoded.tail)
    if planned.constraint is not None and (asked.min_tokens or asked.ignore_eos):
        param = "min_tokens" if asked.min_tokens else "ignore_eos"
        raise invalid(param, f"{param} cannot be had with tools or response_format: a form ends")
    return Prompt(encoded.ids, planned)


def for_template(message: Message, codec: TextCodec) -> dict[str, Any]:
    """The same with its calls, or the call it answers, as the model's template knows them."""
    out = dict(message)
    calls: Sequence[Any] = message.get("tool_calls", ())
    if calls:
        out["tool_calls"] = calls_for_template(calls, codec.formats.tools, codec.wants_text)
    if "tool_call_id" in message:
        out["tool_call_id"] = id_for_template(message["tool_call_id"], codec.formats.tools)
    return out
