"""What a request's tools and `response_format` come to, checked. Part of stage 2.

Comes in: the fields as wire.py decoded them. Goes out: a `StructuredRequest` that knows neither
model nor format, or an ApiError that names the field. All schemas are looked at here, with bounds
on the request as a whole, so what comes later meets none that is absurd. Takes some milliseconds
for schemas at the bounds: call it where that holds nobody up.

Regular expressions and grammars are formats of our own beside OpenAI's; with tools they contradict.

With tools and a `response_format` together the answer is either calls or of that form. Where a call
is required, `response_format` has nothing left to say.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec

from gateway.errors import INVALID_CONSTRAINT, INVALID_REQUEST, ApiError
from gateway.prepare.schema_form import arguments_schema, enforced
from gateway.prepare.schema_limits import (
    MAX_PATTERN_CHARS,
    MAX_REQUEST_BYTES,
    MAX_SUBSCHEMAS,
    SchemaRefused,
    check,
    pattern_size,
)
from gateway.prepare.tool_types import (
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

Calls: TypeAlias = Literal["none", "auto", "required"]

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class StructuredRequest:
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


PLAIN = StructuredRequest()
"""Of a request that asks for nothing but text."""


def understand(
    tools: Sequence[Tool] = (),
    tool_choice: ToolChoice | None = None,
    parallel_tool_calls: bool = True,
    response_format: ResponseFormat | None = None,
) -> StructuredRequest:
    """Raises ApiError."""
    if not tools and tool_choice is None and isinstance(response_format, TextFormat | None):
        return PLAIN
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
            limit = f"more than {MAX_REQUEST_BYTES} bytes"
            raise _refusal(param, f"the request's schemas have {limit}, all in all")

    def take(self, schema: Any, param: str) -> None:
        """Raises ApiError where the schema is refused."""
        try:
            self._left -= check(schema, _size_bytes(schema, param), self._left)
        except SchemaRefused as error:
            raise _refusal(param, str(error)) from error
        except RecursionError as error:
            raise _refusal(param, "it is nested too deeply") from error


def _size_bytes(schema: Any, param: str) -> int:
    try:
        return len(_encode(schema))
    except (RecursionError, msgspec.MsgspecError) as error:
        raise _refusal(param, "it is nested too deeply") from error


def _refusal(param: str, why: str) -> ApiError:
    return ApiError(INVALID_CONSTRAINT, f"{param} is not accepted: {why}", param)


def _check_names(tools: Sequence[Tool]) -> None:
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.function.name in seen:
            param = f"tools[{index}].function.name"
            text = f"{param}: there is another function {tool.function.name!r}"
            raise ApiError(INVALID_REQUEST, text, param)
        seen.add(tool.function.name)


def _choice(tools: Sequence[Tool], choice: ToolChoice | None) -> tuple[Calls, frozenset[str]]:
    """Whether to call, and what may be called."""
    offered = frozenset(tool.function.name for tool in tools)
    if not offered and choice not in (None, "none"):
        raise ApiError(INVALID_REQUEST, "tool_choice is only allowed with tools", "tool_choice")
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
        raise ApiError(INVALID_REQUEST, f"{param}: {unknown[0]!r} is not among the tools", param)
    return calls, named


def _parameters(index: int, tool: Tool, budget: _Budget) -> dict[str, Any]:
    parameters = tool.function.parameters
    param = f"tools[{index}].function.parameters"
    if parameters is not None:
        if parameters.get("type", "object") != "object":
            raise ApiError(INVALID_REQUEST, f"{param}: the type must be object", param)
        budget.take(parameters, param)
    return arguments_schema(parameters)


def _answer_schema(response_format: ResponseFormat | None, budget: _Budget) -> Any:
    if isinstance(response_format, JsonObjectFormat):
        return {"type": "object"}
    if not isinstance(response_format, JsonSchemaFormat):
        return None
    schema = response_format.json_schema.schema
    if schema is None:
        return True
    budget.take(schema, "response_format.json_schema.schema")
    return enforced(schema)


def _answer_text(response_format: ResponseFormat | None, calls: Calls) -> tuple[str, str]:
    """(pattern, grammar) an answer has to obey."""
    if not isinstance(response_format, RegexFormat | GrammarFormat):
        return "", ""
    if calls != "none":
        text = "response_format of this type cannot be had with tools: leave one of them out"
        raise ApiError(INVALID_REQUEST, text, "response_format")
    if isinstance(response_format, GrammarFormat):
        return "", response_format.grammar
    if pattern_size(response_format.pattern) > MAX_PATTERN_CHARS:
        param = "response_format.pattern"
        raise ApiError(INVALID_CONSTRAINT, f"{param} is too long when written out", param)
    return response_format.pattern, ""


def _shown(tool: Tool) -> dict[str, Any]:
    """As the caller wrote it: templates print it, or pick fields from it."""
    function: dict[str, Any] = {"name": tool.function.name}
    if tool.function.description is not None:
        function["description"] = tool.function.description
    # Many templates read `parameters.properties` without asking whether there are any.
    function["parameters"] = tool.function.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}
