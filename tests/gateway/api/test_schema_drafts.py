"""Every keyword of JSON Schema, drafts 4 to 2020-12, against a validator.

What our grammar accepts is what is valid, or the schema is refused by the keyword's name. Only this
is stricter: objects with `properties` are closed, their names come in the schema's order, numbers
and texts are written in one way.
"""

import json
from dataclasses import dataclass
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from engine.errors import ConstraintBroken, ConstraintRefused
from engine.grammar.structured import Grammar, Matcher
from engine.protocol import Constraint
from gateway.api.schema_form import enforced
from gateway.api.schema_keywords import translated
from gateway.api.schema_limits import SchemaRefused, check
from tests.engine.grammar.test_structured import END, allowed, compiler, short_ids, tokenizer

VALIDATORS: dict[int, Any] = {
    4: jsonschema.Draft4Validator,
    6: jsonschema.Draft6Validator,
    7: jsonschema.Draft7Validator,
    2019: jsonschema.Draft201909Validator,
    2020: jsonschema.Draft202012Validator,
}
DRAFTS = tuple(VALIDATORS)


def of_draft(draft: int, schema: Any) -> Any:
    return {"$schema": VALIDATORS[draft].META_SCHEMA["$schema"], **schema}


def compiled(schema: Any) -> Grammar:
    """As a request's schema comes to the worker. Raises SchemaRefused, ConstraintRefused."""
    plain = translated(schema)
    check(plain, len(json.dumps(schema)))
    return compiler().compile(Constraint("json_schema", json.dumps(enforced(plain))))


def accepts(grammar: Grammar, text: str) -> bool:
    matcher = Matcher(grammar)
    for token in tokenizer().encode(text, add_special_tokens=False).ids:
        try:
            matcher.accept(token)
        except ConstraintBroken:
            return False
    return END in allowed(matcher)


@dataclass(frozen=True, slots=True)
class Case:
    """A keyword from its first draft to its last; texts of JSON that obey the schema, or do not.

    The texts are written as answers are: `, ` and `: `, names in the schema's order.
    """

    keyword: str
    schema: Any
    valid: tuple[str, ...] = ()
    invalid: tuple[str, ...] = ()
    first: int = 4
    last: int = 2020

    @property
    def drafts(self) -> tuple[int, ...]:
        return tuple(draft for draft in DRAFTS if self.first <= draft <= self.last)


