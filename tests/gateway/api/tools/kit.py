"""What models write, for the tests of parsers: calls in every format, cut in every way."""

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from gateway.api.tools.cursor import Cursor
from gateway.api.tools.json_formats import HermesParser, LlamaJsonParser, MistralParser
from gateway.api.tools.marked_formats import DEEPSEEK_CLOSE as CLOSE
from gateway.api.tools.marked_formats import DEEPSEEK_END as END
from gateway.api.tools.marked_formats import DEEPSEEK_OPEN as OPEN
from gateway.api.tools.marked_formats import DEEPSEEK_SECTION as SECTION
from gateway.api.tools.marked_formats import DEEPSEEK_SEPARATOR as SEPARATOR
from gateway.api.tools.marked_formats import DeepSeekParser, KimiParser
from gateway.api.tools.output_parser import (
    ArgumentsDelta,
    ContentDelta,
    Event,
    OutputParser,
    ToolCallEnd,
    ToolCallStart,
    joined,
)
from gateway.api.tools.pythonic import PythonicParser

NAMES = ("f", "g.h", "look_up-2")
PARSERS: dict[str, type[Cursor]] = {
    "hermes": HermesParser,
    "llama3_json": LlamaJsonParser,
    "mistral": MistralParser,
    "mistral_args": MistralParser,
    "pythonic": PythonicParser,
    "kimi": KimiParser,
    "deepseek": DeepSeekParser,
    "deepseek_v3": DeepSeekParser,
}
Call = tuple[str, dict[str, Any]]


def new_parser(fmt: str, max_calls: int | None = None) -> Cursor:
    ids = iter(range(10_000))
    return PARSERS[fmt](NAMES, lambda: f"id{next(ids)}", max_calls)


def run(parser: OutputParser, pieces: Sequence[str]) -> list[Event]:
    events: list[Event] = []
    for piece in pieces:
        events += parser.feed(piece)
    return joined([*events, *parser.flush()])


def parse(fmt: str, text: str) -> list[Event]:
    return run(new_parser(fmt), [text])


def cut(text: str, cuts: Sequence[int]) -> list[str]:
    """Pieces of the text, cut at these places; empty ones too."""
    places = [0, *sorted(min(place, len(text)) for place in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(places)]


def content(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, ContentDelta))


def argument_texts(events: Sequence[Event]) -> list[str]:
    num_calls = sum(isinstance(event, ToolCallStart) for event in events)
    texts = [""] * num_calls
    for event in events:
        if isinstance(event, ArgumentsDelta):
            texts[event.index] += event.text
    return texts


def calls(events: Sequence[Event]) -> list[Call]:
    names = [event.name for event in events if isinstance(event, ToolCallStart)]
    arguments = [json.loads(text) for text in argument_texts(events)]
    return list(zip(names, arguments, strict=True))


def are_whole(events: Sequence[Event]) -> list[bool]:
    return [event.whole for event in events if isinstance(event, ToolCallEnd)]


def check_order(events: Sequence[Event]) -> None:
    """A call starts, has its arguments and ends before anything else; numbered from 0."""
    open_index: int | None = None
    num_calls = 0
    for event in events:
        match event:
            case ToolCallStart():
                assert open_index is None
                assert event.index == num_calls
                open_index, num_calls = num_calls, num_calls + 1
            case ArgumentsDelta():
                assert event.index == open_index
                assert event.text
            case ToolCallEnd():
                assert event.index == open_index
                open_index = None
            case ContentDelta():
                assert open_index is None
                assert event.text
            case _:
                assert open_index is None
    assert open_index is None


# What each format's models write, as their templates do.


def hermes_text(said: str, made: Sequence[Call]) -> str:
    blocks = [
        f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {json.dumps(arguments)}}}\n'
        "</tool_call>"
        for name, arguments in made
    ]
    return "\n".join([said, *blocks] if said else blocks)


def llama_text(said: str, made: Sequence[Call]) -> str:
    objects = [json.dumps({"name": name, "parameters": value}) for name, value in made]
    return said + ("<|python_tag|>" if said and made else "") + "; ".join(objects)


def mistral_text(said: str, made: Sequence[Call]) -> str:
    array = json.dumps([{"name": name, "arguments": value} for name, value in made])
    return f"{said}[TOOL_CALLS]{array}" if made else said


def mistral_args_text(said: str, made: Sequence[Call]) -> str:
    blocks = (f"[TOOL_CALLS]{name}[ARGS]{json.dumps(value)}" for name, value in made)
    return said + "".join(blocks)


