"""Chat templates render as transformers renders them, and cannot get out of their sandbox."""

import gzip
import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from gateway.text.templates import ChatTemplate, TemplateRefused, load_template, special_tokens

DATA = Path(__file__).parents[2] / "data" / "conformance" / "templates"
MESSAGES = [{"role": "user", "content": "Hi <b> 'x' & ü"}]


def render(source: str, **values: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(MESSAGES, **values)


def test_blocks_are_trimmed_as_transformers_does() -> None:
    loop = "  {% for m in messages %}\n  {{ m.role }}: {{ m.content }}\n  {% endfor %}"
    assert render("{{ bos_token }}\n" + loop) == "<s>\n  user: Hi <b> 'x' & ü\n"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages | tojson }}", json.dumps(MESSAGES, ensure_ascii=False)),
        ("{{ {'b': 1, 'a': '<'} | tojson }}", '{"b": 1, "a": "<"}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{% generation %}a{{ messages|length }}{% endgeneration %}b", "a1b"),
        ("{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}", "2"),
        ("{{ add_generation_prompt }} {{ tools is none }}", "True True"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ nowhere }}", ""),
    ],
)
def test_the_environment(source: str, text: str) -> None:
    assert render(source) == text


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ messages[5].content }}", "has no element"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{{ messages[0].content.nowhere() }}", "nowhere"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% set ns = namespace(_x=1) %}", "may not contain"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{% for i in range(1000000000) %}{% endfor %}", "Range too big"),
    ],
)
def test_what_a_template_may_not(source: str, part: str) -> None:
    with pytest.raises(TemplateRefused, match=part):
        render(source)


def test_a_text_that_is_no_template() -> None:
    with pytest.raises(TemplateRefused, match="invalid chat template"):
        ChatTemplate("{% for %}", {})


def test_messages_are_not_shared_with_the_template() -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(TemplateRefused):
        ChatTemplate("{{ messages[0].update({'content': 'y'}) }}", {}).render(messages)
    assert messages == [{"role": "user", "content": "x"}]


def test_where_templates_are_found(tmp_path: Path) -> None:
    assert load_template(tmp_path) is None
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "named"}]
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": named}))
    template = load_template(tmp_path)
    assert template is not None
    assert template.render([]) == "named"
    config.write_text(json.dumps({"chat_template": "{{ eos_token }}", "eos_token": "</s>"}))
    template = load_template(tmp_path)
    assert template is not None
    assert template.render([]) == "</s>"
    (tmp_path / "chat_template.jinja").write_text("file")
    template = load_template(tmp_path)
    assert template is not None
    assert template.render([]) == "file"


def test_the_template_beside_a_processor_comes_last(tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "processor"}))
    template = load_template(tmp_path)
    assert template is not None
    assert template.render([]) == "processor"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "tokenizer"}))
    template = load_template(tmp_path)
    assert template is not None
    assert template.render([]) == "tokenizer"


# As the templates of LLaVA 1.5, SmolVLM and Qwen2-VL go through what a message holds.
OF_PARTS = {
    "parts only": "{% for m in messages %}{{ m['role'] }}: {% for part in m['content'] | "
    "selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %};{% endfor %}",
    "first part": "{% for m in messages %}{{ m.role }}{% if m['content'][0]['type'] == 'image' %}:"
    "{% else %}: {% endif %}{% for line in m['content'] %}{% if line['type'] == 'text' %}"
    "{{ line['text'] }}{% endif %}{% endfor %};{% endfor %}",
    "either": "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}"
    "{% else %}{{ 1 / 0 }}{% endif %};{% endfor %}",
}


@pytest.mark.parametrize("kind", OF_PARTS)
def test_templates_of_multimodal_models_show_texts(kind: str) -> None:
    template = ChatTemplate(OF_PARTS[kind], {})
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hi {{ 1 }}"},
        {"role": "assistant", "content": "Ye"},
    ]
    text = "system: Be short.;user: Hi {{ 1 }};assistant: Ye"
    assert template.render(messages, add_generation_prompt=False) == f"{text};"
    assert template.render(messages, continue_final_message=True) == text
    assert messages[1] == {"role": "user", "content": "Hi {{ 1 }}"}


def test_special_tokens_of_all_spellings(tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"pad_token": "<pad>"}))
    config = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "unk_token": None,
        "extra_special_tokens": {"image_token": "<img>"},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert special_tokens(tmp_path) == {
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "image_token": "<img>",
    }
    (tmp_path / "tokenizer_config.json").write_text("[broken")
    assert special_tokens(tmp_path) == {"pad_token": "<pad>"}


def as_transformers(source: str, messages: list[dict[str, Any]], **values: Any) -> str:
    rendered, _ = render_jinja_template([messages], chat_template=source, **values)
    text: str = rendered[0]
    return text


def cases() -> list[Any]:
    with gzip.open(DATA / "chat_template_cases.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [pytest.param(row, id=f"{row['model']} {row['group']}") for row in rows]


@pytest.mark.parametrize("row", cases())
@pytest.mark.parametrize("way", ["as given", "prompted", "continued"])
def test_real_templates_render_as_in_transformers(row: dict[str, Any], way: str) -> None:
    values = {"add_generation_prompt": False, **row["data"]}
    messages = values.pop("messages")
    if way == "prompted":
        values["add_generation_prompt"] = True
    if way == "continued":
        values["add_generation_prompt"] = False
        values["continue_final_message"] = True
    try:
        expected = as_transformers(row["chat_template"], messages, **values)
    except (jinja2.TemplateError, TypeError, ValueError):
        with pytest.raises(TemplateRefused):
            ChatTemplate(row["chat_template"], {}).render(messages, **values)
        return
    assert ChatTemplate(row["chat_template"], {}).render(messages, **values) == expected


TRIMMING = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}[end]{% endfor %}"
KEEPING = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"


@pytest.mark.parametrize("source", [TRIMMING, KEEPING])
@pytest.mark.parametrize("content", ["so", "so ", " so\n", "so [end]", "x"])
def test_a_last_message_is_left_open_as_in_transformers(source: str, content: str) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": content}]
    expected = as_transformers(source, messages, continue_final_message=True)
    assert ChatTemplate(source, {}).render(messages, continue_final_message=True) == expected
    assert not expected.endswith("[end]") or content.endswith("[end]")


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        ("{% for m in messages[:-1] %}{{ m.content }}{% endfor %}", MESSAGES * 2),
        ("{{ messages[-1].content[:2] }}", MESSAGES),
        ("nothing of it", MESSAGES),
        (KEEPING, [{"role": "assistant", "content": None}]),
        (KEEPING, []),
    ],
)
def test_what_cannot_be_continued(source: str, messages: list[dict[str, Any]]) -> None:
    with pytest.raises(TemplateRefused, match="continue"):
        ChatTemplate(source, {}).render(messages, continue_final_message=True)


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_has_one_name_for_templates(name: str) -> None:
    source = "{{ messages[0].reasoning_content }} {{ messages[0].thinking }}"
    messages = [{"role": "assistant", "content": "x", name: "hm"}]
    assert ChatTemplate(source, {}).render(messages) == "hm hm" == as_transformers(source, messages)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ dict(a=1).a }}", "1"),
        ("{{ dict.fromkeys(['a']) }}", "{'a': None}"),
        ("{{ dict.__subclasses__ }}", ""),
    ],
)
def test_dict_is_for_making_dicts(source: str, text: str) -> None:
    assert render(source) == text == as_transformers(source, MESSAGES)