NULL = {"type": "null"}
NODE = {"type": "integer", "minimum": 3}
ENFORCED = (
    Case("type", {"type": "integer"}, ("1", "-7"), ("1.5", '"1"', "null", "true")),
    Case("type", {"type": ["null", "boolean"]}, ("null", "true"), ("0", '""')),
    Case("enum", {"enum": [1.0, "a", None, [2]]}, ("1", '"a"', "null", "[2]"), ("2", "[]")),
    Case("const", {"const": 1.0}, ("1",), ("2", '"1"', "true"), 6),
    Case("const", {"const": {"a": [1, "é"]}}, ('{"a": [1, "é"]}',), ('{"a": [1]}', "1"), 6),
    Case("multipleOf", {"type": "integer", "multipleOf": 3}, ("9", "0", "-3"), ("10", "1")),
    Case("multipleOf", {"type": "number", "multipleOf": 0.25}, ("0.50", "2"), ("0.3",)),
    Case("minimum", {"type": "integer", "minimum": 3}, ("3", "10"), ("2", "-3")),
    Case("maximum", {"type": "number", "maximum": 3}, ("3", "2.5", "-10"), ("3.5", "4")),
    Case("exclusiveMinimum", {"type": "integer", "minimum": 3, "exclusiveMinimum": True},
         ("4",), ("3", "2"), 4, 4),
    Case("exclusiveMaximum", {"type": "integer", "maximum": 3, "exclusiveMaximum": True},
         ("2",), ("3", "4"), 4, 4),
    Case("exclusiveMinimum", {"type": "integer", "minimum": 3, "exclusiveMinimum": False},
         ("3",), ("2",), 4, 4),
    Case("exclusiveMinimum", {"type": "number", "exclusiveMinimum": 3}, ("3.5",), ("3", "2"), 6),
    Case("exclusiveMaximum", {"type": "number", "exclusiveMaximum": 3}, ("2.5",), ("3", "4"), 6),
    Case("minLength", {"type": "string", "minLength": 2}, ('"ab"', '"🐲é"'), ('"🐲"', '""')),
    Case("maxLength", {"type": "string", "maxLength": 1}, ('"🐲"', '""', r'"\n"'), ('"ab"', '"é̂"')),
    Case("maxLength", {"type": "string", "maxLength": 1.0}, ('"a"',), ('"ab"',), 6),
    Case("pattern", {"type": "string", "pattern": "a|b$"}, ('"xax"', '"xb"'), ('"bx"', '""')),
    Case("pattern", {"type": "string", "pattern": "^\\d\\w.$"}, ('"1b🐲"',),
         ('"1b"', r'"1b\n"')),
    Case("items", {"type": "array", "items": {"type": "integer"}}, ("[]", "[1, 2]"), ('[1, "a"]',)),
    Case("items", {"type": "array", "items": [{"type": "integer"}]}, ("[]", '[1, "a"]'), ('["a"]',),
         4, 2019),
    Case("additionalItems", {"type": "array", "items": [{}], "additionalItems": {"type": "null"}},
         ("[1]", "[1, null]"), ("[1, 1]",), 4, 2019),
    Case("additionalItems", {"type": "array", "items": {}, "additionalItems": False}, ("[1, 2]",),
         ("1",), 4, 2019),
    Case("prefixItems", {"type": "array", "prefixItems": [{"type": "null"}], "items": False},
         ("[]", "[null]"), ("[1]", "[null, null]"), 2020),
    Case("minItems", {"type": "array", "minItems": 2}, ("[1, 2]",), ("[1]", "[]")),
    Case("maxItems", {"type": "array", "maxItems": 1}, ("[]", "[1]"), ("[1, 2]",)),
    Case("uniqueItems", {"type": "array", "uniqueItems": False}, ("[1, 1]",), ("1",)),
    Case("properties", {"type": "object", "properties": {"a": {"type": "null"}, "b": {}}},
         ("{}", '{"a": null}', '{"a": null, "b": 1}'), ('{"a": 1}', '{"b": 1, "a": 1}')),
    Case("required", {"type": "object", "required": ["a", "b"]}, ('{"a": 1, "b": 2}',),
         ('{"a": 1}', "{}")),
    Case("additionalProperties",
         {"type": "object", "properties": {"a": {}}, "additionalProperties": False},
         ("{}", '{"a": 1}'), ('{"b": 1}',)),
    Case("additionalProperties",
         {"type": "object", "properties": {"a": NULL}, "additionalProperties": {"type": "integer"}},
         ('{"a": null, "b": 1}',), ('{"b": null}', '{"a": 1}', r'{"\u0061": 1}')),
    Case("patternProperties",
         {"type": "object", "patternProperties": {"é$": {"type": "integer"}}},
         ('{"é": 1, "b": null}',), ('{"é": null}', r'{"\u00e9": null}')),
    Case("minProperties", {"type": "object", "minProperties": 1}, ('{"a": 1}',), ("{}",)),
    Case("minProperties", {"type": "object", "required": ["a"], "minProperties": 2},
         ('{"a": 1, "b": 1}',), ('{"a": 1}', '{"a": 1, "a": 2}')),
    Case("maxProperties", {"type": "object", "maxProperties": 1}, ("{}", '{"a": 1}'),
         ('{"a": 1, "b": 1}',)),
    Case("allOf", {"allOf": [{"type": "integer"}, {"minimum": 3}]}, ("3",), ("2", "3.5")),
    Case("anyOf", {"anyOf": [{"type": "null"}, NODE]}, ("null", "3"), ("2", '"a"')),
    Case("oneOf", {"oneOf": [{"type": "null"}, NODE]}, ("null", "3"), ("2", '"a"')),
    Case("$ref", {"$ref": "#/definitions/a", "definitions": {"a": NODE}}, ("3",), ("2", '"a"')),
    Case("$ref", {"$ref": "#/$defs/a", "$defs": {"a": NODE}}, ("3",), ("2", '"a"'), 2019),
    Case("$ref",
         {"items": {"$ref": "#/definitions/a", "maximum": 5}, "definitions": {"a": NODE}},
         ("[3]", "[9]"), ("[2]",), 4, 7),
    Case("$ref",
         {"items": {"$ref": "#/definitions/a", "maximum": 5}, "definitions": {"a": NODE}},
         ("[3]", "[5]"), ("[2]", "[9]"), 2019),
    Case("$recursiveRef", {"type": "array", "items": {"$recursiveRef": "#"}}, ("[]", "[[[]]]"),
         ("[1]", "1"), 2019, 2019),
    Case("unevaluatedProperties",
         {"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False},
         ('{"a": 1}',), ('{"b": 1}',), 2019),
    Case("unevaluatedItems", {"type": "array", "prefixItems": [{}], "unevaluatedItems": False},
         ("[1]",), ("[1, 2]",), 2020),
    Case("then", {"type": "integer", "then": {"minimum": 5}}, ("3",), ('"a"',), 7),
    Case("minContains", {"type": "array", "minContains": 2}, ("[]",), ("1",), 2019),
    Case("contains", {"type": "array", "contains": False, "minContains": 0}, ("[]",), ("1",), 2019),
    Case("if", {"type": "integer", "if": {"minimum": 5}}, ("3",), ('"a"',), 7),
    Case("propertyNames", {"type": "object", "propertyNames": True}, ('{"a": 1}',), ("1",), 6),
    Case("dependencies", {"type": "object", "dependencies": {"a": []}}, ("{}",), ("1",), 6, 7),
)  # fmt: skip
ANNOTATIONS: dict[str, Any] = {
    "title": "t", "description": "d", "default": 1, "examples": [1], "$comment": "c",
    "readOnly": True, "writeOnly": True, "deprecated": True, "contentEncoding": "base64",
    "contentMediaType": "image/png", "contentSchema": {"type": "null"}, "format": "color",
    "$id": "https://example.com/s", "$anchor": "a", "$dynamicAnchor": "d",
    "x-guidance": {"lenient": True}, "$vocabulary": {}, "$recursiveAnchor": True,
    "nonsense": {"not": {}}, "nullable": True,
}  # fmt: skip
REFUSED = (
    Case("not", {"not": {"type": "null"}}),
    Case("if", {"if": {"type": "integer"}, "then": {"minimum": 3}}, first=7),
    Case("if", {"if": {"type": "integer"}, "else": {"type": "null"}}, first=7),
    Case("contains", {"type": "array", "contains": NODE}, first=6),
    Case("contains", {"contains": NODE, "minContains": 0, "maxContains": 2}, first=2019),
    Case("uniqueItems", {"type": "array", "uniqueItems": True}),
    Case("propertyNames", {"type": "object", "propertyNames": {"maxLength": 3}}, first=6),
    Case("dependencies", {"type": "object", "dependencies": {"a": ["b"]}}, last=7),
    Case("dependencies", {"dependencies": {"a": {"required": ["b"]}}}, last=7),
    Case("dependentRequired", {"dependentRequired": {"a": ["b"]}}, first=2019),
    Case("dependentSchemas", {"dependentSchemas": {"a": {"required": ["b"]}}}, first=2019),
    Case("unevaluatedProperties", {"allOf": [{}], "unevaluatedProperties": False}, first=2019),
    Case("unevaluatedItems", {"anyOf": [{}], "unevaluatedItems": False}, first=2019),
    Case("$dynamicRef", {"$dynamicRef": "#d", "$dynamicAnchor": "d"}, first=2020),
    Case("$recursiveRef", {"$recursiveRef": "#", "$ref": "#"}, first=2019, last=2019),
    Case("minProperties", {"type": "object", "patternProperties": {"^a": {}}, "minProperties": 2}),
    Case("minProperties", {"type": "object", "required": ["a"], "minProperties": 3}),
    Case("const", {"const": {"a": ["b\x01"]}}, first=6),
    Case("enum", {"enum": ["a\x7f"]}),
    Case("pattern", {"type": "string", "pattern": "a\\x01?"}),
    Case("patternProperties", {"patternProperties": {"[\\u0001]": {}}}),
)  # fmt: skip


def by_draft(cases: tuple[Case, ...]) -> list[Any]:
    return [
        pytest.param(case, draft, id=f"{index}-{case.keyword}-{draft}")
        for index, case in enumerate(cases)
        for draft in case.drafts
    ]


@pytest.mark.parametrize(("case", "draft"), by_draft(ENFORCED))
def test_what_is_accepted_is_what_is_valid(case: Case, draft: int) -> None:
    schema = of_draft(draft, case.schema)
    grammar = compiled(schema)
    validator = VALIDATORS[draft](schema)
    for text in case.valid:
        assert validator.is_valid(json.loads(text)), text
        assert accepts(grammar, text), text
    for text in case.invalid:
        assert not validator.is_valid(json.loads(text)), text
        assert not accepts(grammar, text), text


@pytest.mark.parametrize(("case", "draft"), by_draft(REFUSED))
def test_what_cannot_be_held_is_refused_by_name(case: Case, draft: int) -> None:
    schema = of_draft(draft, {"properties": {"p": case.schema}})
    with pytest.raises(SchemaRefused) as caught:
        compiled(schema)
    assert str(caught.value).startswith(f"#/properties/p/{case.keyword} cannot be enforced")


def test_annotations_and_unknown_keywords_say_nothing() -> None:
    grammar = compiled({"type": "string", **ANNOTATIONS})
    assert accepts(grammar, '"a"')
    assert not accepts(grammar, "null")


def test_every_keyword_of_every_draft_is_in_a_table() -> None:
    """As the drafts' own schemas list them."""
    tables = {case.keyword for case in (*ENFORCED, *REFUSED)} | ANNOTATIONS.keys()
    others = {"$schema", "$defs", "definitions", "id", "else", "maxContains"}
    for validator in VALIDATORS.values():
        assert validator.VALIDATORS.keys() <= tables | others
        assert validator.META_SCHEMA.get("properties", {}).keys() <= tables | others


def test_draft_3_is_refused() -> None:
    with pytest.raises(SchemaRefused, match="draft-03"):
        translated({"$schema": "http://json-schema.org/draft-03/schema#"})


def test_references_from_another_base_are_refused() -> None:
    inner = {"$id": "https://example.com/i", "items": {"$ref": "#/$defs/a"}, "$defs": {"a": {}}}
    with pytest.raises(SchemaRefused, match=r"#/items/\$id"):
        translated({"allOf": [{"$ref": "#"}], "items": inner})
    old = of_draft(4, {"items": {"id": "i", "items": {"$ref": "#"}}})
    with pytest.raises(SchemaRefused, match="#/items/id"):
        translated(old)
    assert translated({"items": {"$id": "i", "type": "null"}})["items"]["type"] == "null"


@pytest.mark.parametrize(
    "pattern",
    ["[^\\x00-\\x1f]*", "[\\x01a]", "[" * 100_000 + "\x01", "\\n\\t", "[\x7f-é]", "\\" * 100_000],
)
def test_control_characters_that_need_not_be_written_are_no_reason(pattern: str) -> None:
    """A class that is never closed takes no longer than others: the compiler refuses it."""
    assert translated({"pattern": pattern}) == {"pattern": pattern}


# Any keywords together, whatever they say of each other.

NAMES = st.sampled_from(["a", "b", "ab", "é"])
TEXTS = st.sampled_from(["a", "b", "ab", "", "é", "1"])
COUNTS = st.integers(0, 3)
PATTERNS = st.sampled_from(["a", "^a", "b$", "^[a-c]{1,3}$", "^$", "^a*$", "1|é", "^\\w+$"])
NUMBERS = st.sampled_from([0, 1, 2, -1, 3, 1.5, -0.5, 2.0, 10])
TYPES = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=3,
)


