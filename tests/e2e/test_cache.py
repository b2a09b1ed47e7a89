"""A real server: two gateway processes, a Redis, an embedder. Hits by meaning, at either one."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from bench.servers import Server
from tests.e2e.conftest import DEVICE_BUDGET, Prepared
from tests.e2e.server import polyhost, polyhost_json, serving
from tests.redis_kit import RedisServer

pytestmark = pytest.mark.e2e

ASK, SAME = "The cat sat on the mat", "the cat sat on the mat!"


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def cached(
    prepared: Prepared, redis: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    data_dir = prepared.copy_to(tmp_path_factory.mktemp("cached"))
    settings = {
        "POLYHOST_CACHE_EMBEDDER": "embed",
        "POLYHOST_CACHE_EMBED_TIMEOUT_S": "5",
        "POLYHOST_CACHE_LEAST_LOGPROB": "-100",  # asked for, and never so low
        "POLYHOST_REDIS_URL": redis.url,
    }
    arguments = ("--device-budget", DEVICE_BUDGET, "--gateway-processes", "2")
    with serving(data_dir, *arguments, **settings) as server:
        yield server


def ask(server: Server, key: str, prompt: str, mode: str = "semantic") -> tuple[str, str, str]:
    """What the cache said, the entry, the text. Each time by a connection of its own, so that
    either gateway process may get it."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key) as client:
        raw = client.completions.with_raw_response.create(
            model="shakespeare",
            prompt=prompt,
            max_tokens=8,
            temperature=0,
            extra_headers={"x-polyhost-cache-mode": mode},
        )
    headers = raw.headers
    return (
        headers["x-polyhost-cache"],
        headers.get("x-polyhost-cache-entry", ""),
        raw.parse().choices[0].text,
    )


def embeds(server: Server) -> bool:
    """Whether the embedder answers: a question is embedded, not passed over."""
    before = failures(server)
    ask(server, server_key(server), f"old moon {os.urandom(4).hex()}")
    return failures(server) == before


def failures(server: Server) -> float:
    return server.metrics()["semantic_cache_embed_failures_total"]


def server_key(server: Server) -> str:
    return KEYS[server.port]


KEYS: dict[int, str] = {}


def hits(server: Server, key: str, prompt: str) -> list[tuple[str, str, str]]:
    """Until it was answered by both processes, most likely."""
    return [ask(server, key, prompt) for _ in range(8)]


def test_hits_are_shared_traced_and_purged_everywhere(cached: Server, prepared: Prepared) -> None:
    key = KEYS[cached.port] = prepared.key
    cached.wait_until(lambda: embeds(cached))
    first, _, _ = ask(cached, key, ASK)
    assert first == "miss"
    cached.wait_until(lambda: ask(cached, key, SAME)[0] == "hit")
    found = hits(cached, key, SAME)
    # One in twenty hits is withheld to be compared.
    assert [result for result, _, _ in found].count("hit") >= 4
    for entry, text in {(entry, said) for result, entry, said in found if result == "hit"}:
        shown = polyhost_json(cached.data_dir, "cache", "show", entry)
        assert shown["answer"].strip() == text.strip()
        assert (shown["request_id"], shown["model"]) == (entry, "shakespeare")
    rows = polyhost_json(cached.data_dir, "cache", "stats")
    assert [row["gateway"] for row in rows] == ["gateway-0", "gateway-1"]
    assert {row["store"].partition(" ")[0] for row in rows} == {"redis"}
    listed = polyhost_json(cached.data_dir, "cache", "list", "--tenant", "acme")
    assert {entry for result, entry, _ in found if result == "hit"} <= {
        row["request_id"] for row in listed
    }
    assert ask(cached, prepared.keys["crowd"], SAME)[0] == "miss"  # another tenant
    said = {row["question"] for row in listed if row["question"] in (ASK, SAME)}
    for text in said:
        purged = polyhost(cached.data_dir, "cache", "purge", "--tenant", "acme", "--text", text)
        assert purged.stdout.startswith("purged ")
        assert purged.stdout != "purged 0 answers\n"
    assert said.isdisjoint(
        row["question"]
        for row in polyhost_json(cached.data_dir, "cache", "list", "--tenant", "acme")
    )
    assert ask(cached, key, SAME)[0] == "miss"
    done = polyhost(cached.data_dir, "cache", "purge", "--tenant", "acme")
    assert done.returncode == 0, done.stderr
    assert ask(cached, key, "the cat sat on THE mat")[0] == "miss"
    gone = polyhost(cached.data_dir, "cache", "show", entry, "--tenant", "acme")
    assert gone.returncode == 1
    audited: Any = polyhost_json(cached.data_dir, "audit", "list")
    assert [row["action"] for row in audited[:2]] == ["cache.read", "cache.purge"]


def test_an_embedder_that_is_killed_comes_back(cached: Server, prepared: Prepared) -> None:
    KEYS[cached.port] = prepared.key
    cached.wait_until(lambda: embeds(cached))
    os.kill(embedder_pid(cached), signal.SIGKILL)
    assert ask(cached, prepared.key, "a dog ran far")[0] == "miss"
    cached.wait_until(lambda: embeds(cached))
    restarts = 'worker_restarts_total{worker="embedder-0"}'
    assert cached.metrics()[restarts] == 1


def embedder_pid(server: Server) -> int:
    log = server.process.read_log()
    told = [line for line in log.splitlines() if "started name=embedder-0 pid=" in line]
    return int(told[-1].partition("pid=")[2].partition('"')[0])


def test_redis_gone_is_a_miss_and_it_comes_back(
    cached: Server, prepared: Prepared, redis: RedisServer
) -> None:
    key = prepared.key
    redis.stop()
    try:
        for _ in range(4):
            assert ask(cached, key, ASK)[0] == "miss"
        done = polyhost(cached.data_dir, "cache", "purge", "--model", "shakespeare")
        assert done.returncode == 1
        assert "did not answer" in done.stderr
    finally:
        redis.start()
    cached.wait_until(lambda: ask(cached, key, ASK)[0] == "hit")
