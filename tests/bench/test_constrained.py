"""The constrained benchmark: documents become schemas, walks end in what was asked for."""

import itertools
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from bench import bfcl_schema
from bench.constrained import Tally, Walker, walk
from bench.constrained_cases import Case, calls
from gateway.answer.tools.formats import FORMATS
from tests.gateway.edge_kit import byte_level_tokenizer

DOCUMENT: dict[str, Any] = {
    "name": "math.area",
    "description": "Area of a triangle.",
    "parameters": {
        "type": "dict",
        "properties": {
            "base": {"type": "float", "default": 1.0, "optional": True},
            "sides": {"type": "tuple", "items": {"type": "int"}},
            "unit": {"type": "String", "enum": ["cm", "m", 5]},
            "extra": {"type": "HashMap"},
            "anything": {"type": "any"},
        },
        "required": ["base", "unit", "ghost"],
    },
}
ROW = {"id": "simple_0", "category": "simple", "turns": [[{"role": "user", "content": "?"}]]}


def test_documents_become_schemas() -> None:
    found = bfcl_schema.tool(DOCUMENT)["function"]
    assert (found["name"], found["description"]) == ("math.area", "Area of a triangle.")
    assert found["parameters"] == {
        "type": "object",
        "properties": {
            "base": {"type": "number"},
            "sides": {"type": "array", "items": {"type": "integer"}},
            "unit": {"type": "string", "enum": ["cm", "m"]},
            "extra": {"type": "object"},
            "anything": {},
        },
        "required": ["base", "unit"],
    }


def test_rows_have_tools_of_their_own_or_of_their_classes() -> None:
    assert len(bfcl_schema.tools_of({"functions": [DOCUMENT, DOCUMENT]}, {})) == 1
    classes = {"math_api": [DOCUMENT]}
    assert len(bfcl_schema.tools_of({"involved_classes": ["MathAPI"]}, classes)) == 1


@pytest.mark.parametrize(
    ("value", "is_in"),
    [
        ({"s": "x" * 17}, False),
        ({"s": "x"}, True),
        ({"n": 10**5}, False),
        ({"a": [1, 2, 3]}, False),
    ],
)
def test_bounds_are_tighter(value: Any, is_in: bool) -> None:
    properties = {"s": {"type": "string"}, "n": {"type": "number"}, "a": {"type": "array"}}
    schema = {"type": "object", "properties": properties}
    bounded = bfcl_schema.bounded(schema, 16, 2)
    assert jsonschema.Draft202012Validator(bounded).is_valid(value) == is_in
    jsonschema.validate(value, schema)


def write_data(folder: Path) -> None:
    (folder / "tools").mkdir()
    rows: dict[str, dict[str, Any]] = {
        "bfcl.jsonl.gz": {**ROW, "functions": [DOCUMENT]},
        "bfcl_multi_turn_functions.jsonl.gz": {"cls": "math_api", "functions": [DOCUMENT]},
    }
    for name, row in rows.items():
        bfcl_schema.write_rows(folder / "tools" / name, [row])


def test_walks_end_in_calls_that_are_valid(tmp_path: Path) -> None:
    write_data(tmp_path)
    path = tmp_path / "tokenizer.json"
    byte_level_tokenizer().save(str(path))
    walker = Walker(path, None, seed=1)
    cases = list(itertools.islice(calls(tmp_path, 1, True), 2 * len(FORMATS)))
    assert {case.format for case in cases} == set(FORMATS)
    report = walk(walker, iter(cases), max_tokens=400).report()
    assert report["total"] == {"valid": len(cases)}, report["problems"]
    assert (report["finished_share"], report["valid_share"]) == (1.0, 1.0)


def test_what_is_refused_or_wrong_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    byte_level_tokenizer().save(str(path))
    forms: list[Any] = [{"$ref": "#/nowhere"}, {"not": {}}, {"type": "string", "minLength": 60}]
    cases = []
    for form in forms:
        asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": form}}
        cases.append(Case(str(form), "schema", [], {"response_format": asked}, {"": form}))
    tally = walk(Walker(path, None, seed=1), iter(cases), max_tokens=10)
    assert dict(tally.counts["schema"]) == {"refused": 2, "unfinished": 1}


def test_cases_know_what_is_wrong() -> None:
    schemas = {"f": {"type": "object", "required": ["a"]}}
    case = Case("x", "call", [], {}, schemas)

    def message(name: str, arguments: str) -> dict[str, Any]:
        call = {"function": {"name": name, "arguments": arguments}}
        return {"content": None, "tool_calls": [call]}

    assert case.problem(message("f", json.dumps({"a": 1}))) is None
    assert "not valid" in str(case.problem(message("f", "{}")))
    assert "not JSON" in str(case.problem(message("f", "{")))
    assert "no such function" in str(case.problem(message("g", "{}")))
    assert "not only calls" in str(case.problem({"content": "hello"}))
    assert Tally().report()["finished_share"] == 0
