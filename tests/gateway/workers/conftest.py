"""What tests of connections to workers share."""

from collections.abc import Iterator

import pytest
import zmq


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """Destroyed at the end."""
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)