def pythonic_text(said: str, made: Sequence[Call]) -> str:
    written = ", ".join(
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in made
    )
    if not made:
        return said
    return f"{said}<|python_start|>[{written}]<|python_end|>" if said else f"[{written}]"


def kimi_text(said: str, made: Sequence[Call]) -> str:
    blocks = (
        f"<|tool_call_begin|>functions.{name}:{n}<|tool_call_argument_begin|>{json.dumps(value)}"
        "<|tool_call_end|>"
        for n, (name, value) in enumerate(made)
    )
    section = f"<|tool_calls_section_begin|>{''.join(blocks)}<|tool_calls_section_end|>"
    return said + (section if made else "")


def deepseek_text(said: str, made: Sequence[Call]) -> str:
    blocks = (f"{OPEN}{name}{SEPARATOR}{json.dumps(value)}{CLOSE}" for name, value in made)
    return said + (f"{SECTION}{''.join(blocks)}{END}" if made else "")


def deepseek_v3_text(said: str, made: Sequence[Call]) -> str:
    blocks = (
        f"{OPEN}function{SEPARATOR}{name}\n```json\n{json.dumps(value)}\n```{CLOSE}"
        for name, value in made
    )
    return said + (SECTION + "\n".join(blocks) + END if made else "")


def xml_text(fmt: str, said: str, made: Sequence[Call]) -> str:
    """As templates write them: a text as it is, all else as JSON."""
    blocks = []
    for name, arguments in made:
        values = {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in arguments.items()
        }
        if fmt == "qwen_xml":
            inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
            blocks.append(f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>")
        else:
            inner = "".join(
                f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in values.items()
            )
            blocks.append(f"<tool_call>{name}\n{inner}</tool_call>")
    return "\n".join([said, *blocks] if said else blocks)


WRITERS: dict[str, Callable[[str, Sequence[Call]], str]] = {
    "hermes": hermes_text,
    "llama3_json": llama_text,
    "mistral": mistral_text,
    "mistral_args": mistral_args_text,
    "pythonic": pythonic_text,
    "kimi": kimi_text,
    "deepseek": deepseek_text,
    "deepseek_v3": deepseek_v3_text,
}

# Strategies.

FORMAT = st.sampled_from(sorted(PARSERS))
CUTS = st.lists(st.integers(0, 400), max_size=40)
_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12)
)
JSON = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
KEYWORD = st.text("abcxyz_é", min_size=1, max_size=5)
MADE = st.lists(
    st.tuples(st.sampled_from(NAMES), st.dictionaries(KEYWORD, JSON, max_size=3)), max_size=3
)
# Words that begin no call in any format.
SAID = st.text("abc é.,\n", max_size=20).map(str.strip)
_FRAGMENTS = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "<tool", "_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
        "<|python_tag|>", "<|python_start|>", "<|python_end|>", "<|tool_call_start|>",
        '{"name": "f", "arguments": {', '{"name": "f"', '"arguments"', '"parameters": ', '"name"',
        '{"a": 1}', "{}", "f(a=1", "f(", "g.h", "f", "a=", "(", ")", "{", "}", "[", "]", ":", ",",
        "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.f:0", "<|tool_call_end|>",
        "<|tool_call_argument_begin|>", "<|tool_calls_section_end|>", SECTION, OPEN, SEPARATOR,
        CLOSE, END, "function", "```json\n", "```", ";", "=",
        '"', "'", '"""', "'''", "\\", "\\u", "d83d", "\\ud83d\\ude00", "\n", " ",
        " " * 300, "1", "-", "1e5", "true", "None", "nul", "é", "\x01", "\x00", "😀",
    ]
)  # fmt: skip
NOISE = st.lists(_FRAGMENTS, max_size=14).map("".join)


@st.composite
def spoiled(draw: st.DrawFn) -> tuple[str, str]:
    """(format, text): well-formed calls with something taken out, put in, or cut off."""
    fmt = draw(FORMAT)
    text = WRITERS[fmt](draw(SAID), draw(MADE))
    start = draw(st.integers(0, len(text)))
    end = draw(st.integers(start, min(len(text), start + 8)))
    text = text[:start] + draw(_FRAGMENTS | st.just("")) + text[end:]
    return fmt, text[: draw(st.integers(0, len(text)))] if draw(st.booleans()) else text
