"""The formats by name, and which of them a model's chat template was written for. Stage 2.

Comes in: a chat template's source, or the catalog's word for it. Goes out: a `ToolFormat`: the
parser, the marks it looks for, what ids its templates take. The envelopes are in envelope.py, so
that formats with one parser can differ in what a model is made to write.

Detection reads what a template would write, not the model's name: fine-tunes keep the template and
change the name. A template that writes calls in a form not known here has no format, and requests
with tools are refused for it; better than calls that arrive as text.
"""

import re
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gateway.api.tools import pythonic
from gateway.api.tools.cursor import Cursor
from gateway.api.tools.json_formats import (
    HERMES_CLOSE,
    HERMES_OPEN,
    LLAMA_MARK,
    MISTRAL_ARGUMENTS_MARK,
    MISTRAL_ID_MARK,
    MISTRAL_MARK,
    HermesParser,
    LlamaJsonParser,
    MistralParser,
)
from gateway.api.tools.marked_formats import (
    DEEPSEEK_CLOSE,
    DEEPSEEK_END,
    DEEPSEEK_OPEN,
    DEEPSEEK_SECTION,
    DEEPSEEK_SEPARATOR,
    KIMI_ARGUMENTS,
    KIMI_CLOSE,
    KIMI_END,
    KIMI_OPEN,
    KIMI_SECTION,
    DeepSeekParser,
    KimiParser,
)
from gateway.api.tools.xml_formats import XML_CLOSE, XML_OPEN, GlmXmlParser, QwenXmlParser

FormatName: TypeAlias = Literal[
    "hermes",
    "llama3_json",
    "mistral",
    "mistral_args",
    "pythonic",
    "qwen_xml",
    "glm_xml",
    "kimi",
    "deepseek",
    "deepseek_v3",
]

_ALPHANUMERIC = string.ascii_letters + string.digits
_MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}\Z")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`marks`: texts that may be control tokens and have to reach the parser as text.

    `open`, `close`: what a model is made to write around its calls; "" where there is nothing.
    `needs_schemas`: what a value is depends on the function's schema.
    """

    name: FormatName
    parser: type[Cursor]
    marks: tuple[str, ...]
    open: str = ""
    close: str = ""
    has_short_ids: bool = False
    needs_schemas: bool = False

    def new_id(self) -> str:
        """An id no client has seen before, of a kind this format's templates take back."""
        if self.has_short_ids:
            return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    def takes_id(self, call_id: str) -> bool:
        """Mistral's templates raise for ids of another make than theirs."""
        return not self.has_short_ids or _MISTRAL_ID.match(call_id) is not None


_HERMES = ToolFormat("hermes", HermesParser, (HERMES_OPEN, HERMES_CLOSE))
_LLAMA = ToolFormat("llama3_json", LlamaJsonParser, (LLAMA_MARK,))
_MISTRAL_MARKS = (
    MISTRAL_MARK,
    MISTRAL_ID_MARK,
    MISTRAL_ARGUMENTS_MARK,
)
_MISTRAL = ToolFormat(
    "mistral",
    MistralParser,
    _MISTRAL_MARKS,
    open=MISTRAL_MARK,
    has_short_ids=True,
)
_MISTRAL_ARGS = ToolFormat(
    "mistral_args",
    MistralParser,
    _MISTRAL_MARKS,
    open=MISTRAL_MARK,
    has_short_ids=True,
)


def _pythonic(open_mark: str = "", close_mark: str = "") -> ToolFormat:
    marks = (*pythonic.MARKS, *pythonic.END_MARKS)
    return ToolFormat("pythonic", pythonic.PythonicParser, marks, open_mark, close_mark)


_PYTHONIC = _pythonic()
_XML_MARKS = (XML_OPEN, XML_CLOSE)
_QWEN_XML = ToolFormat("qwen_xml", QwenXmlParser, _XML_MARKS, XML_OPEN, needs_schemas=True)
_GLM_XML = ToolFormat(
    "glm_xml",
    GlmXmlParser,
    (*_XML_MARKS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    XML_OPEN,
    needs_schemas=True,
)
_KIMI = ToolFormat(
    "kimi",
    KimiParser,
    (KIMI_SECTION, KIMI_OPEN, KIMI_ARGUMENTS, KIMI_CLOSE, KIMI_END),
    KIMI_SECTION,
    KIMI_END,
)
_DEEPSEEK_MARKS = (
    DEEPSEEK_SECTION,
    DEEPSEEK_OPEN,
    DEEPSEEK_SEPARATOR,
    DEEPSEEK_CLOSE,
    DEEPSEEK_END,
)
_DEEPSEEK = ToolFormat("deepseek", DeepSeekParser, _DEEPSEEK_MARKS, DEEPSEEK_SECTION, DEEPSEEK_END)
_DEEPSEEK_V3 = ToolFormat(
    "deepseek_v3", DeepSeekParser, _DEEPSEEK_MARKS, DEEPSEEK_SECTION, DEEPSEEK_END
)
FORMATS: dict[FormatName, ToolFormat] = {
    "hermes": _HERMES,
    "llama3_json": _LLAMA,
    "mistral": _MISTRAL,
    "mistral_args": _MISTRAL_ARGS,
    "pythonic": _PYTHONIC,
    "qwen_xml": _QWEN_XML,
    "glm_xml": _GLM_XML,
    "kimi": _KIMI,
    "deepseek": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK_V3,
}

# What templates write, most telling first. The pythonic marks come with the end marks they pair.
_SIGNS: tuple[tuple[Callable[[str], bool], ToolFormat], ...] = (
    (lambda t: "[TOOL_CALLS]" in t and "[ARGS]" in t, _MISTRAL_ARGS),
    (lambda t: "[TOOL_CALLS]" in t, _MISTRAL),
    (lambda t: DEEPSEEK_OPEN in t and "```json" in t, _DEEPSEEK_V3),
    (lambda t: DEEPSEEK_OPEN in t, _DEEPSEEK),
    (lambda t: KIMI_OPEN in t and KIMI_ARGUMENTS in t, _KIMI),
    # These write XML inside the mark of the next.
    (lambda t: "<tool_call>" in t and "<function=" in t, _QWEN_XML),
    (lambda t: "<tool_call>" in t and "<arg_key>" in t, _GLM_XML),
    (lambda t: "<tool_call>" in t and "<function=" not in t and "<arg_key>" not in t, _HERMES),
    (lambda t: "<|tool_call_start|>[" in t, _pythonic("<|tool_call_start|>", "<|tool_call_end|>")),
    (lambda t: "<|python_start|>" in t, _pythonic("<|python_start|>", "<|python_end|>")),
    (lambda t: "params_name1=params_value1" in t, _PYTHONIC),
    (lambda t: "ipython" in t and '"parameters": ' in t, _LLAMA),
)


def detect(template: str) -> ToolFormat | None:
    """The format a chat template's source was written for, None where it is none of these."""
    return next((found for shows, found in _SIGNS if shows(template)), None)
