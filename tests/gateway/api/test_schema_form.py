"""Schemas are enforced as they were meant: nothing that matters is dropped or forbidden."""

from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.schema_form import arguments_schema, enforced


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (True, True),
        ({"type": "string", "title": "t", "x-guidance": {"lenient": True}}, {"type": "string"}),
        ({"format": "uuid"}, {"format": "uuid"}),
        ({"format": "color"}, {}),
        (
            {"properties": {"title": {"description": "d"}}},
            {"properties": {"title": {}}, "additionalProperties": False},
        ),
        (
            {"properties": {"a": {}}, "additionalProperties": {"type": "null"}},
            {"properties": {"a": {}}, "additionalProperties": {"type": "null"}},
        ),
        ({"type": "object"}, {"type": "object"}),
        (
            {"items": {"properties": {"a": {}}}},
            {"items": {"properties": {"a": {}}, "additionalProperties": False}},
        ),
        (
            {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
            {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        ),
        (
            {"anyOf": [{"properties": {"a": {}}}]},
            {"anyOf": [{"properties": {"a": {}}, "additionalProperties": False}]},
        ),
        (
            {"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}]},
            {"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}]},
        ),
        (
            {"$defs": {"x": {"properties": {}}}, "allOf": [{"$ref": "#/$defs/x"}]},
            {"$defs": {"x": {"properties": {}}}, "allOf": [{"$ref": "#/$defs/x"}]},
        ),
        (
            {"$defs": {"x": {"properties": {}}}, "items": {"$ref": "#/$defs/x"}},
            {
                "$defs": {"x": {"properties": {}, "additionalProperties": False}},
                "items": {"$ref": "#/$defs/x"},
            },
        ),
        (
            {"items": [{"title": "a"}], "enum": [{"title": 1}]},
            {"items": [{}], "enum": [{"title": 1}]},
        ),
    ],
)
def test_forms(schema: Any, expected: Any) -> None:
    assert enforced(schema) == expected


def test_arguments_are_an_object() -> None:
    none = {"type": "object", "properties": {}, "additionalProperties": False}
    assert arguments_schema(None) == none
    assert arguments_schema({}) == none
    assert arguments_schema({"type": "object"}) == {"type": "object"}
    assert arguments_schema({"anyOf": []}) == {"type": "object", "anyOf": []}


NAMES = st.sampled_from("ab")
SCHEMAS = st.recursive(
    st.sampled_from(["string", "integer", "null"]).map(lambda name: {"type": name, "title": "t"}),
    lambda inner: (
        st.builds(lambda items: {"type": "array", "items": items}, inner)
        | st.builds(lambda members: {"anyOf": members}, st.lists(inner, min_size=1, max_size=2))
        | st.builds(lambda members: {"allOf": members}, st.lists(inner, min_size=1, max_size=2))
        | st.builds(
            lambda properties: {"type": "object", "properties": properties},
            st.dictionaries(NAMES, inner, max_size=2),
        )
    ),
    max_leaves=6,
)
VALUES = st.recursive(
    st.sampled_from(["x", 1, None]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=6,
)


@given(schema=SCHEMAS, value=VALUES)
def test_what_is_enforced_is_never_laxer(schema: Any, value: Any) -> None:
    if jsonschema.Draft202012Validator(enforced(schema)).is_valid(value):
        jsonschema.Draft202012Validator(schema).validate(value)
