"""requirements.lock has every pin of constraints.txt and hashes for each."""

import re

import pytest

from tests.lock_file import CONSTRAINTS, HEAD, LOCK, NOT_LOCKED, is_ours, pins, render


def test_the_lock_pins_what_the_constraints_pin() -> None:
    wanted = pins(CONSTRAINTS.read_text(encoding="utf-8"))
    assert wanted.pop(NOT_LOCKED)
    assert pins(LOCK.read_text(encoding="utf-8")) == wanted, (
        "run `python -m tests.lock_file` (it needs uv)"
    )


def test_every_pin_has_a_hash() -> None:
    text = LOCK.read_text(encoding="utf-8")
    assert text.startswith(HEAD)
    found = text.removeprefix(HEAD)
    pinned = re.findall(r"^\S+==\S+(?: \\\n    --hash=sha256:[0-9a-f]{64})+\n", found, re.MULTILINE)
    assert "".join(pinned) == found


@pytest.mark.parametrize(
    ("wheel", "expected"),
    [
        ("a-1-py3-none-any.whl", True),
        ("a-1-py2.py3-none-any.whl", True),
        ("a-1-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.whl", True),
        ("a-1-cp39-abi3-manylinux_2_28_aarch64.whl", True),
        ("a-1-1-cp314-cp314-manylinux_2_28_x86_64.whl", True),
        ("a-1-cp310-cp310-manylinux_2_28_x86_64.whl", False),
        ("a-1-cp314-cp314t-manylinux_2_28_x86_64.whl", False),
        ("a-1-cp311-cp311-musllinux_1_2_x86_64.whl", False),
        ("a-1-cp311-cp311-win_amd64.whl", False),
        ("a-1-py2-none-any.whl", False),
    ],
)
def test_wheels_of_our_platforms(wheel: str, expected: bool) -> None:
    assert is_ours(wheel) == expected
    package = {"name": "a", "version": "1", "wheels": [{"name": wheel, "hashes": {"sha256": "f"}}]}
    assert ("sha256:f" in render([package])) == expected
