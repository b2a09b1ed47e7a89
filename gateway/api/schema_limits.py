"""What schemas are refused before anything is spent on them. Part of stage 2.

Comes in: a JSON Schema that schema_keywords.py has translated. Goes out: why it is refused, or
nothing. Here is refused what nobody should try to compile, and what no answer could obey:

    too large or too deep      more bytes, subschemas or levels than any real schema has
    no schema                  keywords whose values are of the wrong kind
    references                 out of the document, into nothing, or round in a circle of nothing
                               but references
    exponential                `allOf` of `anyOf`s multiplies out; so do repeats inside repeats
    impossible                 no finite JSON obeys it: `false` where a value must be, a required
                               property that needs itself, more items wanted than allowed
    endless                    the shortest JSON that obeys it is longer than any answer

Sizes are bounded first, so that every later step takes milliseconds whatever the schema says.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_BYTES = 131_072
# All schemas of a request together: the worker takes no longer constraint.
MAX_REQUEST_BYTES = 524_288
# Of all schemas of a request together; this many take some 20 ms to look at.
MAX_SUBSCHEMAS = 2_000
MAX_DEPTH = 48
MAX_BRANCHES = 1_024
MAX_REPEATS = 2.0**30
MAX_PATTERN_CHARS = 4_096
MAX_SHORTEST_CHARS = 65_536

_INF = float("inf")
_MANY = 2.0**31
# Schemas that refer to themselves take two or three; more are built to.
_MAX_ROUNDS = 8
_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
# Keywords with schemas in them.
MAPS = ("properties", "patternProperties", "$defs", "definitions")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
SINGLES = ("additionalItems", "additionalProperties", "items")
_COUNTS = (
    "maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties",
)  # fmt: skip
_NUMBERS = ("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf")
# A class that is never closed is no pattern at all; it is taken to the end, for looking for the end
# of each of a thousand of them anew would take seconds.
_PATTERN_TOKENS = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*+(?:\]|\\?\Z)|\{(?P<low>\d{1,9}),?(?P<high>\d{0,9})\}|.",
    re.DOTALL,
)


class SchemaRefused(ValueError):
    """The text says where and why, for the caller."""


def check(schema: Any, size_bytes: int, max_subschemas: int = MAX_SUBSCHEMAS) -> int:
    """How many schemas it holds. Raises SchemaRefused. `size_bytes`: its length as JSON."""
    if size_bytes > MAX_BYTES:
        raise SchemaRefused(f"the schema has {size_bytes} bytes, the maximum is {MAX_BYTES}")
    _check_depth(schema)
    nodes = _nodes_of(schema, max_subschemas)
    _Sizes(nodes).check()
    return len(nodes)


def _check_depth(schema: Any) -> None:
    """Without recursion: nothing is known of the value yet."""
    level = [schema]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below.extend(v for v in value.values() if isinstance(v, dict | list))
            elif isinstance(value, list):
                below.extend(v for v in value if isinstance(v, dict | list))
        if not below:
            return
        level = below
    raise SchemaRefused(f"the schema is nested deeper than {MAX_DEPTH} levels")


@dataclass(frozen=True, slots=True)
class _Node:
    """A schema and the places of those directly in it. `body`: {} for `true`."""

    body: Mapping[str, Any] | None
    children: tuple[str, ...]


def _nodes_of(root: Any, max_subschemas: int) -> dict[str, _Node]:
    """By JSON pointer, the schema and all within it. Raises SchemaRefused."""
    found: dict[str, _Node] = {}
    waiting: list[tuple[str, Any]] = [("#", root)]
    while waiting:
        at, body = waiting.pop()
        if len(found) == max_subschemas:
            raise SchemaRefused(
                f"the request's schemas have more than {MAX_SUBSCHEMAS} subschemas in total"
            )
        if isinstance(body, bool):
            found[at] = _Node({} if body else None, ())
        elif isinstance(body, dict):
            children = list(_children(at, body))
            waiting.extend(children)
            found[at] = _Node(body, tuple(place for place, _ in children))
        else:
            raise SchemaRefused(f"{at} must be an object, true or false")
    return found


def _children(at: str, body: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Raises SchemaRefused where a keyword's value is of the wrong kind."""
    for key, value in body.items():
        check_value = _SHAPES.get(key)
        if check_value is not None and not check_value(value):
            raise SchemaRefused(f"{at}/{key[:64]} has an invalid value")
        if key in MAPS:
            for name, child in value.items():
                yield f"{at}/{key}/{_escaped(name)}", child
        elif key in LISTS or (key == "items" and isinstance(value, list)):
            for index, child in enumerate(value):
                yield f"{at}/{key}/{index}", child
        elif key in SINGLES:
            yield f"{at}/{key}", value


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1") if "~" in name or "/" in name else name


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_map(value: Any) -> bool:
    return isinstance(value, dict)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return all(isinstance(name, str) and name in _TYPES for name in names)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


