"""The swap benchmark on a tiny pack: tiers are the ones meant, nothing leaks, results are whole."""

import json
from pathlib import Path

import pytest
import torch

from bench import files, servers, shapes, swap, swap_load
from bench.client import RequestResult
from bench.processes import ServerFailed
from tests.bench.test_shapes import SHAPES


@pytest.fixture
def shapes_file(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps({"tiny": SHAPES["qwen2"]}), encoding="utf-8")
    assert shapes.read_shapes(path)
    return path


def test_in_process_run_writes_shares_of_their_floors(tmp_path: Path, shapes_file: Path) -> None:
    output = tmp_path / "out" / "swap.json"
    shm = tmp_path / "shm"
    shm.mkdir()
    arguments = ["--shapes", str(shapes_file), "--shape", "tiny", "--repeats", "2"]
    arguments += ["--work-dir", str(tmp_path / "work"), "--output", str(output)]
    assert swap.main([*arguments, "--shm-dir", str(shm)]) == 0
    result = json.loads(output.read_text(encoding="utf-8"))
    assert result["benchmark"] == "swap"
    assert len(result["rounds"]) == 2
    for way in ("cold", "cached", "warm"):
        assert result["summary"][f"{way}_share"]["median"] > 0
        assert result["summary"][f"{way}_gb_s"] > 0
    assert not list(shm.iterdir())
    assert "tiny" in swap.table(result)


def test_dropped_pages_are_seen_to_be_gone(tmp_path: Path) -> None:
    path = tmp_path / "blob"
    path.write_bytes(b"x" * (1 << 20))
    assert files.cached_share(path) == 1.0
    share = files.drop_pages(path)
    assert share in (0.0, 1.0)  # a file system in memory keeps them, and the result says so
    path.write_bytes(b"")
    assert files.cached_share(path) == 0.0


def test_swap_means_come_from_sums_and_counts() -> None:
    name = 'swap_duration_seconds_{}{kind="load"}'
    changed = {name.replace("{}", "sum"): 3.0, name.replace("{}", "count"): 2.0, "other": 1.0}
    assert swap_load._swap_means(changed) == {
        'swap_duration_seconds{kind="load"}': {"count": 2.0, "mean_s": 1.5}
    }
    with pytest.raises(ServerFailed, match="no model was swapped"):
        swap_load._swap_means({"other": 1.0})


def test_metrics_are_read_by_series() -> None:
    text = """# HELP polyhost_swaps_total Finished loads and evictions.
# TYPE polyhost_swaps_total counter
polyhost_swaps_total{kind="load",model_name="a b"} 2.0
polyhost_arena_pages{owner="free"} 1e3
polyhost_num_requests_running{model_name="a b"} 7.0
"""
    found = servers.parse_metrics(text)
    assert found == {
        'swaps_total{kind="load",model_name="a b"}': 2.0,
        'arena_pages{owner="free"}': 1000.0,
        'num_requests_running{model_name="a b"}': 7.0,
    }
    assert servers.total(found, "arena_pages", 'owner="free"') == 1000.0
    assert servers.total(found, "arena_pages", 'owner="kv"') == servers.total(found, "arena") == 0


def test_the_large_models_loads_are_read_from_the_log() -> None:
    log = (
        '{"message": "swap model=big kind=load tier=disk bytes=9 seconds=0.5000 reason=-"}\n'
        '{"message": "swap model=big kind=evict tier=host bytes=9 seconds=9.0 reason=room"}\n'
        '{"message": "swap model=bigger kind=load tier=disk bytes=9 seconds=7.0 reason=-"}\n'
        '{"message": "swap model=big kind=load tier=host bytes=9 seconds=0.2 reason=-"}\n'
    )
    loads = swap_load.big_loads(log)
    assert loads == [{"tier": "disk", "seconds": 0.5}, {"tier": "host", "seconds": 0.2}]
    shares = swap_load._shares(loads, "warm", 0.1)
    assert shares is not None
    assert shares["values"] == [pytest.approx(0.5)]
    assert swap_load._shares([], "warm", 0.1) is None


def test_big_requests_that_failed_are_named() -> None:
    good = RequestResult(0, 1.0, first_s=2.5, last_s=3.0, completion_tokens=6)
    summary = swap_load._big_summary([good, RequestResult(1, 1.0, error="http 503: busy")])
    assert summary["errors"] == ["http 503: busy"]
    assert summary["ttft_s"]["median"] == 1.5
    assert summary["itl_s"]["median"] == pytest.approx(0.1)


def test_the_budget_holds_the_model_and_little_more(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x" * 3_000_000)
    assert swap_load.device_budget(tmp_path) == (3 + 16 + 14) << 20
