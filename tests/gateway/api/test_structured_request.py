"""What tools and `response_format` mean together, and what is refused, each with its field."""

from typing import Any

import msgspec
import pytest

from gateway.api.output_plan import StructuredRequest, understand
from gateway.api.tool_types import ResponseFormat, ToolChoice, Tools
from gateway.errors import ApiError


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("f", {"properties": {"a": {"type": "integer"}}}), tool("g")]


def asked(tools: Any = (), choice: Any = None, form: Any = None) -> StructuredRequest:
    return understand(
        msgspec.convert(tools, Tools),
        msgspec.convert(choice, ToolChoice | None),
        True,
        msgspec.convert(form, ResponseFormat | None),
    )


def schema_form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def test_nothing_asked_is_plain() -> None:
    assert asked() == StructuredRequest()
    assert asked().is_plain
    assert asked(form={"type": "text"}).is_plain
    assert asked(TOOLS, "none").is_plain


@pytest.mark.parametrize(
    ("choice", "calls", "names", "is_single"),
    [
        (None, "auto", ["f", "g"], False),
        ("auto", "auto", ["f", "g"], False),
        ("required", "required", ["f", "g"], False),
        ("none", "none", [], False),
        ({"type": "function", "function": {"name": "g"}}, "required", ["g"], True),
    ],
)
def test_choices(choice: Any, calls: str, names: list[str], is_single: bool) -> None:
    found = asked(TOOLS, choice)
    assert (found.calls, [name for name, _ in found.functions]) == (calls, names)
    assert found.is_single == is_single
    assert [item["function"]["name"] for item in found.shown] == ["f", "g"]


def test_parameters_are_closed_objects() -> None:
    functions = dict(asked(TOOLS).functions)
    assert functions["f"] == {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "additionalProperties": False,
    }
    assert functions["g"] == {"type": "object", "properties": {}, "additionalProperties": False}


def test_templates_see_what_the_caller_wrote() -> None:
    function = {"name": "f", "description": "d", "parameters": {"x-note": 1, "properties": {}}}
    shown = asked([{"type": "function", "function": function}]).shown
    assert shown == [{"type": "function", "function": function}]


@pytest.mark.parametrize(
    ("tools", "choice", "form", "param"),
    [
        ([], "required", None, "tool_choice"),
        ([], "auto", None, "tool_choice"),
        (TOOLS, {"type": "function", "function": {"name": "h"}}, None, "tool_choice.function.name"),
        ([tool("f"), tool("f")], None, None, "tools[1].function.name"),
        ([tool("f", {"type": "array"})], None, None, "tools[0].function.parameters"),
        ([tool("g"), tool("f", {"$ref": "#/x"})], "none", None, "tools[1].function.parameters"),
        ([], None, schema_form({"type": "strnig"}), "response_format.json_schema.schema"),
        ([], None, schema_form(False), "response_format.json_schema.schema"),
        ([], None, schema_form("x"), "response_format.json_schema.schema"),
        ([], None, {"type": "regex", "pattern": "(a{999}){999}"}, "response_format.pattern"),
    ],
)
def test_refusals_name_the_field(tools: Any, choice: Any, form: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        asked(tools, choice, form)
    assert caught.value.param == param
    assert caught.value.kind.status == 400


def test_the_bound_on_schemas_is_the_requests() -> None:
    wide: dict[str, Any] = {"properties": {f"p{i}": {} for i in range(100)}}
    asked([tool(f"f{i}", wide) for i in range(19)])
    with pytest.raises(ApiError) as caught:
        asked([tool(f"f{i}", wide) for i in range(20)])
    assert caught.value.param == "tools[19].function.parameters"
    words = {"properties": {"a": {"enum": [f"{n:06}" for n in range(10_000)]}}}
    with pytest.raises(ApiError, match="524288 bytes") as caught:
        asked([tool(f"f{i}", words) for i in range(60)])
    assert caught.value.param == "tools[5].function.parameters"


def test_forms() -> None:
    assert asked(form={"type": "json_object"}).schema == {"type": "object"}
    assert asked(form={"type": "json_schema", "json_schema": {"name": "x"}}).schema is True
    assert asked(form=schema_form({"title": "t", "type": "string"})).schema == {"type": "string"}


@pytest.mark.parametrize(
    "body",
    [
        b'[{"type": "function", "function": {"name": ""}}]',
        b'[{"type": "function", "function": {"name": "a b"}}]',
        b'[{"type": "custom", "custom": {"name": "f"}}]',
        b'[{"type": "function", "function": {"name": "f", "unknown": 1}}]',
    ],
)
def test_tools_of_another_shape_do_not_decode(body: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(body, type=Tools)