def keywords(inner: st.SearchStrategy[Any]) -> dict[str, st.SearchStrategy[Any]]:
    several = st.lists(inner, min_size=1, max_size=2)
    named = st.dictionaries(NAMES, inner, max_size=3)
    return {
        "type": TYPES | st.lists(TYPES, min_size=1, max_size=3, unique=True),
        "enum": st.lists(VALUES, min_size=1, max_size=3),
        "const": VALUES,
        **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), COUNTS),
        **dict.fromkeys(("minProperties", "maxProperties"), COUNTS),
        **dict.fromkeys(("minimum", "maximum"), NUMBERS),
        **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), NUMBERS | st.booleans()),
        "multipleOf": st.sampled_from([1, 2, 3, 0.5, 0.1]),
        "pattern": PATTERNS,
        "format": st.sampled_from(["date", "uuid", "color"]),
        "items": inner | several,
        "prefixItems": several,
        "additionalItems": inner,
        "properties": named,
        "required": st.lists(NAMES, max_size=2, unique=True),
        "additionalProperties": inner | st.booleans(),
        "patternProperties": st.dictionaries(PATTERNS, inner, max_size=2),
        **dict.fromkeys(("allOf", "anyOf", "oneOf"), several),
        "$ref": st.sampled_from(["#", "#/$defs/a", "#/definitions/b"]),
        "unevaluatedProperties": st.booleans(),
        "unevaluatedItems": st.booleans(),
        "uniqueItems": st.booleans(),
        "not": inner,
        "if": inner,
        "then": inner,
        "contains": inner,
        "propertyNames": inner,
        "dependencies": st.fixed_dictionaries({"a": st.just(["b"]) | inner}),
        "dependentRequired": st.just({"a": ["b"]}),
    }


