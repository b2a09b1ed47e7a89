"""A batch on a real server of two gateway processes that are killed while it runs: each line has
one answer and one posting, of the answer's tokens where no kill came between."""

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from bench.servers import Server
from registry.accounts import api_keys, tenants
from registry.session import make_engine, writing
from tests.e2e.conftest import Prepared
from tests.e2e.server import child_pids, polyhost_process, serving, usage_rows

pytestmark = pytest.mark.e2e

NUM_LINES = 40
NUM_KILLS = 2
NUM_BATCH_LINES = 4
TENANT = "acme"
KEY = "sk-batches-e2e-0123456789abcdef0123456789"


@pytest.fixture
def two_gateways(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    data_dir = prepared.copy_to(tmp_path_factory.mktemp("batches"))
    engine = make_engine(f"sqlite:///{data_dir / 'polyhost.db'}")
    with writing(engine, "tests") as session:
        scopes = ("inference", "files")
        owner = tenants.get_tenant(session, TENANT).id
        api_keys.create_key(
            session, owner, "batches", scopes=scopes, plaintext=KEY, now_at=time.time()
        )
    engine.dispose()
    narrow = {"POLYHOST_BATCH_LINES": str(NUM_BATCH_LINES), "POLYHOST_QUEUE_TIMEOUT_S": "120"}
    with serving(data_dir, "--gateway-processes", "2", "--host-tier", "0", **narrow) as running:
        yield running
        assert running.stop() == 0


def request(number: int) -> dict[str, Any]:
    body = {
        "model": "sherlock",
        "max_tokens": 60,
        "temperature": 0.0,
        "messages": [{"role": "user", "content": f"Tell me of case {number}"}],
    }
    url = "/v1/chat/completions"
    return {"custom_id": f"case-{number}", "method": "POST", "url": url, "body": body}


def client_of(server: Server) -> openai.OpenAI:
    """On a connection of its own, which the kernel gives to one of the processes."""
    return openai.OpenAI(api_key=KEY, base_url=f"{server.url}/v1", max_retries=8)


def test_each_line_once_across_kills(two_gateways: Server) -> None:
    data = "\n".join(json.dumps(request(number)) for number in range(NUM_LINES)).encode()
    with client_of(two_gateways) as sdk:
        file = sdk.files.create(file=data, purpose="batch")
        batch = sdk.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
    killed = 0
    deadline_s = time.monotonic() + 400
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < deadline_s, batch
        time.sleep(1.0)
        if killed < NUM_KILLS and batch.status == "in_progress":
            killed += 1
            time.sleep(2.0)
            for name in ("gateway-0", "gateway-1"):
                for pid in child_pids(two_gateways, f"gateway_process {name} "):
                    os.kill(pid, signal.SIGKILL)
            two_gateways.wait_until(two_gateways.is_ready)
        with client_of(two_gateways) as sdk:
            batch = sdk.batches.retrieve(batch.id)
    assert killed == NUM_KILLS
    assert batch.status == "completed"
    assert batch.output_file_id is not None
    with client_of(two_gateways) as sdk:
        text = sdk.files.content(batch.output_file_id).text
    lines = [json.loads(line) for line in text.splitlines()]
    assert Counter(line["custom_id"] for line in lines) == {
        f"case-{number}": 1 for number in range(NUM_LINES)
    }
    two_gateways.wait_until(two_gateways.has_posted)
    rows = usage_rows(two_gateways.data_dir, polyhost_process, TENANT)
    posted = Counter(row["request_id"] for row in rows)
    answered = {f"chatcmpl-{line['response']['request_id']}": line["response"] for line in lines}
    assert posted == dict.fromkeys(answered, 1)
    num_same = 0
    for row in rows:
        usage = answered[row["request_id"]]["body"]["usage"]
        tokens, billed = usage["completion_tokens"], row["completion_tokens"]
        if row["outcome"] == "finished":
            assert (billed, row["prompt_tokens"]) == (tokens, usage["prompt_tokens"])
            num_same += 1
        else:  # Its process was killed while it was being answered, and it was answered again.
            assert billed <= tokens
    assert num_same >= NUM_LINES - NUM_KILLS * NUM_BATCH_LINES
