"""`polyhost simulate`: what it hands to the simulator, what comes back, how it ends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gateway.cli import build_parser, main
from gateway.cli_simulate import command

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


def test_a_run_prints_its_report(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trace = "synthetic:rate=2,requests=8,lengths=short"
    out = tmp_path / "report"
    assert main(["simulate", trace, *WORLD, "--out", str(out), "--json"]) == 0
    shown = capfd.readouterr()
    assert json.loads(shown.out) == json.loads((out / "report.json").read_text())
    assert "ours: 8 requests" in shown.err
    assert (out / "report.html").exists()


def test_the_simulators_status_and_words_come_through(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "azure2024"]) == 2
    said = capfd.readouterr().err
    assert "no workload 'azure2024'" in said
    assert "azure2023_conv" in said


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
    assert not Path(f"/proc/{child}").exists()
