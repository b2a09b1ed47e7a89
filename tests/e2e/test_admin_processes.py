"""The operator's pages of two gateway processes: one session, the same limits, streams of both."""

import asyncio
import threading
from pathlib import Path

import pytest

from bench.servers import Server
from tests.admin.site import Visitor
from tests.admin.web.test_streams import Listener
from tests.e2e.conftest import Prepared
from tests.e2e.server import polyhost_json, serving
from tests.e2e.test_failures import CHAT, post

pytestmark = pytest.mark.e2e

PASSWORD = "the operator's password"
NUM_STREAMS = 8
"""The kernel spreads connections: that all go to one process is one chance in 128."""


def _spread(visitor: Visitor) -> list[Listener]:
    return [Listener(visitor, "/live/models") for _ in range(NUM_STREAMS)]


def _rest_of(listeners: list[Listener]) -> list[bytes]:
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda each=each: found.append(each.rest())) for each in listeners
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_one_session_limits_and_streams_over_two_processes(
    prepared: Prepared, tmp_path: Path
) -> None:
    data_dir = prepared.copy_to(tmp_path)
    given = {
        "POLYHOST_ADMIN_PASSWORD": PASSWORD,
        "POLYHOST_MAX_ADMIN_STREAMS_PER_USER": str(NUM_STREAMS),
    }
    with serving(data_dir, "--gateway-processes", "2", **given) as server:
        admin, other = Visitor(server.url), Visitor(server.url)
        for visitor in (admin, other):
            assert visitor.sign_in("admin", PASSWORD).status == 200
        for _ in range(12):  # each on a connection of its own
            assert admin.get("/account").url.endswith("/account")
        _a_limit_is_felt(server, prepared, admin)
        streams = _spread(other)
        assert [each.status for each in streams] == [200] * NUM_STREAMS
        for each in streams:
            each.until("tick")
        assert "sign-in" in other.post("/sign-out", {}).url
        assert all(b"event: signed-out" in rest for rest in _rest_of(streams))
        for each in streams:
            each.close()
        assert server.stop() == 0


def _a_limit_is_felt(server: Server, prepared: Prepared, admin: Visitor) -> None:
    (tenant,) = [
        row for row in polyhost_json(server.data_dir, "tenants", "list") if row["name"] == "acme"
    ]
    path = f"/tenant/limits/{tenant['id']}"
    assert "limits were changed" in admin.post(path, {"requests_per_minute": "1"}).text

    def is_refused() -> bool:
        return asyncio.run(post(server, prepared.key, CHAT))[0] == 429

    # Each process hears of the change for itself, within a second: all of eight connections of
    # their own are refused when both have.
    server.wait_until(lambda: all(is_refused() for _ in range(8)))
    assert "limits were changed" in admin.post(path, {"requests_per_minute": ""}).text
    server.wait_until(lambda: not is_refused())