_SHAPES: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(MAPS, _is_map),
    **dict.fromkeys((*LISTS, "enum"), _is_list),
    **dict.fromkeys(("$ref", "pattern", "format", "$anchor", "$id"), _is_text),
    **dict.fromkeys(_COUNTS, _is_count),
    **dict.fromkeys(_NUMBERS, _is_number),
    "type": _is_type,
    "required": _is_names,
}


class _Sizes:
    """How short an answer can be, and how far a schema multiplies out, by schema."""

    def __init__(self, nodes: Mapping[str, _Node]) -> None:
        self._nodes = nodes
        self._targets: dict[str, str] = {}
        self._shortest: dict[str, float] = {}
        self._branches: dict[str, float] = {}
        self._repeats: dict[str, float] = {}

    def check(self) -> None:
        """Raises SchemaRefused."""
        for at, node in self._nodes.items():
            if node.body and "$ref" in node.body:
                self._targets[at] = self._resolve(at, node.body["$ref"])
        self._refuse_circles()
        order = self._inner_first()
        self._find_shortest(order)
        shortest = self._shortest["#"]
        if shortest == _INF:
            raise SchemaRefused("no finite JSON value can satisfy the schema")
        if shortest > MAX_SHORTEST_CHARS:
            raise SchemaRefused(
                "the shortest JSON that satisfies the schema has more than "
                f"{MAX_SHORTEST_CHARS} characters"
            )
        for at in order:
            self._branches[at] = self._branches_of(at)
            if self._branches[at] > MAX_BRANCHES:
                raise SchemaRefused(
                    f"{at}: anyOf within allOf gives more than {MAX_BRANCHES} combinations"
                )
            self._repeats[at] = self._repeats_of(at)
            if self._repeats[at] > MAX_REPEATS:
                raise SchemaRefused(f"{at}: nested repetitions multiply to too many items")
            pattern = (self._nodes[at].body or {}).get("pattern", "")
            if "{" in pattern and pattern_size(pattern) > MAX_PATTERN_CHARS:
                raise SchemaRefused(f"{at}/pattern is too large once its repetitions are expanded")

    def _resolve(self, at: str, reference: str) -> str:
        if reference in self._nodes:
            return reference
        if reference == "#" or reference.startswith("#/"):
            raise SchemaRefused(f"{at}/$ref: no schema at {reference[:200]!r}")
        raise SchemaRefused(f"{at}/$ref: only references within the schema are supported")

    def _refuse_circles(self) -> None:
        """References that lead to each other and to nothing else say nothing at all."""
        led_on: set[str] = set()  # looked at already: a chain may be as long as the schema
        for start in self._targets:
            way: set[str] = set()
            at = start
            while at in self._targets and at not in led_on:
                if at in way:
                    raise SchemaRefused(f"{at}/$ref refers back to itself")
                way.add(at)
                at = self._targets[at]
            led_on |= way

    def _inner_first(self) -> list[str]:
        """All schemas, each behind those it is made of; where they go round, somewhere in between.

        Without recursion: a chain of references may be as long as the schema.
        """
        order: list[str] = []
        seen: set[str] = set()
        waiting = [(at, False) for at in self._nodes]
        while waiting:
            at, is_done = waiting.pop()
            if is_done:
                order.append(at)
            elif at not in seen:
                seen.add(at)
                waiting.append((at, True))
                waiting.extend((inner, False) for inner in self._parts_of(at))
        return order

    def _parts_of(self, at: str) -> tuple[str, ...]:
        parts = self._nodes[at].children
        return (*parts, self._targets[at]) if at in self._targets else parts

    # The shortest text, as the least fixpoint: what refers to itself starts as impossible.

    def _find_shortest(self, order: Sequence[str]) -> None:
        self._shortest = dict.fromkeys(order, _INF)
        targets = set(self._targets.values())
        for _ in range(_MAX_ROUNDS):
            before = {target: self._shortest[target] for target in targets}
            for at in order:
                self._shortest[at] = self._shortest_of(at, self._nodes[at].body)
            if all(self._shortest[target] == value for target, value in before.items()):
                return
        raise SchemaRefused("the references in the schema are nested too deeply")

    def _shortest_of(self, at: str, node: Mapping[str, Any] | None) -> float:
        if not node:
            return _INF if node is None else 1
        least = self._shortest_of_type(at, node)
        if "enum" in node:
            least = max(least, min((_length(v) for v in node["enum"]), default=_INF))
        if "const" in node:
            least = max(least, _length(node["const"]))
        if at in self._targets:
            least = max(least, self._shortest[self._targets[at]])
        for index in range(len(node.get("allOf", ()))):
            least = max(least, self._shortest[f"{at}/allOf/{index}"])
        for key in ("anyOf", "oneOf"):
            if key in node:
                members = (self._shortest[f"{at}/{key}/{i}"] for i in range(len(node[key])))
                least = max(least, min(members, default=_INF))
        return least

    def _shortest_of_type(self, at: str, node: Mapping[str, Any]) -> float:
        types = node.get("type")
        if types is None:  # a digit will do, whatever else is said of objects and strings
            return self._shortest_of_one(at, node, "number")
        listed = types if isinstance(types, list) else [types]
        return min((self._shortest_of_one(at, node, name) for name in listed), default=_INF)

    def _shortest_of_one(self, at: str, node: Mapping[str, Any], name: str) -> float:
        if name == "string":
            low = _count(node, "minLength", 0)
            return low + 2 if low <= _count(node, "maxLength", _INF) else _INF
        if name in ("integer", "number"):
            low = max(node.get("minimum", -_INF), node.get("exclusiveMinimum", -_INF))
            high = min(node.get("maximum", _INF), node.get("exclusiveMaximum", _INF))
            return 1 if low <= high else _INF
        if name == "array":
            return self._shortest_array(at, node)
        if name == "object":
            return self._shortest_object(at, node)
        return 4

    def _shortest_array(self, at: str, node: Mapping[str, Any]) -> float:
        low = _count(node, "minItems", 0)
        if low > _count(node, "maxItems", _INF):
            return _INF
        length: float = 2
        for index in range(int(low)):
            place = f"{at}/prefixItems/{index}"
            if place not in self._shortest:
                return length + (low - index) * (1 + self._shortest.get(f"{at}/items", 1))
            length += 1 + self._shortest[place]
        return length

    def _shortest_object(self, at: str, node: Mapping[str, Any]) -> float:
        required = set(node.get("required", ()))
        low = max(_count(node, "minProperties", 0), len(required))
        if low > _count(node, "maxProperties", _INF):
            return _INF
        others = self._shortest.get(f"{at}/additionalProperties", 1)
        if "patternProperties" in node:
            others = 1
        length: float = 2
        for name in required:
            length += len(name) + 4
            length += self._shortest.get(f"{at}/properties/{_escaped(name)}", others)
        return length + (low - len(required)) * 5

    # How far it multiplies out. A schema that refers to itself counts once.

    def _branches_of(self, at: str) -> float:
        node = self._nodes[at].body
        known = self._branches
        count = 1.0
        if node:
            if at in self._targets:
                count *= known.get(self._targets[at], 1)
            for index in range(len(node.get("allOf", ()))):
                count *= known.get(f"{at}/allOf/{index}", 1)
            for key in ("anyOf", "oneOf"):
                members = range(len(node.get(key, ())))
                count *= sum(known.get(f"{at}/{key}/{i}", 1) for i in members) or 1
        return count

    def _repeats_of(self, at: str) -> float:
        """The product of all bounded repeats on the way to the most repeated value."""
        node = self._nodes[at].body
        count = max((self._repeats.get(part, 1) for part in self._parts_of(at)), default=1.0)
        if node:
            # One bound alone may be as large as it likes: compilers count.
            count *= min(max(1, _count(node, "minItems", 1), _count(node, "maxItems", 1)), 1024)
        return count


def _count(node: Mapping[str, Any], key: str, default: float) -> float:
    """Past all limits counts are all the same; as they come they may be too large for a float."""
    return min(node[key], _MANY) if key in node else default


def pattern_size(pattern: str) -> float:
    """How many characters a regular expression has with its `{n,m}` written out."""
    sizes, last = [0.0], 0.0
    for token in _PATTERN_TOKENS.finditer(pattern):
        text = token.group()
        if text == "(":
            sizes.append(0.0)
            last = 0.0
        elif text == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
        elif text[0] == "{" and len(text) > 1:
            sizes[-1] += last * (float(token["high"] or token["low"] or 1) - 1)
        else:
            last = 1.0
            sizes[-1] += last
    return sum(sizes)


def _length(value: Any) -> float:
    """Of a value as JSON text; roughly, and only as far as it matters."""
    if isinstance(value, str):
        return len(value) + 2
    if isinstance(value, list):
        return 2 + sum(_length(item) + 1 for item in value)
    if isinstance(value, dict):
        return 2 + sum(len(key) + 4 + _length(item) for key, item in value.items())
    return 1
