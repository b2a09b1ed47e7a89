"""An application over scripted neighbours and its client; one Redis for a test, empty at its start.

A module with another application has a fixture `kit` of its own.
"""

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.gateway.edge_kit import Client, Kit, client_of, make_kit
from tests.redis_kit import RedisServer


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    with tempfile.TemporaryDirectory(
        prefix="polyhost-redis-"
    ) as folder:  # a socket's path is short
        server = RedisServer(Path(folder))
        server.start()
        yield server
        server.stop()


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return make_kit(tmp_path / "tiny")


@pytest.fixture
async def client(kit: Kit) -> AsyncIterator[Client]:
    async with client_of(kit) as client:
        yield client
