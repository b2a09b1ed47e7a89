"""The benches of packs run from end to end on models that take no time."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import convert_memory, format_loss, pack_load, shapes
from engine.registration.source import SourceTensors, weight_files

SHAPE = {
    "model_type": "llama",
    "architecture": "LlamaForCausalLM",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "params_matmul_approx": 100_000,
}


@pytest.fixture
def shape_file(tmp_path: Path) -> Path:
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps({"tiny": SHAPE}))
    return path


def test_holes_are_a_checkpoint_of_zeros(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "MAX_SHARD_BYTES", 100_000)
    built = shapes.build_sparse({"tiny": SHAPE}, "tiny", tmp_path / "model")
    files = weight_files(built.folder)
    assert len(files) > 1
    with SourceTensors(files) as source:
        tensors = {name: source.read(name) for name in source.shapes}
    assert sum(tensor.nbytes for tensor in tensors.values()) == built.weight_bytes
    assert max(tensor.nbytes for tensor in tensors.values()) == built.largest_bytes
    assert not any(bool(tensor.any()) for tensor in tensors.values())
    assert tensors["lm_head.weight"].dtype == torch.bfloat16


def test_memory_fields_are_bytes() -> None:
    text = "Name:\tpython\nVmHWM:\t  2048 kB\nRssAnon:\t 12 kB\nThreads:\t3\nPss_Anon: 4 kB\n"
    assert convert_memory.read_fields(text) == {"VmHWM": 2 << 20, "RssAnon": 12 << 10}


def test_peaks_are_kept_by_phase() -> None:
    peaks = convert_memory.Peaks()
    for phase, value in (("check", 5), ("convert", 9), ("convert", 7)):
        peaks.add(phase, {"RssAnon": value})
    assert peaks.whole["RssAnon"] == 9
    assert peaks.anonymous_by_phase == {"check": 5, "convert": 9}


def test_loads_are_compared(
    tmp_path: Path, shape_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "result.json"
    arguments = ["--shape", "tiny", "--shapes", str(shape_file), "--output", str(output)]
    for _ in range(2):
        pack_load.main([*arguments, "--work-dir", str(tmp_path / "work"), "--repeats", "2"])
    results: list[Any] = json.loads(output.read_text())["results"]
    assert len(results) == 2
    assert set(results[1]["summary"]) == set(pack_load.WAYS)
    assert len(results[1]["rounds"]) == 2
    assert results[1]["summary"]["dd"]["share_of_dd"]["median"] == 1.0
    assert "safetensors" not in capsys.readouterr().err


def test_losses_and_times_of_formats(
    tmp_path: Path, shape_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in format_loss.MODELS:
        (tmp_path / f"{name}.txt.gz").write_bytes(gzip.compress(b"To be, or not to be. " * 400))
    output = tmp_path / "result.json"
    arguments = [str(tmp_path), "--rows", "1", "--repeats", "1", "--output", str(output)]
    format_loss.main([*arguments, "--shape", "tiny", "--shapes", str(shape_file)])
    result = json.loads(output.read_text())
    for row in result["loss"].values():
        sizes = [row[name]["pack_bytes"] for name in ("int4", "int8", "bfloat16")]
        assert sizes == sorted(set(sizes))
        for name, bound in (("int8", 0.05), ("int8 dynamic", 0.05), ("int4 dynamic", 0.3)):
            assert 0 < abs(row[name]["loss"] - row["bfloat16"]["loss"]) < bound
        # Formats that differ in what is rounded differ in what comes out.
        assert len({row[name]["loss"] for name in format_loss.FORMATS}) == len(format_loss.FORMATS)
    assert set(result["linears"]) == {"1", "16", "128"}
    assert "bfloat16" in result["linears"]["16"]
    assert "perplexity" in capsys.readouterr().out
