"""What callers say about reasoning, and to the chat template, as several APIs spell it. Stage 2.

    reasoning_effort        OpenAI's: none, minimal, low, medium, high, xhigh, max
    thinking                Anthropic's, which DeepSeek and GLM take in chats, too:
                            {"type": "enabled", "budget_tokens": 2048}, {"type": "disabled"}
    chat_template_kwargs    vLLM's: values for the template's own variables

Comes in: these fields. Goes out: a `Reasoning`, and the values, or an ApiError that names the
field. What a model's template makes of them is prepare/template_values.py's.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from gateway.errors import INVALID_REQUEST, ApiError

Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORTS: tuple[str, ...] = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
MAX_TEMPLATE_VALUES = 32

# What the server fills in itself: a caller who set these would write the prompt.
_OWN_VALUES = frozenset({"messages", "tools", "self", "raise_exception", "strftime_now"})
_OWN_FIELDS = frozenset({"add_generation_prompt", "continue_final_message"})
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")


class ThinkingBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`thinking`. `display`: whether it is told is the model's to decide here."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Whether the model is to reason, and how much. `effort`: "" where no word for it was sent;
    `budget_tokens`: 0 where no number was."""

    is_on: bool
    effort: str = ""
    budget_tokens: int = 0


def reasoning_of(effort: Effort | None, thinking: ThinkingBody | None) -> Reasoning | None:
    """None: nothing was said of it. Raises ApiError where the two contradict each other."""
    if effort is None and thinking is None:
        return None
    is_on = thinking.type != "disabled" if thinking is not None else effort != "none"
    if effort is not None and is_on != (effort != "none"):
        message = (
            "reasoning_effort and thinking contradict each other: send only one of them, or "
            "reasoning_effort: none with thinking: disabled"
        )
        raise ApiError(INVALID_REQUEST, message, "reasoning_effort")
    budget = thinking.budget_tokens if thinking is not None and is_on else None
    return Reasoning(is_on, effort if effort is not None and is_on else "", budget or 0)


def check_template_values(values: dict[str, Any]) -> dict[str, Any]:
    """Of `chat_template_kwargs`. Raises ApiError for what is the server's own to say."""
    if len(values) > MAX_TEMPLATE_VALUES:
        raise _refusal("", f"may have at most {MAX_TEMPLATE_VALUES} names")
    for name in values:
        if name in _OWN_FIELDS:
            raise _refusal(name, f"may not set {name!r}: send the field {name} instead")
        if name in _OWN_VALUES or name.endswith("_token"):
            raise _refusal(name, f"may not set {name!r}, which the server fills in: remove it")
        if _NAME.fullmatch(name) is None:
            raise _refusal("", f"{name[:64]!r} is not a name of a template's variable: remove it")
    return values


def _refusal(name: str, text: str) -> ApiError:
    param = "chat_template_kwargs" + (f".{name}" if name else "")
    return ApiError(INVALID_REQUEST, f"chat_template_kwargs: {text}", param)
