"""The constraint that makes a model call, or keeps the calls it makes well-formed. Stage 2; pure.

Comes in: the functions on offer, the format, what else the answer may be. Goes out: a grammar for
the worker, in llguidance's Lark. A format's envelope is literal text, so the model spends no choice
on it; each function's arguments are bound to its own schema, whose references stay its own.

    forced      one call or more, and nothing else
    triggered   any text; once it holds the format's opening mark, a call must follow. Formats
                without a mark are not bound: text that begins like a call may be an answer. Nor are
                those in XML
    reasoning   before either: any text up to the closing mark
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from gateway.api.tools.formats import ToolFormat
from gateway.api.tools.json_formats import (
    HERMES_CLOSE,
    HERMES_OPEN,
    MISTRAL_ARGUMENTS_MARK,
    MISTRAL_MARK,
)
from gateway.api.tools.marked_formats import (
    DEEPSEEK_CLOSE,
    DEEPSEEK_OPEN,
    DEEPSEEK_SEPARATOR,
    FENCE,
    KIMI_ARGUMENTS,
    KIMI_CLOSE,
    KIMI_OPEN,
)
from gateway.api.tools.output_parser import ReasoningMarks, ReasoningState
from gateway.api.tools.xml_formats import XML_CLOSE, XML_OPEN, is_text

# As `json.dumps` writes, which is what models have read most. No other white space: a model that
# may write spaces anywhere may write nothing else.
# No escaped code points: a name that is escaped would not be known for one of the schema's.
SPACING = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": 'nrbtf\\"',
}

_ANY_TEXT = r"/(.|\n)*/"

# What stands before a function's name, between it and its arguments, behind these, and between two
# calls. Kimi's models count the calls.
_MARKED = {
    "kimi": (f"{KIMI_OPEN}functions.", ":", KIMI_CLOSE, ""),
    "deepseek": (DEEPSEEK_OPEN, DEEPSEEK_SEPARATOR, DEEPSEEK_CLOSE, ""),
    "deepseek_v3": (
        f"{DEEPSEEK_OPEN}function{DEEPSEEK_SEPARATOR}",
        f"\n{FENCE}json\n",
        f"\n{FENCE}{DEEPSEEK_CLOSE}",
        "\n",
    ),
}

Schema: TypeAlias = Mapping[str, Any]


class NoEnvelope(ValueError):
    """This function cannot be called in this format; the text says why."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Functions with their arguments' schemas. `is_single`: at most one call."""

    functions: Sequence[tuple[str, Schema]]
    is_single: bool = False


@dataclass(slots=True)
class Lark:
    """A grammar being written. `special`: ids of the texts that are control tokens here."""

    special: Mapping[str, int]
    rules: list[str] = field(default_factory=list)

    def rule(self, body: str, options: str = "") -> str:
        """A new rule; its name."""
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def text(self, text: str) -> str:
        """A literal; control tokens in it as such."""
        for mark, token_id in self.special.items():
            if mark in text:
                before, _, after = text.partition(mark)
                return f"{self.text(before)} <[{token_id}]> {self.text(after)}".strip()
        return json.dumps(text, ensure_ascii=False) if text else ""

    def json(self, schema: Any) -> str:
        """A value that obeys a schema, an object or `true`."""
        body = schema if isinstance(schema, Mapping) else {}
        return self.rule("%json " + json.dumps({"x-guidance": SPACING, **body}))

    def regex(self, pattern: str) -> str:
        """A text that a regular expression matches; `/` ends one here."""
        escaped = _SLASHES.sub(_escaped_slash, pattern)
        return self.rule(f"/{escaped}/")

    def any_text_to(self, mark: str) -> str:
        """Any text, up to a mark and with it."""
        if mark in self.special:
            return self.rule(f"{_ANY_TEXT} <[{self.special[mark]}]>")
        regex = "".join(f"\\{char}" if char in _REGEX_CHARS else char for char in mark)
        regex = regex.replace("\n", r"\n")
        return self.rule(rf"/(.|\n)*{regex}/", "[lazy]")

    def grammar(self, start: str) -> str:
        """All rules, with this one first."""
        return "\n".join(["%llguidance {}", f"start: {start}", *self.rules, ""])


_SLASHES = re.compile(r"\\[\s\S]|/|\n")


def _escaped_slash(found: re.Match[str]) -> str:
    """A backslash and what it escapes stay as they are."""
    return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(found.group(), found.group())


_REGEX_CHARS = frozenset("\\/.^$|?*+()[]{}-")


