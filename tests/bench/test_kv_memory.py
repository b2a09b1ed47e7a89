"""KV memory figures: the minimum against published bytes, the arithmetic, a run of the loop."""

import gzip
import json
from pathlib import Path

import pytest

from bench import kv_memory, lengths, shapes
from bench.kv_minimum import model_of
from bench.kv_traffic import Pace, Sample, Traffic, Unit
from bench.lengths import Length
from engine.memory.page_pool import PagePool


def test_the_minimum_is_the_published_bytes_a_token() -> None:
    for name, shape in shapes.read_shapes().items():
        model = model_of(name, shape)
        assert model.minimum_bytes(1) == shape["kv_bytes_per_token_bf16"], name
        assert sorted(i for group in model.groups for i in group.layers) == list(
            range(shape["num_hidden_layers"])
        )


def test_a_window_bounds_what_its_layers_need() -> None:
    shape = dict(shapes.read_shapes()["Qwen/Qwen2.5-0.5B"])
    shape |= {"model_type": "gemma3_text", "sliding_window": 512, "sliding_window_pattern": 6}
    shape |= {"num_hidden_layers": 12, "query_pre_attn_scalar": 64}
    model = model_of("windowed", shape)
    row = 2 * 2 * 64 * 2
    assert model.minimum_bytes(500) == 12 * row * 500
    assert model.minimum_bytes(2000) == (2 * 2000 + 10 * 512) * row


def test_means_are_weighted_by_time_and_idle_rounds_do_not_count() -> None:
    samples = [Sample(300, 100, 100, 1), Sample(900, 0, 900, 3), Sample(0, 400, 0, 0)]
    row = kv_memory.figures(samples, kv_bytes=1300)
    assert row["ratio_mean"] == pytest.approx(1200 / 1000)
    assert row["with_cached_mean"] == pytest.approx(1300 / 1000)
    assert row["ratio"] is not None
    assert row["ratio"]["p50"] == pytest.approx(2.0)
    assert row["kv_share"] == pytest.approx(0.5)
    assert row["num_running"] == 2


def test_every_fleet_is_of_known_shapes_and_leaves_room_for_kv() -> None:
    # The larger shapes of the data folder are not shipped; their published sizes are.
    published = {
        "meta-llama/Llama-3.1-8B": 8.03e9,
        "meta-llama/Llama-3.2-1B": 1.24e9,
        "Qwen/Qwen2.5-1.5B": 1.55e9,
        "Qwen/Qwen3-0.6B": 0.6e9,
        "Qwen/Qwen3-8B": 8.2e9,
        "mistralai/Mistral-7B-v0.1": 7.25e9,
        "google/gemma-2-2b": 2.62e9,
        "google/gemma-2-9b": 9.25e9,
        "google/gemma-3-1b-it": 1.0e9,
        "microsoft/Phi-3-mini-4k-instruct": 3.83e9,
        "HuggingFaceTB/SmolLM2-135M": 0.135e9,
        "HuggingFaceTB/SmolLM2-360M": 0.362e9,
        "Qwen/Qwen2.5-0.5B": 0.494e9,
        "openai-community/gpt2": 0.125e9,
        "EleutherAI/pythia-160m": 0.163e9,
        "facebook/opt-125m": 0.126e9,
    }
    counts = set()
    for device in kv_memory.DEVICES:
        for num_models, names in device.fleets.items():
            assert len(names) == num_models
            weights = sum(published[name] * 2 for name in names)
            assert weights < 0.85 * device.arena_bytes, (device.name, num_models)
            counts.add(num_models)
    assert counts == {1, 8, 40}


@pytest.mark.parametrize("load", ["light", "heavy"])
def test_a_case_runs_in_the_production_pool(load: str, tmp_path: Path) -> None:
    data, output = tmp_path / "data", tmp_path / "out.json"
    trace = "t_s,in_tokens,out_tokens\n" + "".join(f"{i},{40 * i + 1},{9 * i}\n" for i in range(30))
    (data / "traces").mkdir(parents=True)
    (data / "traces/azure2023_conv.csv.gz").write_bytes(gzip.compress(trace.encode()))
    arguments = [str(data), "--devices", "cpu-1g", "--lengths", "azure2023_conv", "--loads", load]
    arguments += ["--light-rounds", "60", "--heavy-rounds", "40", "--output", str(output)]
    arguments += ["--shapes", str(shapes.DEFAULT_SHAPES)]
    assert kv_memory.main([*arguments, "--no-families"]) in (0, 1)
    (row,) = json.loads(output.read_text(encoding="utf-8"))["cases"]
    assert row["num_finished"] > 0
    # Never fewer bytes than the architecture needs: the minimum would be wrong.
    assert row["ratio"]["max"] >= row["ratio"]["p50"] >= 1.0
    assert row["with_cached_mean"] >= row["ratio_mean"] >= 1.0
    if load == "heavy":
        assert row["kv_share"] > 0.5


def test_traffic_ends_every_request_whole_and_leaks_nothing() -> None:
    """A pool for a few requests only: growth preempts, windows free, all pages come back."""
    shape = dict(shapes.read_shapes()["Qwen/Qwen2.5-0.5B"])
    shape |= {"model_type": "gemma3_text", "sliding_window": 64, "sliding_window_pattern": 6}
    shape |= {"num_hidden_layers": 6, "query_pre_attn_scalar": 64}
    model = model_of("windowed", shape)
    pool = PagePool(64, 64 << 10)
    caches, memory = kv_memory.production_caches(pool, [model, model], True, max_chunk=32)
    rows = [Length(20, 400), Length(300, 30), Length(5, 90)]
    units = [Unit(model, cache, lengths.stream(rows, 1)) for cache in caches]
    traffic = Traffic(units, pool, memory, "heavy", Pace(chunk=32))
    for _ in range(150):
        sample = traffic.round()
        assert sample.minimum <= sample.held <= 64 * pool.page_bytes
        traffic.check_integrity()
    assert traffic.num_finished > 10
    assert traffic.num_preempted > 0
    for unit in units:
        unit.cache.drop_all()
    pool.begin_step(10**6)
    pool.retire(10**6)
    assert pool.num_free == pool.num_pages
