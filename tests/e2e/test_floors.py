"""A floor that an operator sets, from the command line to what stays on the device."""

from collections.abc import Sequence

import openai
import pytest

from bench.servers import Server
from tests.e2e.conftest import Prepared
from tests.e2e.folders import NAMES
from tests.e2e.server import polyhost, polyhost_json

pytestmark = pytest.mark.e2e


def test_others_loads_leave_a_tenants_floor(server: Server, prepared: Prepared) -> None:
    mine, *others = NAMES
    ask(server, prepared.key, [mine])
    assert polyhost(server.data_dir, "tenants", "floor", "acme", "1KiB", mine).returncode == 0
    told_to_the_worker(server, "floor-set")
    before = len(evicted(server))
    # Room for two: without the floor the one that rests the longest would have to go.
    ask(server, prepared.keys["crowd"], others * 3)
    assert mine not in evicted(server)[before:]
    assert mine in kept_by_a_floor(server)
    (floor,) = polyhost_json(server.data_dir, "tenants", "floors")
    assert (floor["size_bytes"], floor["models"]) == (1024, [mine])
    assert mine in polyhost(server.data_dir, "tenants", "floors").stdout

    assert polyhost(server.data_dir, "tenants", "floor", "acme", "0").returncode == 0
    told_to_the_worker(server, "floor-gone")
    before = len(evicted(server))
    # What it was worth by its first request fades against what the others are asked for.
    for _ in range(20):
        ask(server, prepared.keys["crowd"], others)
        if mine in evicted(server)[before:]:
            break
    assert mine in evicted(server)[before:]
    assert polyhost_json(server.data_dir, "tenants", "floors") == []


def test_a_floor_that_cannot_be_is_refused(server: Server) -> None:
    for wrong in (["acme", "1KiB"], ["acme", "1KiB", "nobody"], ["nobody", "1KiB", NAMES[0]]):
        done = polyhost(server.data_dir, "tenants", "floor", *wrong)
        assert done.returncode != 0
        assert done.stderr
    assert polyhost_json(server.data_dir, "tenants", "floors") == []


def ask(server: Server, key: str, names: Sequence[str]) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key) as client:
        for name in names:
            messages = [{"role": "user", "content": "Who stays?"}]
            client.chat.completions.create(model=name, messages=messages, max_tokens=2)  # type: ignore[arg-type]


def told_to_the_worker(server: Server, name: str) -> None:
    """A key made after a change is let in with the look that saw the change."""
    made = polyhost_json(server.data_dir, "keys", "create", "--tenant", "acme", "--name", name)
    server.wait_until(lambda: server.get("/v1/models", made["key"])[0] == 200)


def evicted(server: Server) -> list[str]:
    """Models that had to go, the oldest first."""
    answer = polyhost_json(server.data_dir, "decisions", "--limit", "1000")
    rows = sorted(
        (row for row in answer["decisions"] if row["kind"] == "eviction"),
        key=lambda row: float(row["at"]),
    )
    return [
        one["model_id"] for row in rows for one in row["candidates"] if one["outcome"] == "evicted"
    ]


def kept_by_a_floor(server: Server) -> set[str]:
    answer = polyhost_json(server.data_dir, "decisions", "--limit", "1000")
    return {
        one["model_id"]
        for row in answer["decisions"]
        if row["kind"] == "eviction"
        for one in row["candidates"]
        if one["outcome"] == "kept: floor"
    }
