"""A server of two gateway processes, a dispatcher and one in waiting: kill -9, and who notices."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bench import client
from bench.client import Answer
from bench.servers import Server
from tests.e2e.conftest import Prepared
from tests.e2e.folders import NAMES
from tests.e2e.server import (
    child_pids,
    polyhost,
    polyhost_json,
    polyhost_process,
    serving,
    usage_rows,
)
from tests.e2e.test_failures import CHAT, begin, post

pytestmark = pytest.mark.e2e

NUM_QUEUED = 24


@pytest.fixture(scope="module")
def several(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two rows at a time: most requests wait when something dies."""
    data_dir = prepared.copy_to(tmp_path_factory.mktemp("several"))
    narrow = {
        "POLYHOST_MAX_NUM_SEQS": "2",
        "POLYHOST_QUEUE_TIMEOUT_S": "120",
        "POLYHOST_DISPATCHER_TIMEOUT_S": "4",
    }
    with serving(data_dir, "--gateway-processes", "2", "--host-tier", "0", **narrow) as running:
        yield running
        assert running.stop() == 0
        assert child_pids(running, "gateway") == []


def active_dispatcher(server: Server) -> int:
    """Who holds the lock, as the kernel says."""
    inode = (server.data_dir / "run" / "dispatcher.lock").stat().st_ino
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if fields[1] == "FLOCK" and fields[5].endswith(f":{inode}"):
            return int(fields[4])
    raise AssertionError("nobody is active")


async def ask_all(
    server: Server, key: str, session: aiohttp.ClientSession
) -> "tuple[list[Answer], asyncio.Future[Any]]":
    """Streams that have begun, and more than can run."""
    long = {**CHAT, "max_tokens": 60, "temperature": 1.0}
    bodies = [{**long, "model": NAMES[i % 2], "seed": i} for i in range(NUM_QUEUED)]
    return await begin(server, key, session, bodies)


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """A connection a request: any gateway may get it."""
    async with client.new_session(force_close=True) as opened:
        yield opened


async def test_a_killed_dispatcher_loses_no_request_and_doubles_none(
    prepared: Prepared, several: Server, session: aiohttp.ClientSession
) -> None:
    seen, ended = await ask_all(several, prepared.keys["killed"], session)
    first = active_dispatcher(several)
    os.kill(first, signal.SIGKILL)
    await ended
    assert [one.status for one in seen] == [200] * NUM_QUEUED
    assert all(one.end == "done" and one.chunks for one in seen), seen
    assert active_dispatcher(several) != first
    several.wait_until(several.has_posted)
    rows = usage_rows(several.data_dir, polyhost_process, tenant="killed")
    assert Counter(row["request_id"] for row in rows) == Counter(one.request_id for one in seen)
    assert {row["outcome"] for row in rows} == {"finished"}
    metrics = several.metrics()
    assert metrics["dispatcher_epoch"] >= 2
    counts = [value for name, value in metrics.items() if "requests_ended_total" in name]
    assert sum(counts) == NUM_QUEUED
    assert metrics["ready"] == 1
    assert polyhost_json(several.data_dir, "why")["num_waiting"] == 0


async def test_a_dispatcher_that_hangs_is_ended_and_its_place_taken(
    prepared: Prepared, several: Server, session: aiohttp.ClientSession
) -> None:
    seen, ended = await ask_all(several, prepared.keys["gone"], session)
    first = active_dispatcher(several)
    os.kill(first, signal.SIGSTOP)
    await ended
    assert all(one.end == "done" and one.chunks for one in seen), seen
    assert active_dispatcher(several) != first


