"""The bench of the processor: its arithmetic, and children by a program that answers at once."""

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import cpu

ECHO = """
import json, sys
print("noise", flush=True)
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    positions = sum(len(prompt) for prompt in asked["prompts"])
    seconds = positions * 0.001 + asked["max_tokens"] * 0.5
    print("more noise", flush=True)
    print(json.dumps({"seconds": seconds, "peak_bytes": 3 << 20}), flush=True)
"""


def child(tmp_path: Path, program: str, name: str = "echo") -> cpu.Child:
    return cpu.Child(name, [sys.executable, "-c", program], tmp_path / "log")


def test_decode_is_what_the_tokens_after_the_first_take(tmp_path: Path) -> None:
    engine = child(tmp_path, ECHO)
    engine.wait_ready()
    args = argparse.Namespace(repeats=2, tokens=8)
    found = cpu.run_case(cpu.Case("m", 4, 100), [engine], args, vocab=50)["echo"]
    engine.close()
    assert len(found["decode"]["values"]) == 2
    assert found["prefill"]["median"] == pytest.approx(400 / (0.4 + 0.5))
    assert found["decode"]["median"] == pytest.approx(4 * 8 / (8 * 0.5))
    assert found["peak"]["max"] == 3.0
    assert "| m x4 p100 | echo | 444.4 | 8.0 | 3 |" in cpu.table({"m x4 p100": {"echo": found}})


def test_a_child_that_dies_is_named_with_its_log(tmp_path: Path) -> None:
    engine = child(tmp_path, "import sys; sys.exit('no such model')", "broken")
    with pytest.raises(SystemExit, match=r"broken ended.*log"):
        engine.wait_ready()
    engine.close()
    assert "no such model" in (tmp_path / "log").read_text()


def test_cases_and_engines(tmp_path: Path) -> None:
    assert {case.batch for case in cpu.cases(short=False) if case.model == cpu.QWEN25} == {
        1,
        4,
        8,
        16,
    }
    assert all(case.prompt == 128 for case in cpu.cases(short=True))
    args = argparse.Namespace(threads=2, llama_python=None, without=["generate"])
    assert list(cpu.commands(tmp_path, args, 4, 300)) == ["ours", "ours, torch"]
    args = argparse.Namespace(threads=2, llama_python="/py", without=[])
    last: list[Any] = cpu.commands(tmp_path, args, 4, 300)["llama.cpp"]
    assert last[0] == "/py"
    assert last[-1] == "300"
