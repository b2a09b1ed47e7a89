"""`polyhost simulate`: what it hands to the simulator, what comes back, how it ends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from admin.cli import server as cli_simulate
from admin.cli.main import build_parser, main
from admin.cli.server import command
from bench.sim.__main__ import main as simulate

WORLD = ["--workers", "1", "--models", "2", "--mix", "tiny", "--tenants", "2", "--device", "l4"]


def test_every_option_is_handed_over_by_its_name() -> None:
    line = ["simulate", "burstgpt:minutes=1", "--models", "m.json", "--slo-ttft", "1.5"]
    line += ["--policy", "evict=lru", "--policy", "share=fcfs", "--only", "--set", "a=-1"]
    words = command(build_parser(line).parse_args(line))
    assert words[1:] == [
        *("-m", "bench.sim", "--models=m.json", "--slo-ttft=1.5"),
        *("--policy=evict=lru", "--policy=share=fcfs", "--set=a=-1", "--only"),
        *("--", "burstgpt:minutes=1"),
    ]


def test_a_run_prints_its_report_and_another_process_gives_the_same(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = "synthetic:rate=12,requests=160,scale=0.2,aborts=0.05@4,max_tokens=300"
    world = ["--workers", "2", "--models", "5", "--mix", "tiny", "--tenants", "4", "--seed", "3"]
    out, again = tmp_path / "report", tmp_path / "again"
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    line = [trace, *world, "--device", "cpu-2", "--json", "--out"]
    assert main(["simulate", *line, str(out)]) == 0
    shown = capfd.readouterr()
    report = (out / "report.json").read_text()
    assert json.loads(shown.out) == json.loads(report)
    assert "ours: 160 requests" in shown.err
    assert (out / "report.html").exists()
    assert simulate([*line, str(again)]) == 0
    assert (again / "report.json").read_text() == report


def test_the_simulators_status_and_words_come_through(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says of which mistake is its own affair (tests/bench/sim/test_command.py)."""
    program = "import sys; print('simulate:', sys.argv[1:], file=sys.stderr); sys.exit(2)"
    said = [sys.executable, "-c", program]
    monkeypatch.setattr(cli_simulate, "command", lambda options: [*said, options.trace])
    assert main(["simulate", "azure2024"]) == 2
    assert capfd.readouterr().err == "simulate: ['azure2024']\n"


def test_an_interrupt_that_the_simulation_loses_ends_it(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = """if True:
        import os, signal, time
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print(os.getpid(), flush=True)
        time.sleep(0.5)  # the parent waits by now
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(20)
    """
    monkeypatch.setattr(cli_simulate, "command", lambda options: [sys.executable, "-c", program])
    monkeypatch.setattr(cli_simulate, "INTERRUPT_S", 0.1)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # xdist ignores it
    try:
        assert main(["simulate", "azure2024"]) == 1
    finally:
        signal.signal(signal.SIGINT, before)
    said = capfd.readouterr()
    assert "polyhost: interrupted" in said.err
    assert not Path(f"/proc/{int(said.out)}").exists()


def test_an_interrupt_ends_both_processes() -> None:
    trace = "synthetic:rate=50,minutes=6000"
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway", "simulate", trace, *WORLD],
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not (child := children.read_text().strip()):
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "polyhost: interrupted" in said
    while Path(f"/proc/{child}").exists():  # it has had the signal, and may be a moment behind
        time.sleep(0.01)
