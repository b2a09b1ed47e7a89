"""Clients that mean no good, against the real server: others are served, and nothing is left over.

The attackers come from 127.0.0.2, the others from 127.0.0.1; each has a tenant of its own.
"""

import asyncio
import json
import urllib.request
from pathlib import Path

import pytest

from bench.servers import Server
from tests import hostile
from tests.e2e.conftest import DEVICE_BUDGET, Prepared
from tests.e2e.server import serving

MODEL = "shakespeare"
PER_ADDRESS = 60
FINE = {"closed", "400", "401", "404", "405", "408", "411", "413", "415", "429", "431", "503"}
SETTINGS = {
    "POLYHOST_RECEIVE_TIMEOUT_S": "1.5",
    "POLYHOST_KEEP_ALIVE_TIMEOUT_S": "2",
    "POLYHOST_MAX_CONNECTIONS_PER_ADDRESS": str(PER_ADDRESS),
    "POLYHOST_STREAM_WRITE_TIMEOUT_S": "2",
}


def ask(server: Server, key: str) -> int:
    """A chat of an honest client; its status."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    request = urllib.request.Request(
        f"{server.url}{hostile.PATH}",
        json.dumps(body).encode(),
        {"authorization": f"Bearer {key}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] >= 1
        return int(answer.status)


def num_files(server: Server) -> int:
    """Descriptors that the server holds."""
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


def at_rest(server: Server) -> bool:
    """Nothing runs, waits or is held; only the connection that asks is open."""
    figures = server.metrics()
    running = sum(v for k, v in figures.items() if k.startswith("num_requests_"))
    open_now = figures["connections_open"]
    return not running and not figures["limit_reservations_open"] and open_now <= 1


@pytest.mark.e2e
async def test_others_are_served_and_nothing_is_left(prepared: Prepared, tmp_path: Path) -> None:
    data_dir = prepared.copy_to(tmp_path)
    with serving(data_dir, "--device-budget", DEVICE_BUDGET, **SETTINGS) as server:
        honest, other = prepared.keys["acme"], prepared.keys["crowd"]
        assert ask(server, honest) == 200
        num_before = num_files(server)
        site = hostile.Site(server.port, other, MODEL, patience_s=15.0)
        attacks = asyncio.gather(*(attack(site) for attack in hostile.ATTACKS.values()))
        statuses = []
        while not attacks.done():
            statuses.append(await asyncio.to_thread(ask, server, honest))
        found = dict(zip(hostile.ATTACKS, await attacks, strict=True))
        crowd = asyncio.create_task(hostile.crowd(site, 5 * PER_ADDRESS, 1.0))
        while not crowd.done():
            statuses.append(await asyncio.to_thread(ask, server, honest))

        assert set(statuses) == {200}
        for name, outcomes in found.items():
            assert set(outcomes) <= FINE | ({"200"} if name == "half-closed" else set()), found
        assert set(found["slow heads"]) == {"closed"}
        assert set(found["slow bodies"]) <= {"408", "closed"}
        assert (await crowd)["200"] <= PER_ADDRESS
        assert set(await crowd) <= {"200", "429", "closed"}
        await asyncio.to_thread(server.wait_until, lambda: at_rest(server), 20)
        assert num_files(server) <= num_before + 5  # threads open databases when they first ask
        log = server.process.read_log()
        assert "Traceback" not in log, log[-4000:]
        assert server.stop() == 0