# Drawn less often: most schemas with these are refused.
RARE = frozenset(
    {"not", "if", "then", "contains", "propertyNames", "dependencies", "dependentRequired"}
    | {"uniqueItems", "unevaluatedItems", "unevaluatedProperties"}
)


def schemas(depth: int = 3) -> st.SearchStrategy[Any]:
    inner = st.deferred(lambda: schemas(depth - 1)) if depth else st.just({})
    table = keywords(inner)
    common = {key: value for key, value in table.items() if key not in RARE}
    few = st.sampled_from(sorted(common) * 3 + sorted(RARE))
    return st.lists(few, min_size=1, max_size=4, unique=True).flatmap(
        lambda chosen: st.fixed_dictionaries({key: table[key] for key in chosen})
    )


def documents() -> st.SearchStrategy[Any]:
    whole = st.tuples(schemas(), schemas(2), schemas(2))
    return whole.map(lambda s: {**s[0], "$defs": {"a": s[1]}, "definitions": {"b": s[2]}})


def output(grammar: Grammar, seed: int) -> str | None:
    """A random one that has come to its end."""
    generator = np.random.default_rng(seed)
    matcher, ids = Matcher(grammar), list[int]()
    while len(ids) < 60:
        choices = allowed(matcher)
        if END in choices and (len(choices) < 4 or generator.random() < 0.5):
            return str(tokenizer().decode(ids, skip_special_tokens=False))
        choices = choices[choices > END]
        if not len(choices):
            return None
        # Mostly a token of one character, so that strings and numbers end, and names meet.
        short = np.intersect1d(choices, short_ids())
        pool = short if len(short) and generator.random() < 0.9 else choices
        ids.append(int(generator.choice(pool)))
        matcher.accept(ids[-1])
    return None


def hold(draft: int, schema: Any) -> None:
    whole = of_draft(draft, schema)
    try:
        VALIDATORS[draft].check_schema(whole)
        grammar = compiled(whole)
    except (SchemaRefused, ConstraintRefused, jsonschema.SchemaError):
        return
    try:
        validator = VALIDATORS[draft]({key: v for key, v in whole.items() if key != "format"})
        for seed in range(4):
            text = output(grammar, seed)
            if text is not None:
                assert validator.is_valid(json.loads(text)), text
    except (ConstraintBroken, RecursionError):  # too costly; or a circle that the validator runs in
        return


REPEATED = {"type": "object", "patternProperties": {"^a": {}}, "minProperties": 2}


@given(draft=st.sampled_from(DRAFTS), schema=documents())
@example(draft=7, schema={"type": "object", "dependencies": {"a": ["b"]}, "required": ["a"]})
@example(draft=2020, schema=REPEATED)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_is_generated_is_valid(draft: int, schema: Any) -> None:
    hold(draft, schema)


@pytest.mark.soak
@given(draft=st.sampled_from(DRAFTS), schema=documents())
@settings(max_examples=3_000, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_is_generated_is_valid_of_many(draft: int, schema: Any) -> None:
    hold(draft, schema)
