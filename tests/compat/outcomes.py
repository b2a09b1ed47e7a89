"""What a run of an SDK's suite says of each of the SDK's methods, from the recorder's rows.

    valid                    every test passed; where the suite sends all fields, all were taken
    refused: A, B            valid without these fields, which were refused by name
    absent                   the route, or its method, does not exist
    suite's own fault: WHY   a test fails because of a right answer, or asks no server at all
    invalid: WHY             none of these. expected.json may not say so

The fault is a person's judgement: FAULTS names the errors that are the suite's, and the rest of the
method's tests must pass. Where they no longer come, the outcome changes.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

EXPECTED = Path(__file__).resolve().parent / "expected.json"
ABSENT, VALID, REFUSED = "absent", "valid", "refused: "
INVALID, FAULT = "invalid: ", "suite's own fault: "
NEVER_SENT = FAULT + "answers itself and sends nothing"
UNKNOWN_URL = "unknown URL"
FAULTS: dict[str, tuple[re.Pattern[str], str]] = {
    "embeddings.create": (
        re.compile(r"APIResponseValidationError.*\.embedding .*valid list"),
        "the SDK asks for base64 by itself, and validates before it decodes",
    ),
    "completions.create": (
        re.compile(r"APIResponseValidationError.*token_logprobs\.0 .*valid number"),
        "no null is allowed for the log-probability of the first token of an echo",
    ),
}
"""By method: the error, and why a right answer makes it."""


def read_expected() -> dict[str, dict[str, str]]:
    """By SDK and method."""
    found: dict[str, dict[str, str]] = json.loads(EXPECTED.read_text())
    return found


def outcomes(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """By method."""
    by_method: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        by_method[row["method"]].append(row)
    return {method: _outcome(method, by_method[method]) for method in sorted(by_method)}


def _outcome(method: str, rows: list[Mapping[str, Any]]) -> str:
    sent = [row for row in rows if row["exchanges"] and not row["mocked"]]
    if not sent:
        errors = [row["error"] for row in rows if row["error"] and not row["mocked"]]
        return f"{INVALID}{errors[0]}" if errors else NEVER_SENT
    if all(_is_absent(row["exchanges"][-1]) for row in sent):
        return ABSENT
    fault, why = FAULTS.get(method, (None, ""))
    errors = [row["error"] for row in sent if row["error"]]
    wrong = [error for error in errors if fault is None or not fault.search(error)]
    if wrong:
        return f"{INVALID}{wrong[0]}"
    refused = sorted({field for row in sent for field in row["refused"]})
    parts = [FAULT + why] if errors else []
    parts += [REFUSED + ", ".join(refused)] if refused else []
    return "; ".join(parts) or VALID


def _is_absent(exchange: Mapping[str, Any]) -> bool:
    is_unknown = exchange["status"] == 404 and UNKNOWN_URL in (exchange.get("message") or "")
    return is_unknown or exchange["status"] == 405


def differences(expected: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """What has to be changed in expected.json, or mended, for the two to agree."""
    return [
        f"{method}: expected {expected.get(method)!r}, found {found.get(method)!r}"
        for method in sorted(expected.keys() | found.keys())
        if expected.get(method) != found.get(method)
    ]


def absent_areas(outcomes: Mapping[str, str]) -> set[str]:
    """The shortest names below which nothing is served: `files`, `models.delete`."""
    areas = set()
    for method, outcome in outcomes.items():
        names = method.split(".")
        above = (".".join(names[:length]) for length in range(1, len(names) + 1))
        if outcome == ABSENT:
            areas.add(next(area for area in above if _serves_nothing(area, outcomes)))
    return areas


def _serves_nothing(area: str, outcomes: Mapping[str, str]) -> bool:
    return all(
        outcome in (ABSENT, NEVER_SENT)
        for method, outcome in outcomes.items()
        if f"{method}.".startswith(f"{area}.")
    )
