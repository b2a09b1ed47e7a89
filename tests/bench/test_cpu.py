"""The bench of the processor: its arithmetic, and children by a program that answers at once."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import cpu, cpu_attention, cpu_busy, cpu_http, servers
from kernels.native_calls import library

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
    args = argparse.Namespace(
        threads=2,
        llama_python=None,
        peer_python=None,
        vllm_python=None,
        without=["generate"],
        quantized=False,
        repeats=2,
    )
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
    args = argparse.Namespace(
        threads=2,
        llama_python=None,
        peer_python=None,
        vllm_python=None,
        without=["generate"],
        quantized=False,
    )
    assert list(cpu.commands(tmp_path, args, 4, 300)) == ["ours", "ours, torch", "ours, HTTP"]
    args = argparse.Namespace(
        threads=2,
        llama_python="/py",
        peer_python="/peer",
        vllm_python="/vllm",
        without=[],
        quantized=True,
    )
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


def test_only_what_goes_beyond_taken_time_counts() -> None:
    def window(tokens_s: float, taken: float) -> cpu_busy.Window:
        return {
            "busy": taken > 0.1,
            "tokens_s": tokens_s,
            "worker_cores": 2 - taken,
            "gateway_cores": taken / 2,
            "client_cores": taken / 2,
            "hit_p50_ms": 1.0,
            "hit_p99_ms": 2.0,
            "refused": 0,
        }

    # Half a core of two is taken: three quarters of 40 could have been had, 27 were.
    alone = window(40.0, 0.0)
    found = cpu_busy.report([alone, window(27.0, 0.5), alone], cores=2)["loss"]
    assert found["taken"]["median"] == pytest.approx(0.25)
    assert found["lost"]["median"] == pytest.approx(13 / 40)
    assert found["beyond"]["median"] == pytest.approx(0.1)


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
    assert cpu_http.arena_bytes(metrics) == {"arena": 40960, "arena_held": 28672}


@pytest.mark.skipif(library() is None, reason="nothing was compiled")
def test_attention_is_measured_over_layers_that_exceed_caches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_attention, "LEAST_BYTES", 1 << 20)
    case = cpu_attention.Case(cpu_attention.Shape(4, 2, 32, 2), rows=2, context=40)
    assert case.num_bytes >= 1 << 20
    assert case.num_bytes == case.layers * 2 * 40 * 2 * 32 * 2 * 2
    native = cpu_attention.chosen(None)
    found = cpu_attention.measure(native, case, torch.ones(1 << 16), repeats=1)
    assert found["share"]["median"] == found["gb_s"]["median"] / found["read_gb_s"]["median"]
    assert "| 2 x 40 |" in cpu_attention.table({"2 x 40": found})


def test_a_worker_in_a_session_of_its_own_is_told_from_the_gateway() -> None:
    spin = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\ninput()"
    command = [sys.executable, "-c", spin, "engine.worker"]
    with subprocess.Popen(
        command, start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        of_workers, of_others = cpu_busy.cpu_seconds(os.getpid())
        assert of_workers >= 0.1
        assert of_others > 0
        assert cpu_busy.cpu_seconds(worker.pid)[1] == 0
        worker.communicate(b"\n")
