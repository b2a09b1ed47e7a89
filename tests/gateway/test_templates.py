"""Chat templates render as transformers renders them, and cannot get out of their sandbox."""

import json
from pathlib import Path

import pytest

from gateway.templates import ChatTemplate, TemplateRefused, load_template, special_tokens

MESSAGES = [{"role": "user", "content": "Hi <b> 'x' & ü"}]


def render(source: str, **values: object) -> str:
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
        ("{% set ns = namespace(_x=1) %}", "may not hold"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{% for i in range(1000000000) %}{% endfor %}", "Range too big"),
    ],
)
def test_what_a_template_may_not(source: str, part: str) -> None:
    with pytest.raises(TemplateRefused, match=part):
        render(source)


def test_a_text_that_is_no_template() -> None:
    with pytest.raises(TemplateRefused, match="not valid"):
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
