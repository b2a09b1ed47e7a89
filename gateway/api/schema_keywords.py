"""The keywords of JSON Schema, drafts 4 to 2020-12: enforced, refused by name, or annotations.

Part of stage 2; pure. Comes in: a JSON Schema as a caller sent it. Goes out: an equal schema in the
one dialect that the later modules and the worker know, or SchemaRefused with the keyword and its
place. What is enforced is what `schema_form.py` keeps; here is

    said otherwise   what drafts say in different ways: `exclusiveMinimum: true`, whole numbers as
                     1.0, `$recursiveRef: "#"`, `unevaluatedProperties` where nothing else evaluates
    left out         what says nothing: siblings of `$ref` in a schema that declares draft 4 to 7,
                     `uniqueItems: false`, `then` without `if`
    refused          what a grammar cannot hold: `not`, `uniqueItems`, `contains`, `if`, ...; and
                     texts with control characters, which answers do not have

A schema has the keywords of all drafts, whichever it declares: callers who write one want it.
Annotations (`title`, `default`, `contentEncoding`, unknown keywords) are left for schema_form.py.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from gateway.api.schema_limits import LISTS, MAPS, SINGLES, SchemaRefused

# Siblings of `$ref` say nothing in these.
_REF_ALONE = ("draft-04", "draft-06", "draft-07")
_COUNTS = ("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties")
_APPLICATORS = frozenset(
    {"$ref", "allOf", "anyOf", "oneOf", "if", "not", "dependentSchemas", "dependencies"}
)
_BELOW_ZERO = -1e-9
_REFERENCES = frozenset({"$ref", "$recursiveRef", "$dynamicRef"})
# Refused, unless what they say is nothing.
_REFUSED: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "$dynamicRef": lambda node: False,
    "$recursiveRef": lambda node: False,
    "contains": lambda node: node.get("minContains") == 0 and "maxContains" not in node,
    "dependencies": lambda node: _says_nothing(node["dependencies"]),
    "dependentRequired": lambda node: _says_nothing(node["dependentRequired"]),
    "dependentSchemas": lambda node: _says_nothing(node["dependentSchemas"]),
    "if": lambda node: _is_any(node.get("then", True)) and _is_any(node.get("else", True)),
    "not": lambda node: node["not"] is False,
    "propertyNames": lambda node: _is_any(node["propertyNames"]),
    "unevaluatedItems": lambda node: _is_any(node["unevaluatedItems"]),
    "unevaluatedProperties": lambda node: _is_any(node["unevaluatedProperties"]),
    "uniqueItems": lambda node: node["uniqueItems"] is False,
}
# Those that JSON has a letter for are written; of the others the compiler would leave nothing.
_CONTROL = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f]")
_CONTROL_IN_PATTERN = re.compile(
    r"(?:[\x00-\x07\x0b\x0e-\x1f\x7f]|\\(?:x|u00)(?:0[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])|\\c.|\\[0v])+"
)
# One that is never closed goes on to the end: looked for once, not from each bracket.
_CLASS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*+(?:\]|\\?\Z)", re.DOTALL)
# What modifies another keyword, and says nothing without it.
_MODIFIERS = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}


def translated(schema: Any) -> Any:
    """A new value. Raises SchemaRefused for a keyword that cannot be enforced.

    Recursion is as deep as the schema, which the caller bounds.
    """
    declared = schema.get("$schema") if isinstance(schema, dict) else ""
    draft = declared if isinstance(declared, str) else ""
    if any(f"draft-0{number}" in draft for number in (1, 2, 3)):
        raise SchemaRefused(f"#/$schema: {draft[:80]!r} is not supported: use draft 4 or later")
    _refers("#", schema, "id" if "draft-04" in draft else "$id")
    return _translated("#", schema, draft)


def _translated(at: str, schema: Any, draft: str) -> Any:
    if not isinstance(schema, dict):
        return schema
    node = dict(schema)
    if "$ref" in node and any(name in draft for name in _REF_ALONE):
        node = {key: node[key] for key in ("$ref", "$defs", "definitions") if key in node}
    _say_otherwise(node, draft)
    for key, says_nothing in _REFUSED.items():
        if key in node:
            if not says_nothing(node):
                raise SchemaRefused(f"{at}/{key} cannot be enforced: leave it out")
            del node[key]
    for key, modified in _MODIFIERS.items():
        if modified not in node:
            node.pop(key, None)
    _refuse_control_characters(at, node)
    return {key: _inner(f"{at}/{key[:64]}", key, value, draft) for key, value in node.items()}


def _inner(at: str, key: str, value: Any, draft: str) -> Any:
    """What the keyword's value has of schemas, translated."""
    if key in MAPS and isinstance(value, dict):
        return {
            name: _translated(f"{at}/{name[:64]}", child, draft) for name, child in value.items()
        }
    if isinstance(value, list) and (key in LISTS or key == "items"):
        return [_translated(f"{at}/{index}", child, draft) for index, child in enumerate(value)]
    return _translated(at, value, draft) if key in SINGLES else value


