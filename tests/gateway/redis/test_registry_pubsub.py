"""News of the registry is heard at once, over a Redis that goes and comes, in nobody's way."""

import asyncio
from pathlib import Path

import pytest

from admin.cli.main import main
from gateway.redis import registry_pubsub
from gateway.redis.redis_script import check_url
from gateway.redis.registry_pubsub import RegistryPubsub
from tests.redis_kit import RedisServer


async def test_it_is_heard(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_pubsub, "RETRY_S", 0.05)
    heard = asyncio.Queue[None]()
    listener = asyncio.create_task(
        RegistryPubsub(redis_server.url, "a").listen(lambda: heard.put_nowait(None))
    )
    async with asyncio.timeout(20):
        await heard.get()  # what was heard before nobody has heard
        await asyncio.to_thread(RegistryPubsub(redis_server.url, "another").publish)
        await asyncio.to_thread(RegistryPubsub(redis_server.url, "a").publish)
        await heard.get()
        assert heard.empty()
        redis_server.stop()
        await asyncio.to_thread(
            RegistryPubsub(redis_server.url, "a").publish
        )  # nobody to hear it: no matter
        redis_server.start()
        await heard.get()
        await asyncio.to_thread(RegistryPubsub(redis_server.url, "a").publish)
        await heard.get()
    listener.cancel()
    await asyncio.gather(listener, return_exceptions=True)


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("redis://:sekret@127.0.0.1:1/0?x=1", "unknown option 'x'"),
        ("redis://:sek/ret@127.0.0.1:1/0", "percent-encoded"),
        ("redis://:sekret@127.0.0.1:port/0", "percent-encoded"),
        ("http://:sekret@127.0.0.1:1/0", "rediss://"),
        ("redis://:sekret@127.0.0.1:1/0?decode_responses=yes", "unknown option 'decode_responses'"),
        ("redis://:sekret@127.0.0.1:1/0?socket_timeout=abc", "percent-encoded"),
    ],
)
def test_an_address_that_cannot_be_used_ends_the_start_in_a_sentence(
    url: str,
    word: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Of any command: it would fail once something is published."""
    monkeypatch.setenv("POLYHOST_REDIS_URL", url)
    assert main(["tenants", "list", "--data-dir", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert (said.count("\n"), word in said, "sek" in said) == (1, True, False), said


@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost",
        "rediss://u:p%2F@h:6380/2?ssl_cert_reqs=none",
        "unix:///run/r.sock?db=1",
        "redis://h?socket_timeout=0.5&health_check_interval=30&protocol=3&client_name=polyhost",
    ],
)
def test_addresses_that_redis_py_knows(url: str) -> None:
    check_url(url)
