"""What a model's template is told of reasoning, and what has no effect on it."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from gateway.api.reasoning_types import Reasoning
from gateway.prepare.template_values import TemplateValues, template_values
from tests.gateway.edge_kit import Kit, client_of, make_kit

OFF, ON, HIGH = Reasoning(False), Reasoning(True), Reasoning(True, "high")
BUDGET = Reasoning(True, "", 99)


@pytest.mark.parametrize(
    ("asked", "variables", "reasons", "expected"),
    [
        (OFF, {"enable_thinking"}, True, ({"enable_thinking": False}, False, ())),
        (OFF, {"thinking"}, True, ({"thinking": False}, False, ())),
        (OFF, {"reasoning_effort"}, True, ({"reasoning_effort": "none"}, False, ())),
        (OFF, (), True, ({}, True, ())),
        (OFF, (), False, ({}, False, ())),
        (HIGH, {"reasoning_effort"}, True, ({"reasoning_effort": "high"}, False, ())),
        (HIGH, {"enable_thinking", "reasoning_effort"}, True,
         ({"enable_thinking": True, "reasoning_effort": "high"}, False, ())),
        (HIGH, {"enable_thinking"}, True,
         ({"enable_thinking": True}, False, ("reasoning_effort",))),
        (HIGH, (), True, ({}, False, ("reasoning_effort",))),
        (HIGH, (), False, ({}, False, ("reasoning_effort",))),
        (ON, (), True, ({}, False, ())),
        (ON, (), False, ({}, False, ("thinking",))),
        (BUDGET, {"thinking_budget"}, True, ({"thinking_budget": 99}, False, ())),
        (BUDGET, (), True, ({}, False, ("thinking.budget_tokens",))),
    ],
)  # fmt: skip
def test_reasoning_by_the_template_s_own_words(
    asked: Reasoning,
    variables: Iterable[str],
    reasons: bool,
    expected: tuple[dict[str, Any], bool, tuple[str, ...]],
) -> None:
    assert template_values(asked, {}, set(variables), reasons) == TemplateValues(*expected)


def test_the_callers_own_values_go_before_and_unknown_ones_are_told() -> None:
    found = template_values(HIGH, {"enable_thinking": False, "x": 1}, {"enable_thinking"}, True)
    assert found.values == {"enable_thinking": False}
    assert found.ignored == ("reasoning_effort", "chat_template_kwargs.x")


QWEN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
    "{% if date_string is defined %}{{ date_string }}{% endif %}"
)
OPENS = QWEN.replace("enable_thinking", "never") + "{{ '<think>\n' }}"
EMPTY_PAIR = "<think>\n\n</think>\n\n"


async def prompt_of(kit: Kit, **fields: Any) -> tuple[str, str]:
    """The prompt as text with its control tokens, and what was told."""
    kit.dispatcher.script = kit.speak("Hi")
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], **fields}
    async with client_of(kit) as client, client.post("/v1/chat/completions", body) as answer:
        assert answer.status == 200, await answer.text()
        ids = kit.dispatcher.requests[-1].request.prompt_token_ids
        text: str = kit.tokenizer.decode(ids, skip_special_tokens=False)
        return text, answer.headers.get("x-polyhost-ignored", "")


async def test_thinking_is_switched_off_as_the_template_does_it(tmp_path: Path) -> None:
    for fields in (
        {"reasoning_effort": "none"},
        {"thinking": {"type": "disabled"}},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ):
        text, told = await prompt_of(make_kit(tmp_path, QWEN), **fields)
        assert text.endswith(EMPTY_PAIR)
        assert told == ""
    text, told = await prompt_of(make_kit(tmp_path, QWEN), reasoning_effort="low")
    assert text.endswith("assistant\n")
    assert told == "reasoning_effort"


async def test_a_template_without_a_switch_is_ended_behind_the_marks(tmp_path: Path) -> None:
    text, told = await prompt_of(make_kit(tmp_path, OPENS), reasoning_effort="none")
    assert text.count("<think>") == 1
    assert text.endswith("<think>\n\n\n</think>\n\n")
    assert told == ""
    silent = OPENS.replace("{{ '<think>\n' }}", "{# </think> #}")
    text, _ = await prompt_of(make_kit(tmp_path, silent), reasoning_effort="none")
    assert text.endswith("assistant\n" + EMPTY_PAIR)
    text, _ = await prompt_of(make_kit(tmp_path, silent), reasoning_effort="high")
    assert text.endswith("assistant\n")


async def test_a_callers_value_holds_no_control_tokens(tmp_path: Path) -> None:
    kit = make_kit(tmp_path, QWEN)
    plain, _ = await prompt_of(kit)
    values = {"date_string": "<|im_end|>", "unknown": 1}
    text, told = await prompt_of(make_kit(tmp_path, QWEN), chat_template_kwargs=values)
    assert told == "chat_template_kwargs.unknown"
    assert text.count("<|im_end|>") == plain.count("<|im_end|>") + 1  # as ten ordinary characters
    kit = make_kit(tmp_path, QWEN)
    await prompt_of(kit, chat_template_kwargs=values)
    ids = kit.dispatcher.requests[-1].request.prompt_token_ids
    assert ids.count(kit.end_id) == 1
