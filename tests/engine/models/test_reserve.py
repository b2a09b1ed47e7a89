"""The estimate of what a step needs outside the arena, held against what steps really take."""

import json
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig

from bench.family_configs import tiny_config
from engine.config import EngineConfig
from engine.models.reserve import WIDE_TENSORS, latent_heads, step_bytes
from engine.modules.quantized import kept_shape
from engine.pack import PackIndex, TensorEntry, read_index
from engine.registration.blueprint import blueprint
from engine.registration.quantize import schemes_of
from tests.engine.encoder_rig import POSITIONS
from tests.engine.encoders.test_encoder_engine import EncoderDriver, Encoders
from tests.engine.test_engine import Driver, Models
from tests.engine.tiny_models import MAX_CONTEXT, make_tiny_models
from tests.engine.unusual_models import own_configs, shared_configs

SPARSE = ("deepseek_v32", "minimax_m3_vl_text")


class PeakMeter:
    """Runs steps under the profiler; `peak_bytes` is the most that was alive at once."""

    def __init__(self, execute: Callable[[Any], Any], folder: Path) -> None:
        self._execute = execute
        self._trace = folder / "trace.json"
        self.peak_bytes = 0

    def __call__(self, batch: Any) -> Any:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            output = self._execute(batch)
        profiler.export_chrome_trace(str(self._trace))
        events = json.loads(self._trace.read_text())["traceEvents"]
        changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]")
        self.peak_bytes = max(self.peak_bytes, *accumulate(change for _, change in changes))
        return output

    def check(self, estimate: int) -> None:
        assert self.peak_bytes <= estimate
        assert estimate < 20 * self.peak_bytes  # it refuses models: it must not be absurd


@pytest.fixture(scope="module")
def measured(tiny_models: Models, tmp_path_factory: pytest.TempPathFactory) -> Models:
    configs = {family: tiny_config(family) for family in ("minicpm3", *SPARSE)}
    for family in SPARSE:  # what experts take would hide all else
        configs[family].mlp_layer_types = ["dense", "dense"]
    configs["minimax_m3_vl_text"].dense_intermediate_size = 96
    return tiny_models | make_tiny_models(tmp_path_factory.mktemp("latent"), configs)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma", "minicpm3", *SPARSE])
def test_no_step_takes_more_than_was_estimated(
    measured: Models, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _measure(measured, name, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon", "gemma3n"])
def test_nor_does_one_of_an_unusual_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = (own_configs() | shared_configs())[name]
    _measure(make_tiny_models(tmp_path, {name: config}), name, tmp_path, monkeypatch)


def _measure(models: Models, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"max_batch_tokens": 64, "max_num_seqs": 8}
    driver = Driver({name: models[name]}, num_pages=400, prefix_cache=False, **settings)
    config = EngineConfig(arena_bytes=400 * 8192, shm_prefix="t", **settings)
    driver.make_resident(name)
    runner = driver.runner(name)
    meter = PeakMeter(runner.execute, tmp_path)
    monkeypatch.setattr(runner, "execute", meter)
    for i in range(8):
        driver.submit(str(i), name, [2 + i] * (MAX_CONTEXT - 8), 8)
    driver.run(lambda: len(driver.finishes) == 8)
    meter.check(step_bytes(read_index(models[name].pack_dir), config))
    driver.empty()


def test_what_the_estimate_grows_with(tiny_models: Models) -> None:
    index = read_index(tiny_models["llama"].pack_dir)

    def bytes_of(tokens: int, rows: int, **change: object) -> int:
        config = EngineConfig(
            arena_bytes=1 << 24, shm_prefix="t", max_batch_tokens=tokens, max_num_seqs=rows
        )
        return step_bytes(msgspec.structs.replace(index, **change), config)

    base = bytes_of(256, 8)
    assert bytes_of(512, 8) > base
    assert bytes_of(256, 16) > base
    assert bytes_of(256, 8, vocab_size=100_000) > base + 8 * 99_000 * 4
    assert bytes_of(256, 8, max_context=4096) > base
    # A table with a row an id and a part for each layer: only the row is computed with.
    tables = TensorEntry("model.embed_tokens_per_layer.weight", 0, 0, 0, (1 << 18, 960), "float32")
    wider = bytes_of(256, 8, tensors=(*index.tensors, tables))
    assert base < wider <= base + 256 * 4 * WIDE_TENSORS * 960


@pytest.mark.parametrize("name", ["bert", "modernbert", "xlm-roberta"])
def test_no_step_of_an_encoder_takes_more_than_was_estimated(
    encoders: Encoders, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = EncoderDriver(encoders, max_batch_tokens=4 * POSITIONS)
    driver.make_resident(name)
    runner = driver.encoder(name)
    meter = PeakMeter(runner.encode, tmp_path)
    monkeypatch.setattr(runner, "encode", meter)
    driver.encode("long", name, [[5] * POSITIONS] * 8)
    driver.encode("short", name, [[5]] * 60)
    driver.run(lambda: len(driver.finishes) == 2)
    config = EngineConfig(arena_bytes=600 * 8192, shm_prefix="t", max_batch_tokens=4 * POSITIONS)
    meter.check(step_bytes(read_index(encoders[name].pack_dir), config))


def test_the_longest_input_makes_the_largest_step(encoders: Encoders) -> None:
    index = read_index(encoders["bert"].pack_dir)
    config = EngineConfig(arena_bytes=1 << 20, shm_prefix="t", max_batch_tokens=64)
    longer = msgspec.structs.replace(index, max_context=8192)
    assert step_bytes(longer, config) > 50 * step_bytes(index, config)


def test_a_model_whose_steps_need_more_is_not_loaded(encoders: Encoders) -> None:
    driver = EncoderDriver(encoders, reserve_bytes=1000)
    driver.engine.load("bert", driver.now_s)
    (row,) = driver.engine.status(driver.now_s).models
    assert row.state == "failed"
    assert "reserve_bytes of 1000" in row.reason


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
@pytest.mark.parametrize(("family", "heads"), [("deepseek_v3", 128), ("deepseek_v2", 32)])
def test_heads_of_latents_are_counted(family: str, heads: int, dtype: str) -> None:
    """From a pack's shapes: its index does not say them."""
    plan = blueprint(AutoConfig.for_model(family, num_hidden_layers=2))
    quantization = dtype if dtype != "float32" else ""
    schemes = schemes_of(plan, list(plan.tensors), quantization) if quantization else {}
    entries = tuple(
        TensorEntry(
            name,
            0,
            0,
            0,
            kept_shape(tuple(t.shape), schemes.get(name, "")),
            "bfloat16",
            scheme=schemes.get(name, ""),
        )
        for name, t in plan.tensors.items()
        if ".self_attn." in name
    )
    (group,) = plan.kv_groups
    index = PackIndex(
        version=1,
        revision="",
        family=family,
        architecture="",
        dtype="bfloat16",
        vocab_size=1,
        max_context=4096,
        total_bytes=0,
        segments=(),
        tensors=entries,
        tied={},
        chunks=(),
        kv_groups=(group,),
        kv_dtype="bfloat16",
    )
    assert latent_heads(group, index) == pytest.approx(heads, rel=0.02)
