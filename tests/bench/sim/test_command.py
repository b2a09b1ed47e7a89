"""`python -m bench.sim`: devices and models from files, reports, words about what cannot be."""

import json
from pathlib import Path

import pytest

from bench.sim.__main__ import main
from bench.sim.devices import DEVICES, write_device
from bench.sim.worlds import read_models

TRACE = "synthetic:rate=4,requests=12,lengths=short,scale=0.2"
WORLD = ["--workers", "1", "--models", "2", "--mix", "tiny", "--tenants", "2"]


def test_a_device_file_brings_its_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "slow.json"
    firsts = []
    for request_s in (0.0, 0.5):
        write_device(path, DEVICES["cpu-2"], {"request_s": request_s}, {})
        line = [TRACE, *WORLD, "--device", str(path), "--out", str(tmp_path), "--json"]
        assert main(line) == 0
        (run,) = json.loads(capsys.readouterr().out)["runs"].values()
        firsts.append(run["latency_s"]["ttft"]["p50"])
    assert firsts[1] == pytest.approx(firsts[0] + 0.5, abs=0.3)


def test_models_come_from_a_list(tmp_path: Path) -> None:
    path = tmp_path / "models.json"
    rows = [
        {"name": "a", "shape": "Qwen/Qwen2.5-0.5B", "pinned": True},
        {"name": "b", "shape": "karpathy/tinyllamas-42M", "dtype": "float32"},
    ]
    path.write_text(json.dumps(rows))
    models = read_models(path)
    assert [(m.name, m.dtype, m.pinned) for m in models] == [
        ("a", "bfloat16", True),
        ("b", "float32", False),
    ]


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], "at least one model"),
        ([{"name": "a"}], "is no list of models"),
        ([{"name": "a", "shape": "no/such"}], r"no shape 'no/such': one of Qwen"),
        ([{"name": "a", "shape": "Qwen/Qwen2.5-0.5B", "dtype": "int3"}], "no dtype 'int3'"),
        ([{"name": "a", "shape": "Qwen/Qwen2.5-0.5B"}] * 2, "a name of its own"),
    ],
)
def test_a_list_that_makes_no_sense_is_refused(
    rows: list[dict[str, str]], reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "models.json"
    path.write_text(json.dumps(rows))
    with pytest.raises(ValueError, match=reason):
        read_models(path)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["nosuch:rate=1"], "write one of synthetic, azure2023_conv"),
        (["azure2023_conv:rate=1"], "name the folder that holds it with --data"),
        (["azure2023_conv:rate=1", "--data", "/no/such"], "--data /no/such is no folder"),
        ([TRACE, "--policy", "evict=best"], "no evict policy 'best': one of ours, lru"),
        ([TRACE, "--policy", "order=fcfs"], "one of evict, share, place"),
        ([TRACE, "--device", "abacus"], "one of h200, h100"),
        ([TRACE, "--models", "many"], "--models many: write how many, or the path"),
        ([TRACE, "--models", "0"], "at least one model"),
        ([TRACE, "--workers", "0"], "at least one worker"),
        ([TRACE, "--set", "wings=2"], "no setting is called 'wings'"),
    ],
)
def test_mistakes_are_told_with_what_to_write(
    line: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*line, "--out", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_data_folder_without_the_trace_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["azure2023_conv:rate=1,minutes=1", "--data", str(tmp_path), "--out", str(tmp_path)]
    assert main(line) != 0
    assert "azure2023_conv" in capsys.readouterr().err
