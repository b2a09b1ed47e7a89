"""The bodies that `bench.refusals` sends: what the gateway alone can tell is told by it."""

import json

import msgspec
import pytest

from bench.refusals import bodies
from gateway.errors import ApiError
from gateway.prepare.structured_request import understand
from gateway.prepare.tool_types import ResponseFormat

# The worker's compiler is who knows these.
COMPILED = (
    "a keyword that cannot be held",
    "a pattern with look-ahead",
    "a grammar without rules",
    "a grammar that takes minutes",
    "a grammar that doubles",
)


def forms() -> dict[str, object]:
    found = {}
    for name, body in bodies("m").items():
        if isinstance(body, dict) and "response_format" in body:
            found[name] = body["response_format"]
    return found


@pytest.mark.parametrize("name", sorted(forms()))
def test_forms_are_refused_where_the_table_says(name: str) -> None:
    asked = msgspec.json.encode(forms()[name])

    def read() -> None:
        # As bytes, for so the field's own bounds are met first.
        understand(response_format=msgspec.json.decode(asked, type=ResponseFormat))

    if name in COMPILED:
        read()
        return
    with pytest.raises((ApiError, msgspec.ValidationError)):
        read()


def test_bodies_are_what_they_say() -> None:
    found = bodies("m")
    text = json.dumps(found["half a megabyte of schema, exponential"])
    assert 400_000 < len(text) < 600_000
    assert found["a schema 40,000 levels deep"].count("items") == 40_000
    assert set(COMPILED) <= found.keys()