def any_of(bodies: Iterable[str]) -> str:
    """One of these."""
    return "(" + " | ".join(bodies) + ")"


def forced_calls(lark: Lark, fmt: ToolFormat, offer: Offer) -> str:
    """One call or more. Raises NoEnvelope."""
    return _open(lark, fmt) + _after_open(lark, fmt, offer)


def triggered_calls(lark: Lark, fmt: ToolFormat, offer: Offer) -> str | None:
    """Any text with calls in it, None where the format has no mark. Raises NoEnvelope."""
    mark = HERMES_OPEN if fmt.name == "hermes" else fmt.open
    if not mark or fmt.needs_schemas:
        return None
    head = lark.any_text_to(mark)
    if fmt.name == "hermes":
        calls = f"{head} {_hermes_call(lark, offer)}"
    elif fmt.name == "mistral_args":
        calls = f"{head} {_args_call(lark, offer)}"
    else:
        return f"({head} {_after_open(lark, fmt, offer)} | {_ANY_TEXT})"
    return f"({calls} | {_ANY_TEXT})" if offer.is_single else f"({calls})* {_ANY_TEXT}"


def reasoned(lark: Lark, body: str, marks: ReasoningMarks | None, state: ReasoningState) -> str:
    """`body`, with the reasoning that goes before it where a model may reason."""
    if marks is None or state == "done":
        return body
    thought = f"{lark.any_text_to(marks.close)} /\\n{{0,2}}/"
    if state == "possible":
        thought = f"({lark.text(marks.open)} {thought})?"
    return f"{thought} {body}"


def _open(lark: Lark, fmt: ToolFormat) -> str:
    mark = HERMES_OPEN if fmt.name == "hermes" else fmt.open
    return f"{lark.text(mark)} " if mark else ""


def _after_open(lark: Lark, fmt: ToolFormat, offer: Offer) -> str:
    if fmt.name == "hermes":
        call = _hermes_call(lark, offer)
        return _repeated(call, lark.text("\n" + HERMES_OPEN), offer)
    if fmt.name == "llama3_json":
        return _repeated(_object_call(lark, offer, "parameters"), lark.text("; "), offer)
    if fmt.name == "mistral":
        calls = _repeated(_object_call(lark, offer, "arguments"), lark.text(", "), offer)
        return f'"[" {calls} "]"'
    if fmt.name == "mistral_args":
        return _repeated(_args_call(lark, offer), lark.text(MISTRAL_MARK), offer)
    if fmt.name in _MARKED:
        calls = _repeated(_marked_call(lark, fmt, offer), lark.text(_MARKED[fmt.name][3]), offer)
        return f"{calls} {lark.text(fmt.close)}"
    if fmt.needs_schemas:
        call = tagged_call(lark, fmt.name, offer.functions)
        return _repeated(call, lark.text("\n" + XML_OPEN), offer)
    calls = _repeated(_python_call(lark, offer), lark.text(", "), offer)
    return f'"[" {calls} "]" {lark.text(fmt.close)}'.rstrip()


def _repeated(call: str, separator: str, offer: Offer) -> str:
    return call if offer.is_single else f"{call} ({separator} {call})*"


def _object_call(lark: Lark, offer: Offer, key: str, before: str = "", after: str = "") -> str:
    calls = []
    for name, schema in offer.functions:
        head = lark.text(f'{before}{{"name": {json.dumps(name)}, "{key}": ')
        calls.append(f"{head} {lark.json(schema)} {lark.text('}' + after)}")
    return lark.rule(any_of(calls))


def _hermes_call(lark: Lark, offer: Offer) -> str:
    return _object_call(lark, offer, "arguments", "\n", "\n" + HERMES_CLOSE)


def _marked_call(lark: Lark, fmt: ToolFormat, offer: Offer) -> str:
    before, between, after, _ = _MARKED[fmt.name]
    more = f"/[0-9]+/ {lark.text(KIMI_ARGUMENTS)}" if fmt.name == "kimi" else ""
    calls = (
        f"{lark.text(before + name + between)} {more} {lark.json(schema)} {lark.text(after)}"
        for name, schema in offer.functions
    )
    return lark.rule(any_of(calls))


def _args_call(lark: Lark, offer: Offer) -> str:
    calls = (
        f"{lark.text(name + MISTRAL_ARGUMENTS_MARK)} {lark.json(schema)}"
        for name, schema in offer.functions
    )
    return lark.rule(any_of(calls))