def _refers(at: str, value: Any, key: str) -> bool:
    """Whether there is a reference in it. Raises SchemaRefused where that starts from an identifier
    within the schema, the value of `key`.
    """
    if isinstance(value, list):
        inner = [_refers(f"{at}/{index}", child, key) for index, child in enumerate(value)]
        return any(inner)
    if not isinstance(value, dict):
        return False
    inner = [_refers(f"{at}/{name[:64]}", child, key) for name, child in value.items()]
    refers = any(inner) or not _REFERENCES.isdisjoint(value)
    base = value.get(key)
    if refers and at != "#" and isinstance(base, str) and not base.startswith("#"):
        raise SchemaRefused(f"{at}/{key} cannot be enforced: references must start from the root")
    return refers


def _say_otherwise(node: dict[str, Any], draft: str) -> None:
    for key in _COUNTS:
        value = node.get(key)
        if isinstance(value, float) and value.is_integer():
            node[key] = int(value)
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        is_exclusive = node.get(exclusive)
        if isinstance(is_exclusive, bool) and (not draft or "draft-04" in draft):
            del node[exclusive]
            if is_exclusive and bound in node:
                node[exclusive] = node.pop(bound)
    # Between a number above -1 and this bound the compiler writes -0, which is 0.
    if _is_zero(node.get("exclusiveMaximum")) and isinstance(node.get("maximum", 0), int | float):
        del node["exclusiveMaximum"]
        node["maximum"] = min(node.get("maximum", 0), _BELOW_ZERO)
    if node.get("$recursiveRef") == "#" and "$ref" not in node:
        # No `$recursiveAnchor` is supported, and without one it is an ordinary reference.
        node["$ref"] = node.pop("$recursiveRef")
    if _APPLICATORS.isdisjoint(node):
        _unevaluated(node, "unevaluatedProperties", "additionalProperties")
        if "contains" not in node:
            _unevaluated(node, "unevaluatedItems", _rest_of_items(node))


def _unevaluated(node: dict[str, Any], key: str, other: str) -> None:
    """Nothing but the siblings evaluates: what they leave is what the other keyword is about."""
    if key in node:
        value = node.pop(key)
        node.setdefault(other, value)


def _rest_of_items(node: Mapping[str, Any]) -> str:
    return "additionalItems" if isinstance(node.get("items"), list) else "items"


def _refuse_control_characters(at: str, node: Mapping[str, Any]) -> None:
    patterns = node.get("patternProperties")
    patterns = patterns if isinstance(patterns, dict) else ()
    for key, says in (
        ("const", "const" in node and _has_control(node["const"])),
        ("enum", "enum" in node and _has_control(node["enum"])),
        ("pattern", _matches_control(node.get("pattern"))),
        ("patternProperties", any(map(_matches_control, patterns))),
    ):
        if says:
            raise SchemaRefused(f"{at}/{key} cannot be enforced with control characters")


def _has_control(value: Any) -> bool:
    """Names of objects may have them: those are written as they are."""
    if isinstance(value, str):
        return _CONTROL.search(value) is not None
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(_has_control, inner))


def _matches_control(pattern: Any) -> bool:
    """Whether a control character has to be written: a class with others in it does without."""
    if not isinstance(pattern, str) or not _CONTROL_IN_PATTERN.search(pattern):
        return False
    classes = [text for text in _CLASS.findall(pattern) if text[0] == "["]
    outside = _CLASS.sub(lambda found: "" if found[0][0] == "[" else found[0], pattern)
    return _CONTROL_IN_PATTERN.search(outside) is not None or any(
        _CONTROL_IN_PATTERN.fullmatch(text[1:-1]) for text in classes
    )


def _is_zero(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == 0


def _is_any(schema: Any) -> bool:
    return schema is True or schema == {}


def _says_nothing(dependents: Any) -> bool:
    return isinstance(dependents, dict) and all(
        value == [] or _is_any(value) for value in dependents.values()
    )
