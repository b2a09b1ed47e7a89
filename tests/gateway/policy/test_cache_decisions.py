"""What stage 4's policies say stays what it was, text for text (`decisions_kit`)."""

import json

import pytest

from tests.gateway.policy.decisions_kit import FAMILIES, FILE, told

KNOWN: dict[str, str] = json.loads(FILE.read_text(encoding="utf-8"))


def test_every_family_is_written_down() -> None:
    assert list(KNOWN) == list(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_readings_comparisons_and_verdicts_are_those_written_down(family: str) -> None:
    now = told(family)
    changed = [n for n, (a, b) in enumerate(zip(now, KNOWN[family].split(), strict=True)) if a != b]
    assert not changed
