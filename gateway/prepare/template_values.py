"""What a request says to the chat template: reasoning switched or bounded, and values of its own.

Part of stage 2; pure. Comes in: what the caller asked, and the variables that the model's template
reads. Goes out: values for the template, whether reasoning is closed in the prompt, and the fields
that this model has no use for. Templates differ in what they call the switch:

    enable_thinking, thinking   true or false: Qwen 3, GLM 4.5, DeepSeek V3.1, Granite
    reasoning_effort            a word: gpt-oss, Mistral
    thinking_budget             a number of tokens: Seed-OSS

A model that reasons, whose template has no switch, is kept from it by a pair of marks with nothing
between them at the prompt's end, as Qwen's template writes them.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.api.reasoning_types import Reasoning

_SWITCHES = ("enable_thinking", "thinking")
_EFFORT = "reasoning_effort"
_BUDGET = "thinking_budget"


@dataclass(frozen=True, slots=True)
class TemplateValues:
    """`values` by the template's names. `closes_reasoning`: the prompt ends it before it begins.
    `ignored`: fields without effect on this model."""

    values: Mapping[str, Any] = field(default_factory=dict)
    closes_reasoning: bool = False
    ignored: tuple[str, ...] = ()


NOTHING_SAID = TemplateValues()


def template_values(
    reasoning: Reasoning | None,
    kwargs: Mapping[str, Any],
    variables: Collection[str],
    reasons: bool,
) -> TemplateValues:
    """`kwargs`: the request's `chat_template_kwargs`, which go before what `reasoning` comes to.
    `reasons`: the model writes reasoning between marks that are known."""
    values: dict[str, Any] = {}
    ignored: list[str] = []
    closes = False
    if reasoning is not None:
        closes = _reasoning(reasoning, variables, reasons, values, ignored)
    for name, value in kwargs.items():
        if name in variables:
            values[name] = value
        else:
            ignored.append(f"chat_template_kwargs.{name}")
    return TemplateValues(values, closes, tuple(ignored))


def _reasoning(
    asked: Reasoning,
    variables: Collection[str],
    reasons: bool,
    values: dict[str, Any],
    ignored: list[str],
) -> bool:
    """Fills both in. Returns whether the prompt closes the reasoning."""
    switch = next((name for name in _SWITCHES if name in variables), None)
    if switch is not None:
        values[switch] = asked.is_on
    if asked.budget_tokens:
        if _BUDGET in variables:
            values[_BUDGET] = asked.budget_tokens
        else:
            ignored.append("thinking.budget_tokens")
    if not asked.is_on:
        if switch is None and _EFFORT in variables:
            values[_EFFORT] = "none"
            return False
        return switch is None and reasons
    if asked.effort and _EFFORT in variables:
        values[_EFFORT] = asked.effort
    elif asked.effort:
        ignored.append(_EFFORT)
    elif switch is None and not reasons:
        ignored.append("thinking")
    return False
