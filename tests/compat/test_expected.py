"""expected.json without running a suite: it judges as outcomes.py does, and docs/api.md says it."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.compat import outcomes

API_PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
SECTION = re.compile(r"^## What is absent\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
SERVED = {
    "openai": (
        "admin.organization.usage.completions",
        "admin.organization.usage.costs",
        "chat.completions.create",
        "completions.create",
        "embeddings.create",
        "models.list",
        "models.retrieve",
        "responses.create",
    ),
    "anthropic": ("messages.count_tokens", "messages.create", "models.list", "models.retrieve"),
}
"""What may never become worse than refusing fields by name."""


def row(**fields: Any) -> dict[str, Any]:
    """A test of `files.list` that got a 200."""
    exchange = {"path": "/v1/files", "verb": "GET", "status": 200}
    plain = {"method": "files.list", "mocked": False, "refused": [], "error": ""}
    return {**plain, "exchanges": [exchange], **fields}


def lost(message: str = "unknown URL: GET /v1/files") -> dict[str, Any]:
    exchange = {"path": "/v1/files", "verb": "GET", "status": 404, "message": message}
    return row(exchanges=[exchange], error="NotFoundError: gone")


@pytest.mark.parametrize(
    ("rows", "outcome"),
    [
        ([row()], "valid"),
        ([row(), row(refused=["b", "a"])], "refused: a, b"),
        ([lost()], "absent"),
        ([row(), lost()], "invalid: NotFoundError: gone"),
        ([lost("the model 'm' does not exist")], "invalid: NotFoundError: gone"),
        ([row(mocked=True)], outcomes.NEVER_SENT),
        ([row(exchanges=[], error="TypeError: x")], "invalid: TypeError: x"),
        (
            [row(error="APIResponseValidationError: y"), row()],
            "invalid: APIResponseValidationError: y",
        ),
    ],
)
def test_a_method_is_judged_by_all_its_tests(rows: list[dict[str, Any]], outcome: str) -> None:
    assert outcomes.outcomes(rows) == {"files.list": outcome}


def test_a_known_fault_covers_its_own_error_and_no_other() -> None:
    known = "APIResponseValidationError: data.0.embedding Input should be a valid list"
    rows = [row(method="embeddings.create", error=known), row(method="embeddings.create")]
    assert outcomes.outcomes(rows)["embeddings.create"].startswith(outcomes.FAULT)
    rows.append(row(method="embeddings.create", error="APIResponseValidationError: data.0.index"))
    assert outcomes.outcomes(rows)["embeddings.create"].startswith(outcomes.INVALID)


def test_a_change_either_way_is_a_difference() -> None:
    assert not outcomes.differences({"a": "valid"}, {"a": "valid"})
    for was, now in (("valid", "absent"), ("absent", "valid"), (None, "valid"), ("valid", None)):
        expected = {"a": was} if was else {}
        (line,) = outcomes.differences(expected, {"a": now} if now else {})
        assert repr(was) in line


def test_what_is_served_is_expected_to_be_right() -> None:
    expected = outcomes.read_expected()
    assert expected.keys() == SERVED.keys()
    for name, methods in expected.items():
        bad = {m: o for m, o in methods.items() if o.startswith(outcomes.INVALID)}
        assert not bad
        for method in SERVED[name]:
            assert methods[method] != outcomes.ABSENT, method


def test_each_absent_area_is_a_line_of_the_page() -> None:
    section = SECTION.search(API_PAGE.read_text())
    assert section is not None
    for name, methods in outcomes.read_expected().items():
        listed = re.search(rf"^### {name}\n(.*?)(?=^###|\Z)", section[1], re.M | re.S | re.I)
        assert listed is not None, name
        areas = re.findall(r"`([a-z_.]+)`", listed[1])
        assert sorted(areas) == sorted(outcomes.absent_areas(methods)), name
