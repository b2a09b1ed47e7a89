"""Formats are told by what templates would write, and plans follow from them."""

import pytest

from gateway.api.tools.formats import FORMATS, detect
from gateway.api.tools.marked_formats import DEEPSEEK_OPEN as OPEN
from gateway.api.tools.marked_formats import DEEPSEEK_SECTION as SECTION
from gateway.api.tools.marked_formats import DEEPSEEK_SEPARATOR as SEPARATOR

# The telling lines of real templates.
HERMES = """{{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}"""
LLAMA = """{{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}
{%- elif message.role == "tool" or message.role == "ipython" %}"""
MISTRAL = """{{- "[TOOL_CALLS][" }}{%- set out = tool_call.function|tojson %}"""
MISTRAL_ARGS = """{{- "[TOOL_CALLS]" + name + "[ARGS]" + arguments }}"""
LFM = """{{- "<|tool_call_start|>[" + (calls | join(", ")) + "]<|tool_call_end|>" -}}"""
LLAMA4 = """{{- '<|python_start|>' }}{{- tool_call.name }}"""
LLAMA32 = """[func_name1(params_name1=params_value1), func_name2()]"""
XML = """{{- '<tool_call>\\n<function=' + tool_call.name + '>\\n' }}"""
XML2 = """<tool_call>{{ name }}<arg_key>{{ k }}</arg_key>"""
KIMI = """{{ '<|tool_call_begin|>' + id + '<|tool_call_argument_begin|>' + arguments }}"""
DEEPSEEK = "{{'%s%s' + tool.function.name + '%s' + arguments}}" % (SECTION, OPEN, SEPARATOR)  # noqa: UP031
DEEPSEEK_V3 = DEEPSEEK + "{{ '\\n```json\\n' }}"
PLAIN = """{% for message in messages %}{{ message.content }}{% endfor %}"""


@pytest.mark.parametrize(
    ("template", "name", "mark"),
    [
        (HERMES, "hermes", ""),
        (LLAMA, "llama3_json", ""),
        (MISTRAL, "mistral", "[TOOL_CALLS]"),
        (MISTRAL_ARGS, "mistral_args", "[TOOL_CALLS]"),
        (LFM, "pythonic", "<|tool_call_start|>"),
        (LLAMA4, "pythonic", "<|python_start|>"),
        (LLAMA32, "pythonic", ""),
        (XML, "qwen_xml", "<tool_call>"),
        (XML2, "glm_xml", "<tool_call>"),
        (KIMI, "kimi", "<|tool_calls_section_begin|>"),
        (DEEPSEEK, "deepseek", SECTION),
        (DEEPSEEK_V3, "deepseek_v3", SECTION),
    ],
)
def test_templates_show_their_format(template: str, name: str, mark: str) -> None:
    found = detect(template)
    assert found is not None
    assert (found.name, found.open) == (name, mark)


@pytest.mark.parametrize("template", [PLAIN, ""])
def test_other_templates_have_none(template: str) -> None:
    assert detect(template) is None


def test_ids_are_what_templates_take_back() -> None:
    for fmt in FORMATS.values():
        ids = {fmt.new_id() for _ in range(50)}
        assert len(ids) == 50
        assert all(fmt.takes_id(call_id) for call_id in ids)
    assert not FORMATS["mistral"].takes_id("call_0123456789")
