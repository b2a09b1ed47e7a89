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

from gateway.api.schema_limits import LISTS, MAPS, SINGLES, SchemaRefused

_KEPT = frozenset(
    {
        "$ref", "const", "enum", "exclusiveMaximum", "exclusiveMinimum", "maxItems", "maxLength",
        "maxProperties", "maximum", "minItems", "minLength", "minProperties", "minimum",
        "multipleOf", "pattern", "required", "type",
    }
)  # fmt: skip
_FORMATS = frozenset(
    {
        "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid",
    }
)  # fmt: skip
# Where one of these stands beside `properties`, more than those may be meant.
_OPENING = frozenset(
    {
        "$ref", "additionalProperties", "allOf", "anyOf", "oneOf", "patternProperties",
    }
)  # fmt: skip


def enforced(schema: Any) -> Any:
    """A new value; the caller's is left as it is. Raises SchemaRefused where the form that is
    enforced would let invalid JSON through."""
    return _form("#", schema, can_close=True, is_combined=_combines(schema))


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


def _form(at: str, node: Any, can_close: bool, is_combined: bool) -> Any:
    if not isinstance(node, dict):
        return node
    out: dict[str, Any] = {}
    is_alone = "properties" not in node
    for key, value in node.items():
        place = f"{at}/{key[:64]}"
        if key in MAPS:
            inner = not (is_combined and key in ("$defs", "definitions"))
            out[key] = {
                name: _form(f"{place}/{name[:64]}", child, inner, is_combined)
                for name, child in value.items()
            }
        elif key in LISTS or (key == "items" and isinstance(value, list)):
            inner = key == "prefixItems" or (key != "allOf" and is_alone and can_close)
            out[key] = [
                _form(f"{place}/{index}", child, inner, is_combined)
                for index, child in enumerate(value)
            ]
        elif key in SINGLES:
            out[key] = _form(place, value, True, is_combined)
        elif key in _KEPT or (key == "format" and value in _FORMATS):
            out[key] = value
    if can_close and not is_alone and _OPENING.isdisjoint(node):
        out["additionalProperties"] = False
    _refuse_uncounted(at, out)
    return out


def _refuse_uncounted(at: str, node: Mapping[str, Any]) -> None:
    """A grammar knows which of the names in the schema have been written, but not which others: one
    of these may come twice, and counts as one. So beyond the required names one more is sure.
    """
    has_others = "patternProperties" in node or node.get("additionalProperties") is not False
    if has_others and node.get("minProperties", 0) > len(set(node.get("required", ()))) + 1:
        raise SchemaRefused(
            f"{at}/minProperties cannot be enforced where names are free: require names, or forbid "
            "others by additionalProperties: false"
        )
