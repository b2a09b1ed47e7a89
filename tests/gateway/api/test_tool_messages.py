"""Calls that clients send back reach templates in the form each of them wants."""

import json
from typing import Any

import pytest

from gateway.api.tool_messages import calls_for_template, id_for_template, wants_text
from gateway.api.tool_types import CalledFunction, ToolCall
from gateway.api.tools.formats import FORMATS
from gateway.text.templates import ChatTemplate, TemplateRefused

# The lines of real templates that print calls: Qwen's take both, Mistral's the value only and ids
# of their own make, DeepSeek's glue the text to other text.
QWEN = """{%- for m in messages %}{%- for tool_call in m.tool_calls or [] %}
{%- set tool_call = tool_call.function %}
{{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
{%- if tool_call.arguments is string %}{{- tool_call.arguments }}
{%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
{{- '}\\n</tool_call>' }}{%- endfor %}{%- endfor %}"""
MISTRAL = """{%- for m in messages %}{%- for tool_call in m.tool_calls or [] %}
{{- "[TOOL_CALLS][" }}{%- set out = tool_call.function|tojson %}{{- out[:-1] }}
{%- if tool_call.id|length != 9 %}{{- raise_exception("length 9!") }}{%- endif %}
{{- ', "id": "' + tool_call.id + '"}' }}{{- "]" }}{%- endfor %}{%- endfor %}"""
DEEPSEEK = """{% for m in messages %}{% for tool in m.tool_calls or [] %}
{{- '```json\\n' + tool['function']['arguments'] + '\\n```' }}{% endfor %}{% endfor %}"""
SILENT = """{% for m in messages %}{{ m.content }}{% endfor %}"""


def renderer(source: str) -> Any:
    template = ChatTemplate(source, {})

    def render(messages: list[dict[str, Any]]) -> str:
        try:
            return template.render(messages)
        except TemplateRefused as error:
            raise ValueError(str(error)) from error

    return render


def call(arguments: str, call_id: str = "call_1") -> ToolCall:
    return ToolCall(id=call_id, function=CalledFunction(name="f", arguments=arguments))


@pytest.mark.parametrize(
    ("source", "as_text"), [(QWEN, False), (MISTRAL, False), (DEEPSEEK, True), (SILENT, False)]
)
def test_a_sample_tells_what_a_template_wants(source: str, as_text: bool) -> None:
    assert wants_text(renderer(source)) == as_text


@pytest.mark.parametrize(
    ("source", "fmt"), [(QWEN, "hermes"), (MISTRAL, "mistral"), (DEEPSEEK, None)]
)
def test_calls_go_back_into_the_template(source: str, fmt: Any) -> None:
    render = renderer(source)
    arguments = '{"city": "Zürich", "n": [1, {"x": null}]}'
    made = calls_for_template([call(arguments)], FORMATS.get(fmt), wants_text(render))
    text = render([{"role": "assistant", "content": "", "tool_calls": made}])
    start = text.index('{"city"')
    assert json.JSONDecoder().raw_decode(text, start)[0] == json.loads(arguments)


@pytest.mark.parametrize("text", ["", "  "])
def test_no_arguments_are_an_empty_object(text: str) -> None:
    [made] = calls_for_template([call(text)], None, as_text=False)
    assert made["function"]["arguments"] == {}


@pytest.mark.parametrize("text", ['{"a": ', "[" * 5000, "{'a': 1}"])
def test_what_a_model_spoiled_goes_back_as_it_is(text: str) -> None:
    [made] = calls_for_template([call(text)], None, as_text=False)
    assert made["function"]["arguments"] == text


def test_ids_are_made_over_where_a_template_is_strict() -> None:
    mistral = FORMATS["mistral"]
    made = id_for_template("call_0123456789abcdef", mistral)
    assert mistral.takes_id(made)
    assert made == id_for_template("call_0123456789abcdef", mistral)
    assert made != id_for_template("call_0123456789abcdee", mistral)
    assert id_for_template("abcDEF123", mistral) == "abcDEF123"
    assert id_for_template("anything goes", FORMATS["hermes"]) == "anything goes"
    assert id_for_template("anything goes", None) == "anything goes"
