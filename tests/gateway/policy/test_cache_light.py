"""Light words, and who does it to whom."""

import pytest

from gateway.policy.cache_light import light_in, roles_in


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("how do i order my card", set()),
        ("how do i order another card", {"another"}),
        ("which one have i used up", {"use", "up"}),
        ("why is it not working", {"work"}),
    ],
)
def test_light(text: str, found: set[str]) -> None:
    assert light_in(text.split()) == found


@pytest.mark.parametrize(
    ("text", "roles"),
    [
        ("can i call you bob", {"by me"}),
        ("can you call me bob", {"to me"}),
        ("can you tell me how i call you", {"by me"}),
        ("can you please tell me the time", set()),
        ("where is the card you sent me", {"to me"}),
        ("i want you to sing", set()),
        ("may i ask you to call me bob", {"by me", "to me"}),
        ("what is the time", set()),
    ],
)
def test_roles(text: str, roles: set[str]) -> None:
    assert roles_in(text.split()) == roles
