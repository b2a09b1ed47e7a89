"""Python literals become the JSON that Python itself would make of them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.tools.pythonic import to_json
from tests.gateway.api.tools.kit import JSON


@given(value=JSON)
def test_every_repr_comes_back(value: Any) -> None:
    assert json.loads(to_json(repr(value))) == value


@given(value=JSON)
def test_every_json_comes_back(value: Any) -> None:
    assert json.loads(to_json(json.dumps(value))) == value
    assert json.loads(to_json(json.dumps(value, ensure_ascii=False))) == value


@given(text=st.text("ab'\"\\nxu0{}[](),:1-.e ", max_size=20))
def test_noise_is_a_literal_or_a_value_error(text: str) -> None:
    try:
        found = to_json(text)
    except ValueError:
        return
    json.loads(found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"'\x41\101\u00e9\U0001F600'", "AAé😀"),
        (r"'a\qb'", "a\\qb"),
        ("'a\\\nb'", "ab"),
        ('"it\'s"', "it's"),
        ("'''a'b\n'''", "a'b\n"),
        ("(1,)", [1]),
    ],
)
def test_as_python_reads_it(text: str, expected: Any) -> None:
    assert json.loads(to_json(text)) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "f()", "1 2", "[1", "{1: 2}", "{'a' 1}", "'a", "1e999", "b'a'", "open('x')"),
        *("[" * 100 + "]" * 100, "9" * 5000, r"'\UFFFFFFFF'"),
    ],
)
def test_what_is_no_literal_or_has_no_json(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - its texts are nobody's business
        to_json(text)


def test_half_a_surrogate_pair_stays_escaped() -> None:
    assert to_json(r"'\ud83d'") == r'"\ud83d"'
    assert to_json(r"'\ud83d\ude00'") == '"😀"'
