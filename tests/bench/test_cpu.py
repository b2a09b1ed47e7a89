"""The bench of the processor: its arithmetic, and children by a program that answers at once."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import cpu, cpu_http, recurrent_cases, servers

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
    found: dict[str, Any] = {}
    for number in range(2):
        figures = cpu.run_engine(cpu.Case("m", 4, 100), number, engine, 8, vocab=50)
        cpu.add(found, "echo", figures)
    assert cpu.num_repeats(found, [engine]) == 2
    engine.close()
    assert found["echo"]["prefill"]["median"] == pytest.approx(400 / (0.4 + 0.5))
    assert found["echo"]["decode"]["median"] == pytest.approx(4 * 8 / (8 * 0.5))
    assert found["echo"]["end_to_end"]["median"] == pytest.approx(4 * 9 / (0.4 + 4.5))
    assert found["echo"]["peak"]["max"] == 3.0
    assert "| m x4 p100 | echo | 444.4 | 8.0 | 7.3 | 3 |" in cpu.table({"m x4 p100": found})


def test_a_server_is_counted_by_what_it_said(tmp_path: Path) -> None:
    """It may have ended early: 20 of 36 tokens came, 4 of them in the first part."""
    counting = ECHO.replace('"seconds": seconds,', '"seconds": seconds, "num_tokens": 20,')
    engine = child(tmp_path, counting)
    engine.wait_ready()
    found = cpu.run_engine(cpu.Case("m", 4, 100), 0, engine, 8, vocab=50)
    engine.close()
    assert found["decode"] == pytest.approx(16 / (8 * 0.5))


def test_what_is_there_is_not_run_again(tmp_path: Path) -> None:
    args = cpu.parse(["--without", "generate", "--repeats", "2"])
    case = cpu.Case("m", 1, 8)
    names = list(cpu.commands(tmp_path, args, 1, 8))
    done: dict[str, Any] = {case.name: {}}
    for name in names:
        assert cpu.missing(case, done, args)
        for _ in range(2):
            cpu.add(done[case.name], name, {"decode": 1.0})
    assert not cpu.missing(case, done, args)
    args.without = []
    assert cpu.missing(case, done, args)


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
    args = cpu.parse(["--without", "generate"])
    assert list(cpu.commands(tmp_path, args, 4, 300)) == ["ours", "ours, torch", "ours, HTTP"]
    pythons = ["--llama-python", "/py", "--peer-python", "/peer", "--vllm-python", "/vllm"]
    args = cpu.parse([*pythons, "--quantized"])
    found = cpu.commands(tmp_path, args, 4, 300)
    assert found["serve, HTTP"][-1] == "/peer"
    assert found["vllm, HTTP"][-1] == "/vllm"
    assert servers.VLLM in found["vllm, HTTP"]
    last: list[Any] = found["llama.cpp"]
    assert last[0] == "/py"
    assert last[-1] == "300"
    for dtype, kind in cpu.QUANTIZED:
        assert found[f"ours, {dtype}"][-2:] == ["--dtype", dtype]
        assert found[f"llama.cpp, {kind}"] == [*last, "--kind", kind]


def test_a_server_tells_its_parts_of_memory(tmp_path: Path) -> None:
    parts = '"memory": {"total": 3 << 20, "workers": 2 << 20}, "seconds": seconds,'
    engine = child(tmp_path, ECHO.replace('"seconds": seconds,', parts))
    engine.wait_ready()
    found = cpu.run_engine(cpu.Case("m", 4, 100), 0, engine, 8, vocab=50)
    engine.close()
    assert (found["peak"], found["peak_total"], found["peak_workers"]) == (3.0, 3.0, 2.0)


def test_servers_get_room_for_what_they_are_asked(tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(shape | {"num_key_value_heads": 2}))
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    room = cpu_http.Room(batch=3, positions=100)
    # 2 layers, K and V of 2 heads of 8 in two bytes.
    assert room.kv_bytes(tmp_path) == 2 * 2 * 2 * 8 * 2 * 300
    assert room.arena_bytes(tmp_path) == 1000 + 57_600 + cpu_http.PAGES_SLACK_BYTES
    (tmp_path / "config.json").write_text(json.dumps(shape | {"head_dim": 16}))
    assert room.kv_bytes(tmp_path) == 2 * 2 * 4 * 16 * 2 * 300


def test_what_of_the_arena_is_held() -> None:
    metrics = """
# TYPE polyhost_arena_pages gauge
polyhost_arena_pages{worker="w",model_name="m",kind="weights"} 5.0
polyhost_arena_pages{worker="w",model_name="m",kind="kv"} 2.0
polyhost_arena_pages{worker="w",model_name="",kind="free"} 3.0
# TYPE polyhost_arena_num_pages gauge
polyhost_arena_num_pages{worker="w"} 10.0
# TYPE polyhost_arena_page_size_bytes gauge
polyhost_arena_page_size_bytes{worker="w"} 4096.0
"""
    assert cpu_http.arena_bytes(servers.parse_metrics(metrics)) == {
        "arena": 40960,
        "arena_held": 28672,
    }


def test_recurrent_mixers_by_their_definitions() -> None:
    """The table's rows; what it measures is compared elsewhere."""
    how = recurrent_cases.DEFINITIONS, 1, torch.float32, True
    lines = recurrent_cases.on_processor(*how).splitlines()
    assert [line.split(" | ")[:2] for line in lines[2:]] == [
        [f"| {name}", shape]
        for name in recurrent_cases.KERNELS
        for shape in ("1 x 1", "16 x 1", "1 x 512")
    ]
