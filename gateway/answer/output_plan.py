"""From what a request asks for and what its model can: constraint and parser. Part of stage 2.

Comes in: a `StructuredRequest`, the model's `OutputFormats`, the end of the rendered prompt. Goes
out: an `OutputPlan`: what binds the worker (`constraint`), which control tokens have to reach the
parser as text (`spelled_tokens`), and a parser for every choice. Nothing here waits or fails later:
what a model's format cannot do is refused now.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from engine.protocol import Constraint
from gateway.answer import reasoning
from gateway.answer.output_parser import IdentityParser, OutputParser
from gateway.answer.reasoning import ReasoningMarks, ReasoningParser, ReasoningState
from gateway.answer.tools import formats
from gateway.answer.tools.envelope import (
    Lark,
    NoEnvelope,
    Offer,
    forced_calls,
    reasoned,
    triggered_calls,
)
from gateway.answer.tools.formats import FORMATS, FormatName, ToolFormat
from gateway.errors import INVALID_REQUEST, UNSUPPORTED_PARAMETER, ApiError
from gateway.prepare.structured_request import StructuredRequest

_SINGLE_CALL = "single tool-calls at once"
_JSON_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class OutputFormats:
    """What one model revision's answers look like. Made once, with its codec.

    `special_ids`: its control tokens, those that a detokenizer leaves out, by their text.
    `is_single`: its template takes no more than one call in a message.
    """

    tools: ToolFormat | None = None
    reasoning: ReasoningMarks | None = None
    special_ids: Mapping[str, int] = field(default_factory=dict)
    is_single: bool = False


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """`names`: functions whose calls are told as such. See the module's text for the others."""

    constraint: Constraint | None = None
    spelled_tokens: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    max_calls: int | None = None
    tools: ToolFormat | None = None
    reasoning: ReasoningMarks | None = None
    state: ReasoningState = "done"

    @property
    def is_plain(self) -> bool:
        """The answer is text and nothing else: parsers change nothing."""
        return not self.names and self.state == "done"

    def new_parser(self) -> OutputParser:
        """For one choice."""
        inner: OutputParser = IdentityParser()
        if self.tools is not None:
            inner = self.tools.parser(self.names, self.tools.new_id, self.max_calls)
        if self.reasoning is None:
            return inner
        return ReasoningParser(inner, self.reasoning, self.state)


PLAIN = OutputPlan()


def detect(
    template: str,
    special_ids: Mapping[str, int],
    tool_format: FormatName | None = None,
) -> OutputFormats:
    """From a chat template's source and the tokenizer's control tokens (with `special` set).

    `tool_format`: the catalog's word, which goes before what the template looks like.
    """
    tools = formats.detect(template) if tool_format is None else FORMATS[tool_format]
    return OutputFormats(
        tools=tools,
        reasoning=reasoning.detect(template),
        special_ids=dict(special_ids),
        is_single=_SINGLE_CALL in template,
    )


def plan(asked: StructuredRequest, model: OutputFormats, prompt_tail: str) -> OutputPlan:
    """`prompt_tail`: the end of the rendered prompt, which says whether reasoning has begun.

    Raises ApiError: a model without a known format of calls, a function its format cannot write.
    """
    state = reasoning.state_of(model.reasoning, prompt_tail)
    if asked.calls != "none" and model.tools is None:
        text = "this model's chat template has no tool calls that are known here"
        raise ApiError(UNSUPPORTED_PARAMETER, text, "tools")
    offer = Offer(asked.functions, asked.is_single or model.is_single)
    marks: Sequence[str] = ()
    if state != "done" and model.reasoning is not None:
        marks = (model.reasoning.open, model.reasoning.close)
    names: frozenset[str] = frozenset()
    if asked.calls != "none" and model.tools is not None:
        names = frozenset(name for name, _ in asked.functions)
        marks = (*marks, *model.tools.marks)
    return OutputPlan(
        constraint=_constraint(asked, model, offer, state),
        spelled_tokens=frozenset(marks).intersection(model.special_ids),
        names=names,
        max_calls=1 if offer.is_single else None,
        tools=model.tools if names else None,
        reasoning=model.reasoning if state != "done" else None,
        state=state,
    )


def _constraint(
    asked: StructuredRequest, model: OutputFormats, offer: Offer, state: ReasoningState
) -> Constraint | None:
    if asked.is_plain:
        return None
    if asked.calls == "none" and state == "done":
        return _answer_constraint(asked)
    if asked.grammar:
        text = "response_format: a grammar cannot be had from a model that reasons first"
        raise ApiError(UNSUPPORTED_PARAMETER, text, "response_format")
    lark = Lark(model.special_ids)
    try:
        body = _body(lark, asked, model, offer)
    except NoEnvelope as error:
        raise ApiError(INVALID_REQUEST, f"tools: {error}", "tools") from error
    if body is None:
        return None
    start = reasoned(lark, body, model.reasoning, state)
    return Constraint("grammar", lark.grammar(start))


def _body(lark: Lark, asked: StructuredRequest, model: OutputFormats, offer: Offer) -> str | None:
    """What follows the reasoning; None: anything."""
    if asked.pattern:
        return lark.regex(asked.pattern)
    if asked.calls == "none" or model.tools is None:
        return lark.json(asked.schema)
    if asked.calls == "required":
        return forced_calls(lark, model.tools, offer)
    if asked.schema is not None:
        return f"({forced_calls(lark, model.tools, offer)} | {lark.json(asked.schema)})"
    return triggered_calls(lark, model.tools, offer)


def _answer_constraint(asked: StructuredRequest) -> Constraint:
    """Where nothing comes before the answer and it can be no call."""
    if asked.grammar:
        return Constraint("grammar", asked.grammar)
    if asked.pattern:
        return Constraint("regex", asked.pattern)
    if asked.schema == _JSON_OBJECT:
        return Constraint("json_object")
    return Constraint("json_schema", msgspec.json.encode(asked.schema).decode())
