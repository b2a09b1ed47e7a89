"""Whether two answers say the same."""

import pytest

from gateway.policy.cache_agree import LEAST_SIMILARITY, agrees


@pytest.mark.parametrize(
    ("a", "b", "similarity", "same"),
    [
        ("It is Paris.", "it  is paris.", None, True),
        ("It is Paris.", "Paris it is.", None, False),
        ("It is Paris.", "Paris it is.", 0.97, True),
        ("It is Paris.", "Paris it is.", LEAST_SIMILARITY - 0.01, False),
        ("It takes 3 days.", "It takes 4 days.", 0.99, False),
        ("It is safe.", "It is not safe.", 0.99, False),
        ("It is Paris.", "It is Rome.", 0.99, False),
        ("Run `ls -l`.", "Run `ls -a`.", 0.99, False),
    ],
)
def test_agrees(a: str, b: str, similarity: float | None, same: bool) -> None:
    assert agrees(a, b, similarity) is same
    assert agrees(b, a, similarity) is same
