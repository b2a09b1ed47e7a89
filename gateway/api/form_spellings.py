"""The form of an answer as vLLM's clients spell it, made one `response_format`. Part of stage 2.

    structured_outputs    {"json": ...}, {"regex": ...}, {"choice": [...]}, {"grammar": ...} or
                          {"json_object": true}: exactly one of them
    guided_json, guided_regex, guided_choice, guided_grammar    older names of the same

A choice among texts is a regular expression. A schema may be an object or its JSON as text.
Grammars are llguidance's Lark. Comes in: these fields. Goes out: a `ResponseFormat`, or an ApiError
that names the field.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

import msgspec

from gateway.api.bodies import decode_body, invalid
from gateway.api.tool_types import (
    MAX_GRAMMAR_CHARS,
    MAX_PATTERN_CHARS,
    GrammarFormat,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    RegexFormat,
    ResponseFormat,
)

MAX_ALTERNATIVES = 1024
_NOTHING = msgspec.Raw(b"null")
# What has a meaning in a regular expression. `re.escape` escapes more than llguidance's takes.
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$]")

Pattern: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_PATTERN_CHARS)]
Grammar: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_GRAMMAR_CHARS)]
Alternatives: TypeAlias = Annotated[
    list[Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_PATTERN_CHARS)]],
    msgspec.Meta(min_length=1, max_length=MAX_ALTERNATIVES),
]


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`structured_outputs`. The last four change how JSON is spaced, or who enforces it."""

    json: msgspec.Raw = _NOTHING
    regex: Pattern | None = None
    choice: Alternatives | None = None
    grammar: Grammar | None = None
    json_object: bool | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class GuidedFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The older names; a part of the bodies."""

    structured_outputs: StructuredOutputs | None = None
    guided_json: msgspec.Raw = _NOTHING
    guided_regex: Pattern | None = None
    guided_choice: Alternatives | None = None
    guided_grammar: Grammar | None = None


def form_of(body: GuidedFields, response_format: ResponseFormat | None) -> ResponseFormat | None:
    """What the answer has to obey; None: nothing was said. Raises ApiError where several fields say
    it."""
    found: dict[str, ResponseFormat] = {}
    if response_format is not None:
        found["response_format"] = response_format
    asked = body.structured_outputs
    if asked is not None:
        prefix = "structured_outputs."
        _add(found, prefix, asked.json, asked.regex, asked.choice, asked.grammar)
        if asked.json_object:
            found[prefix + "json_object"] = JsonObjectFormat()
    _add(
        found,
        "guided_",
        body.guided_json,
        body.guided_regex,
        body.guided_choice,
        body.guided_grammar,
    )
    if len(found) > 1:
        first, second = list(found)[:2]
        raise invalid(second, f"{first} and {second} contradict each other: send only one of them")
    return next(iter(found.values()), None)


def _add(
    found: dict[str, ResponseFormat],
    prefix: str,
    json: msgspec.Raw,
    regex: str | None,
    choice: Sequence[str] | None,
    grammar: str | None,
) -> None:
    if json != _NOTHING:
        schema = JsonSchema(name="answer", schema=_schema(json, prefix + "json"))
        found[prefix + "json"] = JsonSchemaFormat(json_schema=schema)
    if regex is not None:
        found[prefix + "regex"] = RegexFormat(pattern=regex)
    if choice is not None:
        found[prefix + "choice"] = RegexFormat(pattern=_any_of(choice, prefix + "choice"))
    if grammar is not None:
        found[prefix + "grammar"] = GrammarFormat(grammar=grammar)


def _schema(raw: msgspec.Raw, param: str) -> Any:
    schema = decode_body(_any_decoder, bytes(raw), param)
    if isinstance(schema, str):
        schema = decode_body(_any_decoder, schema.encode(), param)
    return schema


def _any_of(texts: Sequence[str], param: str) -> str:
    pattern = "|".join(_SPECIAL.sub(r"\\\g<0>", text) for text in texts)
    if len(pattern) > MAX_PATTERN_CHARS:
        longest = f"the maximum is {MAX_PATTERN_CHARS} characters together"
        raise invalid(param, f"{param} is too long, {longest}: send fewer or shorter texts")
    return pattern


_any_decoder = msgspec.json.Decoder()
