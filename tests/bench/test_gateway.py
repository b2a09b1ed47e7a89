"""The gateway's bench: its client against its mock, and what it makes of figures."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from bench import gateway, gateway_peer, processes
from bench.gateway import Place, load, plan, table, verdict
from bench.gateway_load import _is_whole


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_client_reads_whole_answers_of_the_mock(tmp_path: Path, stream: bool) -> None:
    process, port = gateway_peer.start_upstream(tmp_path)
    with process:
        place = Place(port, (), ("key",), "mock", "mock")
        found = load(plan(place, 12, 3, stream))
        paced = load(plan(place, 6, 1, stream=False, rate=100.0))
    assert found.statuses == {"200": 12}
    assert len(found.done_s) == len(found.first_s) == 12
    assert all(first <= done for first, done in zip(found.first_s, found.done_s, strict=True))
    assert found.num_events == (12 * (gateway_peer.NUM_CHUNKS + 3) if stream else 0)
    assert paced.statuses == {"200": 6}


def test_an_answer_is_whole_by_its_length_or_its_last_chunk() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: a\r\nContent-Length: 3\r\n\r\n"
    assert not _is_whole(bytearray(head[:-2]))
    assert not _is_whole(bytearray(head + b"ab"))
    assert _is_whole(bytearray(head + b"abc"))
    chunked = b"HTTP/1.1 200 OK\r\ncontent-type: a\r\ntransfer-encoding: chunked\r\n\r\n"
    assert not _is_whole(bytearray(chunked + b"3\r\nabc\r\n"))
    assert _is_whole(bytearray(chunked + b"3\r\nabc\r\n0\r\n\r\n"))


@pytest.mark.parametrize("dialect", gateway.DIALECTS)
def test_a_chat_is_the_same_in_every_dialect(dialect: str) -> None:
    said = json.loads(gateway.said_in(dialect, gateway.body("m", 7, stream=False)))
    assert said["model"] == "m"
    assert "number 7" in json.dumps(said)
    most = said["max_output_tokens"] if dialect == "responses" else said["max_tokens"]
    assert most == gateway.ANSWER_TOKENS


def test_a_dialect_is_held_against_the_chat() -> None:
    row = {"messages": {"ratio": {"p50": 1.2}}, "responses": {"ratio": {"p50": 1.1}}, "chat": {}}
    goals = verdict({"polyhost": {"dialects": row}})
    assert {name: goal["met"] for name, goal in goals.items()} == {
        "messages_ratio": False,
        "responses_ratio": True,
    }


def test_goals_are_told_with_their_figures() -> None:
    spread = {"p50": 1.0, "p99": 2.0}
    row: dict[str, Any] = {
        "cpu_ms": 0.4,
        "user_ms": 0.3,
        "system_ms": 0.1,
        "requests_per_s": 1.0,
        "statuses": {},
        "done_ms": spread,
    }
    result = {
        "polyhost": {
            "whole": row,
            "stream": {**row, "cpu_ms": 2.0},
            "pace": {**row, "added_ms": {"p50": 0.5, "p99": 9.0}},
            "idle": {"held_mib": 100.0},
        },
        "litellm": {"whole": {**row, "cpu_ms": 12.0}, "stream": {**row, "cpu_ms": 40.0}},
    }
    goals = verdict(result)
    met = {name: goal["met"] for name, goal in goals.items()}
    assert met == {
        "whole_cpu_ms": True,
        "stream_cpu_ms": False,
        "added_p50_ms": True,
        "added_p99_ms": False,
        "idle_mib": True,
        "litellm_whole_ratio": True,
        "litellm_stream_ratio": False,
    }
    assert "MISSED" in table({**result, "goals": goals})


def test_only_the_gateways_processes_count() -> None:
    user_s, system_s = processes.cpu_s((os.getpid(),))
    assert user_s + system_s > 0
    assert os.getpid() in gateway.gateway_pids(os.getpid())
    assert gateway.loop_us() > 0
