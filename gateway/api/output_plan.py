"""What tools and `response_format` come to, and how the answer is read. Part of stage 2.

Comes in: the fields as wire.py decoded them; the model's `OutputFormats` and the end of the
rendered prompt. Goes out: an `OutputPlan`: what binds the worker (`constraint`), which control
tokens have to reach the parser as text (`spelled_tokens`), and a parser for every choice; or an
ApiError that names the field. Nothing here waits or fails later: what a model's format cannot do is
refused now.

`understand` knows neither model nor format. It looks at all schemas, with bounds on the request as
a whole, so what comes later meets none that is absurd. It takes some milliseconds for schemas at
the bounds: call it where that holds nobody up. `plan` then joins what was understood to a model.

Regular expressions and grammars are formats of our own beside OpenAI's; with tools they contradict.
With tools and a `response_format` together the answer is either calls or of that form. Where a call
is required, `response_format` has nothing left to say.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec

from engine.protocol import Constraint
from gateway.api.schema_form import arguments_schema, enforced
from gateway.api.schema_keywords import translated
from gateway.api.schema_limits import (
    MAX_PATTERN_CHARS,
    MAX_REQUEST_BYTES,
    MAX_SUBSCHEMAS,
    SchemaRefused,
    check,
    pattern_size,
)
from gateway.api.tool_types import (
    AllowedChoice,
    GrammarFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedChoice,
    RegexFormat,
    ResponseFormat,
    TextFormat,
    Tool,
    ToolChoice,
)
from gateway.api.tools import formats
from gateway.api.tools.envelope import (
    Lark,
    NoEnvelope,
    Offer,
    forced_calls,
    reasoned,
    triggered_calls,
)
from gateway.api.tools.formats import FORMATS, FormatName, ToolFormat
from gateway.api.tools.output_parser import (
    IdentityParser,
    OutputParser,
    ReasoningMarks,
    ReasoningParser,
    ReasoningState,
    reasoning_marks,
    state_of,
)
from gateway.errors import INVALID_CONSTRAINT, INVALID_REQUEST, UNSUPPORTED_PARAMETER, ApiError

_SINGLE_CALL = "single tool-calls at once"
_JSON_OBJECT = {"type": "object"}
Calls: TypeAlias = Literal["none", "auto", "required"]
_FormT = TypeVar("_FormT")

_encode = msgspec.json.Encoder().encode


class StructuredRequest(msgspec.Struct, frozen=True):
    """What the answer may be.

    `shown`: the tools as templates take them, all of them, also those that may not be called.
    `functions`: name and arguments' schema of those that may; none where `calls` is "none".
    `schema`: what an answer that is no call has to obey; None: any text. Any JSON object is
    `{"type": "object"}`. `pattern`, `grammar`: the same for texts that are no JSON; "" for none.
    """

    shown: Sequence[Mapping[str, Any]] = ()
    functions: Sequence[tuple[str, Mapping[str, Any]]] = ()
    calls: Calls = "none"
    is_single: bool = False
    schema: Any = None
    pattern: str = ""
    grammar: str = ""

    @property
    def is_plain(self) -> bool:
        """Nothing is asked for: the answer is text."""
        return self.calls == "none" and self.schema is None and not self.pattern + self.grammar


def understand(
    tools: Sequence[Tool] = (),
    tool_choice: ToolChoice | None = None,
    parallel_tool_calls: bool = True,
    response_format: ResponseFormat | None = None,
) -> StructuredRequest:
    """Raises ApiError."""
    if not tools and tool_choice is None and isinstance(response_format, TextFormat | None):
        return StructuredRequest()
    budget = _Budget()
    _check_names(tools)
    calls, allowed = _choice(tools, tool_choice)
    for index, tool in enumerate(tools):
        if tool.function.parameters is not None:
            budget.measure(tool.function.parameters, f"tools[{index}].function.parameters")
    functions = [
        (tool.function.name, _parameters(index, tool, budget)) for index, tool in enumerate(tools)
    ]
    pattern, grammar = _answer_text(response_format, calls)
    return StructuredRequest(
        shown=[_shown(tool) for tool in tools],
        functions=[(name, schema) for name, schema in functions if name in allowed],
        calls=calls,
        is_single=not parallel_tool_calls or isinstance(tool_choice, NamedChoice),
        schema=_answer_schema(response_format, budget),
        pattern=pattern,
        grammar=grammar,
    )


class _Budget:
    """How many schemas this request may still hold, and of how many bytes."""

    def __init__(self) -> None:
        self._left = MAX_SUBSCHEMAS
        self._bytes_left = MAX_REQUEST_BYTES

    def measure(self, schema: Any, param: str) -> None:
        """Raises ApiError where all measured so far are too long together: before any is read."""
        self._bytes_left -= _size_bytes(schema, param)
        if self._bytes_left < 0:
            limit = f"{MAX_REQUEST_BYTES} bytes"
            raise _refusal(param, f"the request's schemas have more than {limit} in total")

    def take(self, schema: Any, param: str, form: Callable[[Any], _FormT]) -> _FormT:
        """As it is enforced. Raises ApiError where the schema is refused."""
        try:
            plain = translated(schema)
            self._left -= check(plain, _size_bytes(schema, param), self._left)
            return form(plain)
        except SchemaRefused as error:
            raise _refusal(param, str(error)) from error
        except RecursionError as error:
            raise _refusal(param, "the schema is nested too deeply") from error


def _size_bytes(schema: Any, param: str) -> int:
    try:
        return len(_encode(schema))
    except (RecursionError, msgspec.MsgspecError) as error:
        raise _refusal(param, "the schema is nested too deeply") from error


def _refusal(param: str, why: str) -> ApiError:
    return ApiError(INVALID_CONSTRAINT, f"invalid schema for {param}: {why}", param)


def _check_names(tools: Sequence[Tool]) -> None:
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.function.name in seen:
            param = f"tools[{index}].function.name"
            text = f"{param}: duplicate function name {tool.function.name!r}"
            raise ApiError(INVALID_REQUEST, text, param)
        seen.add(tool.function.name)


def _choice(tools: Sequence[Tool], choice: ToolChoice | None) -> tuple[Calls, frozenset[str]]:
    """Whether to call, and what may be called."""
    offered = frozenset(tool.function.name for tool in tools)
    if not offered and choice not in (None, "none"):
        raise ApiError(
            INVALID_REQUEST, "tool_choice is only allowed when tools are given", "tool_choice"
        )
    if choice == "none" or not offered:
        return "none", frozenset()
    if choice is None or choice == "auto":
        return "auto", offered
    if choice == "required":
        return "required", offered
    if isinstance(choice, AllowedChoice):
        named = frozenset(item.function.name for item in choice.allowed_tools.tools)
        calls: Calls = choice.allowed_tools.mode
        param = "tool_choice.allowed_tools.tools"
    else:
        named = frozenset({choice.function.name})
        calls = "required"
        param = "tool_choice.function.name"
    unknown = sorted(named - offered)
    if unknown:
        raise ApiError(INVALID_REQUEST, f"{param}: {unknown[0]!r} is not in tools", param)
    return calls, named


def _parameters(index: int, tool: Tool, budget: _Budget) -> dict[str, Any]:
    parameters = tool.function.parameters
    param = f"tools[{index}].function.parameters"
    if parameters is not None:
        if parameters.get("type", "object") != "object":
            raise ApiError(INVALID_REQUEST, f"{param}: type must be 'object'", param)
        return budget.take(parameters, param, arguments_schema)
    return arguments_schema(None)


def _answer_schema(response_format: ResponseFormat | None, budget: _Budget) -> Any:
    if isinstance(response_format, JsonObjectFormat):
        return {"type": "object"}
    if not isinstance(response_format, JsonSchemaFormat):
        return None
    schema = response_format.json_schema.schema
    if schema is None:
        return True
    return budget.take(schema, "response_format.json_schema.schema", enforced)


def _answer_text(response_format: ResponseFormat | None, calls: Calls) -> tuple[str, str]:
    """(pattern, grammar) an answer has to obey."""
    if not isinstance(response_format, RegexFormat | GrammarFormat):
        return "", ""
    if calls != "none":
        text = "response_format of this type is not allowed with tools: remove one of them"
        raise ApiError(INVALID_REQUEST, text, "response_format")
    if isinstance(response_format, GrammarFormat):
        return "", response_format.grammar
    if pattern_size(response_format.pattern) > MAX_PATTERN_CHARS:
        param = "response_format.pattern"
        raise ApiError(
            INVALID_CONSTRAINT, f"{param} is too large once its repetitions are expanded", param
        )
    return response_format.pattern, ""


def _shown(tool: Tool) -> dict[str, Any]:
    """As the caller wrote it: templates print it, or pick fields from it."""
    function: dict[str, Any] = {"name": tool.function.name}
    if tool.function.description is not None:
        function["description"] = tool.function.description
    # Many templates read `parameters.properties` without asking whether there are any.
    function["parameters"] = tool.function.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


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


class OutputPlan(msgspec.Struct, frozen=True):
    """`names`: functions whose calls are reported as such; `schemas`: of their arguments, where the
    format needs them. See the module's text for the others."""

    constraint: Constraint | None = None
    spelled_tokens: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    max_calls: int | None = None
    schemas: Mapping[str, Any] = msgspec.field(default_factory=dict)
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
            about = self.names, self.tools.new_id, self.max_calls, self.schemas
            inner = self.tools.parser(*about)
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
        reasoning=reasoning_marks(template),
        special_ids=dict(special_ids),
        is_single=_SINGLE_CALL in template,
    )


def plan(asked: StructuredRequest, model: OutputFormats, prompt_tail: str) -> OutputPlan:
    """`prompt_tail`: the end of the rendered prompt, which says whether reasoning has begun.

    Raises ApiError: a model without a known format of calls, a function its format cannot write.
    """
    state = state_of(model.reasoning, prompt_tail)
    if asked.calls != "none" and model.tools is None:
        text = "this model does not support tools: its chat template has no known tool call format"
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
        schemas=dict(asked.functions) if model.tools and model.tools.needs_schemas else {},
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
        text = "response_format: grammars are not supported with a reasoning model"
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
