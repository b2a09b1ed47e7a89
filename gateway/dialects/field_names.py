"""What each dialect calls the fields that errors name. Pure.

Stages behind a decoder know a `WireRequest` and name fields as chats do: `messages`, `max_tokens`,
`tools[0].function.parameters`. `renamed` puts the caller's own names in their place, in `param` and
in the message. What a decoder says itself is in the caller's names already, and no rule here
touches one of those.
"""

import re
from typing import TypeAlias

from gateway.errors import ApiError

Names: TypeAlias = tuple[tuple[re.Pattern[str], str], ...]
"""A chat's field, and what stands for it."""


def _names(**rules: str) -> Names:
    return tuple((re.compile(_FIELDS[field]), name) for field, name in rules.items())


_FIELDS = {
    # A message's place is not the caller's: an item may be a part of one, or several.
    "messages": r"\bmessages(?:\[\d+\](?:\.\w+)*)?",
    "max_tokens": r"\bmax_tokens\b",
    "stop": r"\bstop\b(?=\[|$)",
    "function": r"\btools\[(\d+)\]\.function\.(?!parameters)",
    "parameters": r"\btools\[(\d+)\]\.function\.parameters",
    "chosen": r"\btool_choice\.function\.",
    "allowed": r"\btool_choice\.allowed_tools\.",
    "form": r"\bresponse_format(?:\.json_schema(?:\.schema)?)?",
}
MESSAGES_NAMES = _names(
    function=r"tools[\1].",
    parameters=r"tools[\1].input_schema",
    chosen="tool_choice.",
    form="output_config.format.schema",
    stop="stop_sequences",
)
RESPONSES_NAMES = _names(
    messages="input",
    max_tokens="max_output_tokens",
    function=r"tools[\1].",
    parameters=r"tools[\1].parameters",
    chosen="tool_choice.",
    allowed="tool_choice.",
    form="text.format.schema",
)
OLLAMA_CHAT_NAMES = _names(max_tokens="options.num_predict", stop="options.stop", form="format")
OLLAMA_GENERATE_NAMES = (*OLLAMA_CHAT_NAMES, *_names(messages="prompt"))


def renamed(error: ApiError, names: Names) -> ApiError:
    """The error in the caller's names; as it is where its field is none of them."""
    param = _replaced(error.param or "", names)
    if param == (error.param or "") and not any(p.match(param) for p, _ in names):
        return error
    message = _replaced(error.message, names)
    return ApiError(error.kind, message, param or None, error.retry_after_s, error.is_final)


def _replaced(text: str, names: Names) -> str:
    for pattern, name in names:
        text = pattern.sub(name, text)
    return text
