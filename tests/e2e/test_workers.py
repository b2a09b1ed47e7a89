"""Two workers on one machine: streams outlive them, orders are carried out, a model is warm once.

With one gateway process, where the dispatcher is an object in it, and with two, where it is a
process of its own.
"""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bench import client
from bench.client import Answer
from bench.servers import Server, total
from gateway.ipc import machine
from tests.e2e.conftest import Prepared
from tests.e2e.folders import NAMES
from tests.e2e.server import child_pids, polyhost, polyhost_json, serving, usage_rows
from tests.e2e.test_failures import CHAT, begin

pytestmark = pytest.mark.e2e

NUM_STREAMS = 12
TEXTS: dict[Path, list[str]] = {}
PROMPTS = [f"Tell me about number {n}" for n in range(NUM_STREAMS)]


@pytest.fixture(scope="module", params=[1, 2])
def pair(
    request: pytest.FixtureRequest, prepared: Prepared, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Memory for two of the three models on each."""
    data_dir = prepared.copy_to(tmp_path_factory.mktemp("pair"))
    settings = {
        "POLYHOST_WORKER_HEARTBEAT_TIMEOUT_S": "3",
        "POLYHOST_WORKER_DRAIN_TIMEOUT_S": "0.5",
        "POLYHOST_QUEUE_TIMEOUT_S": "120",
    }
    processes = ("--gateway-processes", str(request.param))
    memory = ("--device-budget", "18MiB", "--host-tier", "64MiB")
    with serving(data_dir, "--workers", "2", *processes, *memory, **settings) as running:
        running.wait_until(lambda: len(serving_workers(running)) == 2)
        yield running
        assert running.stop() == 0
        assert child_pids(running, "engine.worker.main") == []


def states(server: Server) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in polyhost_json(server.data_dir, "workers", "list")}


def serving_workers(server: Server) -> list[str]:
    return [name for name, row in states(server).items() if row["state"] == "serving"]


def process_of(server: Server, worker: str) -> int:
    """Its process: the last that the log says was started."""
    told = [
        line
        for line in (server.data_dir / "server.log").read_text().splitlines()
        if f"process started name={worker} pid=" in line
    ]
    return int(told[-1].partition("pid=")[2].partition('"')[0])


def bodies() -> list[dict[str, Any]]:
    return [
        {
            **CHAT,
            "model": NAMES[n % 2],
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 120,
            "temperature": 0,
            "stream_options": {"include_usage": True},
            "logit_bias": {"1": -100, "5": -100},  # they do not end early
        }
        for n, prompt in enumerate(PROMPTS)
    ]


@asynccontextmanager
async def streams(server: Server, key: str) -> AsyncIterator[list[Answer]]:
    """All of them under way; at the end, all have ended."""
    async with client.new_session(force_close=True) as session:
        seen, ended = await begin(server, key, session, bodies())
        yield seen
        await ended


async def undisturbed(server: Server, key: str) -> list[str]:
    """The texts, asked for once."""
    if server.data_dir not in TEXTS:
        async with streams(server, key) as seen:
            pass
        assert [one.end for one in seen] == ["done"] * NUM_STREAMS
        TEXTS[server.data_dir] = [one.text for one in seen]
    return TEXTS[server.data_dir]


def check(server: Server, tenant: str, seen: Sequence[Answer], expected: Sequence[str]) -> None:
    """Every client saw what it would have seen, and pays for it once."""
    assert [(one.end, one.code) for one in seen] == [("done", "")] * NUM_STREAMS
    assert [one.text for one in seen] == list(expected)
    server.wait_until(server.has_posted)
    rows = {row["request_id"]: row for row in usage_rows(server.data_dir, tenant=tenant)}
    posted = Counter(row["request_id"] for row in usage_rows(server.data_dir, tenant=tenant))
    for one in seen:
        row = rows[one.request_id]
        assert posted[one.request_id] == 1
        assert row["outcome"] == "finished"
        assert (row["prompt_tokens"], row["completion_tokens"]) == one.told


async def test_streams_outlive_a_worker_that_dies(prepared: Prepared, pair: Server) -> None:
    expected = await undisturbed(pair, prepared.keys["acme"])
    server_side = total(pair.metrics(), "request_resumes_total")
    async with streams(pair, prepared.keys["killed"]) as seen:
        os.kill(process_of(pair, "worker-0"), signal.SIGKILL)
    check(pair, "killed", seen, expected)
    async with streams(pair, prepared.keys["killed"]) as seen:
        os.kill(process_of(pair, "worker-1"), signal.SIGKILL)
    check(pair, "killed", seen, expected)
    assert total(pair.metrics(), "request_resumes_total") > server_side
    pair.wait_until(lambda: len(serving_workers(pair)) == 2)


async def test_a_worker_that_hangs_is_left_and_replaced(prepared: Prepared, pair: Server) -> None:
    expected = await undisturbed(pair, prepared.keys["acme"])
    hung = process_of(pair, "worker-1")
    async with streams(pair, prepared.keys["gone"]) as seen:
        os.kill(hung, signal.SIGSTOP)
    check(pair, "gone", seen, expected)
    pair.wait_until(lambda: process_of(pair, "worker-1") != hung)
    pair.wait_until(lambda: len(serving_workers(pair)) == 2)
    assert not Path(f"/proc/{hung}").exists()


async def test_all_workers_restart_under_load(prepared: Prepared, pair: Server) -> None:
    expected = await undisturbed(pair, prepared.keys["acme"])
    before = {name: row["started_at"] for name, row in states(pair).items()}
    async with streams(pair, prepared.keys["crowd"]) as seen:
        assert polyhost(pair.data_dir, "workers", "restart", "--all").returncode == 0
        await asyncio.sleep(1.0)
    check(pair, "crowd", seen, expected)
    done = await asyncio.to_thread(
        polyhost, pair.data_dir, "workers", "restart", "--wait", "worker-0"
    )
    assert done.returncode == 0
    pair.wait_until(lambda: len(serving_workers(pair)) == 2)
    after = {name: row["started_at"] for name, row in states(pair).items()}
    assert all(after[name] > before[name] for name in before)


async def test_the_books_agree_while_requests_run(prepared: Prepared, pair: Server) -> None:
    async with streams(pair, prepared.keys["acme"]):
        found = await asyncio.to_thread(polyhost_json, pair.data_dir, "workers", "check")
    assert {row["name"] for row in found} >= {"dispatcher", "worker-0", "worker-1"}
    assert {row["state"] for row in found} == {"ok"}, found


async def test_a_drained_worker_stays_out_until_it_is_resumed(
    prepared: Prepared, pair: Server
) -> None:
    done = await asyncio.to_thread(
        polyhost, pair.data_dir, "workers", "drain", "--wait", "worker-0"
    )
    assert done.returncode == 0
    assert "worker-0: drained" in done.stdout
    async with streams(pair, prepared.keys["acme"]):
        assert states(pair)["worker-0"]["num_running"] == 0
        assert states(pair)["worker-1"]["num_running"] > 0
    os.kill(process_of(pair, "worker-0"), signal.SIGKILL)
    pair.wait_until(lambda: states(pair)["worker-0"]["state"] == "drained")
    assert polyhost(pair.data_dir, "workers", "resume", "worker-0").returncode == 0
    pair.wait_until(lambda: len(serving_workers(pair)) == 2)


def test_a_model_is_warm_once_for_both(prepared: Prepared, pair: Server) -> None:
    """Whichever worker has copied a pack to the host tier, both load from that one file."""
    prefix = f"polyhost-{machine.data_dir_id(pair.data_dir)}"
    files = [path.name for path in machine.SHM_DIR.glob(f"{prefix}-*.pack")]
    packs = {polyhost_json(pair.data_dir, "models", "show", name)["revision"] for name in NAMES}
    assert {name.removeprefix(f"{prefix}-").removesuffix(".pack") for name in files} <= packs
    assert len(files) >= 2  # of the two models that were asked for all the time
    loads = total(pair.metrics(), "swap_duration_seconds_count", 'tier="host"')
    assert loads >= 2  # workers that began anew have read them there
