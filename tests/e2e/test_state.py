"""Stored responses on a real server of two gateway processes: continued at either, and kill -9."""

import os
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from bench.servers import Server
from tests.e2e.conftest import Prepared
from tests.e2e.server import child_pids, polyhost_process, serving, usage_rows

pytestmark = pytest.mark.e2e

NUM_BACKGROUND = 12


@pytest.fixture(scope="module")
def two_gateways(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One row at a time: most background responses wait when a process dies."""
    data_dir = prepared.copy_to(tmp_path_factory.mktemp("state"))
    narrow = {"POLYHOST_MAX_NUM_SEQS": "1", "POLYHOST_QUEUE_TIMEOUT_S": "120"}
    with serving(data_dir, "--gateway-processes", "2", "--host-tier", "0", **narrow) as running:
        yield running
        assert running.stop() == 0


def client_of(server: Server, key: str) -> openai.OpenAI:
    """On a connection of its own, which the kernel gives to one of the processes."""
    return openai.OpenAI(api_key=key, base_url=f"{server.url}/v1", max_retries=8)


def owners(server: Server) -> dict[str, tuple[str, str]]:
    """State and owner of each response."""
    with sqlite3.connect(server.data_dir / "polyhost.db") as database:
        rows = database.execute("SELECT id, state, owner FROM responses")
        return {response_id: (state, owner) for response_id, state, owner in rows}


def test_a_conversation_at_whichever_process(prepared: Prepared, two_gateways: Server) -> None:
    greedy: Any = {"model": "sherlock", "max_output_tokens": 12, "temperature": 0.0}
    said = "The game is afoot, Watson."
    with client_of(two_gateways, prepared.keys["acme"]) as sdk:
        first = sdk.responses.create(input=said, **greedy)
    previous = first
    for number in range(6):
        with client_of(two_gateways, prepared.keys["acme"]) as sdk:
            events = list(
                sdk.responses.create(
                    input="Go on", previous_response_id=previous.id, stream=True, **greedy
                )
            )
            told = events[-1].response
            if number == 0:
                whole = [
                    {"role": "user", "content": said},
                    *(item.model_dump() for item in first.output),
                    {"role": "user", "content": "Go on"},
                ]
                alone = sdk.responses.create(input=whole, store=False, **greedy)
                assert told.output_text == alone.output_text, "as if all of it had been sent"
        previous = told
    with client_of(two_gateways, prepared.keys["crowd"]) as stranger:
        for ask in (
            lambda: stranger.responses.retrieve(first.id),
            lambda: stranger.responses.delete(first.id),
            lambda: stranger.responses.create(
                model="sherlock", input="x", previous_response_id=first.id
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                ask()
    with client_of(two_gateways, prepared.keys["acme"]) as sdk:
        items = list(sdk.responses.input_items.list(previous.id, order="asc", limit=3))
        assert len(items) == 13
        assert sdk.responses.retrieve(previous.id).output_text == previous.output_text
        sdk.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            sdk.responses.create(model="sherlock", input="x", previous_response_id=previous.id)


def test_what_a_killed_process_was_making_fails_once(
    prepared: Prepared, two_gateways: Server
) -> None:
    key = prepared.keys["killed"]
    ids = []
    for number in range(NUM_BACKGROUND):
        with client_of(two_gateways, key) as sdk:
            told = sdk.responses.create(
                model="sherlock",
                input=f"Tell me all of case {number}",
                background=True,
                max_output_tokens=200,
            )
        assert told.status == "queued"
        ids.append(told.id)
    active = [
        owner.rpartition("/")[2]
        for response_id, (state, owner) in owners(two_gateways).items()
        if response_id in ids and state in ("queued", "in_progress")
    ]
    [(name, num_active)] = Counter(active).most_common(1)
    [pid] = child_pids(two_gateways, f"gateway_process {name} ")
    os.kill(pid, signal.SIGKILL)
    ended = Counter(wait_for_ends(two_gateways, key, ids).values())
    assert set(ended) <= {"completed", "incomplete", "failed"}
    assert 0 < ended["failed"] <= num_active
    two_gateways.wait_until(two_gateways.has_posted)
    rows = usage_rows(two_gateways.data_dir, polyhost_process, "killed")
    posted = Counter(row["request_id"] for row in rows)
    states = {response_id: state for response_id, (state, _) in owners(two_gateways).items()}
    for response_id in ids:
        least = 0 if states[response_id] == "failed" else 1
        assert least <= posted[response_id] <= 1, states[response_id]


def wait_for_ends(server: Server, key: str, ids: list[str]) -> dict[str, str]:
    """The states of all responses once all have ended."""
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        with client_of(server, key) as sdk:
            found = {each: str(sdk.responses.retrieve(each).status) for each in ids}
        if not {"queued", "in_progress"} & set(found.values()):
            return found
        time.sleep(0.2)
    raise AssertionError(found)
