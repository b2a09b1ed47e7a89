"""Constraints are held against the parsers: what a grammar lets through is told as calls.

The grammars are given to the compiler that workers use, with one token a byte.
"""

import json
from typing import Any

import llguidance
import msgspec
import pytest

from gateway.answer.answer import message
from gateway.api.output_plan import PLAIN, OutputFormats, OutputPlan, detect, plan, understand
from gateway.api.tool_types import ResponseFormat, ToolChoice, Tools
from gateway.api.tools.formats import FORMATS, FormatName
from gateway.api.tools.output_parser import ReasoningMarks
from gateway.errors import ApiError
from tests.gateway.api.tools.kit import WRITERS, Call, xml_text

THINK = ReasoningMarks("<think>", "</think>")
TOKENIZER = llguidance.LLTokenizer("byte")


def function(name: str, required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    names = list(properties) if required is None else required
    schema = {"type": "object", "properties": properties, "required": names}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [
    function("get.temp", city={"type": "string"}),
    function("add", required=["a"], a={"type": "integer"}, b={"$ref": "#/$defs/n"}),
]
TOOLS[1]["function"]["parameters"]["$defs"] = {"n": {"type": "integer"}}


def planned(
    choice: Any,
    fmt: FormatName | None = "hermes",
    parallel: bool = True,
    response_format: Any = None,
    tail: str = "",
    tools: Any = TOOLS,
    **formats: Any,
) -> OutputPlan:
    asked = understand(
        msgspec.convert(tools, Tools),
        msgspec.convert(choice, ToolChoice | None),
        parallel,
        msgspec.convert(response_format, ResponseFormat | None),
    )
    model = OutputFormats(FORMATS[fmt] if fmt else None, **formats)
    return plan(asked, model, tail)


def accepts(found: OutputPlan, text: str) -> bool:
    """Does the constraint let this text be all of an answer?"""
    assert found.constraint is not None
    kind, body = found.constraint.kind, found.constraint.text
    library = llguidance.LLMatcher
    if kind == "regex":
        grammar = library.grammar_from_regex(body)
    elif kind == "grammar":
        grammar = library.grammar_from_lark(body)
    else:
        grammar = library.grammar_from_json_schema(body or '{"type": "object"}')
    matcher = library(TOKENIZER, grammar, log_level=0)
    assert not matcher.get_error()
    ids = TOKENIZER.tokenize_bytes(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


CALLS: list[Call] = [("get.temp", {"city": "Zwolle"}), ("add", {"a": 1, "b": 2})]


def written(fmt: FormatName, made: list[Call]) -> str:
    if FORMATS[fmt].needs_schemas:
        return xml_text(fmt, "", made)
    text = WRITERS[fmt]("", made)
    return text.replace("'", '"') if fmt == "pythonic" else text


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_forced_call_is_what_the_model_would_write(fmt: FormatName) -> None:
    found = planned("required", fmt)
    for made in (CALLS[:1], CALLS[1:], CALLS, [("add", {"a": 5})]):
        text = written(fmt, made)
        assert accepts(found, text)
        parser = found.new_parser()
        said = message([*parser.feed(text), *parser.flush()])
        got = [call["function"] for call in said["tool_calls"]]
        assert [(f["name"], json.loads(f["arguments"])) for f in got] == made
        assert said["content"] is None
    for text in ("", "Hello", written(fmt, [("rm", {})]), written(fmt, [("add", {"a": "x"})])):
        assert not accepts(found, text)


@pytest.mark.parametrize("fmt", FORMATS)
def test_single_and_named_calls(fmt: FormatName) -> None:
    single = planned("required", fmt, parallel=False)
    assert accepts(single, written(fmt, CALLS[:1]))
    assert not accepts(single, written(fmt, CALLS))
    named = planned({"type": "function", "function": {"name": "add"}}, fmt)
    assert accepts(named, written(fmt, CALLS[1:]))
    assert not accepts(named, written(fmt, CALLS[:1]))
    assert named.max_calls == 1
    assert planned("required", fmt, is_single=True).max_calls == 1


@pytest.mark.parametrize("fmt", ["hermes", "mistral", "mistral_args"])
def test_text_is_free_until_the_mark(fmt: FormatName) -> None:
    found = planned("auto", fmt)
    call = written(fmt, CALLS[:1])
    for text in ("", "Hello.\n\nThere", "A [list] <b>", f"I'll ask.\n{call}", call):
        assert accepts(found, text)
    mark = "<tool_call>" if fmt == "hermes" else "[TOOL_CALLS]"
    for text in (f"{mark} no", call[:-3], written(fmt, [("rm", {})])):
        assert not accepts(found, text)


@pytest.mark.parametrize("fmt", ["qwen_xml", "glm_xml"])
def test_words_of_an_enum_and_values_are_held_to_the_schema_between_tags(fmt: FormatName) -> None:
    tools = [function("f", ["a"], a={"type": "string", "enum": ["x", "y z"]}, b={"type": "array"})]
    found = planned("required", fmt, tools=tools)
    good: list[dict[str, Any]] = [{"a": "x"}, {"a": "y z", "b": [1, "</b>"]}]
    bad: list[dict[str, Any]] = [{"a": "z"}, {"b": [1]}, {"a": "x", "b": 5}, {"a": "x", "c": 1}]
    for made in good:
        assert accepts(found, xml_text(fmt, "", [("f", made)]))
    for made in bad:
        assert not accepts(found, xml_text(fmt, "", [("f", made)]))
    text = function("f", None, a={"type": "string"})
    free = planned("required", fmt, tools=[text])
    assert accepts(free, xml_text(fmt, "", [("f", {"a": 'any\n"text" <b> </p'})]))


@pytest.mark.parametrize("fmt", ["llama3_json", "pythonic", "qwen_xml", "glm_xml"])
def test_formats_without_a_mark_are_left_to_the_model(fmt: FormatName) -> None:
    found = planned("auto", fmt)
    assert found.constraint is None
    assert found.names == {"get.temp", "add"}


def test_allowed_tools_narrow_what_may_be_called() -> None:
    only = {"mode": "required", "tools": [{"type": "function", "function": {"name": "add"}}]}
    found = planned({"type": "allowed_tools", "allowed_tools": only})
    assert accepts(found, written("hermes", CALLS[1:]))
    assert not accepts(found, written("hermes", CALLS[:1]))
    assert found.names == {"add"}


def test_marks_that_are_control_tokens_are_named_by_id() -> None:
    found = planned("required", "mistral", special_ids={"[TOOL_CALLS]": 7, "</s>": 2})
    assert found.constraint is not None
    assert "start: <[7]> " in found.constraint.text
    assert '"[TOOL_CALLS]' not in found.constraint.text
    assert found.spelled_tokens == {"[TOOL_CALLS]"}
    assert planned("none", "mistral", special_ids={"[TOOL_CALLS]": 7}).spelled_tokens == frozenset()


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def test_a_form_alone_is_its_own_kind_of_constraint() -> None:
    found = planned(None, tools=[], response_format=FORM)
    assert found.constraint is not None
    assert found.constraint.kind == "json_schema"
    assert json.loads(found.constraint.text) == {**SCHEMA, "additionalProperties": False}
    found = planned(None, tools=[], response_format={"type": "json_object"})
    assert found.constraint is not None
    assert (found.constraint.kind, found.constraint.text) == ("json_object", "")
    assert planned(None, tools=[]) == PLAIN
    assert planned(None, tools=[]).is_plain


def test_a_call_or_the_form() -> None:
    found = planned("auto", response_format=FORM)
    assert accepts(found, '{"a": 1}')
    assert accepts(found, written("hermes", CALLS))
    assert not accepts(found, "Hello")
    forced = planned("required", response_format=FORM)
    assert not accepts(forced, '{"a": 1}')


@pytest.mark.parametrize(
    ("tail", "before"),
    [
        ("<think>\n", ["Hm.</think>", "</think>\n\n"]),
        ("assistant\n", ["", "<think>Hm. <tool_call>?</think>\n"]),
        ("<think>\n\n</think>\n\n", [""]),
    ],
)
@pytest.mark.parametrize("form", [None, FORM])
def test_reasoning_comes_first_and_is_free(tail: str, before: list[str], form: Any) -> None:
    choice = None if form else "required"
    tools = [] if form else TOOLS
    found = planned(choice, tools=tools, response_format=form, tail=tail, reasoning=THINK)
    answer = '{"a": 1}' if form else written("hermes", CALLS)
    for thought in before:
        assert accepts(found, thought + answer)
        parser = found.new_parser()
        said = message([*parser.feed(thought + answer), *parser.flush()])
        assert len(said.get("tool_calls", [])) == (0 if form else 2)
        assert said["content"] == (answer if form else None)
    assert not accepts(found, "Hm. " + answer)


def test_patterns_and_grammars() -> None:
    found = planned(None, tools=[], response_format={"type": "regex", "pattern": "a+/b"})
    assert accepts(found, "aa/b")
    assert not accepts(found, "aa")
    pattern = {"type": "regex", "pattern": "a/\\/\nb"}
    found = planned(None, tools=[], response_format=pattern, tail="<think>", reasoning=THINK)
    assert accepts(found, "Hm.</think>a//\nb")
    lark = {"type": "grammar", "grammar": 'start: "x" "y"*'}
    assert accepts(planned(None, tools=[], response_format=lark), "xyy")
    with pytest.raises(ApiError) as caught:
        planned("auto", response_format=lark)
    assert caught.value.param == "response_format"
    with pytest.raises(ApiError):
        planned(None, tools=[], response_format=lark, tail="<think>", reasoning=THINK)


def test_models_without_a_known_format_take_no_tools() -> None:
    with pytest.raises(ApiError) as caught:
        planned("auto", None)
    assert caught.value.kind.code == "unsupported_parameter"
    assert caught.value.param == "tools"
    assert planned("none", None).is_plain


@pytest.mark.parametrize(
    "parameters",
    [
        {"anyOf": [{"properties": {"a": {}}}]},
        {"properties": {"a b": {}}},
        {"properties": {"a": {"$ref": "#/properties/b"}, "b": {}}},
    ],
)
def test_what_cannot_be_written_as_python_is_refused(parameters: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    with pytest.raises(ApiError) as caught:
        planned("required", "pythonic", tools=tools)
    assert caught.value.param == "tools"
    assert planned("required", "hermes", tools=tools).constraint is not None


def test_optional_keywords_in_any_selection() -> None:
    tools = [function("f", required=[], a={"type": "integer"}, b={"type": "integer"}, c={})]
    found = planned("required", "pythonic", tools=tools)
    for text in ("[f()]", "[f(a=1)]", "[f(b=1)]", "[f(a=1, c=null)]", "[f(a=1, b=2, c=[])]"):
        assert accepts(found, text)
    for text in ("[f(b=1, a=2)]", "[f(a=1,)]", "[f(d=1)]", "[f(, b=1)]"):
        assert not accepts(found, text)


def test_a_template_is_read_once_for_all() -> None:
    source = "<tool_call> <think></think> raise_exception('only single tool-calls at once!')"
    formats = detect(source, {"</s>": 2})
    assert formats.tools is FORMATS["hermes"]
    assert (formats.reasoning, formats.is_single) == (THINK, True)
    assert detect(source, {}, "pythonic").tools is FORMATS["pythonic"]
    assert detect("", {}) == OutputFormats()
