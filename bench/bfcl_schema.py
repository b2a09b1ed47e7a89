"""Function documents of the Berkeley function-calling leaderboard as tools of our API.

Its parameter types are those of three programming languages ("dict", "float", "ArrayList"); JSON
Schema has seven. What has no counterpart ("any") says nothing. `bounded` makes a schema whose
every JSON is short: a model with random weights ends a text only by chance, so a budget of tokens
means something only where the schema has an end.
"""

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

_TYPES = {
    "dict": "object", "object": "object", "hashmap": "object", "map": "object",
    "float": "number", "number": "number", "double": "number",
    "integer": "integer", "int": "integer", "long": "integer", "short": "integer",
    "byte": "integer", "bigint": "integer",
    "string": "string", "str": "string", "char": "string",
    "boolean": "boolean", "bool": "boolean",
    "array": "array", "tuple": "array", "list": "array", "arraylist": "array", "set": "array",
    "null": "null", "none": "null",
}  # fmt: skip
_CLASS_FILES = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "TwitterAPI": "posting_api",
    "VehicleControlAPI": "vehicle_control",
}
_KEPT_ON_VALUES = ("description", "enum", "minimum", "maximum", "pattern", "minItems", "maxItems")


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Objects of a .jsonl.gz file."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def write_rows(path: Path, values: Iterable[Mapping[str, Any]]) -> None:
    """The other way."""
    with gzip.open(path, "wt", encoding="utf-8") as lines:
        lines.writelines(json.dumps(value) + "\n" for value in values)


def tools_of(row: Mapping[str, Any], classes: Mapping[str, list[dict[str, Any]]]) -> list[Any]:
    """A row's functions as `tools`. `classes`: those of the multi-turn rows, by their file."""
    functions = row.get("functions")
    if functions is None:
        functions = [f for name in row["involved_classes"] for f in classes[_CLASS_FILES[name]]]
    seen: dict[str, Any] = {}
    for function in functions:
        seen.setdefault(function["name"], tool(function))
    return list(seen.values())


def tool(function: Mapping[str, Any]) -> dict[str, Any]:
    """One function document as an item of `tools`."""
    body = {
        "name": function["name"],
        "description": function.get("description", ""),
        "parameters": schema(function["parameters"]),
    }
    return {"type": "function", "function": body}


def schema(value: Any) -> dict[str, Any]:
    """A parameter's document as JSON Schema."""
    if not isinstance(value, dict):
        return {}
    out = {key: value[key] for key in _KEPT_ON_VALUES if key in value}
    kind = _TYPES.get(str(value.get("type", "")).lower())
    if kind is not None:
        out["type"] = kind
    if kind == "object":
        properties = value.get("properties")
        if isinstance(properties, dict):
            out["properties"] = {name: schema(inner) for name, inner in properties.items()}
        elif isinstance(value.get("additionalProperties"), dict):
            out["additionalProperties"] = schema(value["additionalProperties"])
        required = value.get("required")
        if isinstance(required, list):
            known = out.get("properties", {})
            out["required"] = [name for name in required if name in known]
    if kind == "array" and isinstance(value.get("items"), dict):
        out["items"] = schema(value["items"])
    if "enum" in out:
        # Some list the texts of what is a number by its type, or the other way round.
        fitting = [item for item in out["enum"] if _fits(item, kind)]
        if fitting:
            out["enum"] = fitting
        else:
            del out["enum"]
    return out


def _fits(item: Any, kind: str | None) -> bool:
    kinds: dict[str, tuple[type, ...]] = {
        "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,),
        "object": (dict,), "array": (list,), "null": (type(None),),
    }  # fmt: skip
    if kind is None:
        return True
    return isinstance(item, kinds[kind]) and (kind == "boolean" or not isinstance(item, bool))


def bounded(value: Any, max_chars: int, max_items: int) -> Any:
    """The same schema with ends: whatever obeys it obeys the first."""
    if not isinstance(value, dict):
        return _short_scalar(max_chars)
    out = dict(value)
    kind = value.get("type")
    if "enum" in value or "const" in value:
        return out
    if kind == "string":
        if not {"pattern", "format"} & value.keys():
            out["maxLength"] = min(value.get("maxLength", max_chars), max_chars)
    elif kind == "integer":
        out.setdefault("minimum", -9999 if "maximum" not in value else value["maximum"] - 9999)
        out.setdefault("maximum", out["minimum"] + 19998)
    elif kind == "number":
        # A fraction has no last digit, so whole ones.
        out["type"] = "integer"
        return bounded(out, max_chars, max_items)
    elif kind == "array":
        out["items"] = bounded(value.get("items"), max_chars, max_items)
        out["maxItems"] = min(
            value.get("maxItems", max_items), max(max_items, out.get("minItems", 0))
        )
    elif kind == "object" and "properties" in value:
        properties = value["properties"].items()
        out["properties"] = {k: bounded(v, max_chars, max_items) for k, v in properties}
    elif kind == "object":
        # Keys of any length have no end either.
        item = bounded(out.pop("additionalProperties", None), max_chars, max_items)
        out["properties"] = {f"key{n}": item for n in range(max_items)}
    elif kind is None:
        return {**_short_scalar(max_chars), **out}
    return out


def _short_scalar(max_chars: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": max_chars}