def _python_call(lark: Lark, offer: Offer) -> str:
    calls = (
        f'{lark.text(name + "(")} {_python_arguments(lark, name, schema)} ")"'
        for name, schema in offer.functions
    )
    return lark.rule(any_of(calls))


def _python_arguments(lark: Lark, name: str, schema: Schema) -> str:
    """Required ones first, then some of the others, each value as JSON: it is Python but for three
    words, which the parser reads in either spelling."""
    properties, shared, required = _listed(name, schema)
    for key in (*required, *properties):
        if not key or any(char in "=(),[]{}'\" \t\r\n" for char in key):
            raise NoEnvelope(
                f"parameter {key!r} of {name!r} is not a valid Python keyword argument: rename it"
            )

    def argument(key: str) -> str:
        body = _with_shared(name, key, properties.get(key, True), shared)
        return f"{lark.text(key + '=')} {lark.json(body)}"

    rest = ""
    firsts: list[str] = []
    for key in reversed([key for key in properties if key not in required]):
        pair = lark.rule(argument(key))
        firsts.append(f"{pair} {rest}".strip())
        rest = lark.rule(f'(", " {pair})? {rest}')
    if required:
        return ' ", " '.join(argument(key) for key in required) + f" {rest}"
    return f"{any_of(firsts)}?" if firsts else ""


def _listed(
    name: str, schema: Schema
) -> tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, None]]:
    """The properties of an object, its definitions, and what is required. Raises NoEnvelope."""
    if "$ref" in schema or any(key in schema for key in ("allOf", "anyOf", "oneOf")):
        raise NoEnvelope(f"the parameters of {name!r} must be listed under 'properties'")
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return schema.get("properties", {}), shared, dict.fromkeys(schema.get("required", ()))


def _with_shared(name: str, key: str, value: Any, shared: Mapping[str, Any]) -> Any:
    """A property by itself. Raises NoEnvelope."""
    if isinstance(value, Mapping) and _refers_elsewhere(value):
        raise NoEnvelope(f"parameter {key!r} of {name!r}: only references into $defs are supported")
    return {**value, **shared} if isinstance(value, Mapping) else value


def tagged_call(lark: Lark, name: str, functions: Sequence[tuple[str, Schema]]) -> str:
    """A call whose arguments stand each between tags: required ones first, then some of the others
    in the schema's order. A text is free but for an `enum`; any other value is JSON that obeys its
    schema. Raises NoEnvelope."""
    is_qwen = name == "qwen_xml"
    calls = []
    for function, schema in functions:
        head = f"\n<function={function}>\n" if is_qwen else f"{function}\n"
        tail = f"</function>\n{XML_CLOSE}" if is_qwen else XML_CLOSE
        arguments = _tagged_arguments(lark, is_qwen, function, schema)
        calls.append(f"{lark.text(head)} {arguments} {lark.text(tail)}")
    return lark.rule(any_of(calls))


def _tagged_arguments(lark: Lark, is_qwen: bool, name: str, schema: Schema) -> str:
    properties, shared, required = _listed(name, schema)
    parts = []
    for key in (*required, *(key for key in properties if key not in required)):
        if not key or any(char in "<>\n" for char in key):
            raise NoEnvelope(f"parameter {key!r} of {name!r} cannot stand in a tag: rename it")
        value = _tagged_value(lark, is_qwen, name, key, properties.get(key, True), shared)
        head = f"<parameter={key}>\n" if is_qwen else f"<arg_key>{key}</arg_key>\n<arg_value>"
        part = lark.rule(f"{lark.text(head)} {value}")
        parts.append(part if key in required else f"{part}?")
    return " ".join(parts)


def _tagged_value(
    lark: Lark, is_qwen: bool, name: str, key: str, schema: Any, shared: Mapping[str, Any]
) -> str:
    """A value and the end of its tag."""
    end = "\n</parameter>\n" if is_qwen else "</arg_value>\n"
    if isinstance(schema, Mapping) and is_text(schema):
        if schema.get("enum"):
            return f"{any_of(lark.text(value) for value in schema['enum'])} {lark.text(end)}"
        return lark.any_text_to(end)
    return f"{lark.json(_with_shared(name, key, schema, shared))} {lark.text(end)}"


def _refers_elsewhere(value: Any) -> bool:
    if isinstance(value, Mapping):
        reference = value.get("$ref")
        if isinstance(reference, str) and not reference.startswith(("#/$defs/", "#/definitions/")):
            return True
        return any(_refers_elsewhere(inner) for inner in value.values())
    return isinstance(value, list) and any(_refers_elsewhere(inner) for inner in value)
