"""The books of every dispatcher that a test has made agree when it is over."""

from collections.abc import Iterator

import pytest

from tests.gateway.scripted_worker import Rig


@pytest.fixture(autouse=True)
def books_agree() -> Iterator[None]:
    Rig.made.clear()
    yield
    for rig in Rig.made:
        rig.dispatcher.check_integrity()
