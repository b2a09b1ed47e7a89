"""A caller's JSON Schema in the form it is enforced in. Part of stage 2; pure.

Comes in: a schema that schema_limits.py has let through. Goes out: the same schema

    without what validates nothing     descriptions, titles, unknown keywords, unknown formats
    closed                             an object with `properties` has those and no others, unless
                                       the schema says something about others

Closing is stricter than JSON Schema, which lets an object have anything else besides. A model has
to choose among all tokens at every step, and what is allowed to it is taken for wanted: callers who
name properties want those. What is combined with `allOf` and its like is left open, for closing one
part would forbid the other's properties.
"""

from collections.abc import Mapping
from typing import Any

_KEPT = frozenset(
    {
        "$anchor", "$id", "$ref", "allOf", "anyOf", "const", "contains", "dependentRequired",
        "enum", "exclusiveMaximum", "exclusiveMinimum", "format", "maxContains", "maxItems",
        "maxLength", "maxProperties", "maximum", "minContains", "minItems", "minLength",
        "minProperties", "minimum", "multipleOf", "oneOf", "pattern", "required", "type",
        "uniqueItems",
    }
)  # fmt: skip
_FORMATS = frozenset(
    {
        "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid",
    }
)  # fmt: skip
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLES = (
    "additionalItems", "additionalProperties", "contains", "else", "if", "items", "not",
    "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
# Where one of these stands beside `properties`, more than those may be meant.
_OPENING = frozenset(
    {
        "$ref", "additionalProperties", "allOf", "anyOf", "dependentSchemas", "if", "oneOf",
        "patternProperties", "unevaluatedProperties",
    }
)  # fmt: skip


def enforced(schema: Any) -> Any:
    """A new value; the caller's is left as it is."""
    return _form(schema, can_close=True, is_combined=_combines(schema))


def arguments_schema(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Of a function's arguments: an object, whatever the schema says. None: no arguments."""
    formed: dict[str, Any] = enforced(parameters or {"properties": {}})
    formed.setdefault("type", "object")
    return formed


def _combines(schema: Any) -> bool:
    """Is any definition used as one part among others? Then definitions stay open."""
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if "allOf" in value or ("$ref" in value and "properties" in value):
                return True
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
    return False


def _form(node: Any, can_close: bool, is_combined: bool) -> Any:
    if not isinstance(node, dict):
        return node
    out: dict[str, Any] = {}
    is_alone = "properties" not in node
    for key, value in node.items():
        if key in _MAPS:
            inner = not (is_combined and key in ("$defs", "definitions"))
            out[key] = {
                name: _form(child, inner and key != "dependentSchemas", is_combined)
                for name, child in value.items()
            }
        elif key in _LISTS or (key == "items" and isinstance(value, list)):
            inner = key == "prefixItems" or (key != "allOf" and is_alone and can_close)
            out[key] = [_form(child, inner, is_combined) for child in value]
        elif key in _SINGLES:
            inner = key in ("items", "additionalProperties", "additionalItems")
            out[key] = _form(value, inner, is_combined)
        elif key == "format":
            if value in _FORMATS:
                out[key] = value
        elif key in _KEPT:
            out[key] = value
    if can_close and not is_alone and _OPENING.isdisjoint(node):
        out["additionalProperties"] = False
    return out
