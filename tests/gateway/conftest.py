"""One Redis for a test, empty at its start."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway.store.redis_kit import RedisServer


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    with tempfile.TemporaryDirectory(
        prefix="polyhost-redis-"
    ) as folder:  # a socket's path is short
        server = RedisServer(Path(folder))
        server.start()
        yield server
        server.stop()
