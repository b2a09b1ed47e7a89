"""Open after a break or late answers in a row; probed ever more rarely; closed by an answer."""

import logging

import pytest

from gateway.limits.redis_store import RedisLimits
from gateway.redis.redis_script import PATCHED, Breaker, RedisScript, version_fault
from tests.redis_kit import RedisServer


def test_a_broken_connection_opens_at_once() -> None:
    breaker = Breaker()
    assert breaker.failed(10.0, is_late=False)
    assert breaker.is_open
    assert not breaker.failed(10.0, is_late=False)  # told once
    assert breaker.probe_at_s == 10.1


def test_late_answers_open_in_a_row_only() -> None:
    breaker = Breaker()
    assert [breaker.failed(1.0, is_late=True) for _ in range(2)] == [False, False]
    breaker.succeeded()
    told = [breaker.failed(1.0, is_late=True) for _ in range(3)]
    assert told == [False, False, True]


def test_probes_get_rarer_up_to_a_second() -> None:
    breaker = Breaker()
    breaker.failed(0.0, is_late=False)
    waits = []
    for _ in range(6):
        now_s = breaker.probe_at_s
        breaker.probe_failed(now_s)
        waits.append(round(breaker.probe_at_s - now_s, 3))
    assert waits == [0.2, 0.4, 0.8, 1.0, 1.0, 1.0]
    breaker.succeeded()
    assert not breaker.is_open
    breaker.failed(0.0, is_late=False)
    assert breaker.probe_at_s == 0.1


@pytest.mark.parametrize("version", ["6.2.20", "7.2.11", "7.4.9", "8.0.4", "8.2.2", "8.4.0", "9.0"])
def test_a_redis_without_known_holes(version: str) -> None:
    assert version_fault({"redis_version": version}) == ""


@pytest.mark.parametrize(
    "version", ["6.0.16", "6.2.19", "7.0.15", "7.2.4", "7.4.5", "8.0.3", "8.2"]
)
def test_a_redis_with_known_holes(version: str) -> None:
    fault = version_fault({"redis_version": version, "server_name": "redis"})
    assert f"Redis {version} " in fault
    assert "6.2.20, 7.2.11" in fault


@pytest.mark.parametrize(
    "info",
    [{}, {"redis_version": "unknown"}, {"redis_version": "7.2.4", "server_name": "valkey"}],
)
def test_others_have_versions_of_their_own(info: dict[str, str]) -> None:
    assert version_fault(info) == ""


async def test_an_old_server_is_told_of_once(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(PATCHED, (6, 2), 999)
    limits = RedisLimits(redis_server.url, "g", 5.0)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            await limits.join(lease_s=1.0, orphan_s=1.0)
    await limits.close()
    assert len([record for record in caplog.records if "6.2." in record.message]) == 1
    script = RedisScript("redis://127.0.0.1:1", "return 1", 1)
    assert await script.fault(1.0) == "", "who does not answer is not blamed"
    await script.close()
