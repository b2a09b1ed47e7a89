"""What an operator reads of a running server: loads, evictions and waits, each with its reason."""

import openai
import pytest

from bench.servers import Server
from tests.e2e.conftest import Prepared
from tests.e2e.folders import NAMES
from tests.e2e.server import polyhost, polyhost_json

pytestmark = pytest.mark.e2e


def test_an_operator_reads_why_models_came_and_went(server: Server, prepared: Prepared) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=prepared.key) as client:
        # Room for two: by the second time round each has been pushed out by another.
        for name in NAMES * 2:
            messages = [{"role": "user", "content": "Who goes there?"}]
            client.chat.completions.create(model=name, messages=messages, max_tokens=2)  # type: ignore[arg-type]
    answer = polyhost_json(server.data_dir, "decisions", "--limit", "1000")
    kinds = {row["kind"] for row in answer["decisions"]}
    assert {"load", "eviction"} <= kinds
    for name in NAMES:
        mine = polyhost_json(server.data_dir, "decisions", "--model", name)["decisions"]
        loads = [row for row in mine if row["kind"] == "load"]
        assert loads
        assert loads[0]["worker"] == "worker-0"
        assert abs(loads[0]["at"] - answer["at"]) < 600
    evictions = [row for row in answer["decisions"] if row["kind"] == "eviction"]
    gone = [one for row in evictions for one in row["candidates"] if one["outcome"] == "evicted"]
    assert gone
    assert all(one["reload_s"] > 0 and one["size_bytes"] > 0 for one in gone)
    counted = {(row["kind"], row["reason"]): row["count"] for row in answer["counts"]}
    total = sum(
        value
        for name, value in server.metrics().items()
        if name.startswith("decisions_total") and 'kind="load"' in name
    )
    assert total >= sum(count for (kind, _), count in counted.items() if kind == "load")
    assert polyhost_json(server.data_dir, "why")["num_waiting"] == 0
    shown = polyhost(server.data_dir, "why", NAMES[0])
    assert shown.returncode == 0
    assert shown.stdout.startswith(f"{NAMES[0]}: ")
    assert shown.stdout.endswith("no requests are waiting\n")
