"""What `bench.constrained` asks for: tools and schemas of the shared data, as API requests.

    call     tools of a BFCL row with a forced choice (required, or its first function by name), in
             one of the formats of tool calls
    schema   the parameters of a BFCL function as `response_format`
    suite    a schema of the JSON Schema test suite as `response_format`; many are refused

A case knows how to check an answer; what makes the answer is constrained.py's.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
from jsonschema.exceptions import ValidationError

from bench.bfcl_schema import bounded, rows, tools_of
from gateway.answer.tools.formats import FORMATS, FormatName

MAX_CHARS = 16
MAX_ITEMS = 2


@dataclass(frozen=True, slots=True)
class Case:
    """`body`: the fields of a chat request that bind its answer. `schemas`: by function, or "" for
    the answer as a whole."""

    name: str
    kind: str
    messages: Sequence[Mapping[str, Any]]
    body: Mapping[str, Any]
    schemas: Mapping[str, Any]
    format: FormatName = "hermes"

    def problem(self, message: Mapping[str, Any]) -> str | None:
        """What is wrong with a finished answer's message."""
        if "" in self.schemas:
            return _json_problem(message["content"] or "", self.schemas[""])
        if message["content"] or not message.get("tool_calls"):
            return f"not only calls: {str(message)[:200]}"
        for call in message["tool_calls"]:
            function = call["function"]
            if function["name"] not in self.schemas:
                return f"no such function: {function['name']}"
            found = _json_problem(function["arguments"], self.schemas[function["name"]])
            if found:
                return found
        return None


def _json_problem(text: str, schema: Any) -> str | None:
    try:
        jsonschema.validate(json.loads(text), schema)
    except ValueError as error:
        return f"not JSON: {error}: {text[:200]}"
    except ValidationError as error:
        return f"not valid: {error.message[:200]}"
    return None


def calls(data: Path, seed: int, is_bounded: bool) -> Iterator[Case]:
    """Cases without end, all categories and formats in turn."""
    rng = random.Random(seed)
    by_category = _bfcl(data)
    while True:
        for category, members in by_category.items():
            for fmt in FORMATS:
                name, messages, tools = rng.choice(members)
                offered = [_bounded_tool(tool) for tool in tools] if is_bounded else tools
                forced = rng.choice(offered)["function"]["name"]
                named = {"type": "function", "function": {"name": forced}}
                body = {
                    "tools": offered,
                    "tool_choice": rng.choice(("required", named)),
                    "parallel_tool_calls": rng.random() < 0.5,
                }
                # Checked against what was asked for, not against the bounds.
                schemas = {t["function"]["name"]: t["function"]["parameters"] for t in tools}
                yield Case(f"{name}/{fmt}", f"call {category}", messages, body, schemas, fmt)


def schemas(data: Path, seed: int, is_bounded: bool) -> Iterator[Case]:
    """Parameters of single functions as the form of the whole answer; without end."""
    rng = random.Random(seed)
    members = [member for group in _bfcl(data).values() for member in group]
    while True:
        name, messages, tools = rng.choice(members)
        function = rng.choice(tools)["function"]
        schema = function["parameters"]
        sent = bounded(schema, MAX_CHARS, MAX_ITEMS) if is_bounded else schema
        yield _schema_case(f"{name}/{function['name']}", "schema", messages, sent, schema)


def suite(data: Path) -> Iterator[Case]:
    """The JSON Schema test suite, once through."""
    messages = [{"role": "user", "content": "?"}]
    for row in rows(data / "tools" / "json_schema_test_suite.jsonl.gz"):
        if row["draft"] == "draft2020-12" and "optional" not in row["file"]:
            name = f"{row['file']}/{row['description']}"
            yield _schema_case(name, "suite", messages, row["schema"], row["schema"])


def _schema_case(
    name: str, kind: str, messages: Sequence[Mapping[str, Any]], sent: Any, schema: Any
) -> Case:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": sent}}
    return Case(name, kind, messages, {"response_format": form}, {"": schema})


def _bfcl(data: Path) -> dict[str, list[tuple[str, list[dict[str, Any]], list[Any]]]]:
    """(id, messages, tools) by category."""
    documents = rows(data / "tools" / "bfcl_multi_turn_functions.jsonl.gz")
    classes = {row["cls"]: row["functions"] for row in documents}
    found: dict[str, list[tuple[str, list[dict[str, Any]], list[Any]]]] = {}
    for row in rows(data / "tools" / "bfcl.jsonl.gz"):
        tools = tools_of(row, classes)
        if tools:
            messages: list[dict[str, Any]] = next((turn for turn in row["turns"] if turn), [])
            found.setdefault(row["category"], []).append((row["id"], messages, tools))
    return found


def _bounded_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    parameters = bounded(function["parameters"], MAX_CHARS, MAX_ITEMS)
    return {**tool, "function": {**function, "parameters": parameters}}


CaseSource = Callable[[Path, int, bool], Iterator[Case]]
SOURCES: dict[str, CaseSource] = {
    "call": calls,
    "schema": schemas,
    "suite": lambda data, seed, is_bounded: suite(data),
}
