"""What callers say about tools and about the form of an answer, as the API spells it. Stage 2.

Comes in: the fields `tools`, `tool_choice`, `response_format` and, in messages, `tool_calls`,
decoded by wire.py into these structs, which check types, names and counts. Goes out: the same,
typed. What they mean together (a choice that names no offered tool, a schema too large) is
output_plan.py's; what a model is made to write for them is tools/envelope.py's.
"""

from typing import Annotated, Any, Literal, TypeAlias

import msgspec

MAX_TOOLS = 128
MAX_CALLS = 128
MAX_PATTERN_CHARS = 4096
MAX_GRAMMAR_CHARS = 65536
# OpenAI allows no dots; models and public function sets use them ("math.sqrt"), and every format
# here can carry them.
NAME_PATTERN = r"\A[a-zA-Z0-9_.-]{1,64}\Z"

FunctionName: TypeAlias = Annotated[str, msgspec.Meta(pattern=NAME_PATTERN)]
Description: TypeAlias = Annotated[str, msgspec.Meta(max_length=65536)]


class _Wire(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Base: what a caller misspells is refused by name."""


class FunctionSpec(_Wire, frozen=True):
    """A function on offer. `parameters` is a JSON Schema of an object; None: no parameters."""

    name: FunctionName
    description: Description | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Wire, frozen=True):
    """Only functions: no model hosted here has tools of its own."""

    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(_Wire, frozen=True):
    """A function by its name alone."""

    name: str


class NamedTool(_Wire, frozen=True):
    """An item of `allowed_tools`."""

    type: Literal["function"]
    function: NamedFunction


class NamedChoice(_Wire, frozen=True, tag_field="type", tag="function"):
    """`tool_choice`: this function and no other."""

    function: NamedFunction


class AllowedTools(_Wire, frozen=True):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], msgspec.Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedChoice(_Wire, frozen=True, tag_field="type", tag="allowed_tools"):
    """`tool_choice`: some of the tools; the prompt still shows them all."""

    allowed_tools: AllowedTools


ToolChoice: TypeAlias = Literal["none", "auto", "required"] | NamedChoice | AllowedChoice
Tools: TypeAlias = Annotated[list[Tool], msgspec.Meta(max_length=MAX_TOOLS)]


class TextFormat(_Wire, frozen=True, tag_field="type", tag="text"):
    """`response_format`: anything."""


class JsonObjectFormat(_Wire, frozen=True, tag_field="type", tag="json_object"):
    """`response_format`: any JSON object."""


class JsonSchema(_Wire, frozen=True):
    """The schema an answer has to obey. `schema` None: any JSON value.

    `strict` changes nothing: an answer is always held to its schema.
    """

    name: FunctionName
    description: Description | None = None
    # Any: `true` and `false` are schemas too; what is not one is refused with a better text later.
    schema: Any = None
    strict: bool | None = None


class JsonSchemaFormat(_Wire, frozen=True, tag_field="type", tag="json_schema"):
    """`response_format`: JSON that obeys a schema."""

    json_schema: JsonSchema


class RegexFormat(_Wire, frozen=True, tag_field="type", tag="regex"):
    """`response_format`: text that a regular expression matches as a whole. Not of OpenAI's API."""

    pattern: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_PATTERN_CHARS)]


class GrammarFormat(_Wire, frozen=True, tag_field="type", tag="grammar"):
    """`response_format`: text of a grammar, in llguidance's Lark. Not of OpenAI's API."""

    grammar: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_GRAMMAR_CHARS)]


ResponseFormat: TypeAlias = (
    TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat | GrammarFormat
)


class CalledFunction(_Wire, frozen=True):
    """What an earlier answer called. `arguments` is the text the model wrote, as sent to it; some
    clients send the object it stands for."""

    name: str
    arguments: str | dict[str, Any]


class ToolCall(_Wire, frozen=True):
    """A call in an assistant's message that is sent back. `index` is what streamed ones carry."""

    id: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None


ToolCalls: TypeAlias = Annotated[list[ToolCall], msgspec.Meta(max_length=MAX_CALLS)]