async def test_a_killed_gateway_takes_only_its_own_with_it(
    prepared: Prepared, several: Server, session: aiohttp.ClientSession
) -> None:
    seen, ended = await ask_all(several, prepared.keys["crowd"], session)
    victim = child_pids(several, "gateway.server.gateway_process")[0]
    os.kill(victim, signal.SIGKILL)
    await ended
    whole = [one for one in seen if one.end == "done"]
    lost = {one.code for one in seen if one.end == "broken" and one.code.startswith("connection")}
    assert lost <= {
        "connection: ClientPayloadError",
        "connection: ClientOSError",
        "connection: ServerDisconnectedError",
    }
    assert not any(one.code == "timeout" for one in seen)
    several.wait_until(lambda: len(child_pids(several, "gateway.server.gateway_process")) == 2)
    several.wait_until(several.is_ready)
    status, _, _ = await post(several, prepared.keys["crowd"], CHAT)
    assert status == 200
    several.wait_until(lambda: several.metrics()["limit_reservations_open"] == 0)
    several.wait_until(several.has_posted)
    rows = Counter(
        row["request_id"] for row in usage_rows(several.data_dir, polyhost_process, tenant="crowd")
    )
    assert set(rows.values()) == {1}
    assert {one.request_id for one in whole} <= rows.keys()
    metrics = several.metrics()
    restarts = [value for name, value in metrics.items() if "process_restarts_total" in name]
    assert sum(restarts) >= 2  # this one, and the dispatcher of the test before
    waiting = [value for name, value in metrics.items() if "num_requests_waiting" in name]
    assert sum(waiting) == 0


async def test_a_killed_worker_breaks_no_stream(
    prepared: Prepared, several: Server, session: aiohttp.ClientSession
) -> None:
    key = prepared.keys["revoked"]
    undisturbed, ended = await ask_all(several, key, session)
    await ended
    seen, ended = await ask_all(several, key, session)
    (pid,) = several.worker_pids()
    os.kill(pid, signal.SIGKILL)
    await ended
    assert all(one.end == "done" and one.chunks for one in seen), seen
    assert [one.text for one in seen] == [one.text for one in undisturbed]
    assert several.metrics()["request_resumes_total"] >= 1
    several.wait_until(several.has_posted)
    rows = usage_rows(several.data_dir, polyhost_process, tenant="revoked")
    counts = Counter(row["request_id"] for row in rows)
    assert counts == Counter(one.request_id for one in (*undisturbed, *seen))
    assert {row["outcome"] for row in rows} == {"finished"}
    before = {one.text: row_of(rows, one)["completion_tokens"] for one in undisturbed}
    assert {one.text: row_of(rows, one)["completion_tokens"] for one in seen} == before


def row_of(rows: list[dict[str, Any]], answer: Answer) -> dict[str, Any]:
    """Its posting."""
    (row,) = [row for row in rows if row["request_id"] == answer.request_id]
    return row


async def test_a_price_of_loads_is_billed_though_the_dispatcher_is_elsewhere(
    prepared: Prepared, several: Server
) -> None:
    price = ("--prompt", "0", "--completion", "0", "--load-second", "1")
    assert polyhost(several.data_dir, "prices", "set", NAMES[0], *price).returncode == 0
    await asyncio.sleep(2.5)  # when the price begins
    borne: dict[str, Any] = {}
    # One that comes before the pages are given back bears nothing, nor before the price begins.
    for _ in range(10):
        assert polyhost(several.data_dir, "models", "unload", NAMES[0]).returncode == 0
        status, _, _ = await post(several, prepared.keys["crowd"], {**CHAT, "model": NAMES[0]})
        assert status == 200
        several.wait_until(several.has_posted)
        rows = usage_rows(several.data_dir, tenant="crowd")
        borne = max(rows, key=lambda row: int(row["load_nanos"]))
        if borne["load_nanos"]:
            break
    assert borne["load_nanos"] == borne["cost_nanos"] == int(borne["load_s"] * 1e6) * 1000 > 0


async def test_limits_and_keys_are_the_same_at_every_process(
    prepared: Prepared, several: Server
) -> None:
    key = prepared.keys["revoked"]
    done = polyhost(several.data_dir, "limits", "set", "--tenant", "revoked", "--rpm", "5")
    assert done.returncode == 0, done.stderr

    async def statuses(num: int) -> Counter[int]:
        asked = [post(several, key, {**CHAT, "max_tokens": 1}) for _ in range(num)]
        return Counter([status for status, _, _ in await asyncio.gather(*asked)])

    await asyncio.sleep(2.0)  # in which every process has read of it
    assert await statuses(16) == {200: 5, 429: 11}
    assert polyhost(several.data_dir, "keys", "revoke", key.split("-")[2]).returncode == 0
    await asyncio.sleep(2.0)
    assert await statuses(16) == {401: 16}
