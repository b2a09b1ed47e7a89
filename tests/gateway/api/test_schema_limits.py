"""Schemas that nobody should compile, or that nothing can obey, are refused with a reason."""

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.schema_limits import (
    MAX_DEPTH,
    MAX_SUBSCHEMAS,
    SchemaRefused,
    check,
    pattern_size,
)


def size(schema: Any) -> int:
    return len(msgspec.json.encode(schema))


def reason(schema: Any) -> str:
    with pytest.raises(SchemaRefused) as caught:
        check(schema, size(schema))
    return str(caught.value)


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def needs(target: str) -> dict[str, Any]:
    """An object that needs something of that schema."""
    return {"type": "object", "properties": {"a": {"$ref": target}}, "required": ["a"]}


def chain(length: int, last: Any) -> dict[str, Any]:
    definitions: dict[str, Any] = {f"d{i}": needs(f"#/$defs/d{i + 1}") for i in range(length)}
    definitions[f"d{length}"] = last
    return {"$ref": "#/$defs/d0", "$defs": definitions}


ORDINARY: tuple[Any, ...] = (
    True,
    {},
    {"type": ["string", "null"], "minLength": 3, "maxLength": 3},
    {"type": "object", "properties": {"a/b~c": False}, "additionalProperties": {"type": "null"}},
    {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
    {"type": "array", "items": {"$ref": "#"}, "maxItems": 10**400},
    {"$defs": {"a/b": {"type": "string"}}, "items": {"$ref": "#/$defs/a~1b"}},
    {"anyOf": [False, {"enum": [1]}], "unknown": {"type": "nonsense"}},
    {"enum": [{"$ref": "nothing"}], "const": [[[]]]},
    {"minimum": 10**400},
    {"pattern": "^[a-z]{2,8}(-[A-Z]{2})?$"},
)


@pytest.mark.parametrize("schema", ORDINARY)
def test_ordinary_schemas_pass(schema: Any) -> None:
    assert check(schema, size(schema)) >= 1


def test_long_chains_of_references_pass_without_recursion() -> None:
    chained = chain(900, {"type": "string"})
    assert check(chained, size(chained)) == 1 + 900 * 2 + 1


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (nested(MAX_DEPTH + 1), "nested deeper"),
        ({"const": [[nested(MAX_DEPTH)]]}, "nested deeper"),
        ({"properties": {f"p{i}": {} for i in range(MAX_SUBSCHEMAS)}}, "more than 2000 subschemas"),
        ("string", "must be an object"),
        ({"items": 5}, "must be an object"),
        ({"type": "strnig"}, "#/type has an invalid value"),
        ({"properties": []}, "#/properties has an invalid value"),
        ({"items": {"required": [1]}}, "#/items/required has an invalid value"),
        ({"minLength": -1}, "#/minLength has an invalid value"),
        ({"minLength": True}, "#/minLength has an invalid value"),
        ({"$ref": "https://example.com/x"}, "only references within"),
        ({"$ref": "#/$defs/x"}, "no schema at"),
        ({"$ref": "#"}, "refers back to itself"),
        (
            {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
            "refers back to itself",
        ),
        (
            {"$ref": "#/$defs/a", "$defs": {k: {"$ref": "#/$defs/b"} for k in "ab"}},
            "#/$defs/b/$ref refers back to itself",
        ),
        (False, "no finite JSON"),
        ({"enum": []}, "no finite JSON"),
        ({"type": "string", "minLength": 2, "maxLength": 1}, "no finite JSON"),
        ({"type": "array", "minItems": 1, "items": False}, "no finite JSON"),
        ({"type": "integer", "minimum": 2, "maximum": 1}, "no finite JSON"),
        ({"allOf": [{}, False]}, "no finite JSON"),
        (needs("#"), "no finite JSON"),
        (chain(500, {"$ref": "#/$defs/d0"}), "no finite JSON"),
        ({"type": "array", "minItems": 10**400}, "the shortest JSON"),
        ({"type": "string", "minLength": 100_000}, "the shortest JSON"),
        ({"allOf": [{"anyOf": [{}] * 4}] * 6}, "more than 1024 combinations"),
        (
            {"type": "string", "pattern": "((a{99}){99}){99}"},
            "too large once its repetitions are expanded",
        ),
    ],
)
def test_others_are_refused(schema: Any, words: str) -> None:
    assert words in reason(schema)


def test_doubling_is_refused_by_its_shortest_value() -> None:
    doubled: dict[str, Any] = {
        f"d{i}": {"type": "array", "minItems": 2, "items": {"$ref": f"#/$defs/d{i + 1}"}}
        for i in range(60)
    }
    doubled["d60"] = {"type": "null"}
    assert "the shortest JSON" in reason({"$ref": "#/$defs/d0", "$defs": doubled})


def test_repeats_inside_repeats_are_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(4):
        schema = {"type": "array", "maxItems": 1000, "items": schema}
    assert "nested repetitions" in reason(schema)


def test_too_many_bytes_are_not_looked_at() -> None:
    with pytest.raises(SchemaRefused, match="bytes"):
        check(object(), 10**6)


@pytest.mark.parametrize(
    ("pattern", "chars"),
    [
        ("", 0),
        ("abc", 3),
        (r"\d{4}-\d{2}", 7),
        ("(ab){3}", 6),
        ("(a{10}b){10}", 110),
        ("[^]a]{5}", 5),
        ("a{3,}", 3),
        ("a{2,7}", 7),
        ("{", 1),
        (")))(((", 3),
        ("a[b{9}", 2),
        ("[^\\", 1),
        ("[" * 100_000, 1),  # a class that never ends is looked for once, not from each bracket
    ],
)
def test_how_long_patterns_are_written_out(pattern: str, chars: int) -> None:
    assert pattern_size(pattern) == chars


KEYWORDS = st.sampled_from(
    [
        *("type", "properties", "items", "allOf", "anyOf", "$ref", "$defs", "required"),
        *("maxItems", "minItems", "enum", "const", "pattern", "minLength", "prefixItems"),
        "additionalProperties",
    ]
)
VALUES = st.sampled_from(["string", "object", "array", "#", "#/$defs/a", "a", 0, 1, 10**30, True])
JSON = st.recursive(
    VALUES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(KEYWORDS | st.sampled_from(["a", "b"]), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(schema=JSON)
def test_whatever_is_sent_is_taken_or_refused(schema: Any) -> None:
    with contextlib.suppress(SchemaRefused):
        assert check(schema, size(schema)) >= 1
