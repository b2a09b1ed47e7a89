"""The serve benchmark's rounds against scripted servers, its command line, and process handling."""

import sys
import time
from pathlib import Path

import pytest
import torch

from bench import load, machine, processes, serve, shapes
from bench.client import Target
from bench.prompts import PromptMaker
from bench.report import summarise
from tests.bench.scripted_server import Script, scripted_server
from tests.bench.test_shapes import SHAPES

HTTP_SERVER = """
import http.server, sys
address = ("127.0.0.1", int(sys.argv[1]))
http.server.HTTPServer(address, http.server.SimpleHTTPRequestHandler).serve_forever()
"""
DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(60)
"""


def test_a_run_needs_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve.parse(["--skip-ours"])
    assert "--peer" in capsys.readouterr().err


async def test_both_servers_get_the_same_prompts_and_the_client_counts_its_cpu(
    tmp_path: Path,
) -> None:
    torch.set_num_threads(1)
    shapes.build(SHAPES, "qwen2", tmp_path)
    prompts = PromptMaker(tmp_path)
    args = serve.parse(["--concurrency", "2", "--requests", "4"])
    texts = serve.requests_of(args, 2, prompts, "0/c=2/0")
    assert len(texts) == 4
    seen = []
    for name in ("ours", "peer"):
        async with scripted_server(Script(completion_tokens=128)) as server:
            run = await load.closed_loop(Target(name, server.base_url, "m"), texts, 2)
            seen.append(sorted(body["messages"][0]["content"] for body in server.bodies))
            summary = summarise(run, {text.index: text.max_tokens for text in texts})
        assert summary["num_short"] == 0
        assert summary["num_completed"] == 4
        assert summary["client_cpu_share"] > 0
    assert seen[0] == seen[1]
    assert len(set(seen[0])) == 4


def test_a_server_is_waited_for_and_stopped(tmp_path: Path) -> None:
    port = processes.free_port()
    argv = [sys.executable, "-c", HTTP_SERVER, str(port)]
    with processes.ServerProcess("web", argv, tmp_path / "log") as server:
        assert server.wait_ready(f"http://127.0.0.1:{port}/", 20.0) < 20.0
    with pytest.raises(processes.ServerFailed, match="ended with"):
        server.wait_ready(f"http://127.0.0.1:{port}/", 1.0)


def test_a_server_that_dies_shows_its_log(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    with (
        processes.ServerProcess("web", argv, tmp_path / "log") as server,
        pytest.raises(processes.ServerFailed, match=r"ended with 3\nno such model"),
    ):
        server.wait_ready("http://127.0.0.1:9/", 20.0)


def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    server = processes.ServerProcess("web", [sys.executable, "-c", DEAF], tmp_path / "log")
    while "up" not in server.log:
        time.sleep(0.02)
    start = time.monotonic()
    server.stop(grace_s=0.2)
    assert time.monotonic() - start < 10.0


def test_machine_facts_name_no_host_or_path() -> None:
    facts = machine.facts(memcpy_bytes=1 << 20)
    assert facts["memcpy_gb_s"] > 0
    assert facts["cores_usable"] >= 1
    assert facts["packages"]["torch"]
    assert "/" not in facts["cpu"]
